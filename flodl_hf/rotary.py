"""Rotary position embeddings: queries and keys turned by their places, so that scores depend on distances.

Decides the angles; attention (`flodl_hf.attention`) turns by them. Shapes: H width of a head, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flodl_hf.layout import Layout

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Rotary position embeddings: each pair of features turned by an angle that grows with the place (Su et al. 2021).

    The angles of a call are computed once, in float32, for all layers that share a base.

    Args:
        width: H, of a head; even.
        theta: base of the wavelengths.
    """

    def __init__(self, width: int, theta: float = 10_000.0) -> None:
        super().__init__()
        self.width, self.theta = width, theta

    def angles(self, hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for the places of ``hidden``, ``(..., 1, H)``, in float32."""
        key = ("rotary", self.width, self.theta)
        if key not in layout.memo:
            places = layout.positions(hidden).float()
            steps = torch.arange(0, self.width, 2, dtype=torch.int64, device=hidden.device).float()
            angles = places[..., None] * (1.0 / self.theta ** (steps / self.width))
            angles = torch.cat([angles, angles], -1)[..., None, :]
            layout.memo[key] = (angles.cos(), angles.sin())
        return layout.memo[key]

    def forward(self, states: Tensor, layout: Layout, num_heads: int) -> Tensor:
        """Return queries or keys ``(..., N*H)`` turned, in their dtype."""
        cos, sin = self.angles(states, layout)
        x = states.view(*states.shape[:-1], num_heads, self.width)
        one, two = x.float().chunk(2, -1)
        turned = x.float() * cos + torch.cat([-two, one], -1) * sin
        return turned.to(states.dtype).view(states.shape)
