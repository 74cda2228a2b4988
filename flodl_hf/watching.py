"""The inside of one call: states after each layer and attention weights, or embeddings given instead of ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from flodl_hf.errors import PredictError

__all__ = ["given_embeddings", "ids_for", "watched"]


@contextmanager
def watched(network: nn.Module, *, hidden_states: bool, attentions: bool) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what one call goes through, in its order, under the names of transformers' outputs.

    Args:
        network: with an ``encoder``, as `flodl_hf.building.build_graph` makes it.
        hidden_states: what enters the first layer and what leaves each, ``(batch, seq, hidden)``.
        attentions: weights of each layer, ``(batch, heads, seq, seq)``, of eager attention.

    Raises:
        PredictError: attention is computed by kernels that never have its weights.
    """
    encoder = network.get_submodule("encoder")
    found: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        if hidden_states:
            states = Mine()
            found["hidden_states"] = states
            # A block that several layers share is hooked once and fires at each of its calls.
            layers = list(dict.fromkeys(encoder.get_submodule("layers").children()))
            hooks = [layers[0].register_forward_pre_hook(partial(_enters, states))]
            for hook in [*hooks, *(layer.register_forward_hook(partial(_leaves, states)) for layer in layers)]:
                stack.callback(hook.remove)
            last = dict(encoder.named_children()).get("norm")
            if last is not None:  # transformers' last state is the one that the encoder gives
                stack.callback(last.register_forward_hook(partial(_normed, states)).remove)
        if attentions:
            weights = found["attentions"] = Mine()
            for module in _attentions(encoder):
                before, module.seen = module.seen, weights
                stack.callback(setattr, module, "seen", before)
        yield found


class Mine(list[Tensor]):
    """A list that takes only what its own thread appends: others may use the model meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = None if torch.compiler.is_compiling() else get_ident()

    def append(self, value: Tensor) -> None:
        """Append what comes from the thread that made the list."""
        if self.thread is None or self.thread == get_ident():
            super().append(value)


def _enters(states: list[Tensor], _module: nn.Module, given: tuple[Any, ...]) -> None:
    if not states:
        states.append(given[0])


def _leaves(states: list[Tensor], _module: nn.Module, _given: Any, out: Tensor) -> None:
    states.append(out)


def _normed(states: Mine, _module: nn.Module, _given: Any, out: Tensor) -> None:
    if states and states.thread in (None, get_ident()):
        states[-1] = out


def _attentions(encoder: nn.Module) -> list[Any]:
    modules: list[Any] = [module for module in encoder.modules() if hasattr(module, "seen")]
    used = sorted({module.implementation for module in modules} - {"eager"})
    if used or not modules:
        raise PredictError(
            f"output_attentions: attention is computed by {', '.join(used) or 'another module'}, which never has its "
            'weights as a tensor; load with attention="eager", or call model.set_attention("eager")',
            implementation=used,
        )
    return modules


def ids_for(network: nn.Module, embeds: Tensor) -> Tensor:
    """Return ids, ``(batch, seq)``, that stand for given embeddings: none of them is padding.

    Raises:
        PredictError: the embeddings are not ``(batch, seq, size)`` of the word table's size.
    """
    words: Any = network.get_submodule("encoder.embeddings.word")
    if embeds.dim() != 3 or embeds.shape[-1] != words.embedding_dim:
        shape = tuple(embeds.shape)
        raise PredictError(
            f"inputs_embeds has shape {shape}; expected (batch, seq, {words.embedding_dim})", shape=shape
        )
    filler = 1 if words.padding_idx == 0 else 0
    return embeds.new_full(embeds.shape[:2], filler, dtype=int)  # type: ignore[call-overload]


@contextmanager
def given_embeddings(network: nn.Module, embeds: Tensor) -> Iterator[None]:
    """Have the word table give these embeddings, whatever ids it is asked for."""
    here = None if torch.compiler.is_compiling() else get_ident()

    def instead(_module: nn.Module, _ids: Any, _out: Tensor) -> Tensor | None:
        return embeds if here is None or here == get_ident() else None

    hook = network.get_submodule("encoder.embeddings.word").register_forward_hook(instead)
    try:
        yield
    finally:
        hook.remove()
