"""Tokenized training data: rows in concatenated arrays, their collation, and the shapes that batches are padded to.

The task defines tokens and labels; `flodl.data.batches` selects the rows of a batch. A training step is captured once
for each shape, so steps are fast when batches have few shapes, and little is wasted when these fit closely. Rows and
the order of the first epochs are known before training, so the sizes follow the totals of the batches of this run.
Equal data and options give equal sizes, whatever the number of epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.data import Where
from flodl.distributed.shares import ranges, split
from flodl.errors import DataError
from flodl_hf.nn.buckets import FILLER, Bucket, fill, round_up
from flodl_hf.tokenization.alignment import IGNORE
from flodl_hf.training.step import SEEDS, row_seeds

MOST_SHAPES = 6
MOST_RECORDINGS = 8  # of a step with several micro-batches, each of which may have any of the shapes
ENOUGH = 0.03  # filling, of all tokens, that no further shape is worth
ROUGHLY = 0.1  # filling from which a further shape has to save more than its recording costs
RECORDING = 1 << 16  # tokens that recorded steps compute in the time that recording another shape takes
RUN = 10  # number of epochs in which a shape must save more than it costs; a run may be resumed with other epochs
ENOUGH_SLOTS = 0.5  # an empty slot costs a few blocks of a kernel that finish immediately
MOST_SEEN = 512  # batches looked at,
MOST_EPOCHS = 16  # and epochs at most
TOKENS, SLOTS, WIDTHS = 16, 8, 8  # sizes are multiples of these

STEPS = 4  # of other batches: sizes per power of two; the rest of an epoch is such a batch
LEAST_TOKENS = 128
LEAST_TEXTS = 16


@dataclass(frozen=True)
class Shapes:
    """Sizes to fill batches up to.

    Attributes:
        longest: most tokens of any row of the data.
        tokens: sizes in tokens, ascending.
        texts: for each of them the numbers of slots for texts, ascending.
    """

    longest: int = 0
    tokens: tuple[int, ...] = ()
    texts: tuple[tuple[int, ...], ...] = ()

    def bucket(self, lengths: NDArray[Any], least: int = 0) -> Bucket:
        """Return the shape for rows of these lengths: a chosen one, or a rounded one if none is close.

        Args:
            lengths: tokens of each row.
            least: fewest tokens of the shape.
        """
        total, longest = max(int(lengths.sum()), least), max(self.longest, int(lengths.max()))
        for tokens, texts in zip(self.tokens, self.texts, strict=True):
            if total <= tokens:
                if 2 * total < self.tokens[0]:
                    break  # the share of a rank, or the rest of an epoch
                need = _slots(len(lengths), tokens - int(lengths.sum()), longest)
                return Bucket(tokens, next((n for n in texts if n >= need), _round_up(need)), longest)
        tokens = round_up(total, STEPS, LEAST_TOKENS)
        return Bucket(tokens, _round_up(_slots(len(lengths), tokens - int(lengths.sum()), longest)), longest)


def _slots(rows: int, missing: int, longest: int) -> int:
    return max(LEAST_TEXTS, rows + max(1, -(-missing // longest)))


def _round_up(texts: int) -> int:
    step = 1 << (texts - 1).bit_length() - 2
    return -(-texts // step) * step


def choose_shapes(
    lengths: NDArray[Any],
    batches: Any,
    longest: int,
    *,
    micro_batch_size: int | None = None,
    accumulate: int = 1,
    ranks: int = 1,
    texts_per_row: int = 1,
) -> Shapes:
    """Return shapes for the batches of a run.

    Args:
        lengths: tokens of each row of the data.
        batches: which rows form a batch, a `flodl.data.batches.BatchSource`.
        longest: upper bound of the lengths.
        micro_batch_size: rows that go through the model together at most.
        accumulate: batches of a step.
        ranks: among how many the rows of a batch are shared out.
        texts_per_row: how many texts a row of the data has, each of which is a row of the model.
    """
    passes = _passes(batches, micro_batch_size, ranks)
    totals = [int(lengths[part].sum()) for _, part in passes]
    counts = [len(part) * texts_per_row for _, part in passes]
    most = _most(passes, accumulate, ranks)
    # The least share of all tokens that a shape has to save of filling.
    worth = RECORDING / (RUN * max(1, int(lengths.sum())))
    sizes = _sizes(np.maximum(totals, LEAST_TOKENS), most, ENOUGH, TOKENS, worth)
    slots: list[list[int]] = [[] for _ in sizes]
    for total, count, at in zip(totals, counts, np.searchsorted(sizes, totals).tolist(), strict=True):
        if 2 * total >= sizes[0]:
            slots[at].append(_slots(count, sizes[at] - total, longest))
    texts = [
        tuple(_sizes(np.asarray(found or [LEAST_TEXTS]), most // len(sizes), ENOUGH_SLOTS, SLOTS)) for found in slots
    ]
    return Shapes(longest, tuple(sizes), tuple(texts))


def choose_widths(
    lengths: NDArray[Any],
    longest: NDArray[Any],
    batches: Any,
    *,
    micro_batch_size: int | None = None,
    accumulate: int = 1,
) -> tuple[int, ...]:
    """Return widths for padded batches of a run, ascending.

    Args:
        lengths: tokens of each row of the data.
        longest: of its longest text.
        batches: which rows form a batch.
        micro_batch_size: rows that go through the model together at most.
        accumulate: batches of a step.
    """
    passes = _passes(batches, micro_batch_size)
    widths = [int(longest[part].max()) for _, part in passes]
    worth = RECORDING / (RUN * max(1, int(lengths.sum())))
    found = _sizes(np.asarray(widths), _most(passes, accumulate), ENOUGH, WIDTHS, worth)
    return tuple(min(width, int(longest.max())) for width in found)


def _most(passes: list[tuple[int, NDArray[Any]]], accumulate: int, ranks: int = 1) -> int:
    """Return the most shapes of a pass, of which a step has some."""
    whole = passes[-1][0] + 1
    parts = max(1, round(len(passes) / (whole * ranks))) * accumulate
    return max(1, min(MOST_SHAPES, int(MOST_RECORDINGS ** (1 / parts) + 1e-9)))


def _passes(batches: Any, micro_batch_size: int | None = None, ranks: int = 1) -> list[tuple[int, NDArray[Any]]]:
    """Return the rows that go through the model together, behind the number of their batch, of the first epochs."""
    found: list[tuple[int, NDArray[Any]]] = []
    whole = 0
    for epoch in range(MOST_EPOCHS):
        for rows in list(batches.plan(epoch))[: MOST_SEEN - whole]:
            for begin, end in ranges(split(len(rows), [1.0] * ranks)):
                size = micro_batch_size or max(1, end - begin)
                found += [(whole, rows[start : min(start + size, end)]) for start in range(begin, end, size)]
            whole += 1
        if whole >= MOST_SEEN:
            break
    return found


def _sizes(totals: NDArray[Any], most: int, enough: float, grain: int, worth: float = 0.0) -> list[int]:
    """Return at most so many sizes that fill these totals up the least.

    Fewer where they fill up less than enough, or roughly enough and another size saves less than it is worth. Found by
    dynamic programming over the totals, rounded up to a grain.
    """
    grain = max(grain, 1 << max(8, int(totals.max()).bit_length()) - 8)
    values, weights = np.unique(-(-totals // grain) * grain, return_counts=True)
    below = np.concatenate([[0], np.cumsum(weights)])
    cost = np.full(len(values) + 1, np.inf)  # of filling up the first i values with the sizes so far
    cost[0] = 0
    choices: list[NDArray[Any]] = []
    spent = float((values * weights).sum())
    for _ in range(most):
        # one more size, the last of the first j values, contains the values i to j
        table = cost[:-1, None] + (below[None, 1:] - below[:-1, None]) * values[None, :].astype(float)
        table = np.where(np.arange(len(values))[:, None] <= np.arange(len(values))[None, :], table, np.inf)
        before, cost = cost[-1], np.concatenate([[np.inf], table.min(0)])
        if before <= (1 + ROUGHLY) * spent and before - cost[-1] < worth * spent:
            break
        choices.append(table.argmin(0))
        if cost[-1] <= (1 + enough) * spent:
            break
    found: list[int] = []
    end = len(values)
    for choice in reversed(choices):
        found.append(int(values[end - 1]))
        end = int(choice[end - 1])
        if end == 0:
            break
    return sorted(found)


RELATED = "related"
"""Name of the label of a pair of texts, in addition to labels of words: 0 for related texts."""


@dataclass(frozen=True)
class Laid:
    """Lengths of the texts in a batch: all texts of each row, or some.

    Attributes:
        lengths: tokens of each row.
        widest: tokens of the longest text of each row.
        texts: most texts of a row.
    """

    lengths: NDArray[np.int64]
    widest: NDArray[np.int64]
    texts: int = 1


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

    @property
    def laid(self) -> Laid:
        """Lengths of the texts of each row, which is one text."""
        return Laid(self.lengths, self.lengths)

    def get(self, index: int) -> dict[str, Any]:
        """Return row ``index``; per-token parts are int64 ``(tokens,)``."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> TakenRows:
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
        if isinstance(rows, TakenRows):
            return rows
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
            row: a `flodl_hf.tokenization.cuts.Row`.
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

    @classmethod
    def like(cls, usual: CollateRows, **further: Any) -> Self:
        """Return a collate function of this class with the layout of another one, and further arguments."""
        return cls(**{f.name: getattr(usual, f.name) for f in fields(CollateRows)} | further)

    @property
    def settled(self) -> bool:
        """Whether batches have few shapes, which do not depend on the lengths of their rows."""
        return self.layout == "bucketed" or (self.layout == "padded" and bool(self.widths))

    def cut_to(self, size: int | None) -> CollateRows:
        """Return the collate function for micro-batches of this size, with new shapes."""
        return self if self.shapes_for is None else replace(self, shapes=self.shapes_for(micro_batch_size=size))

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch; packed batches also have ``row_lengths``, a list."""
        if self.masking is not None:
            rows = [self.masking(row, position, index) for row, index in zip(rows, position.indices, strict=True)]
        taken = TakenRows.of(rows)
        if self.noise:
            seeds = {SEEDS: row_seeds(position, position.indices)}
            taken = TakenRows(taken.columns, taken.lengths, {**taken.values, **seeds})
        make = {"padded": self._padded, "packed": _packed, "bucketed": self._filled}[self.layout]
        parts = make(taken).items()
        return {name: torch.from_numpy(part) if isinstance(part, np.ndarray) else part for name, part in parts}

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


def filled(parts: Mapping[str, NDArray[np.int64]], room: int) -> dict[str, Tensor]:
    """Return values of tokens as tensors of a length, filled up with 0, and labels with -100."""
    fillers = {name: IGNORE if name.endswith("labels") else 0 for name in parts}
    lacking = {name: (0, room - len(values)) for name, values in parts.items()}
    return {n: torch.from_numpy(np.pad(v, lacking[n], constant_values=fillers[n])) for n, v in parts.items()}


_PER_TOKEN = ("input_ids", "token_type_ids", "labels", "words")
