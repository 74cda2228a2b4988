"""A tiny checkpoint to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.training import demo

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, "type_vocab_size": 2, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.1,
}  # fmt: skip
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained two-layer BERT with a tokenizer, which says that it is an encoder alone."""
    folder = demo.demo_model(demo.learn_vocabulary()).save_pretrained(tmp_path_factory.mktemp("base") / "tiny")
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace("BertForSequenceClassification", "BertModel"), "utf-8")
    return folder


@pytest.fixture(scope="session")
def starts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained two-layer encoders of three families, with one tokenizer."""
    import torch

    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.auto import head_named

    tokenizer, found = demo.learn_vocabulary(), {"base": base}
    for family, head in (("bert", "pretraining"), ("albert", "pretraining"), ("electra", "replaced_tokens")):
        torch.manual_seed(3)
        sizes = SIZES if family == "bert" else {**SIZES, "embedding_size": 32}
        config = ModelConfig.for_model(family, vocab_size=tokenizer.vocab_size, **sizes)
        model = head_named(head).model.from_config(config)
        model.tokenizer = tokenizer
        found[family] = model.save_pretrained(tmp_path_factory.mktemp("starts") / family)
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where nothing is lost: the command writes a folder where it was started."""
    monkeypatch.chdir(tmp_path)
