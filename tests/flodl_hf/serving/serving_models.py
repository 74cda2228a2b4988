"""Small checkpoints of every head in folders, made by this package alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers, pre_tokenizers, processors

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.tokenization.tokenizer import Tokenizer

# What a batch of neighbours may change, on the sizes of these models in float32.
CLOSE = 2e-5

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "ran", "good", "bad", "film", "is", "was", "not", "very"]
WORDS += ["ada", "lives", "in", "paris", "works", "for", "acme", "corp"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = [*SPECIALS, *WORDS, *[f"##{c}" for c in LETTERS], *LETTERS, *".,!?'"]

TEXTS = [
    "Ada lives in Paris.",
    "the cat sat on the mat and the dog ran",
    "a",
    "good film, very good film!",
    "Ada works for Acme Corp in Paris " * 12,
    "not bad",
]
MASKED = ["the [MASK] sat on the mat", "ada lives in [MASK]."]
QUESTIONS = [["who lives in paris", "Ada lives in Paris. The cat sat on the mat."], ["who ran", "the dog ran " * 30]]

# name: head, labels
MODELS: dict[str, tuple[str, list[str] | None]] = {
    "embed": ("base", None),
    "classes": ("sequence_classification", ["bad", "good", "fair"]),
    "ranker": ("sequence_classification", ["fits"]),
    "nli": ("sequence_classification", ["contradiction", "neutral", "entailment"]),
    "ner": ("token_classification", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]),
    "qa": ("question_answering", None),
    "m3": ("base", None),
    "mlm": ("masked_lm", None),
}


def tokenizer() -> Tokenizer:
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


def write(folder: Path, name: str) -> Path:
    head, labels = MODELS[name]
    torch.manual_seed(7)
    settings: dict[str, Any] = {} if labels is None else {"labels": labels}
    config = ModelConfig.for_model(
        "bert", vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64, type_vocab_size=2, **settings,
    )  # fmt: skip
    model = head_named(head).model.from_config(config)
    with torch.no_grad():
        for label, parameter in model.graph.named_parameters():
            if "norm" not in label:
                parameter.normal_(0, 0.2)
    model._mark_untrained(())
    model.tokenizer = tokenizer()
    place = model.eval().save_pretrained(folder / name)
    if name == "m3":
        # As bge-m3 has them: layers for weights of words and for vectors of tokens.
        draw = torch.Generator().manual_seed(5)
        for file, size in (("sparse_linear.pt", 1), ("colbert_linear.pt", 8)):
            layer = {"weight": torch.randn(size, 32, generator=draw), "bias": torch.randn(size, generator=draw)}
            torch.save(layer, place / file)
        parts = [("Transformer", ""), ("Pooling", "1_Pooling")]
        chain = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(parts)
        ]
        (place / "modules.json").write_text(json.dumps(chain))
        (place / "1_Pooling").mkdir()
        (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
        prompts = {"prompts": {"query": "for "}}
        (place / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return place


def asked(http: Any, path: str, **body: Any) -> Any:
    if path in ("/embed", "/embed_all", "/similarity"):
        body = {"model": "embed", **body}
    if path in ("/embed", "/embed_all", "/embed_sparse", "/v1/embeddings"):
        body = {"truncate": True, **body}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def close(a: Any, b: Any) -> None:
    """Compare two trees of records; numbers within the bound."""
    if isinstance(a, float) or isinstance(b, float):
        assert a == pytest.approx(b, abs=CLOSE)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            close(a[name], b[name])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            close(x, y)
    else:
        assert a == b
