"""Tokenized training data: rows in concatenated arrays, and their collation.

This module defines the layout of rows in memory and the parts of a batch. The task defines tokens and labels;
`flodl.data.batches` selects the rows of a batch; `flodl_hf.training.shapes` selects the shapes for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data import Where
from flodl.errors import DataError
from flodl_hf.nn.layout.buckets import FILLER, fill
from flodl_hf.tokenization.alignment import IGNORE, chosen_tokens, mask_tokens
from flodl_hf.training.noise import SEEDS, row_seeds
from flodl_hf.training.shapes import Shapes

__all__ = ["RELATED", "SPECIAL", "CollateRows", "EncodedRows", "Masking", "RowBuilder", "TakenRows"]

RELATED = "related"
"""Name of the label of a pair of texts, in addition to labels of words: 0 for related texts."""


class EncodedRows:
    """Rows of tokens with their labels: ``rows.get(i)`` is a dict of arrays.

    Args:
        columns: mapping of names to per-token values of all rows, concatenated; one is ``input_ids``.
        lengths: tokens of each row.
        values: mapping of names to one value or line of values per row.
        owners: the example that each row is a window of; None where a row is an example.
    """

    def __init__(
        self,
        columns: Mapping[str, NDArray[Any]],
        lengths: Sequence[int],
        values: Mapping[str, NDArray[Any]] | None = None,
        owners: Sequence[int] | None = None,
    ) -> None:
        self.columns, self.values = dict(columns), dict(values or {})
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.ends = np.cumsum(self.lengths)
        self.owners = np.arange(len(self.lengths)) if owners is None else np.asarray(owners, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> dict[str, Any]:
        """Return row ``index``; per-token parts are int64 ``(tokens,)``."""
        end = self.ends[index]
        part = slice(end - self.lengths[index], end)
        row: dict[str, Any] = {name: column[part].astype(np.int64) for name, column in self.columns.items()}
        return row | {name: column[index] for name, column in self.values.items()}

    def __getitems__(self, indices: Sequence[int]) -> TakenRows:
        """Return several rows."""
        which = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[which]
        # each token's place: where its row starts, less where it starts among those taken, and one by one from there
        shifts = self.ends[which] - np.cumsum(lengths)
        at = np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)
        columns = {name: column[at].astype(np.int64) for name, column in self.columns.items()}
        return TakenRows(columns, lengths, {name: _stacked(column[which]) for name, column in self.values.items()})


class TakenRows(Sequence[Mapping[str, Any]]):
    """Some rows: a sequence of dicts of slices of concatenated arrays.

    Args:
        columns: mapping of names to values of all tokens, int64 ``(tokens,)``, ``input_ids`` first.
        lengths: tokens of each row.
        values: mapping of names to arrays ``(rows, ...)`` in the types of batches, or lists.
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64], values: Mapping[str, Any]
    ) -> None:
        self.columns, self.lengths, self.values = columns, lengths, values
        self.ends = np.cumsum(lengths)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> TakenRows:
        """Return rows from dicts; labels are per token if there are as many integers as tokens."""
        lengths = np.asarray([len(row["input_ids"]) for row in rows], np.int64)
        per_token = ["input_ids", *(n for n in rows[0] if n in _PER_TOKEN[1:] and _is_per_token(n, rows, lengths))]
        columns = {n: np.concatenate([np.asarray(row[n]) for row in rows]).astype(np.int64) for n in per_token}
        values = {n: _stacked([row[n] for row in rows]) for n in rows[0] if n not in columns}
        return cls(columns, lengths, values)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part = slice(self.ends[index] - self.lengths[index], self.ends[index])
        row = {name: column[part] for name, column in self.columns.items()}
        return row | {name: column[index] for name, column in self.values.items()}


def _is_per_token(name: str, rows: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]) -> bool:
    found = [row[name] for row in rows]
    if any(not isinstance(value, np.ndarray) or value.dtype.kind != "i" or value.ndim != 1 for value in found):
        return False
    return name != "labels" or [len(value) for value in found] == lengths.tolist()


