"""What the parity tests share: whether recorded numbers can be asked for to the bit."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


@pytest.fixture(scope="session")
def recorded_here() -> bool:
    """Whether this is the torch and the kind of processor that the numbers were recorded on.

    Another one may add in another order, so that equality to the bit cannot be asked.
    """
    made: dict[str, Any] = json.loads((GOLDEN / "provenance.json").read_text("utf-8"))
    here = (torch.__version__, processor(), torch.backends.cpu.get_cpu_capability())
    return here == (made["torch"], made["processor"], made["capability"])
