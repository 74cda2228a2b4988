"""Which layers of a prepared graph a device may rearrange as a whole, and how they are put in its place.

Decides what counts as the shared post-norm block, and when its last one may finish first tokens alone. What a
block becomes is `cpu_block`'s and `cuda`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.attention import SelfAttention
from flodl_hf.encoder import FeedForward, FirstToken, post_norm_block
from flodl_hf.layout import Layout

__all__ = ["finish_first_tokens", "is_block", "replace_blocks"]


class Block(Protocol):
    """A rearranged layer."""

    first_only: bool


def replace_blocks(graph: Graph, make: Callable[[Graph], nn.Module]) -> None:
    """Put what ``make`` gives in the place of every shared block, in place; a block that repeats stays one.

    Then, where a classifier reads first tokens alone, the last layer is told to finish no others.
    """
    better: dict[int, nn.Module] = {}
    for module in list(graph.modules()):
        for name, child in list(module.named_children()):
            if id(child) not in better and isinstance(child, Graph) and is_block(child):
                better[id(child)] = make(child)
            if id(child) in better:
                setattr(module, name, better[id(child)])
    finish_first_tokens(graph, list(better.values()))


def is_block(graph: Graph, attention: type[nn.Module] = SelfAttention, inputs: tuple[str, ...] = ("layout",)) -> bool:
    """Return whether a graph computes what the shared post-norm block does, of parts that are as they were.

    Args:
        graph: any.
        attention: the kind of its attention.
        inputs: what that is given by name.
    """
    parts = dict(graph.named_children())
    norms = [parts.get("attention_norm"), parts.get("feed_forward_norm")]
    linears = [part for part in graph.modules() if isinstance(part, nn.Linear)]
    return (
        type(parts.get("attention")) is attention
        and type(parts.get("feed_forward")) is FeedForward
        and all(type(norm) is nn.LayerNorm and norm.bias is not None for norm in norms)
        # Graphs whose forward passes have one text share one class.
        and type(graph) is _block_class(inputs)
        and all(type(part) is nn.Linear and part.bias is not None for part in linears)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in graph.modules())
    )


@cache
def _block_class(inputs: tuple[str, ...]) -> type[Graph]:
    with torch.device("meta"):
        return type(post_norm_block(_Taking(), FeedForward(1, 1, "relu", 0.0), 1, 1e-5, inputs))


class _Taking(nn.Module):
    """Stands where attention is in a block of which only the order of things matters."""

    def forward(self, hidden: Tensor, **inputs: object) -> Tensor:
        """Return ``hidden`` as it is."""
        return hidden


class _Taken(nn.Module):
    """Stands where first tokens were picked, after a layer that gives nothing else."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return ``hidden`` as it is."""
        return hidden


def finish_first_tokens(graph: Graph, blocks: list[nn.Module]) -> None:
    """Let the last layer finish first tokens alone, where a classifier reads no others and it is one of ``blocks``."""
    parts = dict(graph.named_children())
    if "head" not in parts:
        return
    reader = parts.get("pooler", parts["head"])
    layers = dict(graph.get_submodule("encoder").named_children()).get("layers")
    if not isinstance(layers, Graph) or not isinstance(dict(reader.named_children()).get("first"), FirstToken):
        return
    last = next(reversed(list(layers.children())), None)
    if last is not None and any(last is block for block in blocks) and list(layers.children()).count(last) == 1:
        cast(Block, last).first_only = True
        reader.first = _Taken()
