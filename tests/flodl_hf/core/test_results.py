"""Results: short to read, JSON types, tables and HTML, in every task."""

from __future__ import annotations

import copy
import functools
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from flodl_hf.inference.results import (
    Answer,
    Answers,
    Classification,
    Entities,
    Entity,
    Fill,
    Fills,
    Found,
    Labels,
    Ranked,
    Ranking,
    Results,
)

TEXT = "Ada <b>lives</b> in Paris"
KINDS: dict[str, Found[Any]] = {
    "labels": Labels([Classification("good", 0.75), Classification("bad", 0.25)], TEXT),
    "a pair": Labels([Classification("good", 0.75)], (TEXT, "yes")),
    "entities": Entities([Entity("PER", 0.9, 0, 3, "Ada", (0, 1), (0, 1)), Entity("LOC", 0.8, 20, 25, "Paris", (3, 4), (3, 4))], TEXT),
    "answers": Answers([Answer("Paris", 0.7, 20, 25), Answer("Ada", 0.1, 0, 3)], ("where?", TEXT)),
    "no answer": Answers([Answer("", 0.9, 0, 0, True)], ("when?", TEXT)),
    "masks": Fills([[Fill("cat", 0.5, (7,), "the cat"), Fill("dog", 0.2, (8,), "the dog")]], "the [MASK]"),
    "ranking": Ranking([Ranked(1, 0.9, 1, TEXT), Ranked(0, float("-inf"), 0, " ")], "who?"),
}  # fmt: skip
EMPTY = {
    "labels": Labels((), " "),
    "entities": Entities((), ""),
    "answers": Answers((), ("q", "")),
    "masks": Fills((), "\n"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_it_is_a_sequence_of_its_records(kind: str) -> None:
    found = KINDS[kind]
    assert len(found) == len(list(found)) == len(found[:])
    assert found[0] == next(iter(found))
    assert found == list(found)
    assert list(found) == found
    assert found[:1] == [found[0]]
    assert functools.reduce(operator.iadd, [found, found], []) == list(found) * 2
    assert found != list(found) * 2
    assert bool(found)
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), copy.copy(found)):
        assert type(again) is type(found)
        assert (again, again.source) == (found, found.source)
    assert type(found)(records=list(found), source="x").source == "x"


@kinds
def test_it_becomes_json(kind: str) -> None:
    found = KINDS[kind]
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict(), allow_nan=False))
    several = Results([found, found])
    assert json.loads(several.to_json()) == [found.to_dict()] * 2
    assert [row["number"] for row in several.to_rows()] == [0] * len(found.to_rows()) + [1] * len(found.to_rows())


@pytest.mark.parametrize("kind", EMPTY)
def test_it_says_that_there_was_nothing_to_read(kind: str) -> None:
    found = EMPTY[kind]
    assert found.empty
    assert found.to_dict()["empty"] is True
    assert "empty" in repr(found)
    assert "empty" in found._repr_html_()
    assert found.to_rows() == []
    assert not KINDS[kind].empty


@kinds
def test_its_repr_is_short_and_says_the_best(kind: str) -> None:
    found = KINDS[kind]
    assert len(repr(found)) < 120
    assert f"{found[0].score if kind != 'masks' else found[0][0].score:.3g}" in repr(found)
    many = Results([found] * 1000)
    assert len(repr(many).splitlines()) == 8
    assert "1,000 results" in repr(many)
    assert "995 more" in repr(many)


@kinds
def test_its_page_escapes_what_it_shows(kind: str) -> None:
    for page in (KINDS[kind]._repr_html_(), Results([KINDS[kind]] * 30)._repr_html_()):
        assert "<b>lives" not in page
        assert "<script" not in page
    assert "10 more" in page


def test_entities_are_highlighted_where_they_stand() -> None:
    page = KINDS["entities"]._repr_html_()
    assert page.count("<mark") == 2
    assert page.index(">Ada") < page.index(">PER") < page.index(">Paris") < page.index(">LOC")
    assert "&lt;b&gt;lives&lt;/b&gt; in <mark" in page
    assert KINDS["answers"]._repr_html_().count("<mark") == 1
    assert "no answer" in KINDS["no answer"]._repr_html_()


@kinds
def test_tables_read_it_by_the_names_of_its_columns(kind: str) -> None:
    found = KINDS[kind]
    assert [name for name, _ in found.items()] == list(found.keys())
    for name, value in found.items():
        assert found[name] == value == found.get(name)
        json.dumps(value)
    with pytest.raises(KeyError):
        found["nothing"]
    assert found.get("nothing", 3) == 3


ROWS: dict[str, Callable[[Any], bool]] = {
    "labels": lambda frame: frame[["text", "label", "score"]].values.tolist() == [[TEXT, "good", 0.75], [" ", None, None]],
    "entities": lambda frame: list(frame.columns) == ["text", "entities"] and frame["entities"][0][1]["word"] == "Paris",
    "answers": lambda frame: next(iter(frame["text"])) == "Paris" and list(frame["question"]) == ["where?", "q"],
    "masks": lambda frame: next(iter(frame["token"])) == "cat",
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_a_data_frame_has_a_row_for_each_text(kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(Results([KINDS[kind], EMPTY[kind]]))
    assert len(frame) == 2
    assert ROWS[kind](frame.astype(object).where(frame.notna(), None))
    assert len(pandas.DataFrame(Results([KINDS[kind], EMPTY[kind]]).to_rows())) == len(KINDS[kind].to_rows())


@pytest.mark.parametrize("kind", ["labels", "entities", "answers", "ranking"])
def test_a_data_frame_of_one_result_has_a_row_for_each_record(kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(KINDS[kind])
    assert len(frame) == len(KINDS[kind])
    assert "score" in frame.columns
