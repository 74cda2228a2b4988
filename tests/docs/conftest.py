"""The demo's model, trained once a session, for every document to load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flodl_hf import families
from flodl_hf.demo import write_demo


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo") / "demo-model")


@pytest.fixture
def working_folder(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with ``demo-model`` in it, entered, and no family registered but the package's own."""
    shutil.copytree(demo_model, tmp_path / "demo-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "_registered", {})
    return tmp_path
