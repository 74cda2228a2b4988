"""Multiple choice, next sentences, pre-training pairs and replaced tokens: called, asked and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf import AutoModelForPreTraining, load
from flodl_hf.errors import PredictError

Make = Callable[..., Any]
TEXT = "the cat sat on the mat"


def probabilities(model: Any, prompt: str, choices: list[str]) -> Any:
    """Return the probabilities of choices as a call of the model gives them, in their order."""
    encoded = model.tokenizer([prompt] * len(choices), choices, padding=True, return_tensors="pt")
    rows = {key: encoded[key][None] for key in ("input_ids", "attention_mask", "token_type_ids")}
    with torch.no_grad():
        logits = model(**rows).logits
    assert logits.shape == (1, len(choices))
    return pytest.approx(logits.softmax(-1)[0].tolist())


def test_choices_are_ranked_by_their_probability(make: Make) -> None:
    model = make("bert", "multiple_choice")
    choices = ["a dog ran", "the cat", "a very good film"]
    found = model.predict((TEXT, choices))
    assert found.query == TEXT
    assert sorted(c.text for c in found) == sorted(choices)
    assert all(choices[c.index] == c.text for c in found)
    assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
    assert sum(c.score for c in found) == pytest.approx(1, abs=1e-6)
    assert [c.score for c in sorted(found, key=lambda c: c.index)] == probabilities(model, TEXT, choices)
    several = model.predict([(TEXT, choices), {"prompt": "a dog", "choices": ["ran"]}, ("", choices)])
    assert [(c.index, c.text) for c in several[0]] == [(c.index, c.text) for c in found]
    assert [c.score for c in several[0]] == pytest.approx([c.score for c in found], abs=1e-6)
    assert [c.score for c in several[1]] == [1.0]
    assert [c.score for c in sorted(several[2], key=lambda c: c.index)] == probabilities(model, "", choices)


def test_a_long_prompt_is_read_in_windows(make: Make) -> None:
    model = make("bert", "multiple_choice")
    found = model.predict(("the cat sat on the mat " * 20, ["a dog", "a cat"]))
    assert sum(c.score for c in found) == pytest.approx(1, abs=1e-6)
    with pytest.raises(Exception, match="fit"):
        model.predict(("the cat sat on the mat " * 20, ["a dog", "a cat"]), strict=True)


@pytest.mark.parametrize("item", ["a text", [("a", "b")], [("a", [])], [{"prompt": "a"}], [(1, ["a"])]])
def test_what_is_no_prompt_with_choices_is_refused(make: Make, item: Any) -> None:
    with pytest.raises(PredictError, match="prompt"):
        make("bert", "multiple_choice").predict(item)


def test_a_wrong_choice_and_rows_without_choices(make: Make) -> None:
    model = make("bert", "multiple_choice")
    ids = torch.tensor([[[2, 6, 3], [2, 7, 3]]])
    assert model(ids, labels=torch.tensor([1])).loss.isfinite()
    assert model(ids[0]).logits.shape == (2, 1)
    words = model.graph.get_parameter("encoder.embeddings.word.weight")
    torch.testing.assert_close(model(inputs_embeds=words[ids]).logits, model(ids).logits)
    with pytest.raises(PredictError, match="0 to 1"):
        model(ids, labels=torch.tensor([2]))


@pytest.mark.parametrize("head", ["next_sentence", "pretraining"])
def test_pairs_are_judged(make: Make, head: str) -> None:
    model = make("bert", head)
    (found,) = model.predict([(TEXT, "a dog ran")])
    assert model.predict((TEXT, "a dog ran")) == found
    encoded = model.tokenizer([TEXT], ["a dog ran"], return_tensors="pt")
    with torch.no_grad():
        out = model(**{key: encoded[key] for key in ("input_ids", "attention_mask", "token_type_ids")})
    logits = out.logits if head == "next_sentence" else out.seq_relationship_logits
    assert found.get("label") in ("follows", "other")
    assert {c.label: c.score for c in found} == pytest.approx(
        dict(zip(("follows", "other"), logits.softmax(-1)[0].tolist(), strict=True))
    )
    for wrong in (TEXT, [TEXT]):
        with pytest.raises(PredictError, match="pair"):
            model.predict(wrong)


def test_one_file_is_read_as_masked_words_and_as_both_tasks(make: Make, saved: Callable[..., Path]) -> None:
    folder = saved("bert", "pretraining")
    words = load(folder)
    assert words.head == "masked_lm"
    both: Any = AutoModelForPreTraining.from_pretrained(folder)
    assert both.head == "pretraining"
    assert both.load_report.trained
    masked = "the [MASK] sat"
    assert words.fill_mask(masked) == both.fill_mask(masked)  # type: ignore[attr-defined]
    out = both(torch.tensor([[2, 6, 3]]), labels=torch.tensor([[-100, 7, -100]]), next_sentence_label=torch.tensor([1]))
    assert out.loss.isfinite()
    assert both(torch.tensor([[2, 6, 3]]), labels=torch.tensor([[-100, 7, -100]])).loss is None


def test_replaced_tokens_stand_where_they_are_in_the_text(make: Make, saved: Callable[..., Path]) -> None:
    model = load(saved("electra", "replaced_tokens"))
    assert model.head == "replaced_tokens"
    anyone: Any = model
    every = anyone.predict(TEXT, replaced_only=False)
    assert [e.word for e in every] == TEXT.split()
    assert all(TEXT[e.start : e.end] == e.word for e in every)
    encoded = anyone.tokenizer([TEXT], return_tensors="pt")
    with torch.no_grad():
        chances = model(encoded["input_ids"]).logits[0].sigmoid()[1:-1].tolist()
    assert [e.score if e.label == "replaced" else 1 - e.score for e in every] == pytest.approx(chances, abs=1e-6)
    assert anyone.predict([TEXT])[0] == [e for e in every if e.label == "replaced"]
    ids, mask = torch.tensor([[2, 6, 3, 0]]), torch.tensor([[1, 1, 1, 0]])
    filled, alone = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 1, 0]])
    torch.testing.assert_close(
        model(ids, mask, labels=filled).loss, model(ids[:, :3], labels=alone).loss, rtol=0, atol=1e-6
    )
