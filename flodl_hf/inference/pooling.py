"""One vector per text from the hidden states of its tokens.

This file decides the arithmetic of each pooling, for padded and for packed hidden states. The
caller chooses the pooling, and the mask that excludes prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.nn.layout import Layout, Packed, largest_of_texts

Pooling: TypeAlias = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last_token", "pooler"]

# The least divisor of a mean, as sentence-transformers has it: a row without tokens gives zeros, not NaN.
_LEAST = 1e-9
# Types of devices with reductions by segments.
_SEGMENTED = ("cpu", "cuda")


def pool_padded(
    hidden: Tensor,
    mask: Tensor,
    pooling: Pooling | Sequence[Pooling] = "mean",
    *,
    pooler_output: Tensor | None = None,
) -> Tensor:
    """Return one vector per row; several poolings are joined in the given order, ``(batch, hidden ×
    poolings)``.

    ``mean`` is bit-equal to sentence-transformers' in float32. Half precision is pooled, and returned,
    in float32, in which a sum over thousands of tokens keeps its digits.

    Args:
        hidden: ``(batch, seq, hidden)``.
        mask: ``(batch, seq)``, true or 1 for tokens that count.
        pooling: ``"cls"`` the first token; ``"mean"``; ``"max"`` of each feature; ``"mean_sqrt_len"`` the sum
            over the root of the length; ``"weighted_mean"`` with weights 1, 2, 3, ...; ``"last_token"``;
            ``"pooler"`` the output of the model's pooler.
        pooler_output: ``(batch, hidden)``, needed for ``"pooler"``.

    Raises:
        PredictError: a pooling is unknown, or ``"pooler"`` is requested of a model without one.
    """
    values = _float(hidden)
    return _join([_padded(values, mask, name, pooler_output) for name in check_pooling(pooling)])


def pool_packed(
    hidden: Tensor,
    cu_seqlens: Tensor,
    pooling: Pooling | Sequence[Pooling] = "mean",
    *,
    opens: Tensor | None = None,
    places: Tensor | None = None,
    pooler_output: Tensor | None = None,
) -> Tensor:
    """Return one vector per row from concatenated rows; the same as ``pool_padded`` up to rounding.

    With ``opens`` and ``places`` the device is not synchronised. A slot without tokens gets a finite vector.

    Args:
        hidden: ``(tokens, hidden)``.
        cu_seqlens: where each row begins, and the end of the last one, ``(batch + 1,)``.
        pooling: as in ``pool_padded``.
        opens: each row's first token, ``(batch,)``; None as in ``cu_seqlens``.
        places: each token's place in its row, ``(tokens,)``; None computes them.
        pooler_output: ``(batch, hidden)``, needed for ``"pooler"``.

    Raises:
        PredictError: a pooling is unknown, or ``"pooler"`` is requested of a model without one.
    """
    values, bounds = _float(hidden), cu_seqlens.to(torch.int64)
    lengths = bounds.diff()
    parts = []
    for name in check_pooling(pooling):
        if name == "pooler":
            parts.append(_from_pooler(pooler_output))
        elif name == "cls":
            parts.append(values[bounds[:-1].clamp(max=len(values) - 1) if opens is None else opens])
        elif name == "last_token":
            parts.append(values[(bounds[1:] - 1).clamp(min=0)])
        elif name == "max":
            found = (
                largest_of_texts(values, cu_seqlens)
                if values.device.type in _SEGMENTED
                else _over(values, "max", lengths)
            )
            parts.append(found.masked_fill((lengths == 0)[:, None], 0.0))
        else:
            weighted, length = values, lengths[:, None].to(values.dtype)
            if name == "weighted_mean":
                if places is None:
                    places = torch.arange(len(values), device=values.device)
                    places = places - torch.repeat_interleave(bounds[:-1], lengths)
                weighted, length = values * (places + 1).to(values.dtype)[:, None], length * (length + 1) / 2
            total, length = _over(weighted, "sum", lengths), torch.clamp(length, min=_LEAST)
            parts.append(total / (torch.sqrt(length) if name == "mean_sqrt_len" else length))
    return _join(parts)


def pool(states: Tensor, layout: Layout, names: Sequence[Any], pooled: Tensor | None = None) -> Tensor:
    """Return the pooled vectors of a batch without padding in float32, ``(texts, hidden x poolings)``.

    Args:
        states: ``(tokens, hidden)`` or ``(batch, seq, hidden)``.
        layout: which tokens are a text.
        names: poolings, joined in order.
        pooled: the output of the model's pooler, for "pooler".
    """
    if isinstance(layout, Packed):
        return pool_packed(
            states, layout.offsets, names, opens=layout.opens, places=layout.places, pooler_output=pooled
        )  # fmt: skip
    mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return pool_padded(states, mask, names, pooler_output=pooled)


def over_texts(values: Tensor, layout: Layout, how: str) -> Tensor:
    """Return the sum ("sum") or the largest ("max") of each text's values, none below 0, ``(texts, features)``."""
    if not isinstance(layout, Packed):
        return values.amax(1) if how == "max" else values.sum(1)
    # A slot without tokens would have the least there is as its largest value.
    return _over(values, how, layout.offsets.diff().long()).clamp(min=0.0)


