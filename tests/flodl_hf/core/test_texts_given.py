"""What is given as texts: one or several, told apart without a guess; list-likes; texts with nothing to read."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flodl.errors import FlodlError
from flodl_hf.errors import PredictError

Maker = Callable[..., Any]
TEXTS = ["the cat sat", "a dog ran on the mat"]
# How each head is asked about several texts, and the containers that it answers in.
ASK: dict[str, Callable[..., Any]] = {
    "base": lambda model, texts, **run: model.embed(texts, **run),
    "sequence_classification": lambda model, texts, **run: model.predict(texts, **run),
    "token_classification": lambda model, texts, **run: model.predict(texts, **run),
    "masked_lm": lambda model, texts, **run: model.fill_mask(texts, **run),
    "question_answering": lambda model, texts, **run: model.answer_batch(texts, **run),
}
KINDS = {
    "sequence_classification": "Labels", "token_classification": "Entities", "masked_lm": "Fills",
    "question_answering": "Answers",
}  # fmt: skip
heads = pytest.mark.parametrize("head", ASK)
answering = pytest.mark.parametrize("head", KINDS)


def alike(found: Any, expected: Any) -> bool:
    """Whether two answers are one, scores to the rounding of sums in another order."""
    found, expected = (
        [one.to_dict() if hasattr(one, "to_dict") else one for one in answers] for answers in (found, expected)
    )
    return same(found, expected)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return abs(a - b) < 1e-5
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, atol=1e-5)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def items(head: str, texts: list[str] = TEXTS) -> list[Any]:
    if head == "question_answering":
        return [("what sat?", text) for text in texts]
    return [f"{text} [MASK]" if text.strip() else text for text in texts] if head == "masked_lm" else list(texts)


class Column:
    """A column as datasets has them: known in length, read by place, no list."""

    def __init__(self, texts: list[Any]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.texts)


class Series(Column):
    """A column as pandas has them."""

    def tolist(self) -> list[Any]:
        return list(self.texts)


class Chunked(Column):
    """A column as pyarrow has them, whose elements are no strings."""

    def __iter__(self) -> Iterator[Any]:
        return iter(object() for _ in self.texts)

    def to_pylist(self) -> list[Any]:
        return list(self.texts)


def an_array(texts: list[Any]) -> Any:
    return np.array(texts)


@heads
@pytest.mark.parametrize("kind", [Column, Series, Chunked, an_array, lambda texts: dict.fromkeys(texts).keys()])
def test_what_behaves_like_a_list_is_answered_like_a_list(head: str, kind: Callable[..., Any], make: Maker) -> None:
    model = make("bert", head)
    expected = ASK[head](model, items(head))
    found = ASK[head](model, kind(items(head)))
    assert isinstance(found, torch.Tensor if head == "base" else list)
    assert alike(found, expected)


def test_a_column_of_pandas_is_a_list(make: Maker) -> None:
    pandas = pytest.importorskip("pandas")
    model = make("bert", "sequence_classification")
    found = model.predict(pandas.Series(TEXTS, index=[7, 9]))
    frame = pandas.DataFrame(found)
    assert list(frame.columns) == ["text", "label", "score"]
    assert list(frame["text"]) == TEXTS
    assert list(frame["label"]) == [one[0].label for one in found]


@heads
def test_a_generator_stays_one(head: str, make: Maker) -> None:
    found = ASK[head](make("bert", head), (item for item in items(head)))
    assert isinstance(found, Iterator)
    assert len(list(found)) == 2


def test_a_tuple_of_two_texts_is_refused_with_both_spellings(make: Maker) -> None:
    model = make("bert", "sequence_classification")
    with pytest.raises(PredictError) as refused:
        model.predict(("the cat", "bad"))
    assert "predict([(a, b)])" in str(refused.value)
    assert "predict([a, b])" in str(refused.value)
    assert len(model.predict([("the cat", "bad")])) == 1
    assert len(model.predict(["the cat", "bad"])) == 2
    assert len(model.predict(("the cat", "bad", "the dog"))) == 3
    assert model.predict({"text": "the cat", "text_pair": "bad"}).label is not None


@heads
@pytest.mark.parametrize("wrong", [{"the cat": 1}, {"a", "b"}, b"the cat", 3, None])
def test_what_is_no_list_of_texts_is_refused(head: str, wrong: Any, make: Maker) -> None:
    with pytest.raises(PredictError) as refused:
        ASK[head](make("bert", head), wrong)
    assert re.search("dict|set|bytes|int|NoneType", str(refused.value))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_value_is_called_so(missing: Any, make: Maker) -> None:
    with pytest.raises(PredictError, match=r"item 1 is \w+ \(missing; drop or fill"):
        make("bert", "sequence_classification").predict(["the cat", missing])


@heads
@pytest.mark.parametrize("name", ["columns", "column_names"])
def test_a_whole_table_is_refused_by_the_names_of_its_columns(head: str, name: str, make: Maker) -> None:
    table = type("Table", (Column,), {name: ["text", "label"]})(["text", "label"])
    with pytest.raises(PredictError, match=r"whole table.*'text', 'label'.*one of its columns"):
        ASK[head](make("bert", head), table)


def test_a_table_whose_columns_are_values_is_refused_by_their_names(make: Maker) -> None:
    table = type("Table", (Column,), {"columns": [["a text"]], "column_names": ["text"]})(["text"])
    with pytest.raises(PredictError, match=r"whole table \(Table with columns \['text'\]\)"):
        make("bert", "sequence_classification").predict(table)


def test_a_string_of_numpy_is_a_string(make: Maker) -> None:
    found = make("bert", "sequence_classification").predict(np.str_("the cat"))
    assert type(found.text) is str
    assert repr(found).startswith("Labels('the cat'")


def test_a_dictionary_without_a_text_is_told_by_its_keys(make: Maker) -> None:
    with pytest.raises(PredictError, match=r"item 1 has the keys \['sentence'\]; expected 'text'"):
        make("bert", "sequence_classification").predict([{"text": "a"}, {"sentence": "a"}])


def test_documents_of_a_ranking_are_a_list(make: Maker) -> None:
    model = make("bert", "sequence_classification", id2label={"0": "fits"})
    for query, documents in (("a cat", "the cat sat"), (["a cat"], ["x"]), ("a cat", ["x", 3])):
        with pytest.raises(PredictError, match="rerank"):
            model.rerank(query, documents)
    for several in (TEXTS, tuple(TEXTS), iter(TEXTS), Series(TEXTS), an_array(TEXTS)):
        found = model.rerank("a cat", several)
        assert [TEXTS[document.index] for document in found] == [document.text for document in found]
        assert {document.text for document in found} == set(TEXTS)


def test_candidate_labels_may_be_a_column(make: Maker) -> None:
    names = {"0": "contradiction", "1": "neutral", "2": "entailment"}
    model = make("bert", "sequence_classification", id2label=names)
    found = model.zero_shot(Series(TEXTS), Series(["cats", "dogs"]))
    assert [{one.label for one in labels} for labels in found] == [{"cats", "dogs"}] * 2


# --- nothing to read ---------------------------------------------------------------------------------


@answering
@pytest.mark.parametrize("blank", ["", " \n\t", "\u2003"])
def test_a_text_with_nothing_to_read_says_so_and_disturbs_no_other(head: str, blank: str, make: Maker) -> None:
    model = make("bert", head)
    expected = ASK[head](model, items(head))
    found = ASK[head](model, items(head, [TEXTS[0], blank, TEXTS[1], blank]))
    assert [type(one).__name__ for one in found] == [KINDS[head]] * 4
    assert [one.empty for one in found] == [False, True, False, True]
    assert found.empty == [1, 3]
    assert alike([found[0], found[2]], expected)
    # Labels are those of an empty text; nothing else can be found in one.
    assert bool(found[1]) == (head == "sequence_classification")
    assert found[1].to_dict()["empty"] is True
    # All of them, and by an iterator.
    assert [one.empty for one in ASK[head](model, iter(items(head, [blank] * 3)))] == [True] * 3


@pytest.mark.parametrize("blank", ["", "  "])
def test_one_text_with_nothing_to_read(blank: str, make: Maker) -> None:
    for found in (
        make("bert", "token_classification").predict(blank),
        make("bert", "token_classification").predict([[blank, blank]], words=True)[0],
        make("bert", "masked_lm").fill_mask(blank),
        make("bert", "question_answering").answer("what?", blank),
    ):
        assert found.empty
        assert found == []
    assert make("bert", "token_classification").predict([]) == []
    assert not make("bert", "question_answering").answer(blank, "the cat").empty
    # A word that is blank leaves the others to be read.
    assert not make("bert", "token_classification").predict([["the", blank]], words=True)[0].empty
    # A vector of nothing is what other libraries give for it, too.
    assert make("bert", "base").embed(blank).shape == (16,)


def test_empty_texts_have_no_entities_in_the_form_of_transformers(make: Maker) -> None:
    model = make("bert", "token_classification")
    assert model.predict("", compat="transformers") == []
    assert model.predict(["", " "], compat="transformers") == [[], []]


@pytest.mark.parametrize("blank", ["", "  "])
def test_empty_texts_have_the_labels_that_the_model_gives_them(blank: str, make: Maker, padded: Any) -> None:
    """The numbers are those of a pass over the tokenizer's ids, whatever texts are beside them."""
    model = make("bert", "sequence_classification", id2label={"0": "entailment", "1": "b"})
    pairs = [("the cat", blank), (blank, "the cat"), (blank, blank), ("the cat", "sat")]
    found = model.predict(pairs)
    for pair, labels in zip(pairs, found, strict=True):
        expected = padded(model, *pair).softmax(-1).tolist()
        assert {one.label: one.score for one in labels} == pytest.approx(
            dict(zip(model.config.labels, expected, strict=True)), abs=1e-6
        )
    assert [labels.empty for labels in found] == [False, False, True, False]
    (alone,) = model.predict([blank])
    expected = padded(model, blank).softmax(-1).tolist()
    assert sorted((one.score for one in alone), reverse=True) == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert alone.empty
    # Alone as well, because a row may differ in its last bit from the same row in a larger batch.
    assert model.predict({"text": blank, "text_pair": "the cat"}) == model.predict([(blank, "the cat")])[0]
    assert model.zero_shot(blank, ["cats", "dogs"]).empty
    assert len(model.zero_shot(blank, ["cats", "dogs"])) == 2


