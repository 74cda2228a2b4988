"""The process that forks ranks starts with the command, before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import flodl.fork_server as server
import flodl_hf.cli
started = []
server.prepare_ranks = lambda *modules: started.append("torch" in sys.modules)
sys.argv = ["flodl-hf", *{words!r}, "--help"]
try:
    flodl_hf.cli.main()
except SystemExit:
    print("started", started)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["finetune", "m", "--devices", "2"], [False]),
        (["finetune", "m", "--device=cuda:0,cuda:1"], [False]),
        (["finetune", "m", "--devices", "1"], []),
        (["finetune", "m", "--epochs", "2"], []),
        (["predict", "m", "--devices", "2"], []),
    ],
)
def test_ranks_are_prepared_for_several_devices_only(words: list[str], expected: list[bool]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=words)], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == f"started {expected}"
