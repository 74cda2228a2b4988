"""Infer the roles of a table's columns (text, label, words, tags, question), and with them the task.

Decides from names first and from the types of values second, and raises if both are ambiguous. The caller
can specify any role instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from flodl.errors import DataError, capped, nearest
from flodl_hf.tokenization.readers.targets import as_numbers

Task = Literal["sequence-classification", "token-classification", "question-answering", "masked-lm", "embedding"]

NAMES: dict[str, tuple[str, ...]] = {
    "text": (
        *("text", "sentence", "sentence1", "premise", "question1", "text1", "text_a"),
        *("review", "content", "tweet", "comment", "body", "document", "utterance", "query"),
    ),
    "text_pair": ("text_pair", "sentence2", "hypothesis", "question2", "text2", "text_b", "passage"),
    "label": ("label", "labels", "class", "category", "target", "sentiment", "intent", "score", "rating", "stars"),
    "words": ("words", "tokens"),
    "tags": ("tags", "ner_tags", "labels", "pos_tags", "chunk_tags"),
    "spans": ("spans", "entities", "annotations"),
    "question": ("question", "query"),
    "context": ("context", "passage", "document", "paragraph"),
    "answers": ("answers", "answer"),
}
"""The usual column names of training data, for each role; the earlier one is used if a table has two."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The column of each role; None for roles that a table does not have.

    Attributes:
        task: the task that the columns are for.
        text: the text, or the first of a pair.
        text_pair: the second text of a pair.
        label: the label of the text: a name, a number, or a list of either.
        words: the words of a sentence, a list.
        tags: their tags, a list.
        spans: entities in a text, a list of ``{"start", "end", "label"}``.
        question: the question.
        context: the text that contains the answer.
        answers: the answers: ``{"text": [...], "answer_start": [...]}``.
    """

    task: Task
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    words: str | None = None
    tags: str | None = None
    spans: str | None = None
    question: str | None = None
    context: str | None = None
    answers: str | None = None


def infer_columns(rows: Sequence[Mapping[str, Any]], named: str | None = None, /, **roles: str | None) -> Columns:
    """Return the roles of the columns of ``rows``, and the task that they belong to.

    Args:
        rows: some rows, for example the first hundred.
        named: the task that the caller named; masked words train on a text, and ignore other columns.
        **roles: the caller's columns, by role: ``text="headline"``.

    Raises:
        DataError: there are no rows, a named column is absent, or no task can be read off the columns.
    """
    if not rows:
        raise DataError("columns: no rows to look at", rows=0)
    names = column_names(rows)
    wrong = [
        f"{role}={name!r}"
        + (nearest(str(name), names) if role in NAMES else f": no such role, known are {list(NAMES)}")
        for role, name in roles.items()
        if role not in NAMES or (name is not None and name not in names and not any(name in row for row in rows))
    ]
    if wrong:
        raise DataError(f"columns: {'; '.join(wrong)}; the data has columns {names}", names=names, problems=wrong)
    found = {role: name for role, name in roles.items() if name is not None}
    if not found and named is None:
        _refuse_pairs(names)

    def look(role: str, *kinds: str) -> str | None:
        if role in found:
            return found[role]
        for known in NAMES[role]:
            for name in names:
                if name.lower() == known and name not in found.values() and _written_kind(rows, name) in kinds:
                    return name
        return None

    question, context = look("question", "text"), look("context", "text")
    words, tags = look("words", "list of text"), look("tags", "list of text", "list of numbers")
    text, spans = look("text", "text"), look("spans", "list of records")
    alone = None if named else text
    if named == "masked_lm":
        texts = [name for name in names if _kind(rows, name) == "text"]
        plain = text or context or (texts[0] if len(texts) == 1 else None)
        if plain is not None:
            return Columns(task="masked-lm", text=plain)
    if question and context and not words:
        answers = look("answers", "record", "text", "list of text", "list of records")
        return Columns(task="question-answering", question=question, context=context, answers=answers)
    if words:
        return Columns(task="token-classification", words=words, tags=tags)
    label = look("label", "text", "number", "list of text", "list of numbers")
    if text is None and len(names) <= 2 and not _are_words_as_text(rows, names):
        # two columns, one of them text that hardly repeats: that is the text
        texts = [n for n in names if n != label and _kind(rows, n) == "text"]
        texts.sort(key=lambda n: sum(len(row[n]) for row in rows), reverse=True)
        text = texts[0] if texts else None
        label = label or next((n for n in names if n != text and _repeats(rows, n)), None)
    elif "text" in found and label is None and len(names) == 2:
        label = next((n for n in names if n != text and _repeats(rows, n)), None)
    if text and spans:
        return Columns(task="token-classification", text=text, spans=spans)
    if text and label:
        pair = look("text_pair", "text")
        return Columns(task="sequence-classification", text=text, text_pair=pair, label=label)
    if text and len(names) == 1:
        return Columns(task="masked-lm", text=text)
    kinds = [f"{name}: {_kind(rows, name)}{_meant(name, found)}" for name in names]
    further = "" if alone is None else f". The words of {alone!r} alone are learned by task='masked_lm'"
    if alone is not None and look("text_pair", "text") is not None:
        further = ". Two texts that belong together, without a label, train vectors: task='embedding'"
    flags = [name for name in names if name != text and all(flag_of(row.get(name)) is not None for row in rows)]
    if alone is not None and len(flags) > 1:
        together = "+".join(flags)
        further = f". Labels in a column each, of 0 and 1, are named together: columns={{'label': {together!r}}}"
    if _are_words_as_text(rows, names):
        further = ". Words and tags are lists of as many texts each, which JSON lines, Parquet and CoNLL files contain"
    raise DataError(
        f"columns: what these columns are for is not clear:\n{capped(kinds)}\nexpected text and label, words and "
        "tags, text and spans, or question, context and answers; rename them, or specify their roles: "
        f"columns={{'text': ..., 'label': ...}}{further}",
        names=names,
        problems=kinds,
    )


def _are_words_as_text(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Return whether columns named words and tags contain texts, as in a CSV file."""
    called = {role: [name for name in names if name.lower() in NAMES[role] and name.lower() != "labels"]
              for role in ("words", "tags")}  # fmt: skip
    return all(any(_written_kind(rows, name) == "text" for name in found) for found in called.values())


