"""Tokenized training data: rows kept flat in a few arrays, and how some of them become a batch.

Decides how rows lie in memory and which parts a batch has. Which tokens and labels a row holds is decided by
its task; which rows come together by `flodl.data.batches`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data import CollateTokens
from flodl.data.collate import Where
from flodl.errors import DataError
from flodl_hf.alignment import IGNORE, mask_tokens
from flodl_hf.buckets import FILLER, Bucket, bucket_of, fill

__all__ = ["CollateRows", "EncodedRows", "Masking", "RowBuilder"]


class EncodedRows:
    """Rows of tokens with their labels: ``rows.get(i)`` is a dict of arrays.

    Args:
        columns: per-token values of all rows end to end, by name; ``input_ids`` is one of them.
        lengths: tokens of each row.
        values: one value or line of values for each row, by name.
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

    def add(self, row: Any, owner: int, columns: Mapping[str, Sequence[int]] | None = None, **values: Any) -> None:
        """Take in one window.

        Args:
            row: a `flodl_hf.tokenization.rows.Row`.
            owner: the example that it is a window of.
            columns: further values, one for each token.
            **values: one value, or one line of values, for the row.
        """
        self._put("input_ids", row.ids, np.int32)
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
            raise DataError("finetune: no row of the data holds a token to learn from", rows=0)
        lengths = [part.size for part in self._parts["input_ids"]]
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        values = {name: np.asarray(column) for name, column in self._values.items()}
        return EncodedRows(columns, lengths, values, self._owners)


@dataclass(frozen=True)
class Masking:
    """What a masked language model has to guess, drawn anew for each row and epoch.

    Args:
        mask_id: the mask token.
        vocabulary: the size of the vocabulary.
        probability: share of tokens.
        whole_words: choose whole words.
    """

    mask_id: int
    vocabulary: int
    probability: float
    whole_words: bool

    def __call__(self, row: Mapping[str, Any], where: Where, index: int) -> dict[str, Any]:
        """Return the row with tokens hidden, and ``labels`` for these."""
        words = row["words"].tolist()
        ids, labels = mask_tokens(
            row["input_ids"].tolist(),
            [word == SPECIAL for word in words],
            mask_id=self.mask_id,
            random_ids=self.vocabulary,
            rng=where.rng("mask", index),
            probability=self.probability,
            words=[None if word < 0 else word for word in words] if self.whole_words else None,
        )
        rest = {name: value for name, value in row.items() if name != "words"}
        return {**rest, "input_ids": ids, "labels": labels}


SPECIAL = -1
"""The word number of tokens that belong to no text."""


@dataclass(frozen=True)
class CollateRows:
    """Makes a batch of rows: padded, packed end to end, or packed and filled up to a shape that comes again.

    A bucketed batch has no part that is a matter of its rows' lengths, so that a training step can be recorded
    for its shape: besides what `Packed` needs there are ``places``, ``opens`` and ``longest``, a number, and
    ``real``, ``(texts,)``, 1 for rows and 0 for what fills up. Labels of fillers are -100 or 0.

    Args:
        pad_id: the padding token.
        layout: how the rows lie.
        masking: hides tokens, for masked language models.
        longest: bucketed: most tokens of any row of the data.
    """

    pad_id: int
    layout: Literal["padded", "packed", "bucketed"] = "padded"
    masking: Masking | None = None
    longest: int = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch; packed ones have ``row_lengths``, a list, besides."""
        if self.masking is not None:
            rows = [self.masking(row, where, index) for row, index in zip(rows, where.indices, strict=True)]
        whole = [name for name, value in rows[0].items() if isinstance(value, np.ndarray) and name in _PER_TOKEN]
        ragged = tuple(name for name in whole if name != "labels" or _is_per_token(rows))
        pad = {"input_ids": self.pad_id, "labels": IGNORE}
        together: Any = "padded" if self.layout == "padded" else "packed"
        parts = CollateTokens(layout=together, ragged=ragged, pad=pad)(rows, where)
        if self.layout == "bucketed":
            parts = _filled(parts, ragged, self.longest)
        if self.layout == "packed":
            parts["row_lengths"] = parts["lengths"].tolist()
        for name in ("lengths", "max_length", "position_ids"):
            parts.pop(name, None)
        return {name: _wide(part) for name, part in parts.items()}


def _filled(parts: dict[str, Any], per_token: Sequence[str], longest: int) -> dict[str, Any]:
    """Return a packed batch filled up to the shapes of its bucket."""
    lengths = parts["lengths"].numpy()
    tokens = bucket_of(lengths, steps=BUCKET_STEPS, least=LEAST_TOKENS).tokens
    longest = max(longest, int(lengths.max()))
    missing = tokens - int(lengths.sum())
    texts = max(LEAST_TEXTS, len(lengths) + max(1, -(-missing // longest)))
    step = 1 << (texts - 1).bit_length() - 2
    bucket = Bucket(tokens, -(-texts // step) * step, longest)
    all_lengths = fill(lengths, bucket)
    ends = np.cumsum(all_lengths)
    starts = ends - all_lengths
    offsets = np.full(bucket.texts + 1, bucket.tokens, dtype=np.int32)
    offsets[0], offsets[1 : len(ends) + 1] = 0, ends
    opens = np.full(bucket.texts, bucket.tokens - 1, dtype=np.int64)
    opens[: len(starts)] = starts
    places = np.arange(bucket.tokens) - np.repeat(starts, all_lengths)
    real = torch.zeros(bucket.texts)
    real[: len(lengths)] = 1
    filled: dict[str, Any] = {}
    for name, part in parts.items():
        if name in ("lengths", "max_length", "position_ids", "cu_seqlens"):
            continue
        if not isinstance(part, torch.Tensor):
            filled[name] = part
            continue
        size = bucket.tokens if name in per_token or name == "input_ids" else bucket.texts
        value = bucket.longest if name.endswith("_positions") else IGNORE if name == "labels" else FILLER
        if name == "labels" and part.is_floating_point():
            value = 0
        whole = part.new_full((size, *part.shape[1:]), value)
        whole[: len(part)] = part
        filled[name] = whole
    return filled | {
        "cu_seqlens": torch.from_numpy(offsets), "opens": torch.from_numpy(opens),
        "places": torch.from_numpy(places), "real": real, "longest": bucket.longest,
    }  # fmt: skip


BUCKET_STEPS = 8  # eight sizes from one power of two to the next: a sixteenth is filling at most, half that as a rule
LEAST_TOKENS = 128
LEAST_TEXTS = 16

_PER_TOKEN = ("input_ids", "token_type_ids", "labels")


def _is_per_token(rows: Sequence[Mapping[str, Any]]) -> bool:
    return rows[0]["labels"].dtype.kind == "i" and all(len(row["labels"]) == len(row["input_ids"]) for row in rows)


def _wide(part: Any) -> Any:
    # Labels are stored narrow; losses want the model's float32.
    return part.float() if isinstance(part, torch.Tensor) and part.dtype == torch.float64 else part
