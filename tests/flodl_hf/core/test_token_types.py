"""Whether a second text is marked by token types, computed over families: in calls and in predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf import load
from flodl_hf.families import FAMILIES

PAIR = ("the cat sat", "a dog ran")
TYPES = [family.model_type for family in FAMILIES]
WITH_TEXT_LABELS = [family.model_type for family in FAMILIES if "sequence_classification" in family.heads]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_call_reads_types_where_there_is_a_table(make: Any, model_type: str) -> None:
    model = make(model_type)
    ids, types = torch.tensor([[2, 9, 12, 3, 8, 3]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        plain, zeros, marked = (model(ids, token_type_ids=kind)[0] for kind in (None, torch.zeros_like(types), types))
    assert torch.equal(plain, zeros)
    assert torch.equal(plain, marked) is (model.config.token_types < 2)
    assert model.config.uses_token_types is (model.config.token_types > 1)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("model_type", WITH_TEXT_LABELS)
def test_a_pair_is_marked_in_predictions_where_the_tokenizer_returns_types(
    saved: Any, model_type: str, given: bool
) -> None:
    folder: Path = saved(model_type, "sequence_classification")
    names = ["input_ids", *["token_type_ids"] * given, "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_input_names": names}))
    model: Any = load(folder)
    encoded = model.tokenizer(*PAIR, return_tensors="pt")
    types = torch.tensor([[0] * 5 + [1] * (encoded["input_ids"].shape[1] - 5)])
    with torch.no_grad():
        plain = model(encoded["input_ids"])[0].softmax(-1)[0]
        marked = model(encoded["input_ids"], token_type_ids=types)[0].softmax(-1)[0]
    found = {label.label: label.score for label in model.predict([PAIR], top_k=None)[0]}
    scores = torch.tensor([found[name] for name in model.config.labels])
    torch.testing.assert_close(scores, marked if given else plain, rtol=0, atol=1e-5)
    if model.config.token_types > 1:
        assert not torch.allclose(plain, marked, rtol=0, atol=1e-4)


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["BertTokenizer", "DistilBertTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta"])
def test_predictions_of_pairs_are_those_of_transformers(saved: Any, model_type: str, name: str) -> None:
    """The class of the tokenizer decides whether the model receives token types, in every family."""
    import transformers

    folder: Path = saved(model_type, "sequence_classification")
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **tokens}))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    made = transformers.AutoTokenizer.from_pretrained(folder)(*PAIR, return_tensors="pt")
    ours: Any = load(folder)
    assert ("token_type_ids" in made) is (name == "BertTokenizer")
    assert ours.tokenizer(*PAIR, return_tensors="pt").keys() == made.keys()
    with torch.no_grad():
        expected = theirs(**made).logits.softmax(-1)[0]
    found = {label.label: label.score for label in ours.predict([PAIR], top_k=None)[0]}
    scores = torch.tensor([found[name] for name in ours.config.labels])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
