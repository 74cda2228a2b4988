"""What the columns of a table mean for vectors: which texts belong together, and what is said of them.

Decides the form of a table's examples, and with it the loss that is usual for them. Columns are known by name, or come
in the order of the table: anchor, positive, negatives, with a label by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.errors import ConfigError, DataError, capped
from flodl_hf.columns import Columns, column_names
from flodl_hf.vectors.losses.loss import Form

__all__ = ["TextTable", "are_pairs", "read_table"]

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
    """A table whose examples are texts that a loss puts beside each other.

    Attributes:
        texts: for each example its texts, anchor first; as many in each.
        labels: what is said of each example, ``(examples, ...)``; None where nothing is.
        form: what an example is.
        columns: where texts and labels stand.
        names: of classes by number, where labels are names.
    """

    texts: list[tuple[str, ...]]
    labels: NDArray[Any] | None
    form: Form
    columns: Columns
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Texts of an example."""
        return len(self.texts[0])


def are_pairs(names: Sequence[str]) -> bool:
    """Return whether columns say by their names that they hold texts that belong together."""
    lowered = {name.lower() for name in names}
    return {"anchor", "positive"} <= lowered or {"query", "positive"} <= lowered


def read_table(
    rows: Sequence[Mapping[str, Any]], said: Mapping[str, str] | None = None, where: str = "train"
) -> TextTable:
    """Return the texts and labels of a table.

    Args:
        rows: the table.
        said: columns by role: anchor, positive, negative (several as ``a+b``), label.
        where: what the table is called in messages.

    Raises:
        ConfigError: a role that there is none of.
        DataError: columns whose meaning cannot be told, or values that cannot be.
    """
    columns, label = _columns(column_names(rows[:1]), rows[0], dict(said or {}), where)
    several = [name for name in columns if isinstance(rows[0].get(name), (list, tuple))]
    count = {name: min(len(row.get(name) or ()) for row in rows) for name in several}
    texts, wrong = [], []
    for i, row in enumerate(rows):
        parts: list[Any] = []
        for name in columns:
            parts += list(row[name][: count[name]]) if name in count else [row.get(name)]
        if not all(isinstance(part, str) for part in parts):
            wrong.append(f"row {i}: {[type(part).__name__ for part in parts]}")
        texts.append(tuple(parts))
    if wrong or not texts[0]:
        raise DataError(
            f"{where}: columns {columns} have values that are no texts:\n{capped(wrong or ['no text'], 5)}\nexpected a "
            "text in each, or a list of texts",
            problems=wrong,
        )
    said_of = [] if label is None else [row.get(label) for row in rows]
    found = None if label is None else _labels(said_of, label, where)
    named = bool(said_of) and all(isinstance(value, str) for value in said_of)
    names = tuple(sorted({str(value) for value in said_of})) if named else ()
    if names and len(texts[0]) == 2:
        return TextTable(texts, found, "pair_classes", _as_columns(columns, label), names)
    return TextTable(texts, found, _form(len(texts[0]), found, where), _as_columns(columns, label), names)


def _columns(
    names: list[str], row: Mapping[str, Any], said: dict[str, str], where: str
) -> tuple[list[str], str | None]:
    """Return the columns of texts in their order, and that of labels."""
    strange = [role for role in said if role not in ROLES]
    if strange:
        raise ConfigError(f"columns: no role {strange[0]!r}; expected {', '.join(ROLES)}", problems=strange)
    asked = {role: said[role].split("+") for role in ROLES if said.get(role)}
    absent = [name for part in asked.values() for name in part if name not in row]
    if absent:
        raise DataError(f"{where}: no column {', '.join(map(repr, absent))}; it has {names}", names=absent)
    label = asked.get("label", [None])[0]
    lowered = {name.lower(): name for name in names}
    if label is None:
        label = next((lowered[name] for name in LABELS if name in lowered), None)
    if "anchor" in asked:
        return [*asked["anchor"], *asked.get("positive", []), *asked.get("negative", [])], label
    anchor = next((lowered[name] for name in ANCHORS if name in lowered), None)
    positive = next((lowered[name] for name in POSITIVES if name in lowered), None)
    if anchor is not None and positive is not None:
        negatives = [name for name in names if name.lower().rstrip("_0123456789") in NEGATIVES]
        return [anchor, positive, *negatives], label
    texts = [name for name in names if name != label]
    strange = [name for name in texts if not isinstance(row.get(name), str)]
    if strange or not texts:
        raise DataError(
            f"{where}: which of the columns {names} are texts that belong together is not clear. Expected anchor and "
            "positive (and negative, label), or nothing but texts and a label; or say which is which: "
            "columns={'anchor': ..., 'positive': ...}",
            names=names,
        )
    return texts, label


def _labels(values: Sequence[Any], column: str, where: str) -> NDArray[Any]:
    """Return labels as numbers: lists of them as rows, names as the numbers of classes."""
    if all(isinstance(value, str) for value in values):
        return np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)
    try:
        found = np.asarray([[*map(float, v)] if isinstance(v, (list, tuple, np.ndarray)) else float(v) for v in values])
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: column {column!r} has labels that are no numbers, or lists of different lengths; expected a "
            "number, as many numbers, or a name in each row",
            column=column,
        ) from None
    if not np.isfinite(found).all():
        raise DataError(f"{where}: column {column!r} has labels that are not finite; expected numbers", column=column)
    whole = found.ndim == 1 and all(isinstance(value, (bool, int, np.integer)) for value in values)
    return found.astype(np.int64 if whole else np.float32)


def _form(texts: int, labels: NDArray[Any] | None, where: str) -> Form:
    if labels is None:
        return "texts" if texts == 1 else "pairs" if texts == 2 else "triplets"
    if texts == 1:
        if labels.ndim == 2:
            return "teacher_vectors"
        if labels.dtype.kind == "i":
            return "classes"
    if texts == 2 and labels.ndim == 1:
        return "binary" if labels.dtype.kind == "i" and set(np.unique(labels)) <= {0, 1} else "scored"
    if texts > 2:
        return "teacher_scores"
    raise DataError(
        f"{where}: {texts} texts with labels of shape {labels.shape[1:] or 'one number'} are no examples that a loss "
        "takes; expected a text and its class, two texts and a number, or a question with candidates and scores"
    )


def _as_columns(texts: list[str], label: str | None) -> Columns:
    pair = texts[1] if len(texts) > 1 else None
    return Columns(task="embedding", text=texts[0], text_pair=pair, label=label)