LONG = " ".join(["the cat sat on the mat"] * 20)


@pytest.mark.parametrize("head", ["sequence_classification", "next_sentence"])
@pytest.mark.parametrize("pair", [(LONG, "the cat"), ("the cat", LONG)])
def test_the_longer_text_of_a_pair_is_read_in_windows(head: str, pair: tuple[str, str], make: Maker) -> None:
    model = make("bert", head)
    (found,) = model.predict([pair])
    assert model.tokenizer is not None
    cut = "first" if pair[0] == LONG else "second"
    (rows,) = model.tokenizer.encode_rows([pair[0]], [pair[1]], max_tokens=model.max_tokens, cut=cut)
    assert found[0].windows == len(rows) > 1
    with torch.no_grad():
        passes = [model(torch.tensor([row.ids]), token_type_ids=torch.tensor([row.type_ids])) for row in rows]
    scores = torch.cat([one.logits for one in passes]).softmax(-1)
    weights = torch.tensor([len(row.ids) - sum(row.special) for row in rows], dtype=torch.float32)
    expected = (scores * weights[:, None]).sum(0) / weights.sum()
    assert sorted(one.score for one in found) == pytest.approx(sorted(expected.tolist()), abs=1e-6)
    with pytest.raises(FlodlError, match="text 0"):
        model.predict([pair], strict=True)


