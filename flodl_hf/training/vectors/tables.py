"""Tables for embeddings: which texts belong together, their labels, and the metrics of their vectors.

The form of the examples selects the default loss and the metrics. Columns are identified by their names, or by their
order: anchor, positive, negatives, and a label with one of the label names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.errors import ConfigError, DataError, capped, nearest
from flodl_hf.tokenization.readers.columns import NAMES, Columns, column_names, refuse_rows
from flodl_hf.tokenization.readers.targets import as_numbers, is_missing
from flodl_hf.training.evaluation import CollectedValues
from flodl_hf.training.evaluators import (
    binary_figures,
    clustering_figures,
    retrieval_figures,
    similarity_figures,
    triplet_figures,
)
from flodl_hf.training.losses.pairs import Form
from flodl_hf.training.task import Scorer

ANCHORS = ("anchor", "query", "question", "sentence1", "sentence_a", "text1", "text_a", "premise")
POSITIVES = (
    *("positive", "pos", "context", "passage", "document", "answer", "sentence2", "sentence_b", "text2", "text_b"),
    "hypothesis",
)
NEGATIVES = ("negative", "negatives", "neg", "hard_negative", "hard_negatives")
LABELS = ("label", "labels", "score", "scores")
ROLES = ("anchor", "positive", "negative", "label")


@dataclass(frozen=True)
class TextTable:
    """A table of examples with several texts.

    Attributes:
        texts: for each example its texts, anchor first; examples may have different numbers of negatives.
        labels: the label of each example, ``(examples, ...)``; None without labels.
        form: the form of an example.
        columns: the columns of texts and labels.
        names: of classes by number, where labels are names.
        declared: whether the source of the table declares the classes.
        sources: for each example the columns of its texts.
    """

    texts: list[tuple[str, ...]]
    labels: NDArray[Any] | None
    form: Form
    columns: Columns
    names: tuple[str, ...] = ()
    declared: bool = False
    sources: Sequence[tuple[str, ...]] = ()

    @property
    def width(self) -> int:
        """Most texts of an example."""
        return max(map(len, self.texts))

    def prompted(self, prompts: str | Mapping[str, str] | None) -> list[tuple[str, ...]]:
        """Return the texts of each example after their prompts: one for all texts, or one for each column."""
        if not prompts:
            return self.texts
        by_column = dict.fromkeys({name for names in self.sources for name in names}, prompts)
        if not isinstance(prompts, str):
            by_column = {name: prompts.get(name, "") for name in by_column}
        return [
            tuple(f"{by_column[name]}{text}" for name, text in zip(names, texts, strict=True))
            for names, texts in zip(self.sources, self.texts, strict=True)
        ]

    @property
    def as_scores(self) -> TextTable:
        """The table with declared classes of pairs as numbers: two classes as 0 and 1, or names that are numbers."""
        if self.form != "pair_classes" or not self.declared or self.labels is None:
            return self
        numbers = as_numbers(self.names)
        if not any(isinstance(number, str) for number in numbers):
            labels = _labels([numbers[k] for k in self.labels.tolist()], self.columns.label or "", "train")
            return replace(self, labels=labels, form=_form(2, labels, (), "train"), names=())
        return replace(self, form="binary", names=()) if len(self.names) == 2 else self


def are_pairs(names: Sequence[str]) -> bool:
    """Return whether the names of columns are those of texts that belong together."""
    lowered = {name.lower() for name in names}
    return {"anchor", "positive"} <= lowered or {"query", "positive"} <= lowered


def read_table(
    rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None = None, source: str = "train"
) -> TextTable:
    """Return the texts and labels of a table.

    Args:
        rows: the table.
        role_columns: columns by role: anchor, positive, negative (several as ``a+b``), label.
        source: name of the table in messages.

    Raises:
        ConfigError: a role that there is none of.
        DataError: columns are ambiguous, or contain invalid values.
    """
    columns, label = table_columns(rows, role_columns, source)
    cells = [] if label is None else [row.get(label) for row in rows]
    names, declared = getattr(rows, "classes", {}).get(label, ()), True
    if label is None:
        found = None
    elif names:
        found = _numbers_of(cells, names, label, source)
    else:
        found = _labels(cells, label, source)
        values = as_numbers(cells)
        if found.dtype.kind == "i" and all(isinstance(value, str) for value in values):
            names, declared = sorted(set(values)), False
    texts, sources, wrong = [], [], []
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal tuples are one object
    for i, row in enumerate(rows):
        cells_of = [(name, row.get(name)) for name in columns]
        parts = [
            (name, one) for name, cell in cells_of for one in (cell if isinstance(cell, (list, tuple)) else [cell])
        ]
        if label is not None and any(is_missing(part) for _, part in parts[2:]):
            wrong.append(f"row {i}: a negative is missing, and a label there for it")
        kept = [pair for at, pair in enumerate(parts) if at < 2 or not is_missing(pair[1])]
        texts.append(tuple(part for _, part in kept))
        origin = tuple(name for name, _ in kept)
        sources.append(shared.setdefault(origin, origin))
        if not kept or not all(isinstance(part, str) for part in texts[-1]):
            wrong.append(f"row {i}: {[type(part).__name__ for _, part in parts]}")
    refuse_rows(source, f"columns {columns} have values that are no texts", wrong, "a text in each, or a list of texts")
    form = _form(max(map(len, texts)), found, names, source)
    roles = Columns(task="embedding", text=columns[0], text_pair=columns[1] if columns[1:] else None, label=label)
    return TextTable(texts, found, form, roles, tuple(names), bool(names) and declared, sources)


def expect_equal_widths(table: TextTable, source: str) -> TextTable:
    """Return a table if all examples have the same number of texts.

    Raises:
        DataError: some have fewer negatives than others.
    """
    fewer = [i for i, texts in enumerate(table.texts) if len(texts) < table.width]
    if fewer:
        counts = [f"row {i}: {len(table.texts[i]) - 2} negatives" for i in fewer]
        raise DataError(
            f"{source}: {len(fewer)} of {len(table.texts)} rows have fewer negatives than the others:\n"
            f"{capped(counts, 5)}\nexpected {table.width - 2} in each. Give each row as many, or train on a table for "
            "each number of negatives: train={'one': ..., 'two': ...}",
            rows=fewer,
        )
    return table


def table_columns(
    rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None = None, source: str = "train"
) -> tuple[list[str], str | None]:
    """Return the columns of texts in order, and the column of labels; arguments and errors as in `read_table`."""
    names, asked = column_names(rows[:1]), asked_columns(rows[0], role_columns, ROLES, source)
    label = asked["label"][0] if "label" in asked else known_column(names, LABELS)
    if "anchor" in asked:
        return [*asked["anchor"], *asked.get("positive", []), *asked.get("negative", [])], label
    anchor, positive = known_column(names, ANCHORS), known_column(names, POSITIVES)
    if anchor is not None and positive is not None:
        negatives = [name for name in names if name.lower().rstrip("_0123456789") in NEGATIVES]
        return [anchor, positive, *negatives], label
    texts = [name for name in names if name != label]
    strange = [name for name in texts if not _is_text(rows, name)]
    if strange or not texts:
        raise DataError(
            f"{source}: which of the columns {names} are texts that belong together is not clear. Expected anchor and "
            "positive (and negative, label), or only texts and a label; or set "
            "columns={'anchor': ..., 'positive': ...}",
            names=names,
        )
    return texts, label


def asked_columns(
    row: Mapping[str, Any],
    role_columns: Mapping[str, str] | None,
    roles: Sequence[str],
    source: str = "train",
    *,
    single: Sequence[str] = ("label",),
) -> dict[str, list[str]]:
    """Return the columns that the caller named, by role; ``+`` joins several.

    Args:
        row: the first row.
        role_columns: columns by role.
        roles: all roles.
        source: the table, for messages.
        single: roles of one column.

    Raises:
        ConfigError: there is no such role, or a single role has several columns.
        DataError: there is no such column.
    """
    given = {role: name for role, name in (role_columns or {}).items() if name}
    strange = [role for role in given if role not in roles]
    if strange:
        near = nearest(strange[0], roles)
        raise ConfigError(f"columns: no role {strange[0]!r}{near}; expected {', '.join(roles)}", problems=strange)
    asked = {role: [given[role]] if given[role] in row else given[role].split("+") for role in roles if role in given}
    joined = [f"{role}={given[role]!r}" for role in single if len(asked.get(role, ())) > 1]
    if joined:
        raise ConfigError(f"columns: found {', '.join(joined)}; expected one column in each", problems=joined)
    absent = [name for part in asked.values() for name in part if name not in row]
    if absent:
        raise DataError(f"{source}: no column {', '.join(map(repr, absent))}; it has {list(row)}", names=absent)
    return asked


def known_column(names: Iterable[str], known: Sequence[str]) -> str | None:
    """Return the column with the first of the known names, in any case; None if there is none."""
    lowered = {name.lower(): name for name in names}
    return next((lowered[name] for name in known if name in lowered), None)


def _is_text(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column contains texts, and not numbers as CSV files contain them."""
    cells = [row.get(name) for row in rows[:100]]
    known = name.lower() in NAMES["text"]
    return isinstance(cells[0], str) and (known or any(isinstance(cell, str) for cell in as_numbers(cells)))


