"""Values of tags on request: handed out with one call, or kept from call to call.

Nothing is kept unless somebody asked, because a kept value keeps its memory and its history alive. The
ordinary forward pass comes here only when there is something to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flodl.errors import GraphPathError
from flodl.graph.core import GraphCore
from flodl.graph.source import compile_forward, forward_source
from flodl.graph.tree import Target, resolve_one

__all__ = ["run_captured", "variant"]


def variant(graph: GraphCore, names: frozenset[str]) -> Callable[..., Any]:
    """Return a forward pass that gives ``(result, {name: value})`` for these names (one at least)."""
    if torch.compiler.is_compiling():
        # Nothing can be written while a compiler traces; it drops the values that are not asked for.
        return type(graph)._forward_captured
    function = graph._variants.get(names)
    if function is None:
        function = graph._variants[names] = compile_forward(forward_source(graph.plan, names))
    return function


def run_captured(graph: GraphCore, outputs: Sequence[str] | None, inputs: tuple[Any, ...]) -> Any:
    """Run a graph that is watched or was asked for outputs.

    Args:
        graph: the graph.
        outputs: tags to return, here or by path in graphs inside; None returns the result alone.
        inputs: every argument in order.

    Raises:
        GraphError: when an output names nothing.
    """
    watched = graph._watched
    if outputs is None:
        result, values = variant(graph, watched)(graph, *inputs)
        graph._captured = {name: values[name] for name in watched}
        return result
    distant = [name for name in outputs if "." in name]
    local = [name for name in outputs if "." not in name]
    for name in local:
        graph.plan.require_value(name, "outputs")
    if distant:
        return _run_with_distant(graph, outputs, distant, local, inputs)
    wanted = watched | frozenset(local)
    if not wanted:
        return graph.forward(*inputs), {}
    result, values = variant(graph, wanted)(graph, *inputs)
    if watched:
        graph._captured = {name: values[name] for name in watched}
    return result, {name: values[name] for name in outputs}


def _run_with_distant(
    graph: GraphCore, outputs: Sequence[str], distant: list[str], local: list[str], inputs: tuple[Any, ...]
) -> Any:
    """Run with the owners of distant tags watching them for this one call."""
    targets = {name: _target(graph, name) for name in distant}
    owners = {id(target.owner): target.owner for target in targets.values()}
    before = {key: owner._watched for key, owner in owners.items()}
    for target in targets.values():
        target.owner._watched |= {target.segment}
    try:
        if local:
            result, values = run_captured(graph, local, inputs)
        else:
            result, values = graph.forward(*inputs), {}
        values.update((name, target.owner._captured.get(target.segment)) for name, target in targets.items())
    finally:
        for key, owner in owners.items():
            owner._watched = before[key]
            owner._captured = {name: value for name, value in owner._captured.items() if name in before[key]}
    return result, {name: values[name] for name in outputs}


def _target(graph: GraphCore, path: str) -> Target:
    target = resolve_one(graph, path)
    if target.owner.plan.value_of(target.segment) is None:
        raise GraphPathError(
            f"path {path!r} leads to no value: {target.segment!r} is neither a tag nor a node of its graph",
            path=path,
            segment=target.segment,
        )
    return target
