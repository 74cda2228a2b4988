"""Packed batches brought to a few shapes: on CUDA to buckets, on a CPU to recurring counts of rows.

A forward pass or training step in a bucket can be recorded once. `bucket_of` decides which shapes there are and what
fills a batch up to one: texts of filling tokens that nothing reads, then slots without tokens. Everything is assembled
on the host, as arrays in one buffer, for one copy. Recorded passes are created by `flodl_hf.inference` and
`flodl.train`.

On a CPU, oneDNN makes a kernel for each count of rows that a weight is multiplied by, in milliseconds and half a
megabyte, and keeps a thousand of them. Texts of all lengths would fill that up; `rounded` up, tokens and texts come in
about ninety counts up to 1,024. Rows are added once, after the last text, before the embeddings: they contain a token
of the vocabulary, belong to no text, attend to nothing, and are cut off with the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from flodl_hf.nn.layout import Packed

# Fillers sit at each end of a family's tables, so any token and place 0 is safe.
FILLER = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shapes of a packed batch.

    Attributes:
        tokens: tokens, padding included.
        texts: slots for texts, padding included.
        longest: most tokens of a text.
    """

    tokens: int
    texts: int
    longest: int


@cache
def _counting(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def round_up(value: int, steps: int, least: int) -> int:
    """Return ``value``, and no less than ``least``, rounded up so that sizes have ``steps`` steps an octave."""
    value = max(value, least)
    step = max(1, 1 << max(0, (value - 1).bit_length() - 1 - steps.bit_length() + 1))
    return -(-value // step) * step


def _power_of_four(value: int, least: int) -> int:
    bits = (max(value, least) - 1).bit_length()
    return 1 << bits + bits % 2


def bucket_of(
    lengths: Sequence[int] | np.ndarray,
    *,
    steps: int = 4,
    least: int = 32,
    most: int | None = None,
    full: int | None = None,
) -> Bucket:
    """Return the smallest bucket that fits texts of these lengths.

    Tokens grow by a quarter to an eighth of themselves (with the default ``steps``), so that little is padding
    and few buckets exist.

    Args:
        lengths: tokens of each text, each at least 1.
        steps: steps from one power of two to the next for tokens; 1 also makes slots and longest powers of four.
        least: fewest tokens of a bucket.
        most: most tokens of a text that the model takes; bounds the longest.
        full: tokens of a full batch, for large ones: no bucket is larger unless its texts are, and slots and
            longest are powers of two. They cost little there, and full batches so come in a handful of shapes.
    """
    if len(lengths) == 1:
        total = most_here = int(lengths[0])
    else:
        sizes = np.asarray(lengths, np.int64)
        total, most_here = int(sizes.sum()), int(sizes.max())
    tokens = round_up(total, steps, least)
    if full is not None and total <= full < tokens:
        tokens = full
    fine = 2 if full is None else 1
    longest = _power_of_four(most_here, 16) if steps == 1 else round_up(most_here, fine, min(16, least))
    if most is not None:
        longest = max(most_here, min(longest, most))
    filling = -(-(tokens - total) // longest)
    texts = len(lengths) + filling
    return Bucket(tokens, _power_of_four(texts, 1) if steps == 1 else round_up(texts, fine, 1), longest)


class Buffer:
    """Host memory for one packed batch in a bucket: int32 arrays in one piece of memory.

    ``packed`` contains, in sequence, the token ids, token types, positions, ends ``(tokens,)`` each, then offsets
    ``(texts + 1,)`` and opens ``(texts,)``. `on` cuts a copy of it on a device into those tensors.

    Args:
        bucket: the shapes.
        types: whether there are token types.
        pinned: whether the memory can be copied to a CUDA device without waiting.
    """

    def __init__(self, bucket: Bucket, *, types: bool = True, pinned: bool = False) -> None:
        self.bucket = bucket
        self.types = types
        size = bucket.tokens * (4 if types else 3) + 2 * bucket.texts + 1
        # Every number is written by `write`; filling this much in parallel would also wait for busy cores.
        self.packed = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        self._array = self.packed.numpy()

    def write(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> tuple[int, ...]:
        """Put a batch in, filled up, and return the lengths of all its texts that have tokens.

        Args:
            ids: token ids, texts end to end, ``(tokens,)``.
            types: token types, ``(tokens,)``; None for zeros.
            lengths: tokens of each text, ``(texts,)``.
        """
        tokens, texts, longest = self.bucket.tokens, self.bucket.texts, self.bucket.longest
        if len(lengths) == 1 and tokens - len(ids) <= longest:
            return self._write_one(ids, types)
        all_lengths = fill(lengths, self.bucket)
        a, at, real = self._array, tokens, len(ids)
        a[:real] = ids
        a[real:tokens] = FILLER
        if self.types:
            a[at : at + real] = 0 if types is None else types
            a[at + real : at + tokens] = 0
            at += tokens
        ends = np.cumsum(all_lengths)
        starts = ends - all_lengths
        a[at : at + tokens] = np.arange(tokens) - np.repeat(starts, all_lengths)
        at += tokens
        a[at : at + tokens] = np.repeat(ends, all_lengths)
        at += tokens
        a[at] = 0
        a[at + 1 : at + 1 + texts] = tokens
        a[at + 1 : at + 1 + len(ends)] = ends
        at += texts + 1
        a[at : at + texts] = tokens - 1
        a[at : at + len(starts)] = starts
        assert int(all_lengths.max()) <= longest
        assert len(ends) <= texts
        return tuple(all_lengths.tolist())

    def _write_one(self, ids: np.ndarray, types: np.ndarray | None) -> tuple[int, ...]:
        """Do what `write` does for one text and at most one padding text; optimised for latency."""
        tokens, texts, real = self.bucket.tokens, self.bucket.texts, len(ids)
        parts = self._array[: -2 * texts - 1].reshape(-1, tokens)
        parts[0, :real] = ids
        parts[0, real:] = FILLER
        if self.types:
            parts[1, :real] = 0 if types is None else types
            parts[1, real:] = 0
        counting = _counting(tokens)
        parts[-2, :real] = counting[:real]
        parts[-2, real:] = counting[: tokens - real]
        parts[-1, :real] = real
        parts[-1, real:] = tokens
        offsets, opens = self._array[-2 * texts - 1 : -texts], self._array[-texts:]
        offsets[0], offsets[1], offsets[2:] = 0, real, tokens
        opens[0], opens[1:2], opens[2:] = 0, min(real, tokens - 1), tokens - 1
        return (real, tokens - real) if tokens > real else (real,)

    def on(
        self, packed: Tensor, lengths: tuple[int, ...] = (), real: int | None = None
    ) -> tuple[Tensor, Tensor | None, Packed]:
        """Return ids, token types (or None) and the layout as int32 views of ``packed``, a copy on some device.

        Args:
            packed: like ``self.packed``.
            lengths: what `write` returned; empty for a recorded pass, which must not depend on them.
            real: how many of the texts are no padding.
        """
        tokens, texts = self.bucket.tokens, self.bucket.texts
        sizes = [tokens] * (4 if self.types else 3) + [texts + 1, texts]
        parts = packed.split(sizes)
        places, ends, offsets, opens = parts[-4:]
        layout = Packed(offsets, lengths, self.bucket.longest, places, opens, real, ends)
        return parts[0], parts[1] if self.types else None, layout


def fill(lengths: np.ndarray | Iterable[int], bucket: Bucket) -> np.ndarray:
    """Return the lengths followed by those of the padding texts, which sum to the bucket's tokens."""
    sizes = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), np.int64)
    missing = bucket.tokens - int(sizes.sum())
    assert missing >= 0, "the bucket is too small for these texts"
    whole, rest = divmod(missing, bucket.longest)
    extra = [bucket.longest] * whole + ([rest] if rest else [])
    return np.concatenate([sizes, np.asarray(extra, np.int64)])


def rounded(count: int) -> int:
    """Return ``count`` rounded up to a count of rows that kernels are made for.

    Beyond 128 there are 16 steps from a power of two to the next, so at most a sixteenth is added. Below, where fewer
    kernels matter more than a row, steps are of 4, up to 32 of 2, and up to 8 nothing is added.
    """
    if count <= 8:
        return count
    step = 2 if count <= 32 else max(4, 1 << ((count - 1).bit_length() - 5))
    return -(-count // step) * step


def laid_out(
    ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray, *, lead: int = 0
) -> tuple[Tensor, Tensor | None, Packed]:
    """Return ids, token types and the layout of concatenated texts, tokens and texts rounded up.

    Args:
        ids: token ids, texts end to end, ``(tokens,)``.
        types: token types, ``(tokens,)``, or None.
        lengths: tokens of each text, ``(texts,)``, each at least 1.
        lead: virtual tokens that are put before each text later.
    """
    real, count = len(ids), len(lengths)
    texts = rounded(count)
    tokens = rounded(real + lead * texts) - lead * texts
    places = np.zeros(tokens, np.int64)
    offsets = np.full(texts + 1, real, np.int32)
    opens = np.zeros(texts, np.int64)
    offsets[0] = 0
    if count == 1:  # somebody waits for this one text
        places[:real] = np.arange(real)
    else:
        ends = np.cumsum(lengths)
        offsets[1 : count + 1] = ends
        opens[:count] = ends - lengths
        places[:real] = np.arange(real) - np.repeat(opens[:count], lengths)
    layout = Packed(
        torch.from_numpy(offsets), tuple(lengths.tolist()), 0, torch.from_numpy(places), torch.from_numpy(opens)
    )
    return _filled(ids, tokens), None if types is None else _filled(types, tokens), layout


def _filled(values: np.ndarray, tokens: int) -> Tensor:
    found = np.full(tokens, FILLER, np.int64)
    found[: len(values)] = values
    return torch.from_numpy(found)