def _labels(cells: Sequence[Any], column: str, source: str) -> NDArray[Any]:
    """Return labels as numbers: lists of them as rows, names as the numbers of classes.

    Whole numbers are integers, also where a source has them as 1.0.
    """
    missing = [i for i, cell in enumerate(cells) if is_missing(cell)]
    if missing:
        raise DataError(
            f"{source}: column {column!r} has no label in {len(missing)} of {len(cells)} rows, first row {missing[0]}; "
            "expected one in each",
            column=column,
            rows=missing,
        )
    values = as_numbers(cells)
    if all(isinstance(value, str) for value in values):
        return np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)
    try:
        found = np.asarray([[*map(float, v)] if isinstance(v, (list, tuple, np.ndarray)) else float(v) for v in values])
        finite = np.isfinite(found).all()
    except (TypeError, ValueError):
        found, finite = np.zeros(0), False
    if not finite:
        raise DataError(
            f"{source}: column {column!r} has labels that are no finite numbers, or lists of different lengths; "
            "expected a number, as many numbers, or a name in each row",
            column=column,
        )
    whole = found.ndim == 1 and bool((found == np.floor(found)).all() and np.abs(found).max() < 2**53)
    return found.astype(np.int64 if whole else np.float32)


def _numbers_of(cells: Sequence[Any], names: Sequence[str], column: str, source: str) -> NDArray[np.int64]:
    """Return the numbers of declared classes, which cells contain as numbers or as names.

    Raises:
        DataError: a cell contains neither.
    """
    numbers = {**{k: k for k in range(len(names))}, **{name: k for k, name in enumerate(names)}}
    wrong = [f"row {i}: {cell!r}" for i, cell in enumerate(cells) if isinstance(cell, list) or cell not in numbers]
    what, expected = f"column {column!r} has labels that are none of its classes", ", ".join(names[:20])
    refuse_rows(source, what, wrong, f"one of {expected}, or its number", column=column)
    return np.asarray([numbers[cell] for cell in cells], np.int64)


