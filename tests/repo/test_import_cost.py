"""What ``import flodl_hf`` costs a program that has torch already: little time, and none of the optional libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

BUDGET_MS = 220.0
ABSENT = ("transformers", "tokenizers", "huggingface_hub", "typer", "rich", "pyarrow", "pandas", "sympy")

_PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
started, cpu = time.perf_counter(), time.process_time()
import {module}
took, cpu = time.perf_counter() - started, time.process_time() - cpu
print(json.dumps({{"ms": min(took, cpu) * 1000, "new": sorted(set(sys.modules) - before)}}))
"""


def imported(module: str) -> dict[str, object]:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(module=module)], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("module", ["flodl", "flodl_hf"])
def test_importing_costs_little(module: str) -> None:
    # Processor time of the best of several fresh interpreters: what a busy machine adds is not the package's.
    best = float("inf")
    for _ in range(5):
        result = imported(module)
        roots = {str(name).partition(".")[0] for name in result["new"]}  # type: ignore[attr-defined]
        assert not roots & set(ABSENT)
        best = min(best, float(result["ms"]))  # type: ignore[arg-type]
        if best < BUDGET_MS:
            break
    assert best < BUDGET_MS, f"import {module} adds {best:.0f} ms of processor time to import torch"


def test_flodl_alone_never_loads_flodl_hf() -> None:
    assert not [name for name in imported("flodl")["new"] if str(name).startswith("flodl_hf")]  # type: ignore[attr-defined]
