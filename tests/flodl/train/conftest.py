"""Lets tests use the small runs of `test_resume`."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints be written without waiting for the disk: runs are killed here, and the power stays on."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