def _form(texts: int, labels: NDArray[Any] | None, names: Sequence[str], source: str) -> Form:
    found: Form | None = None
    if labels is None:
        return "texts" if texts == 1 else "pairs" if texts == 2 else "triplets"
    if names:
        found = "classes" if texts == 1 else "pair_classes" if texts == 2 else None
    elif texts > 2:
        found = "teacher_scores"
    elif texts == 1:
        found = "teacher_vectors" if labels.ndim == 2 else "classes" if labels.dtype.kind == "i" else None
    elif labels.ndim == 1:
        found = "binary" if labels.dtype.kind == "i" and set(np.unique(labels)) <= {0, 1} else "scored"
    if found is None:
        what = f"classes ({', '.join(names[:5])})" if names else f"labels of shape {labels.shape[1:] or 'one number'}"
        raise DataError(
            f"{source}: {texts} texts with {what} are no examples that a loss takes; expected one or two texts and a "
            "class, two texts and a number, or a question with candidates and scores"
        )
    return found


RETRIEVAL = {"accuracy": (), "precision": (), "recall": (1, 10), "mrr": (10,), "ndcg": (10,), "map": (100,)}


@dataclass(frozen=True)
class HeldOut:
    """Gold labels of evaluation examples.

    Attributes:
        form: the form of the data.
        texts: which text each one is, ``(examples, texts)``: equal numbers are equal texts, -1 is none.
        labels: the labels of the examples.
        prompted: whether each text occurs twice: with the prompt of the loss, then with the prompt of the metrics.
    """

    form: Form
    texts: NDArray[np.int64]
    labels: NDArray[Any] | None
    prompted: bool = False


