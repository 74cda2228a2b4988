"""Noise on word embeddings in training (NEFTune, arXiv:2310.05914), independent of batches.

The noise of a number is drawn by a hash of its row's seed, its token's place in the row and its place in the vector,
so that it depends on the row, the epoch and the run's seed alone: in padded or packed batches, micro-batches, on any
rank and after a resume. It is uniform within ``alpha / sqrt(tokens * width)``, with the tokens of the row itself; the
reference uses the padded width of the batch instead, which depends on the other rows. The noise is computed on the
device of the batch from its contents, so steps can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flodl.data import Where

__all__ = ["SEEDS", "STEP", "mixed", "noisy", "row_seeds", "uniform_noise"]

SEEDS = "noise_seeds"
"""The part of a batch with a seed for each row, int64 ``(rows,)``."""
WORDS = "encoder.embeddings.word"
MASK = 0xFFFFFFFF
STEP = 0x61C88647
"""Between the numbers of neighbours before they are mixed."""


def row_seeds(where: Where, rows: Sequence[int], purpose: str = "noise") -> NDArray[np.int64]:
    """Return a seed below 2**31 for each row of a batch, for this epoch and purpose."""
    return np.asarray([int(where.rng(purpose, row).integers(1 << 31, 1)[0]) for row in rows], np.int64)


@contextmanager
def noisy(model: Any, alpha: float, batch: Any) -> Iterator[None]:
    """Add noise to the word embeddings of ``model`` inside the context, in training mode."""
    word: nn.Module = model.graph.get_submodule(WORDS)
    if not word.training or SEEDS not in batch:
        yield
        return

    def add(module: nn.Module, given: Any, states: Tensor) -> Tensor:
        noise = uniform_noise(*_tokens(batch, states.shape[:-1]), states.shape[-1])
        return states + (noise * alpha).to(states.dtype)

    handle = word.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _tokens(batch: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token the seed and length of its row, and its place in it, in the shape of the batch."""
    seeds = batch[SEEDS]
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"][1:].to(torch.int64)
        at = torch.arange(math.prod(shape), device=seeds.device)
        row = torch.searchsorted(ends, at, right=True).clamp(max=len(seeds) - 1)
        starts = batch["cu_seqlens"][:-1].to(torch.int64)
        return tuple(part.view(shape) for part in (seeds[row], (ends - starts)[row], at - starts[row]))  # type: ignore[return-value]
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    place = torch.arange(shape[1], device=seeds.device)[None]
    return seeds[:, None].expand(*shape), lengths.expand(*shape), place.expand(*shape)


def uniform_noise(seeds: Tensor, lengths: Tensor, places: Tensor, width: int) -> Tensor:
    """Return float32 noise ``(*tokens, width)``, uniform within ``1 / sqrt(lengths * width)``.

    Args:
        seeds: of each token's row, int64 ``(*tokens)``.
        lengths: tokens of each token's row.
        places: of the tokens in their rows.
    """
    base = mixed(mixed(seeds) + places)
    columns = torch.arange(width, device=seeds.device) * STEP
    bits = mixed(base[..., None] + columns)
    number = (bits >> 8).to(torch.float32) * 2.0**-23 - 1.0  # float32 represents 24 bits exactly
    return number * torch.rsqrt(lengths.to(torch.float32) * width)[..., None]


def mixed(value: Tensor) -> Tensor:
    """Return 32 bits, each of which depends on all bits of ``value``.

    Factors are below 2**31, so that int64 does not overflow.
    """
    value = value & MASK
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK
    value = ((value ^ (value >> 15)) * 0x31848BAB) & MASK
    return value ^ (value >> 16)
