"""What predictions come back in: sequences of records that know their text, and so whether it was empty.

Each contains the records of the decoders, and has the attributes of its best record, so that
``model.predict(text).label`` is the label and ``model.predict(text)[1]`` the second best. All of them become JSON
types by ``to_dict``, a table by ``pandas.DataFrame(result)``, and HTML in a notebook.

A text without a letter, figure or sign has no answer: the result is empty (``empty`` is True), in every
task and for every input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, overload

from flodl_hf.errors import PredictError
from flodl_hf.inference.result_pages import list_page, page_of

__all__ = ["Answers", "Entities", "Fill", "Fills", "Found", "Labels", "Ranking", "Results"]

T = TypeVar("T")
R = TypeVar("R", bound="Found[Any]")


NAMES = {"entity": "label", "entity_group": "label", "answer": "text", "token_str": "token"}
"""Names of transformers' pipelines for fields of records."""


class Record:
    """A record with fields that can also be read by key, as in transformers' pipelines: ``record["score"]``."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        known = self.keys()
        ours = name if name in known else NAMES.get(name)
        if ours not in known:
            raise KeyError(f"{name!r}; expected one of {', '.join(known)}")
        return getattr(self, ours)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(field.name for field in fields(self))  # type: ignore[arg-type]


@cache
def _draft(kind: type) -> Any:
    names = [(field.name, Any) for field in fields(kind)]
    # Of the same slots, which is what lets an instance become one of ``kind``.
    return make_dataclass(
        f"_{kind.__name__}", names, bases=kind.__bases__, slots=True, eq=False, repr=False, match_args=False
    )


def build_records(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """Return ``[kind(*values) for values in zip(*columns)]``, without the checks in ``__post_init__``.

    Args:
        kind: a dataclass with slots.
        columns: the values of each of its fields, in order.
    """
    found = list(map(_draft(kind), *columns))
    for record in found:
        record.__class__ = kind
    return found


def not_finite(task: str) -> PredictError:
    """Return the error for logits that are not finite."""
    return PredictError(
        f"{task}: the logits are not finite; expected numbers; half precision may have overflowed, "
        "so predict in float32 or bfloat16"
    )


@dataclass(frozen=True, slots=True)
class Classification(Record):
    """One label of a text.

    Attributes:
        label: the name.
        score: probability from 0 to 1; for a regression the value itself.
        windows: number of windows of the text that the score is the mean of.
    """

    label: str
    score: float
    windows: int = 1


@dataclass(frozen=True, slots=True)
class Ranked(Record):
    """One document of a ranking.

    Attributes:
        index: its place in the caller's list.
        score: how well it fits, in the units of the chosen activation.
        windows: number of windows of the document; the best of them gave the score.
        text: the document, where the ranking knows it.
        empty: the document or the query is nothing but white space. The score is the model's for such a pair.
    """

    index: int
    score: float
    windows: int = 1
    text: str = ""
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Entity(Record):
    """A labelled piece of a text.

    Attributes:
        label: the entity's name without prefix (``PER``); the full label (``B-PER``) where nothing is
            aggregated.
        score: mean of the probabilities of the words' labels, from 0 to 1.
        start: first character.
        end: character after the last one.
        word: exactly ``text[start:end]``, never empty, without outer white space.
        words: first word index and the one after the last, as the tokenizer counts words; for pre-split input
            these are places in the caller's list. -1 where the tokenizer has no words.
        tokens: first token and the one after the last, in the token stream of the whole text, specials not
            counted.
    """

    label: str
    score: float
    start: int
    end: int
    word: str
    words: tuple[int, int]
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """A span of a context, or the statement that the context contains no answer.

    Attributes:
        text: exactly ``context[start:end]``; empty for no answer.
        score: probability that the answer begins and ends here, from 0 to 1.
        start: first character, 0 for no answer.
        end: character after the last one, 0 for no answer.
        no_answer: True if the context contains no answer.
    """

    text: str
    score: float
    start: int
    end: int
    no_answer: bool = False


def is_empty(item: Any) -> bool:
    """Return whether a text is empty or white space alone; of a pair, whether both of its texts are."""
    if isinstance(item, str):
        return not item.strip()
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (tuple, list)) else ()
    texts = [part for part in parts if isinstance(part, str)]
    return bool(texts) and all(map(is_empty, texts))


def plain(value: Any) -> Any:
    """Return a record or a value as JSON types; numbers that are not finite as None."""
    if isinstance(value, Found):
        return value.to_dict()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


class Found(Sequence[T]):
    """Results of one text, best or first of all first: a sequence of records.

    It can also be read by the names of ``columns`` (``found["label"]``), which is how tables take it:
    ``pandas.DataFrame`` makes a row of each result in a list, and of one result a row of each of its records. Equal to
    a list of the same records.

    Attributes:
        source: the text; a pair as ``(a, b)``, words as a list.
    """

    __slots__ = ("_records", "source")
    called: ClassVar[str] = "found"
    """Key of the records in `to_dict`."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of a row of a table."""

    def __init__(self, records: Iterable[T] = (), source: Any = "") -> None:
        self._records = records if type(records) is list else list(records)
        self.source = source

    # --- a sequence -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[T]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    @overload
    def __getitem__(self, index: str) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if index not in self.columns:
                raise KeyError(f"{index!r}; expected one of {', '.join(self.columns)}")
            return plain(getattr(self, index))
        return self._records[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Found):
            return self._records == other._records
        return self._records == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._records, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._records]

    # --- a row ----------------------------------------------------------------------------------

    def keys(self) -> tuple[str, ...]:
        """Return the names of ``columns``."""
        return self.columns

    def items(self) -> list[tuple[str, Any]]:
        """Return ``columns`` with their values."""
        return [(name, self[name]) for name in self.columns]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a column, or ``default`` where there is no such column."""
        return self[name] if name in self.columns else default

    @property
    def empty(self) -> bool:
        """Whether the text is empty or white space alone; of a pair, whether both of its texts are."""
        return is_empty(self.source)

    def to_dict(self) -> dict[str, Any]:
        """Return text, records and whether the text was empty, as JSON types."""
        return {**_texts(self.source), self.called: [plain(record) for record in self], "empty": self.empty}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a flat row for each record."""
        return [plain(record) for record in self]

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def _of_best(self, name: str) -> Any:
        return getattr(self[0], name) if self else None

    def __repr__(self) -> str:
        told = ", ".join(map(_short, self[:3])) + (f", {len(self) - 3} more" if len(self) > 3 else "")
        return f"{type(self).__name__}({_cut(self.source)}: {told or ('empty' if self.empty else 'none')})"

    def _repr_html_(self) -> str:
        return page_of(self)

    def __reduce__(self) -> Any:
        return type(self), (self._records, self.source)


