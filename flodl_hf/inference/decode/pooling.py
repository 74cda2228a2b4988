"""One vector per text from the hidden states of its tokens.

This file decides the arithmetic of each pooling, for padded and for packed hidden states. The
caller chooses the pooling, and the mask that excludes prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.nn.layout.segments import largest_of_texts

Pooling: TypeAlias = Literal["cls", "mean", "max", "mean_sqrt_len", "weighted_mean", "last_token", "pooler"]

# The least divisor of a mean, as sentence-transformers has it: a row without tokens gives zeros, not NaN.
_LEAST = 1e-9


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
    return _join([_padded(values, mask, name, pooler_output) for name in _names(pooling)])


def pool_packed(
    hidden: Tensor,
    cu_seqlens: Tensor,
    pooling: Pooling | Sequence[Pooling] = "mean",
    *,
    mask: Tensor | None = None,
    pooler_output: Tensor | None = None,
) -> Tensor:
    """Return one vector per row from concatenated rows; the same as ``pool_padded`` up to rounding.

    Args:
        hidden: ``(tokens, hidden)``.
        cu_seqlens: where each row begins, and the end of the last one, ``(batch + 1,)``.
        pooling: as in ``pool_padded``.
        mask: ``(tokens,)``, true for tokens that count; all of them without it.
        pooler_output: ``(batch, hidden)``, needed for ``"pooler"``.

    Raises:
        PredictError: a pooling is unknown, or ``"pooler"`` is requested of a model without one.
    """
    values, bounds = _float(hidden), cu_seqlens.to(torch.int64)
    start = torch.repeat_interleave(bounds[:-1], bounds.diff())
    rank = torch.arange(1, len(values) + 1, device=values.device) - start
    if mask is not None:
        kept = mask.bool()
        counted = torch.nn.functional.pad(kept.to(torch.int64).cumsum(0), (1, 0))
        values, bounds, rank = values[kept], counted[bounds], rank[kept]
    return _join([_packed(values, bounds, rank, name, pooler_output) for name in _names(pooling)])


def pool_bucketed(
    hidden: Tensor,
    cu_seqlens: Tensor,
    opens: Tensor,
    places: Tensor,
    pooling: Pooling | Sequence[Pooling] = "mean",
) -> Tensor:
    """Return one vector per slot of a batch that is padded to its shape, without a device synchronisation.

    The same as ``pool_packed`` for texts that are real; what slots without tokens have is of no meaning, and finite.

    Args:
        hidden: ``(tokens, hidden)``.
        cu_seqlens: where each text begins, and the end of the last one, ``(slots + 1,)``.
        opens: each text's first token, ``(slots,)``.
        places: each token's place in its text, ``(tokens,)``.
        pooling: as in ``pool_padded``, without the pooler.

    Raises:
        PredictError: a pooling is unknown, or the pooler's.
    """
    values, lengths = _float(hidden), cu_seqlens.to(torch.int64).diff()
    parts = []
    for name in _names(pooling):
        if name == "pooler":
            parts.append(_from_pooler(None))
        elif name in ("cls", "last_token"):
            ends = (cu_seqlens[1:].to(torch.int64) - 1).clamp(min=0)
            parts.append(values[opens if name == "cls" else ends])
        elif name == "max":
            parts.append(largest_of_texts(values, cu_seqlens))
        else:
            weighted, length = values, lengths[:, None].to(values.dtype)
            if name == "weighted_mean":
                weighted = values * (places[:, None] + 1).to(values.dtype)
                length = length * (length + 1) / 2
            total = torch.segment_reduce(weighted, "sum", lengths=lengths, axis=0, unsafe=True)
            length = torch.clamp(length, min=1.0)
            parts.append(total / (torch.sqrt(length) if name == "mean_sqrt_len" else length))
    return _join(parts)


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
    return tuple(_names(pooling))


def _names(pooling: Pooling | Sequence[Pooling]) -> list[str]:
    names: list[str] = [pooling] if isinstance(pooling, str) else list(pooling)
    unknown = [name for name in names if name not in get_args(Pooling)]
    if unknown or not names:
        raise PredictError(
            f"embeddings: pooling {unknown or 'nothing'}; expected one or more of {', '.join(get_args(Pooling))}",
            pooling=names,
        )
    return names


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


def _packed(hidden: Tensor, bounds: Tensor, rank: Tensor, name: str, pooler_output: Tensor | None) -> Tensor:
    if name == "pooler":
        return _from_pooler(pooler_output)
    lengths = bounds.diff()
    if name in ("cls", "last_token"):
        place = bounds[:-1] if name == "cls" else bounds[1:] - 1
        found = hidden.new_zeros((len(lengths), hidden.shape[1]))
        real = lengths > 0
        found[real] = hidden[place[real]]
        return found
    if name == "max":
        return largest_of_texts(hidden, bounds)
    length = lengths[:, None].to(hidden.dtype)
    if name == "weighted_mean":
        weight = rank.to(hidden.dtype)[:, None]
        hidden, length = hidden * weight, torch.segment_reduce(weight, "sum", lengths=lengths, axis=0)
    total = torch.segment_reduce(hidden, "sum", lengths=lengths, axis=0)
    length = torch.clamp(length, min=_LEAST)
    return total / (torch.sqrt(length) if name == "mean_sqrt_len" else length)