class VectorScorer(Scorer):
    """Metrics of vectors, which depend on the form of the data.

    Args:
        truth: the gold labels of the examples.
    """

    measure = "cosine"

    def __init__(self, truth: HeldOut) -> None:
        super().__init__(CollectedValues())
        self.truth, self.kept = truth, self.parts[0]

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the vectors of one example, ``[(texts, size)]``."""
        self.kept.update(example, scores[0].numpy())

    def compute(self) -> dict[str, float]:
        """Return the metrics; NaN without examples."""
        names = METRICS[self.truth.form]
        if not names or not self.kept.items:
            return dict.fromkeys(names, math.nan)
        examples = sorted(self.kept.items)
        labels = None if self.truth.labels is None else self.truth.labels[examples]
        return self.figures([self.kept.items[i] for i in examples], self.truth.texts[examples], labels)

    def figures(self, vectors: Sequence[Any], texts: NDArray[np.int64], labels: Any) -> dict[str, float]:
        """Return the metrics of the vectors, texts and labels of examples."""
        columns, form, measure = torch.from_numpy(np.stack(vectors)).unbind(1), self.truth.form, self.measure
        if form == "classes":
            return clustering_figures(columns[0], labels)
        if form in ("scored", "binary"):
            of_pairs = similarity_figures if form == "scored" else binary_figures
            return of_pairs(columns[0], columns[1], labels, measure=measure)
        found = {} if form == "teacher_scores" else _retrieval(columns, texts, measure)
        return found if form == "pairs" else found | _triplets(columns, texts, measure)


def related_texts(texts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], list[set[int]]]:
    """Return the corpus of distinct positives and negatives, and the distinct anchors.

    Args:
        texts: as in `HeldOut`.

    Returns:
        The place of each text in the corpus, ``(examples, texts - 1)``; the first example of each distinct anchor;
        and for each of these anchors the places of its positives.
    """
    there = texts[:, 1:] >= 0
    places = np.zeros(there.shape, np.int64)
    places[there] = np.unique(texts[:, 1:][there], return_inverse=True)[1]
    anchors, first, group = np.unique(texts[:, 0], return_index=True, return_inverse=True)
    relevant: list[set[int]] = [set() for _ in anchors]
    for anchor, place in zip(group.tolist(), places[:, 0].tolist(), strict=True):
        relevant[anchor].add(place)
    return places, first, relevant


def _retrieval(columns: Sequence[Tensor], texts: NDArray[np.int64], measure: str) -> dict[str, float]:
    """Return how well anchors find their positives among all positives and negatives, each distinct text once."""
    there = texts[:, 1:] >= 0
    places, first, relevant = related_texts(texts)
    vectors = torch.zeros(places.max() + 1, columns[0].shape[1])
    for k, column in enumerate(columns[1:]):
        vectors[torch.from_numpy(places[there[:, k], k])] = column[torch.from_numpy(there[:, k])]
    return retrieval_figures(columns[0][torch.from_numpy(first)], vectors, relevant, at=RETRIEVAL, measure=measure)


def _triplets(columns: Sequence[Tensor], texts: NDArray[np.int64], measure: str) -> dict[str, float]:
    a, b, *others = columns
    parts, counts = [], []
    for k, other in enumerate(others, 2):
        there = torch.from_numpy(texts[:, k] >= 0)
        if there.any():
            parts.append(triplet_figures(a[there], b[there], other[there], measure=measure)["triplet_accuracy"])
            counts.append(int(there.sum()))
    return {"triplet_accuracy": float(np.average(parts, weights=counts)) if parts else math.nan}


_FOUND = ("ndcg@10", "recall@1", "recall@10", "mrr@10", "map@100")
METRICS: dict[Form, tuple[str, ...]] = {
    "pairs": _FOUND,
    "triplets": (*_FOUND, "triplet_accuracy"),
    "scored": ("spearman", "pearson"),
    "binary": ("ap", "accuracy", "accuracy_threshold", "f1", "f1_threshold", "precision", "recall", "mcc"),
    "pair_classes": (),
    "classes": ("neighbour_accuracy", "v_measure"),
    "texts": (),
    "teacher_scores": ("triplet_accuracy",),
    "teacher_vectors": (),
}
"""Metrics of each form of data, first the metric that selects the best model; without metrics, the loss selects it."""


def main_metric(form: Form) -> str:
    """Return the metric of a form of data that selects the best model."""
    return next(iter(METRICS[form]), "-eval_loss")
