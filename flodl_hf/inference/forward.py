"""Computations of one pass of a batch: scores, states, pooled vectors, or scores at chosen tokens.

A pass is created for a prepared graph and is called with ids, token types and a layout. Everything in it depends
on tensors and shapes alone, so it can be recorded. Where an adapter puts virtual tokens before texts, a pass puts them
there and returns only the texts' own states: vectors are pooled of those alone, as in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flodl_hf.nn.adapter_layers.prompts import prefix_of
from flodl_hf.nn.layout.layouts import Layout, Padded

if TYPE_CHECKING:
    from flodl.graph import Graph
    from flodl_hf.checkpoints.sentence.sparse import SpladePooling


def encoded(graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout) -> Tensor:
    """Return the token states."""
    return _own(graph, layout, all_states(graph, ids, types, layout)[0])


def scored(graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, *, per_text: bool) -> Tensor:
    """Return the head's scores: one a text, or one a token."""
    lead = prefix_of(graph)
    if lead is None:
        return graph(ids, token_type_ids=types, layout=layout)
    ids, types, led = lead.rows(ids, types, layout)
    found = graph(ids, token_type_ids=types, layout=led)
    return found if per_text else layout.behind(lead.count, found)


def all_states(graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout) -> tuple[Tensor, Layout]:
    """Return the states of all tokens, including an adapter's virtual tokens, and their layout."""
    lead = prefix_of(graph)
    if lead is not None:
        ids, types, layout = lead.rows(ids, types, layout)
    return graph.get_submodule("encoder")(ids, token_type_ids=types, layout=layout), layout


def _own(graph: Graph, layout: Layout, states: Tensor) -> Tensor:
    """Return the states of the texts' own tokens; ``layout`` covers the texts alone."""
    lead = prefix_of(graph)
    return states if lead is None else layout.behind(lead.count, states)


def headed(graph: Graph, states: Tensor, layout: Layout) -> Tensor:
    """Return the head's scores of token states."""
    return graph.get_submodule("head")(states, layout=layout)


@dataclass(frozen=True)
class Scores:
    """The head's scores.

    Args:
        per_text: whether there is one result a text rather than one a token.
    """

    per_text: bool

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, ...)`` or ``(tokens, ...)``."""
        found = scored(graph, ids, types, layout, per_text=self.per_text)
        return found if self.per_text else _flat(found, layout)


@dataclass(frozen=True)
class States:
    """The token states.

    Args:
        shares: numbers of hidden states with their shares of the result; nothing for the last state alone.
    """

    shares: tuple[tuple[int, float], ...] = ()
    per_text: bool = False

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(tokens, hidden)``."""
        if not self.shares:
            return _flat(encoded(graph, ids, types, layout), layout)
        from flodl_hf.inference.graph_model.hidden_states import watched

        with watched(graph, hidden_states=True, attentions=False) as seen:
            all_states(graph, ids, types, layout)
        states = seen["hidden_states"]
        total = sum((states[place].float() * share for place, share in self.shares), states[0].new_zeros(()).float())
        return _flat(_own(graph, layout, total), layout)


@dataclass(frozen=True)
class Pooled:
    """One vector a text, in float32.

    Args:
        names: poolings to concatenate, see `flodl_hf.inference.decode.pooling`; "pooler" is the model's own.
        size: keep so many features; None for all.
        norm: give each vector's length as one more feature: the host divides by it once windows are put together.
    """

    names: tuple[str, ...]
    size: int | None = None
    norm: bool = False
    per_text: bool = True

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, features)``."""
        from flodl_hf.inference.decode.pooling import finish_embeddings, length_of
        from flodl_hf.inference.pool import pool

        whole, led = all_states(graph, ids, types, layout)
        pooled = graph.get_submodule("pooler")(whole, layout=led) if "pooler" in self.names else None
        found = finish_embeddings(pool(_own(graph, layout, whole), layout, self.names, pooled), truncate_dim=self.size)
        return torch.cat([found, length_of(found)], -1) if self.norm else found


@dataclass(frozen=True)
class Splade:
    """The weights of all words in each text, from a masked-word head's scores at its tokens, in float32.

    Args:
        pooling: how.
    """

    pooling: SpladePooling
    per_text: bool = True

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, words)``."""
        from flodl_hf.inference.pool import over_texts

        found = self.pooling.activated(scored(graph, ids, types, layout, per_text=False).float())
        return over_texts(found, layout, self.pooling.strategy)


@dataclass(frozen=True)
class Related:
    """Scores of the relation of two texts, by the head next to a masked-word head."""

    per_text: bool = True

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, labels)``."""
        states, led = all_states(graph, ids, types, layout)
        pooled = graph.get_submodule("pooler")(states, layout=led)
        return graph.get_submodule("relation")(states, pooled)


@dataclass(frozen=True)
class ScoresAt:
    """The head's scores at chosen tokens; for the others they are never computed."""

    per_text: bool = False

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(chosen tokens, ...)``."""
        assert at is not None
        states = _flat(encoded(graph, ids, types, layout), layout)
        return headed(graph, states.index_select(0, at), layout)


@dataclass(frozen=True)
class BestAt(ScoresAt):
    """The best classes at chosen tokens, of which there may be a whole vocabulary: scores of all stay on the device.

    Args:
        top_k: how many of each token.
    """

    top_k: int = 5

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return probabilities, class numbers, and 1 where all scores are finite, ``(chosen tokens, 2 top_k + 1)``."""
        from flodl_hf.inference.decode.masks import best_tokens

        found = super().__call__(graph, ids, types, layout, at).float()
        scores, index = best_tokens(found, self.top_k)
        # Numbers of classes are whole in float32 up to 16 million.
        return torch.cat([scores, index.float(), torch.isfinite(found).all(1, keepdim=True).float()], 1)


Work = Scores | States | Pooled | Related | Splade | ScoresAt


def _flat(values: Tensor, layout: Layout) -> Tensor:
    return values.flatten(0, 1) if isinstance(layout, Padded) else values
