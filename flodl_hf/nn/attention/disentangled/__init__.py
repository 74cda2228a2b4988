"""Disentangled attention (He et al. 2020, https://arxiv.org/abs/2006.03654): content and position kept apart.

`positions` computes the distance of two tokens and the table row for it, `scores`
turns queries, keys and projected positions into attention scores (several implementations, one
meaning), `attention` is the module that projects, masks and mixes.
"""

from flodl_hf.nn.attention.disentangled.attention import DisentangledAttention, hold_positions, release_positions
from flodl_hf.nn.attention.disentangled.positions import Relative, RelativePositions, bucketed, table_rows
from flodl_hf.nn.attention.disentangled.scores import IMPLEMENTATIONS, PositionTables, disentangled_scores

__all__ = [
    "IMPLEMENTATIONS",
    "DisentangledAttention",
    "PositionTables",
    "Relative",
    "RelativePositions",
    "bucketed",
    "disentangled_scores",
    "hold_positions",
    "release_positions",
    "table_rows",
]