def _stacked(column: Any) -> Any:
    """Return values of rows as one array, float64 as the models' float32; others as a list."""
    whole = np.asarray(column)
    if whole.dtype.kind not in "biuf":
        return list(column)
    return whole.astype(np.float32) if whole.dtype == np.float64 else whole


class RowBuilder:
    """Collects rows one by one and gives them as `EncodedRows`.

    Args:
        types: keep token types.
    """

    def __init__(self, types: bool) -> None:
        self.types = types
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._values: dict[str, list[Any]] = {}
        self._owners: list[int] = []

    def add(
        self,
        row: Any,
        owner: int,
        columns: Mapping[str, Sequence[int]] | None = None,
        *,
        ids: Any = None,
        **values: Any,
    ) -> None:
        """Add one window.

        Args:
            row: a `flodl_hf.tokenization.rows.Row`.
            owner: the example that it is a window of.
            columns: further values, one for each token.
            ids: token ids in place of the row's.
            **values: one value, or one line of values, of the row.
        """
        self._put("input_ids", row.ids if ids is None else ids, np.int32)
        if self.types:
            self._put("token_type_ids", row.type_ids, np.uint8)
        for name, column in (columns or {}).items():
            self._put(name, column, np.int32)
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)
        self._owners.append(owner)

    def _put(self, name: str, values: Sequence[int], dtype: Any) -> None:
        self._parts.setdefault(name, []).append(np.asarray(values, dtype=dtype))

    def build(self) -> EncodedRows:
        """Return the rows.

        Raises:
            DataError: there are none.
        """
        if not self._owners:
            raise DataError("finetune: found no tokens in the data, expected at least one row with tokens", rows=0)
        lengths = [part.size for part in self._parts["input_ids"]]
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        values = {name: np.asarray(column) for name, column in self._values.items()}
        return EncodedRows(columns, lengths, values, self._owners)


@dataclass(frozen=True)
class Masking:
    """Masking for a masked language model, drawn again for each row and epoch.

    Args:
        mask_id: the mask token.
        vocabulary: the size of the vocabulary.
        probability: share of tokens.
        whole_words: choose whole words.
        mask_share: share of the chosen tokens that become the mask token.
        random_share: share that becomes a random token.
    """

    mask_id: int
    vocabulary: int
    probability: float
    whole_words: bool
    mask_share: float = 0.8
    random_share: float = 0.1

    def __call__(self, row: Mapping[str, Any], where: Where, index: int) -> dict[str, Any]:
        """Return the row with tokens hidden, and ``labels`` for these."""
        special, choice = self._choice(row, where, index)
        ids, labels = mask_tokens(
            row["input_ids"].tolist(),
            special,
            mask_id=self.mask_id,
            random_ids=self.vocabulary,
            mask_share=self.mask_share,
            random_share=self.random_share,
            **choice,
        )
        rest = {name: value for name, value in row.items() if name != "words"}
        return {**rest, "input_ids": np.asarray(ids), "labels": np.asarray(labels)}

    def number(self, row: Mapping[str, Any], where: Where, index: int) -> int:
        """Return the number of masked tokens of a row."""
        special, choice = self._choice(row, where, index)
        return chosen_tokens(special, **choice).size

    def _choice(self, row: Mapping[str, Any], where: Where, index: int) -> tuple[list[bool], dict[str, Any]]:
        """Return which tokens are special, and the arguments that select the others."""
        words = row["words"].tolist()
        whole = [None if word < 0 else word for word in words] if self.whole_words else None
        rng = where.rng("mask", index)
        return [word == SPECIAL for word in words], {"rng": rng, "probability": self.probability, "words": whole}


SPECIAL = -1
"""The word number of tokens that belong to no text."""


