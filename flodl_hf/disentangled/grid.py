"""Rows of texts of unknown lengths back to packed tokens, with shapes that come from the layout alone.

For passes that may be recorded, on devices or in dtypes that have no kernel for packed texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flodl_hf.layout import Packed

__all__ = ["from_rows"]


def from_rows(rows: Tensor, layout: Packed) -> Tensor:
    """Return the tokens of ``(texts, longest, ...)`` rows end to end, ``(tokens, ...)``."""
    tokens = torch.arange(layout.num_tokens, device=rows.device, dtype=torch.int32)
    text = torch.searchsorted(layout.offsets[1:], tokens, right=True)
    return rows[text, layout.positions(tokens)]