def _over(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    if values.device.type not in _SEGMENTED:
        return scattered(values, how, lengths)
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


def finish_embeddings(embeddings: Tensor, *, truncate_dim: int | None = None, normalize: bool = False) -> Tensor:
    """Return the embeddings cut to ``truncate_dim`` features, then scaled to length 1 if ``normalize`` is
    set.

    Raises:
        PredictError: ``truncate_dim`` is below 1 or above the features there are.
    """
    if truncate_dim is not None:
        if not 1 <= truncate_dim <= embeddings.shape[-1]:
            raise PredictError(
                f"embeddings: truncate_dim={truncate_dim}; expected 1 to {embeddings.shape[-1]}",
                truncate_dim=truncate_dim,
                size=int(embeddings.shape[-1]),
            )
        embeddings = embeddings[..., :truncate_dim]
    return torch.nn.functional.normalize(embeddings, p=2.0, dim=-1) if normalize else embeddings


def length_of(embeddings: Tensor) -> Tensor:
    """Return what `finish_embeddings` divides by to normalise, ``(..., 1)``: lengths, none of them zero."""
    return embeddings.norm(2.0, -1, keepdim=True).clamp_min(1e-12)


def _float(hidden: Tensor) -> Tensor:
    return hidden if hidden.dtype in (torch.float32, torch.float64) else hidden.float()


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def check_pooling(pooling: Pooling | Sequence[Pooling]) -> tuple[str, ...]:
    """Return the poolings' names in order.

    Raises:
        PredictError: one of them is unknown, or there is none.
    """
    names: list[str] = [pooling] if isinstance(pooling, str) else list(pooling)
    unknown = [name for name in names if name not in get_args(Pooling)]
    if unknown or not names:
        raise PredictError(
            f"embeddings: pooling {unknown or 'nothing'}; expected one or more of {', '.join(get_args(Pooling))}",
            pooling=names,
        )
    return tuple(names)


def _from_pooler(pooler_output: Tensor | None) -> Tensor:
    if pooler_output is None:
        raise PredictError("embeddings: pooling 'pooler' needs a pooler, this model has none; use 'cls' or 'mean'")
    return _float(pooler_output)


def _padded(hidden: Tensor, mask: Tensor, name: str, pooler_output: Tensor | None) -> Tensor:
    if name == "pooler":
        return _from_pooler(pooler_output)
    kept = mask.bool()
    if name in ("cls", "last_token"):
        ones = kept.to(torch.int64)
        place = ones.argmax(1) if name == "cls" else hidden.shape[1] - 1 - ones.flip(1).argmax(1)
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), place]
    if name == "max":
        return hidden.masked_fill(~kept[..., None], -torch.inf).amax(1).masked_fill(~kept.any(1)[:, None], 0.0)
    weight = kept[..., None].expand(hidden.size()).to(hidden.dtype)
    if name == "weighted_mean":
        weight = weight * torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)[:, None]
    total = torch.sum(hidden * weight, 1)
    length = torch.clamp(weight.sum(1), min=_LEAST)
    return total / (torch.sqrt(length) if name == "mean_sqrt_len" else length)
