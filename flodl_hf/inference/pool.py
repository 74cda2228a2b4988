"""One vector per text from the states of a batch, on the device, without a device synchronisation.

The arithmetic equals `flodl_hf.inference.decode.pooling.pool_packed`; slots without tokens are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flodl_hf.inference.decode.pooling import pool_padded
from flodl_hf.nn.layout.layouts import Layout, Packed


def pool(states: Tensor, layout: Layout, names: Sequence[str], pooled: Tensor | None = None) -> Tensor:
    """Return the pooled vectors in float32, ``(texts, hidden x poolings)``.

    Args:
        states: ``(tokens, hidden)`` or ``(batch, seq, hidden)``.
        layout: which tokens are a text.
        names: poolings, joined in order.
        pooled: the output of the model's pooler, for "pooler".
    """
    if not isinstance(layout, Packed):
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return pool_padded(states, mask, list(names), pooler_output=pooled)  # type: ignore[arg-type]
    values = states if states.dtype in (torch.float32, torch.float64) else states.float()
    parts = [_one(values, layout, name, pooled) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _one(values: Tensor, layout: Packed, name: str, pooled: Tensor | None) -> Tensor:
    if name == "pooler":
        assert pooled is not None
        return pooled.to(values.dtype)
    if name == "cls":
        return layout.first(values)
    lengths = layout.offsets.diff().long()
    if name == "last_token":
        return values[(layout.offsets[1:] - 1).clamp(min=0).long()]
    if name == "max":
        return _over(values, "max", lengths).masked_fill((lengths == 0)[:, None], 0.0)
    count = lengths[:, None].to(values.dtype)
    if name == "weighted_mean":
        weight = (layout.positions(values) + 1).to(values.dtype)[:, None]
        values, count = values * weight, count * (count + 1) / 2
    total = _over(values, "sum", lengths)
    count = count.clamp(min=1e-9)
    return total / (count.sqrt() if name == "mean_sqrt_len" else count)


def over_texts(values: Tensor, layout: Layout, how: str) -> Tensor:
    """Return the sum ("sum") or the largest ("max") of each text's values, none below 0, ``(texts, features)``."""
    if not isinstance(layout, Packed):
        return values.amax(1) if how == "max" else values.sum(1)
    # A slot without tokens would have the least there is as its largest value.
    return _over(values, how, layout.offsets.diff().long()).clamp(min=0.0)


def _over(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    if values.device.type not in ("cpu", "cuda"):
        return scattered(values, how, lengths)  # other devices have no reduction by segments
    # Not checking spares a wait for the device; the lengths are our own.
    return torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)


def scattered(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    """Return the sum or largest value of each run of rows, ``(runs, hidden)``, by operations that all devices have."""
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    shape = (len(lengths), values.shape[1])
    if how == "sum":
        return values.new_zeros(shape).index_add_(0, owners, values)
    found = values.new_full(shape, float("-inf"))
    return found.scatter_reduce_(0, owners[:, None].expand_as(values), values, "amax")
