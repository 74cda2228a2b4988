"""Positions in attention: rotations of queries and keys, and biases that scores get by the distance of two tokens.

Rotary positions turn queries and keys by their places, so that scores depend on distances. `RelativeBias` and
`SlopedBias` make a `DistanceBias` once a call, which every layer adds (`flodl_hf.nn.attention`).

Shapes: N heads, H width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flodl_hf.nn.layout import Layout


@dataclass(frozen=True)
class RotarySettings:
    """Settings of rotary positions in a configuration, in one of the forms that transformers writes.

    Attributes:
        theta: base of the wavelengths; None for the family's own.
        kind: "default", or how wavelengths are stretched: "linear" or "ntk".
        factor: by how much.
    """

    theta: float | None = None
    kind: str = "default"
    factor: float = 1.0


class Rotary(nn.Module):
    """Rotary position embeddings: each pair of features turned by an angle that grows with the place (Su et al. 2021).

    The angles of a call are computed once for all layers that share a base, in float32; cosines and sines are rounded
    to the states' dtype, as the reference has them.

    Args:
        width: H, of a head; even.
        theta: base of the wavelengths.
        settings: how wavelengths are stretched, and their base where a file states it there; None for neither.
        widened: whether states of half precision are turned in float32.

    Attributes:
        halves: whether a pair is a feature of a head's first half and one of its second, rather than neighbours.
        values: whether values are turned too.
        shares: whether layers of the call take the angles made here, in whatever dtype they compute.
    """

    halves = True
    values = False
    shares = False

    def __init__(
        self, width: int, theta: float = 10_000.0, settings: RotarySettings | None = None, *, widened: bool = False
    ) -> None:
        super().__init__()
        self.widened = widened
        settings = settings or RotarySettings()
        self.width, self.theta = width, settings.theta or theta
        self.kind, self.factor = settings.kind, settings.factor
        # The key of these angles among others of a call.
        self.key: tuple[Any, ...] = ("rotary", width, self.theta, self.kind, self.factor)

    def angles(self, hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for the places of ``hidden``, in its dtype.

        They are ``(..., 1, H)``, and the second half repeats the first; of neighbours ``(..., 1, H / 2)``.
        """
        # Mixed precision computes angles next to states of float32.
        mixed = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.float32 if mixed and hidden.dtype != torch.float64 else hidden.dtype
        if (*self.key, dtype) not in layout.memo:
            given = layout.memo.get("places")  # position_ids of the call
            found = layout.memo.get(self.key) or self.compute(layout.positions(hidden) if given is None else given)
            if self.shares:
                layout.memo[self.key] = found
            layout.memo[*self.key, dtype] = tuple(x.to(dtype) for x in found)
        return layout.memo[*self.key, dtype]

    def compute(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for places, ``(...)``, in float32; shapes as of `angles`."""
        angles = places.float()[..., None] * self.frequencies(places.device)
        angles = torch.cat([angles, angles], -1)[..., None, :]
        return angles.cos(), angles.sin()

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle of one place for each pair of features, ``(H / 2,)``, in float32."""
        steps = torch.arange(0, self.width, 2, dtype=torch.int64, device=device).float()
        # "ntk" stretches the base, so that the highest frequency stays (bloc97 2023), by the fixed form of GTE.
        base = self.theta * self.factor if self.kind == "ntk" else self.theta
        found = 1.0 / base ** (steps / self.width)
        if self.kind == "ntk":
            return found / self.factor ** (2 / self.width)
        return found / self.factor if self.kind == "linear" else found

    def forward(self, states: Tensor, layout: Layout, num_heads: int) -> Tensor:
        """Return queries or keys ``(..., N*H)`` turned, in their dtype."""
        cos, sin = self.angles(states, layout)
        x = states.view(*states.shape[:-1], num_heads, self.width)
        if self.widened:
            x = x.float()
        one, two = x.chunk(2, -1)
        turned = x * cos + torch.cat([-two, one], -1) * sin
        return turned.to(states.dtype).view(states.shape)


class StatedRotary(Rotary):
    """Rotations with frequencies from a file; layers of the same width and base share the angles computed here.

    No change of a model's dtype rounds them.

    Attributes:
        stated: shape of what a file states: frequencies, ``(H / 2,)``.
    """

    shares = True
    table: Tensor | None

    def __init__(self, width: int, theta: float = 10_000.0, *, widened: bool = False) -> None:
        super().__init__(width, theta, widened=widened)
        self.register_buffer("table", None, persistent=False)
        self.stated: tuple[int, ...] = (width // 2,)

    def take(self, numbers: Tensor) -> None:
        """Store numbers as a file states them, of the shape ``stated``.

        Raises:
            ValueError: they have another shape.
        """
        if numbers.shape != self.stated:
            raise ValueError(f"found shape {list(numbers.shape)}; expected {list(self.stated)}")
        self.table = numbers.detach().float().clone()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        held = self.table
        super()._apply(fn, recurse)
        if held is not None and self.table is not None:
            self.table = held.to(self.table.device)
        return self

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle of one place for each pair of features, ``(H / 2,)``, in float32."""
        return super().frequencies(device) if self.table is None else self.table.to(device)


class PairedRotary(StatedRotary):
    """Rotations of neighbours, as in RoFormer: features 0 and 1 are a pair, 2 and 3 the next (Su et al. 2021).

    Sines and cosines are rows of a table of positions, which a file may state; layers of the same sizes share
    the rows. No change of a model's dtype rounds the table.

    Args:
        width: H, of a head; even.
        places: rows of the table.
        values: whether values are turned too.
        held: whether this one has the table, and layers use its rows.
    """

    halves = False

    def __init__(self, width: int, places: int, *, values: bool = False, held: bool = False) -> None:
        super().__init__(width)
        self.places, self.values, self.shares = places, values, held
        self.key, self.stated = ("paired", width, places), (places, width)
        self.table = sinusoids(places, width) if held else None

    def compute(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for places, ``(...)``, in float32: ``(..., 1, H / 2)``, one for each pair."""
        table = sinusoids(self.places, self.width) if self.table is None else self.table
        sin, cos = table.to(places.device)[places][..., None, :].chunk(2, -1)
        return cos, sin

    def forward(self, states: Tensor, layout: Layout, num_heads: int) -> Tensor:
        """Return queries, keys or values ``(..., N*H)`` turned, in their dtype."""
        cos, sin = self.angles(states, layout)
        key = (*self.key, cos.dtype, "of each feature")
        if key not in layout.memo:
            layout.memo[key] = tuple(each.repeat_interleave(2, -1) for each in (cos, sin))
        cos, sin = layout.memo[key]
        x = states.view(*states.shape[:-1], num_heads, self.width)
        # As in the reference: its gradients are sums of these parts.
        across = torch.stack([-x[..., 1::2], x[..., ::2]], -1).view(x.shape)
        return (x * cos + across * sin).to(states.dtype).view(states.shape)


def sinusoids(places: int, width: int) -> Tensor:
    """Return sines of the angles of all pairs, then cosines, ``(places, H)``, computed in float64 as transformers does.

    Args:
        places: rows.
        width: H; even.
    """
    angles = np.arange(places)[:, None] / np.power(10_000, 2 * (np.arange(width) // 2) / width)
    table = np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], 1)
    return torch.from_numpy(table.astype(np.float32))


class DistanceBias:
    """Biases added to scores in one call of a model; each length is computed once, for all layers.

    Args:
        values: ``values(distances)`` gives integers, key's place minus query's, the N biases of each.
        whole: length and device of the longest text, to compute the biases of all texts now: a layer that is run again
            must not find them made.
    """

    def __init__(self, values: Callable[[Tensor], Tensor], whole: tuple[int, torch.device] | None = None) -> None:
        self._values = values
        self._made: dict[tuple[str, str, torch.dtype], Tensor] = {}
        self._along: dict[int, Tensor] = {}
        self._whole = None if whole is None else self._among(*whole)

    def __call__(self, texts: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the biases of texts of one length, ``(texts, N, length, length)``."""
        # As text: numbers of a traced function have names and no hash.
        key = (str(texts), str(length), dtype)
        found = self._made.get(key)
        if found is None:
            found = self._among(length, device) if self._whole is None else self._whole[:, :length, :length]
            found = self._made[key] = found.to(dtype).expand(texts, -1, -1, -1)
        return found

    def _among(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        return self._values(places[None, :] - places[:, None]).permute(2, 0, 1)

    def along(self, length: int, device: torch.device) -> Tensor:
        """Return the biases of the distances in texts up to a length, ``(N, 2*length - 1)``, float32."""
        if length not in self._along:
            distances = torch.arange(1 - length, length, device=device)
            self._along[length] = self._values(distances).float().t().contiguous()
        return self._along[length]


class RelativeBias(nn.Module):
    """One table of biases by bucket of distance, for all layers (Raffel et al. 2020, section 2.1).

    Half of the buckets are for tokens before, half for tokens after. In each half the first half has one distance
    each; farther ones share buckets that widen logarithmically.

    Args:
        num_heads: N.
        buckets: that distances are sorted into; even.
        max_distance: the distance from which on all share the last bucket.
        rows: of the table; None for as many as buckets.
    """

    def __init__(self, num_heads: int, buckets: int = 32, max_distance: int = 128, rows: int | None = None) -> None:
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Embedding(rows or buckets, num_heads)

    def forward(self, hidden: Tensor, layout: Layout) -> DistanceBias:
        """Return what all layers of this call add."""
        learns = self.training and torch.is_grad_enabled() and not torch.compiler.is_exporting()
        return DistanceBias(self._values, (layout.length(hidden), hidden.device) if learns else None)

    def _values(self, distances: Tensor) -> Tensor:
        half = self.buckets // 2
        exact = half // 2
        far = distances.abs()
        # The reference's order of operations: which bucket a distance at an edge falls into is decided by rounding.
        share = torch.log(far.float() / exact) / math.log(self.max_distance / exact) * (half - exact)
        wide = (exact + share.to(torch.long)).clamp(max=half - 1)
        return self.table((distances > 0).long() * half + torch.where(far < exact, far, wide))


class SlopedBias(nn.Module):
    """Biases that fall with distance, with a slope per head, in both directions (Press et al. 2021, ALiBi).

    Of N heads, a power of two, head i (from 1) has the slope 2 to the power of -8i/N; further heads have every second
    slope of twice as many.

    Args:
        num_heads: N.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, hidden: Tensor, layout: Layout) -> DistanceBias:
        """Return what all layers of this call add."""
        return DistanceBias(self._values)

    def _values(self, distances: Tensor) -> Tensor:
        whole = 1 << (self.num_heads.bit_length() - 1)
        # On the device from the start: a recorded pass can copy nothing there.
        first = torch.arange(1, whole + 1, device=distances.device, dtype=torch.float32) * (8 / whole)
        rest = torch.arange(self.num_heads - whole, device=distances.device, dtype=torch.float32)
        slopes = torch.exp2(-torch.cat([first, (2 * rest + 1) * (4 / whole)]))
        return distances.abs().float()[..., None] * -slopes
