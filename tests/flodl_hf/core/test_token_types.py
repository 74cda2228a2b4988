"""Whether a second text is marked by token types, computed over families: in records, in calls and in predictions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flodl_hf.families import FAMILIES, named
from flodl_hf.runtime.engine import facts

PAIR = ("the cat sat", "a dog ran")
TYPES = [family.model_type for family in FAMILIES]
WITH_TEXT_LABELS = [family.model_type for family in FAMILIES if "sequence_classification" in family.heads]


def _record(model_type: str) -> Any:
    family = named(model_type)
    assert family is not None
    return family


def _has_a_table(model_type: str) -> bool:
    return any(row.field == "type_vocab_size" for row in _record(model_type).rows)


def test_families_are_on_both_sides() -> None:
    marked = {name for name in TYPES if _record(name).uses_token_types}
    assert {"bert", "electra", "albert", "nomic_bert", "deberta-v2"} <= marked
    assert {"roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "eurobert", "esm", "gte"}.isdisjoint(marked)
    assert all(_has_a_table(name) for name in marked)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_call_reads_types_where_there_is_a_table(make: Any, model_type: str) -> None:
    model = make(model_type)
    ids, types = torch.tensor([[2, 9, 12, 3, 8, 3]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        plain, zeros, marked = (model(ids, token_type_ids=kind)[0] for kind in (None, torch.zeros_like(types), types))
    assert torch.equal(plain, zeros)
    assert torch.equal(plain, marked) is (model.config.token_types < 2)
    assert model.config.uses_token_types is (_record(model_type).uses_token_types and model.config.token_types > 1)
    assert facts(model)["types"] is model.config.uses_token_types


@pytest.mark.parametrize("model_type", WITH_TEXT_LABELS)
def test_a_pair_is_marked_in_predictions_where_the_family_marks_it(make: Any, model_type: str) -> None:
    model = make(model_type, "sequence_classification")
    encoded = model.tokenizer(*PAIR, return_tensors="pt")
    types = torch.tensor([[0] * 5 + [1] * (encoded["input_ids"].shape[1] - 5)])
    with torch.no_grad():
        plain = model(encoded["input_ids"])[0].softmax(-1)[0]
        marked = model(encoded["input_ids"], token_type_ids=types)[0].softmax(-1)[0]
    found = {label.label: label.score for label in model.predict([PAIR], top_k=None)[0]}
    expected = marked if model.config.uses_token_types else plain
    scores = torch.tensor([found[name] for name in model.config.labels])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    if model.config.token_types > 1:
        assert not torch.allclose(plain, marked, rtol=0, atol=1e-4)


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", TYPES)
def test_the_record_says_what_transformers_does(model_type: str) -> None:
    """Its model takes them, and its tokenizer gives them for a second text."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no such family")
    config: Any = transformers.CONFIG_MAPPING[model_type]
    theirs: Any = transformers.MODEL_MAPPING[config]
    takes = "token_type_ids" in inspect.signature(theirs.forward).parameters
    record = _record(model_type)
    if record.uses_token_types:
        assert takes
    if record.tokenizer is not None and record.tokenizer.type_ids:
        assert record.uses_token_types
