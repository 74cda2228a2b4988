"""Small checkpoints made by this package alone, so that these tests need nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers, pre_tokenizers, processors

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.tokenization.tokenizer import Tokenizer

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "good",
    "bad",
    "film",
    "is",
    "was",
    "not",
    "very",
    "ada",
    "lives",
    "in",
    "paris",
    "works",
    "for",
    "acme",
    "corp",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [
    *SPECIALS,
    *WORDS,
    *[f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"],
    *"abcdefghijklmnopqrstuvwxyz",
    *".,!?'",
]

# The switches of each family's published checkpoints, in small sizes; keys are those of its config.json.
TINY: dict[str, dict[str, Any]] = {}
for family in FAMILIES:
    sizes: dict[str, Any] = {
        "vocab_size": len(VOCABULARY), "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24,
        "max_positions": 40, "type_vocab_size": 2, "embedding_size": 8, "summary": "first",
    }  # fmt: skip
    switches = {key: value for key, value in family.tiny.get("base", {}).items() if key != "pooler_hidden_size"}
    # A masked-word head that is not "legacy" reads the word table, so both have one width.
    sizes |= {} if switches.get("legacy", True) else {"embedding_size": sizes["hidden_size"]}
    TINY[family.model_type] = switches | {row.key: sizes[row.field] for row in family.rows if row.field in sizes}


def word_piece() -> Tokenizer:
    """Return a WordPiece tokenizer that knows a few words and every letter."""
    inner = Inner(models.WordPiece({token: i for i, token in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(SPECIALS)
    settings = '{"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}'
    files = {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": settings.encode()}
    return Tokenizer.from_files(files, folder="made in a test")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return word_piece()


Make = Callable[..., EncoderModel]


@pytest.fixture(scope="session")
def make(tokenizer: Tokenizer) -> Make:
    """Return a maker of small models with spread-out random weights and a tokenizer."""

    def build(model_type: str = "bert", head: str = "base", **settings: Any) -> EncoderModel:
        torch.manual_seed(1)
        config = ModelConfig.for_model(model_type, **(TINY[model_type] | settings))
        model = head_named(head).model.from_config(config)
        with torch.no_grad():
            for name, parameter in model.graph.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0, 0.3)
        model._mark_untrained(())
        model.tokenizer = tokenizer
        return model.eval()

    return build


@pytest.fixture
def saved(make: Make, tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of folders with small models in them."""

    def write(model_type: str = "bert", head: str = "base", **settings: Any) -> Path:
        return make(model_type, head, **settings).save_pretrained(tmp_path / f"{model_type}-{head}")

    return write


Crafted = Callable[..., EncoderModel]


@pytest.fixture
def crafted(make: Make) -> Crafted:
    """Return a maker of models whose right answer is known, because it depends on the token alone.

    A word's state is one-hot at its class, whatever stands around it: attention and feed-forward add nothing.
    With ``mix`` every token is also given the mean of its row, so that whole texts can be told apart.
    """

    def build(
        head: str, classes: dict[str, int], model_type: str = "bert", *,
        other: int = -1, mix: float = 0.0, sure: float = 3.0, **settings: Any,
    ) -> EncoderModel:  # fmt: skip
        model = make(model_type, head, **settings)
        width = model.config.encoder.hidden_size
        with torch.no_grad():
            for name, parameter in model.graph.named_parameters():
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            words = model.graph.get_parameter("encoder.embeddings.word.weight")
            for word, place in {token: i for i, token in enumerate(VOCABULARY)}.items():
                words[place, classes.get(word, other)] = 1.0
            for name, parameter in model.graph.named_parameters():
                if name.endswith(("attention.value.weight", "attention.output.weight")):
                    parameter.copy_(torch.eye(width) * mix)
                elif name.endswith(("projection.weight", "pooler.dense.weight", "head.dense.weight")):
                    parameter.copy_(torch.eye(*parameter.shape))
                elif name.startswith("head.") and name.endswith(("classifier.weight", "spans.weight")):
                    parameter.copy_(torch.eye(*parameter.shape) * sure)
        return model.eval()

    return build


@pytest.fixture
def padded() -> Callable[..., torch.Tensor]:
    """Return what a plain call with a padded batch gives a text: the way every tutorial goes."""

    def ask(model: EncoderModel, text: str, pair: str | None = None, field: str = "logits") -> torch.Tensor:
        assert model.tokenizer is not None
        encoded = model.tokenizer(
            [text, "x " * 9], None if pair is None else [pair, "y"], padding=True, return_tensors="pt"
        )
        known = {key: encoded[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in encoded}
        with torch.no_grad():
            states = model(**known)[field][0]
        return states[encoded["attention_mask"][0].bool()] if states.dim() == 2 else states

    return ask
