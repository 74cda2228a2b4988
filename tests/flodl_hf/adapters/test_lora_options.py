"""Biases, embedding tables and rows of tokens in LoRA adapters: names as in peft's files, values, merging, saving.

`test_as_peft` compares logits of the same options with peft itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import moved  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from flodl.errors import CheckpointError, ConfigError
from flodl_hf import AutoModelForMaskedLM, AutoModelForSequenceClassification
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import named
from flodl_hf.models.adapters import IA3, Lora
from flodl_hf.parity.cell import settings_of

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 8, 11, 3]])
BERT = "base_model.model.bert."
WORDS = BERT + "embeddings.word_embeddings."
QUERY = BERT + "encoder.layer.0.attention.self.query."
PLAIN = {QUERY + "lora_A.weight", QUERY + "lora_B.weight"}
# Options, and names of the first layer as peft 0.21.2 writes them.
OPTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all biases": (
        {"targets": "query", "bias": "all"},
        {*PLAIN, QUERY + "base_layer.bias", BERT + "embeddings.LayerNorm.bias", BERT + "pooler.dense.bias"}
        | {BERT + f"encoder.layer.0.{name}.bias" for name in ("attention.self.key", "attention.self.value")}
        | {BERT + f"encoder.layer.0.attention.output.{name}.bias" for name in ("dense", "LayerNorm")}
        | {BERT + f"encoder.layer.0.{name}.bias" for name in ("intermediate.dense", "output.dense", "output.LayerNorm")},
    ),
    "biases of targets": ({"targets": "query", "bias": "lora_only"}, {*PLAIN, QUERY + "base_layer.bias"}),
    "a bias of the part": ({"targets": "query", "lora_bias": True}, {*PLAIN, QUERY + "lora_B.bias"}),
    "a table": (
        {"targets": ["query", "word_embeddings"]},
        {*PLAIN, WORDS + "lora_embedding_A", WORDS + "lora_embedding_B"},
    ),
    "a table with lengths": (
        {"targets": ["word_embeddings"], "dora": True},
        {WORDS + "lora_embedding_A", WORDS + "lora_embedding_B", WORDS + "lora_magnitude_vector"},
    ),
    "rows of tokens": (
        {"targets": "query", "trainable_token_indices": [5, 9]},
        {*PLAIN, WORDS + "token_adapter.trainable_tokens_delta"},
    ),
    "rows of two tables": (
        {"targets": "query", "trainable_token_indices": {"word_embeddings": [9], "token_type_embeddings": [0]}},
        {*PLAIN, WORDS + "token_adapter.trainable_tokens_delta"}
        | {BERT + "embeddings.token_type_embeddings.token_adapter.trainable_tokens_delta"},
    ),
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("kind", OPTIONS)
def test_names_and_values_go_through_a_folder(
    kind: str, adapted: Callable[..., Any], base: Path, tmp_path: Path
) -> None:
    options, names = OPTIONS[kind]
    model = adapted(**options)
    plain = logits(AutoModelForSequenceClassification.from_pretrained(base))
    expected = logits(model)
    assert (expected - plain).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    of_first = {name for name in stored if "layer.1." not in name and "classifier" not in name}
    assert of_first == names
    again = AutoModelForSequenceClassification.from_pretrained(base, adapter=tmp_path / "adapter")
    assert torch.equal(logits(again), expected)
    again.save_pretrained(tmp_path / "copy")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
    # `predict` runs on merged weights.
    scores = torch.tensor([[one.score for one in answer] for answer in again.predict(["it broke", "i love it"])])
    again.merge_adapter()
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)
    merged = torch.tensor([[one.score for one in answer] for answer in again.predict(["it broke", "i love it"])])
    torch.testing.assert_close(merged, scores, rtol=0, atol=1e-5)
    again.unmerge_adapter()
    assert torch.equal(logits(again), expected)
    again.set_adapter(None)
    assert torch.equal(logits(again), plain)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_fresh_adapter_changes_nothing_and_learns(kind: str, base: Path) -> None:
    options, _ = OPTIONS[kind]
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    plain = logits(model)
    model.add_adapter(Lora(rank=4, alpha=8, **options))
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=1e-6)
    model.eval()(IDS, labels=torch.tensor([0, 1])).loss.backward()
    adapter = model._held_adapters.known["default"]
    # What multiplies zeros has no gradient yet.
    waiting = {id(part.down) for part in adapter.parts.values() if hasattr(part, "down") and not part.up.any()}
    waiting |= {id(part.up) for part in adapter.parts.values() if hasattr(part, "down") and not part.down.any()}
    for parameter in adapter.parameters():
        assert parameter.grad is not None
        assert id(parameter) in waiting or parameter.grad.any()


def test_values_of_a_table_and_of_rows_are_those_of_the_formula(adapted: Callable[..., Any], base: Path) -> None:
    table = AutoModelForSequenceClassification.from_pretrained(base).get_input_embeddings().weight.detach()
    part = adapted(targets=["word_embeddings"], alpha=12).get_input_embeddings()
    low = part.lora.down.t()[IDS] @ part.lora.up.t()
    torch.testing.assert_close(part(IDS), table[IDS] + 3.0 * low)
    part = adapted(targets="query", trainable_token_indices=[9, 5]).get_input_embeddings()
    expected = table.clone()
    expected[[9, 5]] = part.lora.rows.detach()
    assert torch.equal(part(IDS), expected[IDS])


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropout_applies_to_the_input_of_the_part(dora: bool, adapted: Callable[..., Any]) -> None:
    model = adapted(targets="query", dropout=0.5, dora=dora)
    query = model.graph.get_submodule("encoder.layers.0.attention.query").train()
    hidden = torch.randn(3, 7, query.in_features, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(4)
    found = query(hidden)
    torch.manual_seed(4)
    dropped, part = F.dropout(hidden, 0.5), query.lora
    low = part.scale * (dropped @ part.down.t() @ part.up.t())
    plain = F.linear(hidden, query.weight, query.bias)
    expected = plain + low
    if dora:  # Liu et al. 2024, with dropout as in peft: the product with the base sees the dropped input too
        length = (query.weight + part.scale * (part.up @ part.down)).norm(dim=1)
        ratio = part.magnitude / length
        expected = plain + (ratio - 1) * F.linear(dropped, query.weight) + ratio * low
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, query.eval()(hidden), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda values, tensors: values.update(trainable_token_indices=[5, 9, 10]), "shape"),
        (lambda values, tensors: values.update(trainable_token_indices=None), "although no id"),
        (lambda values, tensors: tensors.pop(WORDS + "token_adapter.trainable_tokens_delta"), "missing"),
    ],
    ids=["other ids", "no ids", "no rows"],
)
def test_rows_and_ids_have_to_fit(
    change: Callable[[Any, Any], Any], problem: str, adapted: Callable[..., Any], base: Path, tmp_path: Path
) -> None:
    adapted(**OPTIONS["rows of tokens"][0]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(values, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        AutoModelForSequenceClassification.from_pretrained(base, adapter=tmp_path)
    assert any(problem in fault and WORDS.removesuffix(".") in fault for fault in caught.value.problems)


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": "some"}, {"lora_bias": True, "dora": True}, {"trainable_token_indices": [-1]},
        {"trainable_token_indices": [10**6]}, {"trainable_token_indices": [5, 5]},
        {"trainable_token_indices": {"no_such_table": [1]}},
        {"targets": ["word_embeddings"], "trainable_token_indices": [5]},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be_followed(settings: dict[str, Any], base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoModelForSequenceClassification.from_pretrained(base).add_adapter(Lora(**settings))
    assert caught.value.problems


def test_a_head_that_shares_the_table_of_words_takes_no_part_of_it(base: Path) -> None:
    model: Any = AutoModelForMaskedLM.from_pretrained(base)
    with pytest.raises(ConfigError) as caught:
        model.add_adapter(Lora(targets=["word_embeddings"]))
    assert caught.value.problems == ["bert.embeddings.word_embeddings"]


@pytest.mark.parametrize("options", [{"bias": "all"}, {"bias": "lora_only", "targets": "all-linear"}])
def test_biases_beside_one_matrix_keep_their_names(options: dict[str, Any], tmp_path: Path) -> None:
    """DeBERTa's first version stores the biases of query and value outside of the matrix that joins them."""
    settings = settings_of(named("deberta"), "tiny")
    model: Any = AutoModelForSequenceClassification.from_config(ModelConfig.for_model("deberta", **settings))
    folder = model.save_pretrained(tmp_path / "base")
    model = moved(AutoModelForSequenceClassification.from_pretrained(folder).add_adapter(Lora(**options)))
    model.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {f"base_model.model.deberta.encoder.layer.0.attention.self.{name}_bias" for name in "qv"} <= set(stored)
    back: Any = AutoModelForSequenceClassification.from_pretrained(folder, adapter=tmp_path / "adapter")
    assert torch.equal(logits(back), logits(model))


def test_sets_of_names_have_one_order() -> None:
    names = {"value", "query", "key", "dense"}
    assert Lora(target_modules=names).targets == Lora(targets=names).targets == tuple(sorted(names))
    for kind in (set, frozenset):
        assert IA3(kind(names)).targets == IA3(feedforward_modules=kind(names)).inputs == tuple(sorted(names))
        assert Lora(8, None, 0.0, kind(names)).targets == tuple(sorted(names))
        ids = Lora(trainable_token_indices={"word_embeddings": kind({2, 31, 4, 1})}).trainable_token_indices
        assert ids == {"word_embeddings": (1, 2, 31, 4)}
