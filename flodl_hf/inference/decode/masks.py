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
from flodl_hf.inference.decode.rows import Placed, TokenTable


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The windows of many texts that have masks, each mask in the window where it has most context.

    Attributes:
        table: the windows.
        columns: positions of the masks of each window, specials counted.
        text: the text of each mask, in the order of texts and of their masks, ``(masks,)``.
        order: index of each mask among all ``columns``, ``(masks,)``.
    """

    table: TokenTable
    columns: list[list[int]]
    text: np.ndarray
    order: np.ndarray

    def scores(self, placed: Placed) -> Tensor:
        """Return the results of the masks in their order, ``(masks, ...)``; ``placed`` has one for each column."""
        sizes = [len(own) for own in self.columns]
        starts = np.repeat(placed.starts, sizes) + np.concatenate([np.arange(size) for size in sizes])
        return placed.values[torch.from_numpy(starts[self.order])]


def masks_of(table: TokenTable, mask_id: int) -> Masks:
    """Return the masks of texts.

    Args:
        table: the windows of the texts.
        mask_id: the mask's token.
    """
    found = np.flatnonzero((table.ids == mask_id) & (table.sequence >= 0))
    row = np.searchsorted(np.cumsum(table.lengths), found, side="right")
    column = found - table.starts[row]
    text = table.owners[row]
    # Of several windows the one counts in which a mask is farthest from both ends, the first of equal ones.
    content = np.flatnonzero(table.sequence >= 0)
    lead = content[np.searchsorted(content, table.starts[row])] - table.starts[row]
    whole = table.first_token[row] + column - lead
    context = np.minimum(column, table.lengths[row] - 1 - column)
    order = np.lexsort((table.window[row], -context, whole, text))
    new = np.ones(len(order), bool)
    new[1:] = (text[order][1:] != text[order][:-1]) | (whole[order][1:] != whole[order][:-1])
    order = order[new]
    text, row, column = text[order], row[order], column[order]
    keep = np.isin(np.arange(len(table)), row)
    by_row = np.lexsort((column, row))
    stops = np.cumsum(np.unique(row, return_counts=True)[1])[:-1]
    columns = [own.tolist() for own in np.split(column[by_row], stops)]
    return Masks(table.picked(np.repeat(keep, table.lengths), keep), columns, text, np.argsort(by_row))


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