# Read by ``keys`` and names where rows of tables are; iterated, it gives its records.
Mapping.register(Found)  # pyright: ignore[reportAttributeAccessIssue]


def _short(record: Any) -> str:
    """Return a record in a few words: its value, score, and position."""
    if isinstance(record, list):
        return f"[{', '.join(map(_short, record[:3]))}]"
    names = [n for n in ("label", "token", "index", "word", "text") if getattr(record, n, None) not in (None, "")]
    said = " ".join(_cut(getattr(record, n)) if n in ("word", "text") else str(getattr(record, n)) for n in names)
    if getattr(record, "no_answer", False):
        said = "no answer"
    return f"{said} {record.score:.3g}" if hasattr(record, "score") else str(record)


def _cut(value: Any, limit: int = 40) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= limit else value[: limit - 1] + "…")
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return " + ".join(_cut(part, limit) for part in value[:2]) + (" + …" if len(value) > 2 else "")
    return repr(value)


def _texts(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return {str(name): part for name, part in source.items()}
    if isinstance(source, tuple) and len(source) == 2:
        return {"text": source[0], "text_pair": source[1]}
    return {"text": list(source) if isinstance(source, (list, tuple)) else source}


def _best(name: str, description: str) -> Any:
    """Return a property: a field of the best record, None without records."""
    return property(lambda result: result._of_best(name), doc=description)


def _input(description: str, part: int | None = None) -> Any:
    """Return a property: what was predicted, or one part of it."""
    return property(lambda result: result.source if part is None else result.source[part], doc=description)


class Labels(Found[Classification]):
    """The labels of one text with their scores, best first; ``label`` and ``score`` are the best one's.

    A text without any, because it is empty or no label reaches the threshold, has None.
    """

    __slots__ = ()
    called = "labels"
    columns = ("text", "label", "score")

    text: Any = _input("The text, or the pair of them.")
    label: str | None = _best("label", "The best label.")
    score: float | None = _best("score", "The best label's score.")
    windows: int | None = _best("windows", "In how many windows the text was read.")


class Entities(Found[Entity]):
    """The entities of one text, in its order."""

    __slots__ = ()
    called = "entities"
    columns = ("text", "entities")

    text: str = _input("The text; words that came split are joined.")

    @property
    def entities(self) -> list[dict[str, Any]]:
        """The entities as JSON types."""
        return self.to_rows()


class Answers(Found[Answer]):
    """The answers to one question, best first; ``text``, ``score``, ``start`` and ``end`` are the best one's.

    Equal to an `Answer` if that is the only one. An empty context has no answers; the properties are then None.
    """

    __slots__ = ()
    called = "answers"
    columns = ("question", "context", "text", "score", "start", "end")

    @property
    def empty(self) -> bool:
        """Whether the context is empty or white space alone."""
        return is_empty(self.source[1])

    text: str | None = _best("text", "The best answer, exactly ``context[start:end]``.")
    score: float | None = _best("score", "Its probability.")
    start: int | None = _best("start", "Its first character in the context.")
    end: int | None = _best("end", "The character after its last one.")

    @property
    def no_answer(self) -> bool:
        """Whether the best answer is that there is none, as it is where there was nothing to read."""
        return self[0].no_answer if self else True

    question: str = _input("The question.", 0)
    context: str = _input("The context.", 1)

    def to_dict(self) -> dict[str, Any]:
        """Return question, context, answers and whether there was nothing to read, as JSON types."""
        found = super().to_dict()
        return {"question": found.pop("text"), "context": found.pop("text_pair"), **found}

    def __eq__(self, other: object) -> bool:
        return len(self) == 1 and self[0] == other if is_dataclass(other) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Fill(Record):
    """One proposal for one mask.

    Attributes:
        token: the word or word piece as text.
        score: its probability, from 0 to 1; of several tokens the product.
        token_ids: its ids.
        sequence: the text with this mask filled; other masks stay.
    """

    token: str
    score: float
    token_ids: tuple[int, ...]
    sequence: str


class Fills(Found[list[Fill]]):
    """For each mask of one text its words, best first; ``token``, ``score``, ``sequence`` are the first mask's best."""

    __slots__ = ()
    called = "masks"
    columns = ("text", "token", "score", "sequence")

    text: str = _input("The text with its masks.")
    token: str | None = _best("token", "The best word for the first mask.")
    score: float | None = _best("score", "Its probability.")
    sequence: str | None = _best("sequence", "The text with it.")

    def _of_best(self, name: str) -> Any:
        return getattr(self[0][0], name) if self and self[0] else None

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a flat row for each word of each mask."""
        return [{"mask": number, **plain(fill)} for number, fills in enumerate(self) for fill in fills]


class Ranking(Found[Ranked]):
    """Documents in the order in which they fit a query; ``source`` is the query."""

    __slots__ = ()
    called = "documents"

    query: str = _input("The query.")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to rank."""
        return not self._records and is_empty(self.source)

    def to_dict(self) -> dict[str, Any]:
        """Return query and documents as JSON types."""
        return {"query": self.source, "documents": self.to_rows()}


class Results(list[R]):
    """Results of several texts, in order."""

    __slots__ = ()

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one dictionary of JSON types for each text."""
        return [found.to_dict() for found in self]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a flat row for each record of each text; ``number`` is the index of the text, from 0."""
        return [{"number": number, **row} for number, found in enumerate(self) for row in found.to_rows()]

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @property
    def empty(self) -> list[int]:
        """Places of the texts with nothing to read."""
        return [place for place, found in enumerate(self) if found.empty]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return type(self)(found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        lines = [f"  {found!r}," for found in list.__iter__(self[:5])]
        more = [f"  ... {len(self) - 5:,} more"] if len(self) > 5 else []
        return "\n".join([f"{len(self):,} result{'s' * (len(self) != 1)} [", *lines, *more, "]"])

    def _repr_html_(self) -> str:
        return list_page(self)
