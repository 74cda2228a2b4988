"""The inside of one call: states after each layer and attention weights, or embeddings given instead of ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from flodl_hf.errors import PredictError
from flodl_hf.nn.layout import Padded


@contextmanager
def watched(network: nn.Module, *, hidden_states: bool, attentions: bool) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the intermediate values of one call, in order, under the names of transformers' outputs.

    Args:
        network: with an ``encoder``, as `flodl_hf.models.building.build_graph` makes it.
        hidden_states: what enters the first layer and what leaves each, ``(batch, seq, hidden)``.
        attentions: weights of each layer, ``(batch, heads, seq, seq)``, of eager attention.

    Raises:
        PredictError: attention is computed by kernels that never have its weights.
    """
    encoder = network.get_submodule("encoder")
    states, weights = Mine(), Mine()
    found: dict[str, list[Tensor]] = {}
    try:
        with ExitStack() as stack:
            if hidden_states:
                found["hidden_states"] = states
                # A block that several layers share is hooked once and fires at each of its calls.
                layers = list(dict.fromkeys(encoder.get_submodule("layers").children()))
                _sweep([encoder, *layers, *encoder.children()])
                stack.callback(layers[0].register_forward_pre_hook(partial(_enters, states)).remove)
                for layer in layers:
                    stack.callback(layer.register_forward_hook(partial(_leaves, states)).remove)
                last = dict(encoder.named_children()).get("norm")
                if last is not None:  # transformers' last state is the one that the encoder gives
                    stack.callback(last.register_forward_hook(partial(_normed, states)).remove)
            if attentions:
                found["attentions"] = weights
                modules = _attentions(encoder)
                stack.callback(_take_back, modules)
                for module in modules:
                    _give(module, weights)
            yield found
    finally:
        # A Ctrl-C may have come between a hook and its registration: any hook left of this call stops recording.
        states.over = weights.over = True
        if attentions:
            _take_back(_attentions_in(encoder))


class Mine(list[Tensor]):
    """A list that takes only what its own thread appends, while its call lasts: others may use the model meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = None if torch.compiler.is_compiling() else get_ident()
        self.over = False

    def append(self, value: Tensor) -> None:
        """Append values from the thread that created the list."""
        if not self.over and (self.thread is None or self.thread == get_ident()):
            super().append(value)

    def __deepcopy__(self, memo: Any) -> Mine:
        found = Mine()  # of a copy of the model that is made meanwhile, nobody looks at the inside
        found.over = True
        return found


_GIVING = Lock()


def _give(module: Any, weights: Mine) -> None:
    """Have attention leave its weights here too."""
    with _GIVING:
        module.seen = (*(taker for taker in module.seen if not taker.over), weights)


def _take_back(modules: list[Any]) -> None:
    """Let go of the lists of calls that are over, and of this thread's."""
    with _GIVING:
        for module in modules:
            module.seen = tuple(taker for taker in module.seen if not taker.over and taker.thread != get_ident())


def _sweep(modules: list[nn.Module]) -> None:
    """Remove hooks of calls that are over: a Ctrl-C may have come between a hook and the note of it."""
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, partial) and hook.args and getattr(hook.args[0], "over", False):
                    hooks.pop(key, None)


def _enters(states: list[Tensor], _module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not states:
        states.append(inputs[0])


def _leaves(states: list[Tensor], _module: nn.Module, _given: Any, out: Tensor) -> None:
    states.append(out)


def _normed(states: Mine, _module: nn.Module, _given: Any, out: Tensor) -> None:
    if states and not states.over and states.thread in (None, get_ident()):
        states[-1] = out


def _attentions(encoder: nn.Module) -> list[Any]:
    modules = _attentions_in(encoder)
    used = sorted({module.implementation for module in modules} - {"eager"})
    if used or not modules:
        raise PredictError(
            f"output_attentions: attention is computed by {', '.join(used) or 'another module'}, which never has its "
            'weights as a tensor; load with attention="eager", or call model.set_attention("eager")',
            implementation=used,
        )
    return modules


def _attentions_in(encoder: nn.Module) -> list[Any]:
    return [module for module in encoder.modules() if hasattr(module, "seen")]


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


def embedded(network: nn.Module, ids: Tensor) -> Tensor:
    """Return the input of a call instead of ids, ``(batch, seq, size)``, of rows without padding."""
    module = _embedding(network)
    return module(ids) if isinstance(module, nn.Embedding) else module(ids, layout=Padded.of(None))


def _embedding(network: nn.Module) -> Any:
    """Return the module that is passed by where embeddings are given."""
    whole: Any = network.get_submodule("encoder.embeddings")
    return whole if getattr(whole, "given_whole", False) else whole.word


@contextmanager
def given_embeddings(network: nn.Module, embeds: Tensor) -> Iterator[None]:
    """Replace the output of the word table by these embeddings; or of all embeddings, if the family specifies it."""
    given = Mine()
    given.append(embeds)
    words = _embedding(network)
    _sweep([words])
    try:
        hook = words.register_forward_hook(partial(_instead, given))
        try:
            yield
        finally:
            hook.remove()
    finally:
        given.over = True  # a hook that a Ctrl-C left behind gives the table's own words again


def _instead(embeds: Mine, _module: nn.Module, _ids: Any, _out: Tensor) -> Tensor | None:
    return embeds[0] if not embeds.over and embeds.thread in (None, get_ident()) else None
