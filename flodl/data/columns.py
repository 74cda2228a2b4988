"""What the columns of a table mean: which hold the text, the label, the words, the tags, the question.

Decides from names first and from the kinds of values second, and refuses to guess where both leave a doubt. What is
found here can always be said by the caller instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flodl.errors import DataError, capped, printable

__all__ = ["Columns", "Targets", "infer_columns", "infer_targets"]

Task = Literal["sequence-classification", "token-classification", "question-answering", "masked-lm"]

_NAMES: dict[str, tuple[str, ...]] = {
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


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column holds what; None for what a table does not have.

    Attributes:
        task: the task that the columns are for.
        text: the text, or the first of a pair.
        text_pair: the second text of a pair.
        label: the label of the text: a name, a number, or a list of either.
        words: the words of a sentence, a list.
        tags: their tags, a list.
        spans: entities in a text, a list of ``{"start", "end", "label"}``.
        question: the question.
        context: the text that holds the answer.
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


def infer_columns(rows: Sequence[Mapping[str, Any]], **said: str | None) -> Columns:
    """Return what the columns of ``rows`` mean.

    Args:
        rows: some rows, for example the first hundred.
        **said: columns the caller names, by role: ``text="headline"``.

    Raises:
        DataError: there are no rows, a named column is absent, or no task can be read off the columns.
    """
    if not rows:
        raise DataError("columns: no rows to look at", rows=0)
    names = list(rows[0])
    wrong = [
        f"{role}={name!r}" + ("" if role in _NAMES else f": no such role, known are {list(_NAMES)}")
        for role, name in said.items()
        if role not in _NAMES or (name is not None and name not in names)
    ]
    if wrong:
        raise DataError(f"columns: {'; '.join(wrong)}; the data has columns {names}", names=names, problems=wrong)
    found = {role: name for role, name in said.items() if name is not None}
    if not found:
        _refuse_pairs(names)

    def look(role: str, *kinds: str) -> str | None:
        if role in found:
            return found[role]
        for known in _NAMES[role]:
            for name in names:
                if name.lower() == known and name not in found.values() and _kind(rows, name) in kinds:
                    return name
        return None

    question, context = look("question", "text"), look("context", "text")
    words, tags = look("words", "list of text"), look("tags", "list of text", "list of numbers")
    text, spans = look("text", "text"), look("spans", "list of records")
    if question and context and not words:
        answers = look("answers", "record", "text", "list of text", "list of records")
        return Columns(task="question-answering", question=question, context=context, answers=answers)
    if words:
        return Columns(task="token-classification", words=words, tags=tags)
    label = look("label", "text", "number", "list of text", "list of numbers")
    if text is None and len(names) <= 2:
        # two columns, one of them text that hardly repeats: that is the text
        texts = [n for n in names if n != label and _kind(rows, n) == "text"]
        texts.sort(key=lambda n: sum(len(row[n]) for row in rows), reverse=True)
        text = texts[0] if texts else None
        label = label or next((n for n in names if n != text and _repeats(rows, n)), None)
    if text and spans:
        return Columns(task="token-classification", text=text, spans=spans)
    if text and label:
        pair = look("text_pair", "text")
        return Columns(task="sequence-classification", text=text, text_pair=pair, label=label)
    if text and len(names) == 1:
        return Columns(task="masked-lm", text=text)
    kinds = [f"{name}: {_kind(rows, name)}" for name in names]
    raise DataError(
        f"columns: what these columns are for cannot be told:\n{capped(kinds)}\nexpected text and label, words and "
        f"tags, "
        "text and spans, or question, context and answers; rename them, or say which is which (text=..., label=...)",
        names=names,
        problems=kinds,
    )


_PAIRS = (("anchor",), ("positive",), ("negative",), ("chosen", "rejected"))


def _refuse_pairs(names: Sequence[str]) -> None:
    """Refuse tables for training vectors or preferences, which have no labels.

    Raises:
        DataError: the names say that these are such.
    """
    lowered = {name.lower() for name in names}
    alike = [group for group in _PAIRS if lowered.issuperset(group)]
    if alike and not lowered & set(_NAMES["label"]):
        raise DataError(
            f"columns: {list(names)} look like texts that belong together (anchor, positive, negative; chosen, "
            "rejected). Such rows train vectors or preferences, as sentence-transformers does with "
            "MultipleNegativesRankingLoss; there is no such task here, and none of these columns is a label. Expected "
            "text and label, words and tags, text and spans, or question, context and answers; where a column is a "
            "label after all, say which is which (text=..., label=...)",
            names=list(names),
        )


def _repeats(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column that nothing names a label could be one: its values come again, or are few."""
    values = [str(row.get(name)) for row in rows]
    return _kind(rows, name) != "text" or len(set(values)) <= max(1, len(values) // 2) or len(values) < 4


def _kind(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    kinds = {_kind_of(row.get(name)) for row in rows} - {"nothing"}
    if kinds == {"list of text", "empty list"} or kinds == {"list of records", "empty list"}:
        kinds -= {"empty list"}
    if kinds == {"empty list"}:
        # nothing is annotated in the rows looked at
        return "list of records" if name.lower() in _NAMES["spans"] else "list of text"
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "nothing"


def _kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
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


@dataclass(frozen=True)
class Targets:
    """What labels look like, and their numbers.

    Attributes:
        kind: one label of several, any number of labels, or a number to predict.
        names: the labels in the order of their numbers; empty for regression.
    """

    kind: Literal["single_label", "multi_label", "regression"]
    names: tuple[str, ...] = ()

    def encode(self, value: Any) -> int | float | list[float]:
        """Return the label as a model takes it: its number, a list of 0.0 and 1.0, or the value itself.

        Raises:
            DataError: the label is not one of ``names``.
        """
        if self.kind == "regression":
            return float(value)
        if self.kind == "single_label":
            return self._number(value)
        if len(value) == len(self.names) and all(v in (0, 1) and not isinstance(v, str) for v in value):
            return [float(v) for v in value]
        said = {self._number(v) for v in value}
        return [float(k in said) for k in range(len(self.names))]

    def _number(self, value: Any) -> int:
        name = _name(value)
        if name not in self.names:
            raise DataError(
                f"labels: {printable(name)} is not one of {list(self.names)[:20]}; "
                "were labels taken from other data, or is it misspelt?",
                found=name,
                expected=self.names,
            )
        return self.names.index(name)


def infer_targets(
    values: Sequence[Any], kind: Literal["single_label", "multi_label", "regression"] | None = None
) -> Targets:
    """Return what kind of labels ``values`` are, and their names in order.

    Lists are several labels; numbers with a fraction, other than in lists, are for regression; all else is one label.
    Names that are whole numbers are ordered as numbers, others by character.

    Args:
        values: the labels of all training rows.
        kind: what they are, where that is known.

    Raises:
        DataError: a label is missing, kinds are mixed, or whole numbers take so many values that they may be for
            regression: say ``kind``.
    """
    empty = [i for i, v in enumerate(values) if v is None or v == ""]
    if empty or not values:
        raise DataError(
            f"labels: {len(empty)} of {len(values)} rows have none, first row {empty[0] if empty else 0}; "
            "expected a label in each",
            rows=empty,
        )
    lists = sum(isinstance(v, (list, tuple)) for v in values)
    if lists not in (0, len(values)):
        raise DataError(f"labels: {lists} of {len(values)} rows have a list, the others do not; expected one kind")
    if lists and kind in (None, "multi_label"):
        flags = all(v in (0, 1) and not isinstance(v, str) for row in values for v in row)
        if flags and len({len(row) for row in values}) == 1:
            return Targets("multi_label", tuple(str(k) for k in range(len(values[0]))))
        return Targets("multi_label", _ordered({_name(v) for row in values for v in row}))
    numbers = [_number_of(v) for v in values]
    is_numeric = all(n is not None for n in numbers)
    fractions = is_numeric and any(n is not None and not n.is_integer() for n in numbers)
    if kind == "regression" or (kind is None and fractions):
        if not is_numeric:
            wrong = next(v for v, n in zip(values, numbers, strict=True) if n is None)
            raise DataError(
                f"labels: {printable(str(wrong))} is no number; expected numbers for regression", found=wrong
            )
        return Targets("regression")
    if lists or kind == "multi_label":
        raise DataError(f"labels: kind is {kind!r}, and the labels are {'' if lists else 'not '}lists", kind=kind)
    names = _ordered({_name(v) for v in values})
    if kind is None and not is_numeric and len(names) > max(20, len(values) // 2):
        raise DataError(
            f"labels: {len(names)} different labels in {len(values)} rows, such as {printable(names[0][:60])}: nearly "
            "as many classes as rows. Is this column text? Say which column holds the labels, or kind='single_label' "
            "for that many classes",
            count=len(names),
        )
    if kind is None and is_numeric and len(names) > max(20, len(values) // 2):
        raise DataError(
            f"labels: {len(names)} different whole numbers in {len(values)} rows; say kind='regression' to predict "
            "numbers, or kind='single_label' for that many classes",
            count=len(names),
        )
    return Targets("single_label", names)


def _name(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number_of(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _ordered(names: set[str]) -> tuple[str, ...]:
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))
