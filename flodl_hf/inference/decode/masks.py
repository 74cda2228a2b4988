"""Predictions of a masked language model for its masks.

This file decides how tokens and targets at a mask are scored. It leaves finding masks in a text, expanding
one mask to several and writing tokens as text to the caller, who has the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import TokenTable


@dataclass(frozen=True, slots=True, eq=False)
class MaskPlaces:
    """The masks of many texts, each in the window where it has most context; by text, then by place.

    Attributes:
        text: the text of each mask, never falling, ``(masks,)``.
        row: the row, ``(masks,)``.
        column: the place in that row, specials counted, ``(masks,)``.
    """

    text: np.ndarray
    row: np.ndarray
    column: np.ndarray

    def by_row(self) -> tuple[np.ndarray, list[list[int]], np.ndarray]:
        """Return the rows that have masks, the columns of each, and where each mask is among all of those columns."""
        order = np.lexsort((self.column, self.row))
        rows, counts = np.unique(self.row, return_counts=True)
        ends = np.cumsum(counts).tolist()
        columns = self.column[order].tolist()
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return rows, [columns[a:b] for a, b in zip([0, *ends], ends, strict=False)], place


def mask_places(table: TokenTable, mask_id: int) -> MaskPlaces:
    """Return the positions of the masks of texts.

    Args:
        table: the windows of the texts.
        mask_id: the mask's token.
    """
    found = np.flatnonzero((table.ids == mask_id) & (table.sequence >= 0))
    row = np.searchsorted(np.cumsum(table.lengths), found, side="right")
    column = found - table.starts[row]
    text = table.owners[row]
    if len(table) and int(table.window.max()):
        # Of several windows the one counts in which a mask is farthest from both ends, the first of equal ones.
        content = np.flatnonzero(table.sequence >= 0)
        lead = content[np.searchsorted(content, table.starts[row])] - table.starts[row]
        whole = table.first_token[row] + column - lead
        context = np.minimum(column, table.lengths[row] - 1 - column)
        order = np.lexsort((table.window[row], -context, whole, text))
        new = np.ones(len(order), bool)
        new[1:] = (text[order][1:] != text[order][:-1]) | (whole[order][1:] != whole[order][:-1])
        order = order[new]
    else:
        order = np.argsort(text, kind="stable")
    return MaskPlaces(text[order], row[order], column[order])


def best_tokens(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of each mask's best tokens, best first, and their ids, ``(masks, top_k)`` each.

    Args:
        logits: float32, on any device, ``(masks, vocabulary)``.
        top_k: tokens per mask, at most the vocabulary.
    """
    best, index = logits.topk(min(top_k, logits.shape[1]), dim=1)
    return torch.exp(best - logits.logsumexp(1, keepdim=True)), index


def decode_targets(
    logits: Tensor, targets: Sequence[Sequence[int]], places: Sequence[Sequence[int]], top_k: int | None = None
) -> list[list[tuple[int, float]]]:
    """Return for each mask the indices of targets with their scores, best first; equal scores in the caller's order.

    A target of one token has the token's probability over the whole vocabulary, not renormalised over the targets.
    A target of ``n`` tokens is scored in a separate text, in which the mask occurs ``n`` times: its score is the
    product of the probability of each token at its mask while all ``n`` are hidden (a pseudo-likelihood). Such products
    shrink with length.

    Args:
        logits: vocabulary logits at mask positions, ``(positions, vocabulary)``.
        targets: token ids of each target.
        places: for each mask and target, in the order mask 0 target 0, mask 0 target 1, ..., the rows of ``logits`` for
            the target's tokens.
        top_k: most targets per mask; all without it.

    Raises:
        PredictError: logits are not finite.
    """
    values = logits.float()
    if not bool(torch.isfinite(values).all()):
        raise PredictError(
            f"fill-mask: logits of shape {tuple(values.shape)}; expected finite numbers (masks, vocabulary)",
            found=tuple(values.shape),
        )
    masks = len(places) // len(targets)
    row = torch.tensor([r for place in places for r in place], dtype=torch.int64, device=values.device)
    token = torch.tensor([t for target in targets for t in target] * masks, device=values.device)
    group = torch.repeat_interleave(torch.tensor(list(map(len, places)), device=values.device))
    log = values[row, token] - values.logsumexp(1)[row]
    total = torch.zeros(len(places), device=values.device, dtype=log.dtype).index_add_(0, group, log)
    ordered, index = torch.sort(total.view(masks, len(targets)), dim=1, descending=True, stable=True)
    scores = ordered[:, :top_k].exp().tolist()
    return [list(zip(*both, strict=True)) for both in zip(index[:, :top_k].tolist(), scores, strict=True)]
