"""The table of a CUDA device for prediction in float32: products by the matrix units, which have none of float32.

Each product of float32 numbers is three of fp16 (`flodl_hf.nn.kernels.fp16_split`), which these units compute twelve
times as fast as others compute one; the results differ from exact ones about as much as float32's own do. Norms and
activations pass their results on in parts. Few rows use ordinary products, for which the weights have to be read once
rather than in parts. Inference only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flodl_hf.nn.backends.cpu import Branch
from flodl_hf.nn.backends.cuda import CudaTable
from flodl_hf.nn.layers import GELUS
from flodl_hf.nn.layers import EncoderLayer as Layer
from flodl_hf.nn.layout import Layout

if TYPE_CHECKING:
    from flodl_hf.nn.kernels.split_products import Halves


# Rows from which three products cost less than one.
FEWEST = 256
# A row has to fit into the registers of one program.
WIDEST_SPLIT = 16384


class SplitTable(CudaTable):
    """Runs the layers of one graph that predicts in float32 on a CUDA device that is trusted with the kernels."""

    name = "cuda"

    def __init__(self, *, fewest: int = FEWEST) -> None:
        super().__init__(kernels=True)
        self.fewest = fewest
        self._weights: dict[int, Halves] = {}

    def join(self, layer: Layer) -> None:
        """Concatenate weights as for half precision, and keep the parts of those that products read."""
        from flodl_hf.nn.kernels.split_products import split

        super().join(layer)
        feed_forward: Any = layer.feed_forward
        attention: Any = layer.attention
        linears = (attention.output, feed_forward.gate, feed_forward.up, feed_forward.down)
        weights = [self._joined[id(attention)][0], *(linear.weight for linear in linears if linear is not None)]
        if id(feed_forward) in self._joined:
            weights = [*weights[:2], self._joined[id(feed_forward)][0], feed_forward.down.weight]
        for weight in weights:
            if id(weight) not in self._weights:
                self._weights[id(weight)] = split(weight.detach(), weight=True)

    def transform(self, layer: Layer, hidden: Tensor, layout: Layout) -> Branch:
        """Return the widened states, in parts where the activation is a GELU."""
        feed_forward: Any = layer.feed_forward
        name, up = feed_forward.activation.name, feed_forward.up
        if feed_forward.gate is not None or name not in GELUS or not self._many(hidden):
            return super().transform(layer, hidden, layout)
        from flodl_hf.nn.kernels.split_products import finished_and_split, products

        given, weight = self._parts(hidden, layout), self._weights[id(up.weight)]
        wide = finished_and_split(products(given, weight), given, weight, up.bias, tanh=GELUS[name])
        return Branch(wide, feed_forward.down)

    def times(self, states: Any, weight: Tensor, bias: Tensor | None, layout: Layout | None = None) -> Tensor:
        """Return ``states @ weight.T + bias``; states may come in parts."""
        if isinstance(states, Tensor) and not self._many(states):
            return super().times(states, weight, bias)
        from flodl_hf.nn.kernels.split_products import finished, products

        given, split = self._parts(states, layout), self._weights[id(weight)]
        found = finished(products(given, split), given, split, bias)
        return found.view(*states.shape[:-1], -1) if isinstance(states, Tensor) else found

    def _mixes(self, attention: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any]) -> bool:
        # torch's attention is as fast here, and no less exact than the rest.
        return False

    def _summed(
        self,
        branch: Branch,
        residual: Tensor,
        kind: tuple[Tensor, Tensor | None, float, bool],
        layout: Layout,
        *,
        pre: bool,
    ) -> tuple[Tensor, Tensor]:
        states, linear = branch
        if isinstance(states, Tensor) and not self._many(states):
            return super()._summed(branch, residual, kind, layout, pre=pre)
        from flodl_hf.nn.kernels.split_products import normed_and_split, products

        given, weight = self._parts(states, layout), self._weights[id(linear.weight)]
        flat = residual.reshape(-1, residual.shape[-1]).contiguous()
        found = normed_and_split(products(given, weight), given, weight, linear.bias, flat, kind, pre=pre)
        total, normed = found[0].view(residual.shape), found[1].view(residual.shape)
        layout.memo["parts"] = (normed, found[2])
        return total, normed

    def _many(self, states: Tensor) -> bool:
        return states.numel() >= self.fewest * states.shape[-1]

    def _parts(self, states: Any, layout: Layout | None) -> Halves:
        from flodl_hf.nn.kernels.split_products import split

        if not isinstance(states, Tensor):
            return states
        kept = None if layout is None else layout.memo.pop("parts", None)
        if kept is not None and kept[0] is states:
            return kept[1]
        return split(states.reshape(-1, states.shape[-1]).contiguous())
