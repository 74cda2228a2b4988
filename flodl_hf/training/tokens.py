"""Labels for words: named entities, parts of speech; from words with tags, or from spans of characters.

The first token of a word carries its label. A long text is read in overlapping windows; each word
is used for training and evaluation once, in the window with the most context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from flodl.errors import DataError, nearest
from flodl_hf.inference.metrics import SpanF1
from flodl_hf.tokenization.alignment import IGNORE, Units, align_tags, read_tags, tags_of_spans, word_units
from flodl_hf.tokenization.readers.columns import NAMES, Columns, check_texts, column_names, refuse_rows
from flodl_hf.training.report.figures import conll_tags
from flodl_hf.training.rows import EncodedRows, RowBuilder
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task, encode_chunks, label_names

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

STRIDE = 64


def tag_names(examples: Examples, columns: Columns) -> tuple[str, ...]:
    """Return the tags that occur, ``O`` first, then ``B-x`` and ``I-x`` of each type together.

    Raises:
        DataError: there is no column of tags or spans.
    """
    if columns.spans is not None:
        kinds = {label for i, row in enumerate(examples) for _, _, label in read_character_spans(row[columns.spans], i)}
        return ("O", *(f"{letter}-{kind}" for kind in sorted(kinds) for letter in "BI"))
    tags = _tags(columns, examples)
    kinds_of_cells = [type(row.get(tags)) for row in examples]
    wrong = [
        f"row {i}: {kind.__name__}" for i, kind in enumerate(kinds_of_cells) if not issubclass(kind, (list, tuple))
    ]
    what = f"column {tags!r} has values that are no lists of tags"
    refuse_rows("finetune", what, wrong, "a tag for each word", column=tags)
    found = {str(tag) for row in examples for tag in row[tags]}
    if all(tag.removeprefix("-").isdecimal() for tag in found):
        below = [i for i, row in enumerate(examples) if any(str(tag).startswith("-") for tag in row[tags])]
        if below:
            raise DataError(
                f"finetune: column {tags!r} has numbers below 0 in {len(below)} rows, first row {below[0]}; expected "
                "the number of a tag for each word, from 0. Leave rows without tags out",
                rows=below,
            )
        return tuple(str(k) for k in range(max(map(int, found), default=0) + 1))
    return tuple(sorted(found, key=lambda tag: (tag != "O", tag.partition("-")[2], tag)))


def _tags(columns: Columns, examples: Examples = ()) -> str:
    if columns.tags is None:
        names = [name for name in column_names(examples[:100]) if name != columns.words]
        near = "".join(
            f"; {name!r} contains lists of several kinds of values"
            if name.lower() in NAMES["tags"]
            else f"; {name!r}{close}"
            for name in names
            if (close := nearest(name.lower(), NAMES["tags"]))
        )
        raise DataError(
            f"finetune: found words in {columns.words!r} and no column with their tags among {names}{near}; expected "
            "one, a list of as many tags as words: set columns={'tags': ...}",
            names=names,
        )
    return columns.tags


def read_character_spans(value: Any, row: int) -> list[tuple[int, int, str]]:
    """Return ``(start, end, label)`` of each span of one row.

    Raises:
        DataError: the spans are not a list of records with ``start``, ``end`` and ``label``.
    """
    spans = []
    for item in value or []:
        known = [item[k] for k in ("label", "type", "tag") if k in item] if isinstance(item, Mapping) else []
        label = next(iter(known), None)
        if label is None or not all(isinstance(item.get(k), int) for k in ("start", "end")):
            raise DataError(
                f"finetune: row {row}: the span {item!r} is not understood; expected start and end as integers, "
                "and a label",
                row=row,
            )
        spans.append((item["start"], item["end"], str(label)))
    return spans


@dataclass
class TokenTask(Task):
    """A label for each word.

    Args:
        columns: the columns of words and tags, or of texts and spans.
        labels: names of the labels, by number.
        stored: label names of the data by number, if they differ.
    """

    columns: Columns
    labels: tuple[str, ...]
    stored: tuple[str, ...] | None = None

    headed = True
    head = "token_classification"
    kind = "tokens"

    def __post_init__(self) -> None:
        # Labels are tags of spans, or of words for themselves.
        self.has_spans = "O" in self.labels and all(name == "O" or name[1:2] == "-" for name in self.labels)
        self.main_metric = "f1" if self.has_spans else "accuracy"

    @classmethod
    def plan(cls, source: Source) -> TokenTask:
        """Return the task of words with tags."""
        tables, columns, options, known = source.tables, source.columns, source.options, source.known
        found = tag_names(tables.labelled, columns)
        if columns.spans is not None and options.labels:
            # Spans of one word each need no I- tags; another span is refused with its row.
            found = tuple(name for name in found if name in options.labels or not name.startswith("I-"))
        own = known.labels if known.head == "token_classification" else ()
        stored, names = label_names(found, options.labels, tables.train.classes.get(columns.tags or ""), own)
        return cls(columns, names, None if stored == names else stored)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the windows of each sentence or text."""
        ids = {name: k for k, name in enumerate(self.labels)}
        rename = dict(zip(self.stored, self.labels, strict=True)) if self.stored else {}
        builder, faults = RowBuilder(limits.types), []
        truth: list[tuple[Units, list[str]]] = []
        words = self.columns.words
        source: Any = words or self.columns.text
        if words is None:
            check_texts(examples, source, "finetune")
        how = {"max_tokens": limits.max_tokens, "stride": limits.shared(STRIDE, 3), "words": words is not None}
        for i, windows in encode_chunks(tokenizer, [row[source] for row in examples], **how):
            try:
                units, tags = self._tagged(examples[i], windows, i, rename)
                labels = align_tags(units, tags, ids, once=True)
            except DataError as fault:
                faults.append(f"row {i}: {fault}")
                continue
            for window, line in zip(windows, labels, strict=True):
                builder.add(window, i, {"labels": line})
            if not training:
                truth.append((units, tags))
        which = "sentences" if training else "evaluation sentences"
        refuse_rows("finetune", f"{which} that cannot be labelled", faults, "a label for each word")
        scorer = partial(_Scorer, self.labels, truth, self.has_spans)
        return Prepared(builder.build(), None if training else scorer)

    def _tagged(
        self, row: Mapping[str, Any], windows: Sequence[Any], index: int, rename: Mapping[str, str]
    ) -> tuple[Units, list[str]]:
        if self.columns.words is not None:
            units = word_units(windows, num_words=len(row[self.columns.words]))
            given = row.get(_tags(self.columns))
            if not isinstance(given, (list, tuple)):
                raise DataError(f"found {type(given).__name__}; expected a list of tags")
            tags = [str(tag) for tag in given]
            return units, [rename.get(tag, tag) for tag in tags]
        columns: Any = self.columns
        text = row[columns.text]
        units = word_units(windows, text=text)
        spans = read_character_spans(row[columns.spans], index)
        beyond = [span for span in spans if span[1] > len(text)]
        if beyond:
            raise DataError(
                f"alignment: spans {beyond[:8]} end behind the text, which has {len(text)} characters; expected "
                "start and end counted in characters, not in bytes",
                problems=[str(span) for span in beyond],
            )
        return units, tags_of_spans(units.extents, spans)

    def label_counts(self, rows: EncodedRows) -> list[int]:
        """Return how many words have each label."""
        labels = rows.columns["labels"]
        return np.bincount(labels[labels != IGNORE], minlength=len(self.labels)).tolist()


class _Scorer(Scorer):
    """Metrics of tags; ``truth`` has for each example the positions of its words, and their tags."""

    def __init__(self, names: tuple[str, ...], truth: list[tuple[Units, list[str]]], has_spans: bool) -> None:
        super().__init__(SpanF1())
        self.names, self.truth, self.has_spans = names, truth, has_spans

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the scores of the windows of one text; return the predicted and true tags of its words."""
        predicted, (units, known) = [row.argmax(-1).tolist() for row in scores], self.truth[example]
        fill = "O" if "O" in self.names else self.names[0]
        tags = read_tags(units, predicted, self.names, fill=fill)
        found, true = (conll_tags(line, self.names) for line in (tags, known))
        self.parts[0].update([found], [true])
        return list(tags), list(known)

    def compute(self) -> dict[str, float]:
        """Return the figures."""
        figures = super().compute()
        return figures if self.has_spans else {"accuracy": figures["accuracy"]}
