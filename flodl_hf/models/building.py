"""The graph of a configuration and a task: put together, tied, and given values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flodl.errors import CheckpointError, ConfigError
from flodl.graph import FlowBuilder, Graph
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.nn.layers.activations import Activation


def build_graph(config: ModelConfig, head: str, *, pooler: bool) -> Graph:
    """Return the graph of one task: ids to token states, then the pooler and the head that it takes.

    Args:
        config: the model's configuration.
        head: a head's name, or "base".
        pooler: for "base", also compute the pooler's output (named ``pooler_output``).

    Raises:
        ConfigError: the family has no such head.
    """
    family = config.family
    flow = (
        FlowBuilder(family.encoder(config.encoder), name="encoder")
        .input("token_type_ids", "position_ids", default=None)
        .input("layout")
        .using("token_type_ids", "position_ids", "layout")
        .tag("last_hidden_state")
    )
    if head == "base":
        if pooler and family.pooler is not None:
            flow = flow.fork(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
        return flow.build()
    spec = family.heads.get(head)
    if spec is None:
        raise ConfigError(f"{family.model_type} has no {head} head; it has {', '.join(family.heads)}", problems=[head])
    if spec.relation is not None:
        assert family.pooler is not None
        flow = flow.fork(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
        related = spec.relation(config.encoder, config.num_labels)
        flow = flow.fork(related, name="relation").using(pooled="pooler_output").tag("relation")
    if spec.pooled:
        assert family.pooler is not None
        flow = flow.through(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
    return flow.through(spec.body(config.encoder, config.num_labels), name="head").using("layout").build()


def empty_graph(config: ModelConfig, head: str, *, pooler: bool) -> Graph:
    """Return the graph of one task on ``meta``, where parameters have shapes and no values; as `build_graph`."""
    try:
        with torch.device("meta"), _WithoutInitialisation():
            return build_graph(config, head, pooler=pooler)
    except RuntimeError as fault:
        # A Ctrl-C inside torch's mode switch: torch finds no mode to restore and raises this error instead.
        before = fault.__context__
        while before is not None and not isinstance(before, KeyboardInterrupt):
            before = before.__context__
        if before is not None and "mode stack" in str(fault):
            raise KeyboardInterrupt from None
        raise


class _WithoutInitialisation(TorchFunctionMode):
    """Leaves new tensors unfilled: on ``meta`` there is nothing to fill, and random kernels take seconds to load."""

    # Calls of torch.nn.init functions arrive as these functions, others as tensor methods.
    FILLING = frozenset(
        [
            getattr(torch.nn.init, name)
            for name in ("normal_", "uniform_", "kaiming_uniform_", "constant_", "ones_", "zeros_")
        ]
        + [torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_]
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in self.FILLING:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def declared_ties(config: ModelConfig, head: str) -> tuple[Any, ...]:
    """Return the ties of one head that the configuration specifies."""
    if head == "base" or not config.tie_words:
        return ()
    return config.family.heads[head].ties


def tie_tensors(graph: Graph, ties: Iterable[Any]) -> None:
    """Make each tie's second name refer to the first one's parameter."""
    for tie in ties:
        module, _, leaf = tie.also.rpartition(".")
        setattr(graph.get_submodule(module), leaf, graph.get_parameter(tie.kept))


def assign(graph: Graph, tensors: Mapping[str, Tensor], owners: Mapping[str, nn.Module] | None = None) -> None:
    """Give each named parameter its tensor, without a copy.

    Args:
        graph: the graph with the parameters.
        tensors: by parameter name.
        owners: the graph's modules by path, for callers with many tensors.
    """
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        owner = graph.get_submodule(module) if owners is None else owners[module]
        if leaf not in owner._parameters:
            raise CheckpointError(f"{name} is not a parameter of the model", name=name)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def initialise(graph: nn.Module, only: Iterable[str], scale: float) -> None:
    """Give fresh values to parameters as transformers does: normal weights, zero biases, norms at one.

    Args:
        graph: the network.
        only: names to initialise; empty means all.
        scale: standard deviation of weights.
    """
    chosen = set(only)
    for prefix, module in graph.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if chosen and name not in chosen:
                continue
            with torch.no_grad():
                if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                    parameter.fill_(1.0 if leaf == "weight" else 0.0)
                elif leaf == "bias":
                    parameter.zero_()
                elif not isinstance(module, Activation):
                    parameter.normal_(0.0, scale)
                    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                        parameter[module.padding_idx].zero_()