def test_pairs_of_two_long_texts_are_truncated_as_by_transformers(make: Maker) -> None:
    model = make("bert", "sequence_classification")
    with pytest.warns(UserWarning, match="1 of 3 pairs"):
        found = model.predict([("a cat", "a dog"), (LONG, LONG), ("a cat", LONG)])
    assert [labels[0].windows > 1 for labels in found] == [False, False, True]
    tokenizer: Any = model.tokenizer
    encoded = tokenizer([LONG], [LONG], truncation=True, max_length=model.max_tokens, return_tensors="pt")
    with torch.no_grad():
        expected = model(**encoded).logits[0].softmax(-1).tolist()
    assert sorted(one.score for one in found[1]) == pytest.approx(sorted(expected), abs=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a truncation that was requested needs no warning
        assert model.predict([(LONG, LONG)], truncate=True)[0] == found[1]


def test_zero_shot_and_choices_cut_the_longer_text(make: Maker) -> None:
    model = make("bert", "sequence_classification", id2label={"0": "entailment", "1": "b"})
    assert model.zero_shot(LONG, ["cats"])[0].windows > 1
    assert model.zero_shot("the cat", ["cats"], template=LONG + " {}")[0].windows > 1
    choices: Any = make("bert", "multiple_choice")
    assert len(choices.predict((LONG, ["the cat", "the dog"]))) == 2
    assert len(choices.predict(("the cat", [LONG, "the dog"]))) == 2


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        *(("sequence_classification", wrong) for wrong in (("",), ("a", "b", "c"), {"text_pair": ""}, None, ("", 3))),
        *(("question_answering", wrong) for wrong in (("",), ("a", "b", ""), {"context": ""}, None, (3, ""))),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(head: str, wrong: Any, make: Maker) -> None:
    model = make("bert", head)
    ask = model.predict if head == "sequence_classification" else model.answer_batch
    # The second window of the list.
    for before in (1, 1030):
        with pytest.raises(PredictError) as refused:
            ask([("a", "")] * before + [wrong], window=1024)
        assert refused.value.place == before


@answering
@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_standard_input_with_nothing_in_them_say_so(
    head: str, form: str, saved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    testing = pytest.importorskip("typer.testing")
    from flodl_hf.cli.app import app

    folder = saved("bert", head)
    words = ["predict", str(folder), *(["--json"] if form == "json" else [])]
    words += ["--question", "what sat?"] if head == "question_answering" else []
    lines = [items(head)[0] if isinstance(items(head)[0], str) else TEXTS[0], "", "  "]
    told = testing.CliRunner().invoke(app, words, input="\n".join(lines) + "\n")
    assert told.exit_code == 0, told.output
    if form == "json":
        found = [json.loads(line) for line in told.stdout.splitlines()]
        assert [line["text"] for line in found] == lines
        assert [line.get("empty", False) for line in found] == [False, True, True]
        assert [bool(line["result"]) for line in found][1:] == [head == "sequence_classification"] * 2
    else:
        assert told.stdout.count("(empty)") == 2


def test_documents_with_nothing_to_read_are_scored_and_marked(make: Maker, padded: Any) -> None:
    model = make("bert", "sequence_classification", id2label={"0": "fits"})
    for query in ("a cat", " "):
        documents = ["", *TEXTS, " "]
        found = model.rerank(query, documents)
        expected = [padded(model, query, document)[0].sigmoid().item() for document in documents]
        assert {one.index: one.score for one in found} == pytest.approx(dict(enumerate(expected)), abs=1e-6)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        assert {one.index for one in found if one.empty} == ({0, 3} if query.strip() else {0, 1, 2, 3})
        assert [one["empty"] for one in found.to_dict()["documents"]] == [one.empty for one in found]
    assert model.rerank("a cat", []) == []


def test_the_place_of_a_wrong_item_counts_empty_ones(make: Maker) -> None:
    with pytest.raises(PredictError, match="item 3 is int"):
        make("bert", "sequence_classification").predict(["", "the cat", " ", 3])


def test_the_same_shape_for_one_question_and_for_many(make: Maker) -> None:
    model = make("bert", "question_answering")
    one = model.answer("what sat?", TEXTS[0])
    (many,) = model.answer_batch([("what sat?", TEXTS[0])])
    written = model.answer_batch({"question": "what sat?", "context": TEXTS[0]})
    assert type(one) is type(many) is type(written)
    assert alike([one, one], [many, written])
    assert one == one[0]
    assert one.text == one[0].text == TEXTS[0][one.start : one.end]
    assert (one.question, one.context) == ("what sat?", TEXTS[0])
    assert len(model.answer("what sat?", TEXTS[0], top_k=2)) == len(
        model.answer_batch([("what sat?", TEXTS[0])], top_k=2)[0]
    )


# --- how far it is -----------------------------------------------------------------------------------


@heads
def test_progress_of_one_text_leaves_later_calls_their_progress(head: str, make: Maker) -> None:
    from flodl import progress

    model, item = make("bert", head), items(head, TEXTS[:1])[0]
    if head == "question_answering":
        model.answer(*item, progress=True)
    else:
        ASK[head](model, item, progress=True)
    assert progress._shown == []


@heads
@pytest.mark.parametrize("given", [list, iter])
@pytest.mark.parametrize("show", [None, True, False])
def test_progress_is_shown_where_asked_and_changes_no_answer(
    head: str, given: Callable[..., Any], show: bool | None, make: Maker, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from flodl import progress

    told: list[tuple[str, int, int | None]] = []
    monkeypatch.setattr(progress.Progress, "_draw", lambda self: told.append((self.what, self.done, self.total)))
    model = make("bert", head)
    model.runtime(token_budget=1)  # a batch for each text
    texts = items(head, TEXTS * 4)
    expected = ASK[head](model, list(texts), progress=False)
    assert told == []
    found = ASK[head](model, given(texts), progress=show)
    assert alike(found, expected)
    if show:
        name = {"base": "embed", "masked_lm": "fill_mask", "question_answering": "answer"}.get(head, "predict")
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
        assert told[-1] == (name, 8, 8 if given is list else None)
        # After each batch rather than at the end alone.
        assert len({done for _, done, _ in told}) > 4
    else:
        assert told == []
