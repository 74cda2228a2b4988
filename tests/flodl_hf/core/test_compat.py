"""``compat="transformers"`` through the public calls equals the real pipelines, key by key, on the same folders."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf import load
from flodl_hf.errors import TokenizerError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

Saved = Callable[..., Path]
TEXTS = ["ada lives in paris!", "the acme corp's cat-dog ran, 3.14 times", "it was é not very good.", "xyz"]
NER = {str(i): name for i, name in enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])}
NLI = {"0": "contradiction", "1": "neutral", "2": "entailment"}
# As in the families' real files: a second text is not marked by its type.
TYPES = {"roberta": {"type_vocab_size": 1}, "deberta-v2": {"type_vocab_size": 0}}
families = pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "deberta-v2"])


def pipeline(task: str, folder: Path, **options: Any) -> Callable[..., Any]:
    """The real pipeline on a folder of ours, with the tokenizer that its ``tokenizer.json`` describes."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    names = ["input_ids", "attention_mask"]
    if config["model_type"] in ("bert", "albert"):
        names.insert(1, "token_type_ids")
    roles = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        model_input_names=names,
        **{"model_max_length": 40, **roles, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformers.pipeline(task, model=str(folder), tokenizer=tokenizer, device="cpu")

    def ask(*inputs: Any, **asked: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return made(*inputs, **asked)

    return ask


def same(found: Any, expected: Any) -> None:
    """Equal in every key, its order and its value; scores to the order of sums, which batches change."""
    assert isinstance(found, (type(expected), float)), (found, expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, str) or not hasattr(expected, "__float__"):
        assert found == expected
    else:
        assert float(found) == pytest.approx(float(expected), abs=1e-5)


@families
@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities(saved: Saved, family: str, aggregation: str) -> None:
    folder = saved(family, "token_classification", id2label=NER)
    model: Any = load(folder)
    theirs = pipeline("token-classification", folder)
    options = {"ignore_labels": ["O"]}
    for text in TEXTS:
        expected = theirs(text, aggregation_strategy=aggregation, **options)
        same(model.predict(text, aggregation=aggregation, compat="transformers", **options), expected)
    expected = theirs(TEXTS, aggregation_strategy=aggregation, ignore_labels=[])
    same(model.predict(TEXTS, aggregation=aggregation, compat="transformers", ignore_labels=[]), expected)


def test_entities_of_a_long_text(saved: Saved) -> None:
    folder = saved("bert", "token_classification", id2label=NER)
    text = " ".join(TEXTS * 4)
    expected = pipeline("token-classification", folder)(text, aggregation_strategy="simple", stride=8)
    model: Any = load(folder)
    found = model.predict(text, aggregation="simple", stride=8, compat="transformers")
    assert len(expected) > 10
    assert [list(e) for e in found] == [list(e) for e in expected]


def test_entities_of_given_words(saved: Saved) -> None:
    folder = saved("bert", "token_classification", id2label=NER)
    words = ["ada", "lives", "in", "par-is", "!"]
    expected = pipeline("token-classification", folder)(
        words, aggregation_strategy="simple", is_split_into_words=True, ignore_labels=[]
    )
    model: Any = load(folder)
    found = model.predict(words, words=True, aggregation="simple", ignore_labels=[], compat="transformers")
    same(found, expected[0] if isinstance(expected[0], list) else expected)


@families
@pytest.mark.parametrize(
    ("problem", "labels"),
    [(None, 3), ("single_label_classification", 2), ("multi_label_classification", 3), ("regression", 1), (None, 1)],
)
def test_classes(saved: Saved, family: str, problem: str | None, labels: int) -> None:
    stated: dict[str, Any] = {} if problem is None else {"problem_type": problem}
    stated |= TYPES.get(family, {})
    folder = saved(family, "sequence_classification", id2label={str(i): f"L{i}" for i in range(labels)}, **stated)
    model: Any = load(folder)
    theirs = pipeline("text-classification", folder)
    for options in ({"top_k": None}, {"top_k": 2}, {"top_k": None, "function_to_apply": "sigmoid"}):
        same(model.predict(TEXTS[0], compat="transformers", **options), theirs(TEXTS[0], **options))
        same(model.predict(TEXTS, compat="transformers", **options), theirs(TEXTS, **options))
    pair = {"text": TEXTS[0], "text_pair": TEXTS[1]}
    same(model.predict(pair, compat="transformers"), theirs(pair, top_k=None))


@families
@pytest.mark.parametrize("several", [False, True])
def test_zero_shot(saved: Saved, family: str, several: bool) -> None:
    folder = saved(family, "sequence_classification", id2label=NLI, **TYPES.get(family, {}))
    model: Any = load(folder)
    theirs = pipeline("zero-shot-classification", folder)
    for labels in (["cat", "film", "corp"], ["cat"]):
        options = {"multi_label": several}
        same(model.zero_shot(TEXTS[0], labels, compat="transformers", **options), theirs(TEXTS[0], labels, **options))
        expected = theirs(TEXTS, labels, hypothesis_template="{} or not", **options)
        same(model.zero_shot(TEXTS, labels, template="{} or not", compat="transformers", **options), expected)


@families
def test_masks(saved: Saved, family: str) -> None:
    folder = saved(family, "masked_lm")
    model: Any = load(folder)
    theirs = pipeline("fill-mask", folder)
    for text in ("the [MASK] sat", "a [MASK] of [MASK] was [MASK]!"):
        for options in ({}, {"top_k": 1}, {"top_k": 7}, {"targets": ["cat", "dog", "film"]}):
            same(model.fill_mask(text, compat="transformers", **options), theirs(text, **options))
    both = ["the [MASK] sat", "in [MASK]"]
    same(model.fill_mask(both, compat="transformers"), theirs(both))


def test_compat_refuses_what_the_pipeline_would_cut(saved: Saved) -> None:
    model: Any = load(saved("bert", "sequence_classification"))
    with pytest.raises(TokenizerError, match="text 0"):
        model.predict("the cat " * 60, compat="transformers")


def test_answers_as_the_removed_pipeline_gave_them(saved: Saved) -> None:
    from flodl_hf.inference.transformers_results import question_answering

    model: Any = load(saved("bert", "question_answering"))
    assert model.tokenizer is not None
    question, context = "who ran?", "ada lives in paris and the acme corp cat-dog ran on a mat " * 3
    rows = model.tokenizer.encode_rows([question], [context], max_tokens=40, stride=20, snap=False)[0]
    with torch.no_grad():
        outs = [model(torch.tensor([r.ids]), token_type_ids=torch.tensor([list(r.type_ids)])) for r in rows]
    for top_k in (1, 3):
        expected = question_answering(
            [torch.stack([o.start_logits[0], o.end_logits[0]], -1) for o in outs], rows, context,
            cls_id=model.tokenizer.cls_token_id, top_k=top_k, max_answer_len=15,
        )  # fmt: skip
        found = model.answer(question, context, top_k=top_k, max_answer_length=15, compat="transformers-4.57")
        same(found, expected)
    first = found[0]
    assert list(first) == ["score", "start", "end", "answer"]
    assert context[first["start"] : first["end"]].strip() == first["answer"].strip()
