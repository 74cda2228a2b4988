"""The reference table: each operation of a layer as torch computes it, in the order of the reference implementation.

Other tables are subclasses that override operations. What attention and feed-forward hand to the sum that follows
them, a branch, is the table's own affair: here it is the finished tensor; a table that adds the residual inside the
last product leaves that product undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flodl_hf.nn.adapter_layers.module_replacement import hooked
from flodl_hf.nn.layout.layouts import Layout


class Table:
    """Runs layers by torch's operations, to the bit as the reference implementation does.

    Each ``layer`` is a `flodl_hf.nn.layers.encoder_layer.EncoderLayer`. States are ``(batch, seq, hidden)`` or
    ``(tokens, hidden)``, as the layout has them.
    """

    name = "torch"

    def lacks(self, layer: Any) -> str | None:
        """Return why this table cannot run a layer, as half a sentence; None where it can."""
        return None

    def begin(self, layer: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any]) -> Table:
        """Return the table that runs this call: this one, or `TORCH` if it does not support the call."""
        return self

    def attend(self, layer: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], first: bool) -> Any:
        """Return the attention branch over ``hidden``; with ``first`` only for each text's first token."""
        branch = layer.attention(hidden, layout=layout, **kwargs)
        return layout.first(branch) if first else branch

    def transform(self, layer: Any, hidden: Tensor, layout: Layout) -> Any:
        """Return the branch of the feed-forward part."""
        return layer.feed_forward(hidden)

    def add(self, layer: Any, branch: Any, residual: Tensor, layout: Layout) -> Tensor:
        """Return ``residual`` plus the result of a branch."""
        return residual + branch

    def norm(self, norm: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the normalised states."""
        return norm(hidden)

    def add_norm(self, layer: Any, norm: nn.Module, branch: Any, residual: Tensor, layout: Layout) -> Tensor:
        """Return the normalised sum (post-norm layers)."""
        return self.norm(norm, self.add(layer, branch, residual, layout), layout)

    def add_then_norm(
        self, layer: Any, norm: nn.Module, branch: Any, residual: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, and it normalised (pre-norm layers)."""
        total = self.add(layer, branch, residual, layout)
        return total, self.norm(norm, total, layout)

    def __deepcopy__(self, memo: Any) -> Table:
        # A copy of a layer is run by torch until a table is assigned to it.
        return TORCH

    def __reduce__(self) -> tuple[Any, ...]:
        return _reference, ()


TORCH = Table()


def _reference() -> Table:
    return TORCH


def watched(layer: Any) -> bool:
    """Return whether a part of a layer has hooks, which are called only with torch's operations."""
    return any(hooked(module) for part in layer.children() for module in part.modules())
