"""A folder with the demo's model in it, for every document to load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flodl_hf import families


@pytest.fixture
def working_folder(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with ``demo-model`` in it, entered, and no family registered but the package's own."""
    shutil.copytree(demo_model, tmp_path / "demo-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "_registered", {})
    return tmp_path