def flag_of(value: Any) -> bool | None:
    """Return whether a value is a boolean, including 0 and 1 and their text in a file; None for others."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return {"0": False, "1": True, "0.0": False, "1.0": True}.get(value) if isinstance(value, str) else None


def column_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that any of the rows has, in their order, without columns of row numbers."""
    return data_columns(dict.fromkeys(name for row in rows for name in row))


def data_columns(names: Iterable[str]) -> list[str]:
    """Return the columns that contain data, without unnamed columns with the row numbers of data frames."""
    return [name for name in names if not _ROW_NUMBERS.fullmatch(name)]


_ROW_NUMBERS = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")


def _meant(name: str, roles: Mapping[str, str]) -> str:
    """Return which known name a column's may be a misspelling of, as a question; an empty text where none is near."""
    known = {word for words in NAMES.values() for word in words}
    plain = name.lower().strip()
    close = [] if plain in known or name in roles.values() else get_close_matches(plain, sorted(known), 1, cutoff=0.75)
    return f", did you mean {close[0]!r}?" if close else ""


def pair_columns(rows: Sequence[Mapping[str, Any]], roles: Mapping[str, str] | None, table: str) -> Columns:
    """Return the columns of two texts that may belong together, and the label if there is one.

    Args:
        rows: the table.
        roles: columns by role: text, text_pair, label.
        table: name of the caller, for messages.

    Raises:
        DataError: a named column is absent, or there are no two texts.
    """
    names, asked = column_names(rows[:1]), dict(roles or {})
    wrong = [f"{role}={name!r}" for role, name in asked.items() if role not in PAIR_NAMES or name not in rows[0]]
    if wrong:
        raise DataError(
            f"columns: {'; '.join(wrong)}; the data has columns {names}, and the roles are {', '.join(PAIR_NAMES)}",
            names=names,
            problems=wrong,
        )
    found: dict[str, str | None] = {}
    for role, known in PAIR_NAMES.items():
        free = {name.lower(): name for name in names if name not in found.values()}
        found[role] = asked.get(role) or next((free[name] for name in known if name in free), None)
    texts = [name for name in names if _kind(rows[:100], name) == "text" and name != found["label"]]
    if len(texts) == 2 and not (found["text"] and found["text_pair"]):
        found |= {"text": texts[0], "text_pair": texts[1]}
    if found["text"] is None or found["text_pair"] is None:
        raise DataError(
            f"{table}: which of the columns {names} contain two texts is not clear; expected text and text_pair (or "
            "sentence1 and sentence2, sentence_a and sentence_b), with or without a label; or specify the roles: "
            "columns={'text': ..., 'text_pair': ...}",
            names=names,
        )
    return Columns(task="sequence-classification", **found)


