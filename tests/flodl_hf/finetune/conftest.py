"""A tiny checkpoint to start from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flodl_hf import demo

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained two-layer BERT with a tokenizer, which says that it is an encoder alone."""
    folder = demo.demo_model(demo.learn_vocabulary()).save_pretrained(tmp_path_factory.mktemp("base") / "tiny")
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace("BertForSequenceClassification", "BertModel"), "utf-8")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where nothing is lost: the command writes a folder where it was started."""
    monkeypatch.chdir(tmp_path)
