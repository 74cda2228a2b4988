"""Folders of weights for the tests of reading and writing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import Tensor

# Tests are imported by file, so what they share is not found otherwise.
sys.path.insert(0, str(Path(__file__).parent))

from weight_tables import save_sharded, save_single, some_tensors


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return some_tensors()


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return save_single(tmp_path / "single", tensors)


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return save_sharded(tmp_path / "sharded", tensors)
