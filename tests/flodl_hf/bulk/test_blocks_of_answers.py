"""Answers written many at a time are the bytes of answers written one by one, and a faulty one is found among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.jobs.write import Writer, writer_for
from flodl_hf.tokenization.readers.rows import Row, RowFault, _parsed

ANSWERS: dict[str, dict[str, Any]] = {
    "label": {"label": "text", "score": "float"},
    "span": {"answer": "text", "score": "float", "start": "int", "end": "int"},
    "list": {"labels": [{"label": "text", "score": "float"}]},
}
scores = st.floats(allow_nan=False, allow_infinity=False, width=32)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\r\n"), max_size=8)
labels = st.fixed_dictionaries({"label": texts, "score": scores})
values: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "label": st.tuples(texts, scores),
    "span": st.tuples(st.none() | texts, st.none() | scores, st.none() | st.integers(), st.none() | st.integers()),
    "list": st.tuples(st.lists(labels, max_size=3)),
}


def made(format: str, answer: str, keep: tuple[str, ...], *, with_errors: bool) -> Writer:
    first = [Row(1, 1, {"a": "x", "b%s": "y"})]
    return writer_for(
        format, keep, ANSWERS[answer],
        with_errors=with_errors, lead=None, names=["a", "b%s"], types=None, first=first,
    )  # fmt: skip


@pytest.mark.parametrize("format", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("answer", list(ANSWERS))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), with_errors=st.booleans(), keep=st.sampled_from([(), ("a",), ("b%s", "a")]))
def test_many_lines_are_the_lines_of_each(
    format: str, answer: str, data: st.DataObject, with_errors: bool, keep: tuple[str, ...]
) -> None:
    writer = made(format, answer, keep, with_errors=with_errors)
    rows = data.draw(st.lists(st.fixed_dictionaries({"a": texts, "b%s": texts}), min_size=1, max_size=5))
    kept = [writer.keep(Row(1, 1, row)) for row in rows]
    found = [data.draw(values[answer]) for _ in rows]
    one_by_one = [line for cells, each in zip(kept, found, strict=True) for line in writer.lines([cells], [each])]
    together = list(writer.lines(kept, found))
    if format == "parquet":
        assert together == one_by_one
    else:
        assert b"".join(together) == b"".join(one_by_one)


@pytest.mark.parametrize("format", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused_among_many(format: str, bad: float) -> None:
    writer = made(format, "label", ("a",), with_errors=False)
    kept = [writer.keep(Row(k, k, {"a": "x"})) for k in range(3)]
    with pytest.raises(RowFault, match="expected a number"):
        writer.lines(kept, [("L", 0.5), ("L", bad), ("L", 0.25)])


@pytest.mark.parametrize("format", ["csv", "tsv"])
def test_numbers_need_no_quotes(format: str) -> None:
    writer = made(format, "label", ("a",), with_errors=False)
    shown = np.array([1e-20, 1e20, 0.1, 123456.78], np.float32)
    sign = "," if format == "csv" else "\t"
    lines = writer.lines([["x"]] * 4, [("L", float(score)) for score in shown])
    assert b"".join(lines).decode().splitlines() == [sign.join(["x", "L", str(score)]) for score in shown]


@pytest.mark.parametrize("text", ["{", '{"a": 1} x', "", "nul", '{"a": "\x01"}', "1 2"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 1 column"):
        _parsed(text)


def test_json_is_read() -> None:
    assert _parsed('{"a": [1, null, "é"]}') == {"a": [1, None, "é"]}
