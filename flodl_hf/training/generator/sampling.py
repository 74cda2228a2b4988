"""Words drawn by a generator's scores, the same however rows are cut into batches.

The largest of scores with Gumbel noise is drawn by their softmax. The noise of a word is a hash of its row's seed, its
token's place in the row and its number, as in `flodl_hf.training.noise`: on any rank, in any micro-batch and after a
resume it is the same, and nothing but the batch is needed for it, so steps are recorded as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flodl_hf.training.noise import STEP, mixed

__all__ = ["drawn"]

AT_ONCE = 512
"""Places whose noise is computed together: hashes of a whole vocabulary take several times the memory of its scores."""


@torch.no_grad()
def drawn(scores: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    """Return a class for each row of scores, drawn by their softmax, int64 ``(rows,)``.

    Args:
        scores: ``(rows, classes)``.
        seeds: of the text that each row belongs to, int64 ``(rows,)``.
        places: of the rows in their texts.
    """
    columns = torch.arange(scores.shape[1], device=scores.device) * STEP
    found = []
    for part, base in zip(scores.split(AT_ONCE), mixed(mixed(seeds) + places).split(AT_ONCE), strict=True):
        # Between 0 and 1; near 0, where noise is large, float32 holds all 32 bits.
        number = (mixed(base[:, None] + columns).to(torch.float32) + 0.5) * 2.0**-32
        found.append((part.float() - torch.log(-torch.log1p(-number))).argmax(1))
    return torch.cat(found)