@dataclass(frozen=True)
class CollateRows:
    """Collates rows: padded, packed, or packed and padded to one of a few shapes (bucketed).

    The shapes of a bucketed batch do not depend on the lengths of its rows, so a training step can be captured
    for its shape. In addition to the inputs of `Packed` it has ``places``, ``opens`` and ``longest``, a number, and
    ``real``, ``(texts,)``, 1 for rows and 0 for padding. Labels of padding are -100 or 0.

    Args:
        pad_id: the padding token.
        layout: the layout of rows.
        masking: masks or replaces tokens, for tasks on plain text.
        shapes: bucketed: what batches are filled up to.
        least: bucketed: fewest tokens of a batch.
        widths: padded: what rows are filled up to, ascending; longer ones to their own longest.
        noise: give each row a seed for the noise on its embeddings.
        shapes_for: chooses shapes for another ``micro_batch_size``, where that is found out later.
    """

    pad_id: int
    layout: Literal["padded", "packed", "bucketed"] = "padded"
    masking: Callable[[Mapping[str, Any], Where, int], dict[str, Any]] | None = None
    shapes: Shapes = field(default_factory=Shapes)
    noise: bool = False
    shapes_for: Callable[..., Shapes] | None = None
    least: int = 0
    widths: tuple[int, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether batches have few shapes, which do not depend on the lengths of their rows."""
        return self.layout == "bucketed" or (self.layout == "padded" and bool(self.widths))

    def cut_to(self, size: int | None) -> CollateRows:
        """Return the collate function for micro-batches of this size, with new shapes."""
        return self if self.shapes_for is None else replace(self, shapes=self.shapes_for(micro_batch_size=size))

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch; packed batches also have ``row_lengths``, a list."""
        if self.masking is not None:
            rows = [self.masking(row, where, index) for row, index in zip(rows, where.indices, strict=True)]
        taken = rows if isinstance(rows, TakenRows) else TakenRows.of(rows)
        if self.noise:
            seeds = {SEEDS: row_seeds(where, where.indices)}
            taken = TakenRows(taken.columns, taken.lengths, {**taken.values, **seeds})
        make = {"padded": self._padded, "packed": _packed, "bucketed": self._filled}[self.layout]
        return {name: _tensor(part) for name, part in make(taken).items()}

    def _padded(self, rows: TakenRows) -> dict[str, Any]:
        longest = int(rows.lengths.max())
        mask = np.arange(next((n for n in self.widths if n >= longest), longest)) < rows.lengths[:, None]
        pad = {"input_ids": self.pad_id, "labels": IGNORE}
        parts: dict[str, Any] = {}
        for name, column in rows.columns.items():
            parts[name] = block = np.full(mask.shape, pad.get(name, 0), column.dtype)
            block[mask] = column
        return {**parts, "attention_mask": mask.astype(np.int64), **rows.values}

    def _filled(self, rows: TakenRows) -> dict[str, Any]:
        """Return a packed batch filled up to the shapes of its bucket."""
        bucket = self.shapes.bucket(rows.lengths, self.least)
        lengths = fill(rows.lengths, bucket)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        offsets = np.full(bucket.texts + 1, bucket.tokens, np.int32)
        offsets[0], offsets[1 : len(ends) + 1] = 0, ends
        opens = np.full(bucket.texts, bucket.tokens - 1, np.int64)
        opens[: len(starts)] = starts
        real = np.zeros(bucket.texts, np.float32)
        real[: len(rows)] = 1
        parts: dict[str, Any] = {}
        for name, column in rows.columns.items():
            parts[name] = whole = np.full(bucket.tokens, IGNORE if name == "labels" else FILLER, column.dtype)
            whole[: len(column)] = column
        for name, column in rows.values.items():
            if not isinstance(column, np.ndarray):
                parts[name] = column
                continue
            filler = bucket.longest if name.endswith("_positions") else 0
            if name in ("labels", RELATED) and column.dtype.kind != "f":
                filler = IGNORE
            parts[name] = whole = np.full((bucket.texts, *column.shape[1:]), filler, column.dtype)
            whole[: len(column)] = column
        places = np.arange(bucket.tokens) - np.repeat(starts, lengths)
        further = {"cu_seqlens": offsets, "opens": opens, "places": places, "real": real, "longest": bucket.longest}
        return parts | further


def _packed(rows: TakenRows) -> dict[str, Any]:
    offsets = np.concatenate([[0], np.cumsum(rows.lengths)]).astype(np.int32)
    return {**rows.columns, "cu_seqlens": offsets, **rows.values, "row_lengths": rows.lengths.tolist()}


def _tensor(part: Any) -> Any:
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


_PER_TOKEN = ("input_ids", "token_type_ids", "labels", "words")