PAIR_NAMES = {
    "text": (*NAMES["text"], "sentence_a", "first", "anchor"),
    "text_pair": (*NAMES["text_pair"], "sentence_b", "second", "positive", "next"),
    "label": (*NAMES["label"], "next_sentence_label", "sentence_order_label"),
}

_PAIRS = (("anchor",), ("positive",), ("negative",), ("chosen", "rejected"))
_PAIRED = tuple(name for group in _PAIRS for name in group)


def _refuse_pairs(names: Sequence[str]) -> None:
    """Refuse tables for training vectors or preferences, which have no labels.

    Raises:
        DataError: the names suggest preferences.
    """
    lowered = {name.lower() for name in names}
    alike = [group for group in _PAIRS if lowered.issuperset(group)]
    if alike and not lowered & set(NAMES["label"]):
        strange = [name for name in names if name.lower() not in (*_PAIRED, "query")]
        near = "".join(f"; {name!r}{close}" for name in strange if (close := nearest(name.lower(), _PAIRED)))
        raise DataError(
            f"columns: {list(names)} look like texts that belong together (anchor, positive, negative; chosen, "
            f"rejected), and none of these columns is a label{near}. Rows of anchor and positive train vectors: "
            "task='embedding'; there is no task for preferences. Expected text and label, words and tags, text and "
            "spans, or question, context and answers; if a column is a label after all, specify the roles: "
            "columns={'text': ..., 'label': ...}",
            names=list(names),
        )


def _repeats(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column could be a label: its values repeat, or are few."""
    values = [str(row.get(name)) for row in rows]
    return _kind(rows, name) != "text" or len(set(values)) <= max(1, len(values) // 2) or len(values) < 4


def _kind(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the type of a column's values; texts that are all numbers, as in CSV files, are numbers."""
    kind = _written_kind(rows, name)
    is_number = kind == "text" and not any(isinstance(v, str) for v in as_numbers([row.get(name) for row in rows]))
    return "number" if is_number else kind


def _written_kind(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    kinds = {_kind_of(row.get(name)) for row in rows} - {"nothing"}
    if "empty list" in kinds and kinds - {"empty list"} <= {"list of text", "list of numbers", "list of records"}:
        kinds = kinds - {"empty list"} or kinds
    if kinds == {"empty list"}:
        # nothing is annotated in the rows looked at
        return "list of records" if name.lower() in NAMES["spans"] else "list of text"
    return " and ".join(sorted(kinds)) or "nothing"


def _kind_of(value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return "nothing"  # data frames have NaN where nothing is
    if isinstance(value, str):
        return "text"
    if isinstance(value, (bool, int, float)):
        return "number"
    if isinstance(value, Mapping):
        return "record"
    if isinstance(value, (list, tuple)):
        if not value:
            return "empty list"
        inner = {_kind_of(item) for item in value}
        return {"text": "list of text", "number": "list of numbers", "record": "list of records"}.get(
            inner.pop() if len(inner) == 1 else "", "list"
        )
    return type(value).__name__


def check_texts(rows: Sequence[Mapping[str, Any]], column: str, source: str) -> None:
    """Refuse a column with values that are no texts.

    Raises:
        DataError: some are not; ``problems`` lists them.
    """
    wrong = [
        f"row {i}: {type(row.get(column)).__name__}"
        for i, row in enumerate(rows)
        if not isinstance(row.get(column), str)
    ]
    refuse_rows(source, f"column {column!r} has values that are no texts", wrong, "a text in each", column=column)


def refuse_rows(source: str, what: str, wrong: Sequence[str], expected: str, **details: Any) -> None:
    """Raise an error if some rows are wrong.

    Args:
        source: what the rows are, such as "train".
        what: the fault.
        wrong: rows with their values; empty for no fault.
        expected: the right values.
        **details: further attributes of the error.

    Raises:
        DataError: with ``wrong`` as ``problems``.
    """
    if wrong:
        text = f"{source}: {what}:\n{capped(wrong, 5)}\nexpected {expected}"
        raise DataError(text, problems=list(wrong), **details)
