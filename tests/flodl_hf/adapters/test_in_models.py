"""Adapters in models: the base's bits stay, one is in at a time with its head, merged sums are rounded once."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import moved  # pyright: ignore[reportMissingImports]
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.models.adapters import Lora
from flodl_hf.nn.adapter_layers import AdaptedLinear
from flodl_hf.training.demo import demo_model, learn_vocabulary

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 8, 11, 3]])
TEXTS = ["a good film", "bad", "a film that is neither good nor bad, and long"]


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_fresh_adapter_changes_nothing_and_only_it_and_the_head_learn(base: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    before = logits(model)
    model.add_adapter(Lora(rank=2))
    assert torch.equal(logits(model), before)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {
        *(
            f"network.encoder.layers.{i}.attention.{part}.lora.{leaf}"
            for i in range(2)
            for part in ("query", "value")
            for leaf in ("down", "up")
        ),
        "network.head.classifier.weight",
        "network.head.classifier.bias",
    }


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"rslora": True, "targets": "all-linear"}])
def test_the_base_keeps_its_bits_through_training_steps_and_merging(adapted: Any, base: Path, kind: dict) -> None:
    first: Any = AutoModelForSequenceClassification.from_pretrained(base)
    before, said = state(first), logits(first)
    model = adapted(dropout=0.1, **kind)
    rate = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for _ in range(2):
        model.train()(IDS, labels=torch.tensor([0, 1])).loss.backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        rate.step()
    assert not torch.equal(logits(model), said)
    beside = logits(model)
    model.merge_adapter()
    assert not any(isinstance(m, AdaptedLinear) for m in model.modules())
    assert torch.allclose(logits(model), beside, rtol=0, atol=2e-5)
    assert torch.equal(logits(model.unmerge_adapter()), beside)
    with model.disable_adapter():
        assert torch.equal(logits(model), said)
    assert torch.equal(logits(model), beside)
    model.set_adapter(None)
    assert same(state(model), before)
    assert all(p.requires_grad for p in model.parameters())


def test_a_merged_weight_is_the_sum_in_float64_rounded_once(adapted: Any) -> None:
    model = adapted(targets="all-linear")
    at = "encoder.layers.1.feed_forward.up"
    linear = model.graph.get_submodule(at)
    lora = linear.lora
    exact = linear.weight.double() + 2.0 * lora.up.double() @ lora.down.double()
    merged = model.merge_adapter().graph.get_submodule(at).weight
    assert torch.equal(merged, exact.float())


def test_several_adapters_take_turns_each_with_its_head_and_labels(adapted: Any, base: Path) -> None:
    model = adapted()
    one = logits(model)
    model.add_adapter(Lora(rank=2, targets=("key", "feed_forward.down")), name="second")
    moved(model, "second", seed=7)
    two = logits(model)
    assert list(model.adapters) == ["default", "second"]
    assert model.active_adapter == "second"
    assert torch.equal(logits(model.set_adapter("default")), one)
    assert torch.equal(logits(model.set_adapter("second")), two)
    assert not torch.equal(one, two)
    model.remove_adapter("second")
    assert model.active_adapter is None
    fresh: Any = AutoModelForSequenceClassification.from_pretrained(base)
    assert torch.equal(logits(model), logits(fresh))
    with pytest.raises(ConfigError) as fault:
        model.set_adapter("second")
    assert fault.value.details["problems"] == ["second"]


def test_an_adapter_with_other_labels_brings_them(adapted: Any, base: Path, tmp_path: Path) -> None:
    other: Any = AutoModelForSequenceClassification.from_pretrained(base, labels=["x", "y", "z"])
    other.add_adapter(Lora(rank=2))
    assert other.untrained  # the head is new, whoever holds it
    moved(other)
    assert not other.untrained
    other.save_adapter(tmp_path / "three")
    model = adapted().load_adapter(tmp_path / "three", "three")
    assert (logits(model).shape, model.config.labels) == ((2, 3), ("x", "y", "z"))
    assert torch.equal(logits(model), logits(other))
    model.set_adapter("default")
    assert (logits(model).shape, model.num_labels) == ((2, 2), 2)


@pytest.mark.parametrize("precision", [None, "fp32", "int8"])
def test_predictions_run_merged_weights_on_the_processors_own_table(adapted: Any, precision: Any) -> None:
    model = adapted(targets="all-linear")
    exact = model.predict(TEXTS, precision="exact")
    found = model.predict(TEXTS, precision=precision)
    bound = 2e-2 if precision == "int8" else 1e-5
    for one, other in zip(found, exact, strict=True):
        assert {a.label: pytest.approx(a.score, abs=bound) for a in other} == {a.label: a.score for a in one}
    said = model.explain("cpu", precision)
    assert {group.table for group in said.groups} == {"processor"}
    assert "merged into copies of" in str(said)
    assert {group.table for group in model.explain("cpu", "exact").groups} == {"torch"}


def test_a_change_of_the_adapter_is_seen_by_the_next_prediction(adapted: Any) -> None:
    model = adapted()
    before = [a.score for a in model.predict(TEXTS[0])]
    moved(model, seed=5)
    after = [a.score for a in model.predict(TEXTS[0])]
    assert before != after
    assert [a.score for a in model.set_adapter(None).predict(TEXTS[0])] not in (before, after)


def test_copies_and_pickles_keep_their_adapters(adapted: Any) -> None:
    model = adapted(dora=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), logits(model))
        assert torch.equal(logits(other.set_adapter(None)), logits(copy.deepcopy(model).set_adapter(None)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rank": 0}, "rank 0"),
        ({"alpha": float("nan")}, "alpha nan"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"targets": ("",)}, "targets ('',)"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as fault:
        Lora(**settings)
    assert fault.value.details["problems"] == [problem]


def test_targets_that_are_none_are_named_all_at_once(base: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    with pytest.raises(ConfigError) as fault:
        model.add_adapter(Lora(targets=("quer", "classifier", "value")))
    assert len(fault.value.details["problems"]) == 2
    assert "query" in fault.value.details["problems"][0]
    assert "part of the head" in fault.value.details["problems"][1]
    assert model.active_adapter is None
    assert not model.adapters


def test_parts_of_one_matrix_are_adapted_together() -> None:
    model: Any = AutoModelForMaskedLM.from_config(ModelConfig.from_dict({"model_type": "modernbert", **TINY_MODERN}))
    with pytest.raises(ConfigError, match="one matrix with others"):
        model.add_adapter(Lora(targets=("query",)))
    model.add_adapter(Lora(rank=2))
    downs = [model.graph.get_submodule(f"encoder.layers.0.attention.{p}").lora.down for p in ("query", "key", "value")]
    assert downs[0] is downs[1] is downs[2]


TINY_MODERN = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 2,
}  # fmt: skip


def test_an_encoder_alone_and_masked_words_take_adapters_without_a_head(tmp_path: Path) -> None:
    classifier = demo_model(learn_vocabulary())
    classifier.save_pretrained(tmp_path / "base")
    model: Any = AutoModel.from_pretrained(tmp_path / "base")
    before = model.embed(TEXTS)
    moved(model.add_adapter(Lora(rank=2))).save_pretrained(tmp_path / "vectors")
    found: Any = load(tmp_path / "vectors")
    assert found.head == "base"
    assert torch.allclose(found.embed(TEXTS), model.embed(TEXTS))
    assert not torch.allclose(found.embed(TEXTS), before)


def test_vectors_are_made_as_the_adapter_says_and_as_the_base_says_without_it(base: Path, tmp_path: Path) -> None:
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig

    texts = ["a good film", "the soup was cold"]
    AutoModel.from_pretrained(base).save_pretrained(tmp_path / "vectors")
    first: Any = AutoModel.from_pretrained(tmp_path / "vectors")
    plain = first.embed(texts)
    moved(first.add_adapter(Lora(rank=2)))
    first.sentence_recipe = SentenceTransformerConfig(pooling=("max",), normalize=True)
    folder, wanted = first.save_pretrained(tmp_path / "adapter"), first.embed(texts)
    assert torch.equal(first.set_adapter(None).embed(texts), plain)
    assert torch.equal(first.set_adapter("default").embed(texts), wanted)
    second: Any = AutoModel.from_pretrained(tmp_path / "vectors")
    assert torch.equal(second.load_adapter(folder, "other").embed(texts), wanted)
    with second.disable_adapter():
        assert torch.equal(second.embed(texts), plain)
        again = second.save_adapter(tmp_path / "again", "other")
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "vectors", adapter=again).embed(texts), wanted)
    assert torch.equal(second.embed(texts), wanted)
