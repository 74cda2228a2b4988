"""Values of tags: returned with one call, or kept from call to call.

The ordinary forward pass calls this module only if a value is requested or watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flodl.errors import GraphPathError
from flodl.graph.core import GraphCore
from flodl.graph.source import compile_forward, forward_source
from flodl.graph.tree import Part, part_at


def run_captured(graph: GraphCore, outputs: Sequence[str] | None, inputs: tuple[Any, ...]) -> Any:
    """Run a graph with watched or requested values.

    Args:
        graph: the graph.
        outputs: tags to return, here or by path in graphs inside; None returns the result alone.
        inputs: every argument in order.

    Raises:
        GraphError: an output does not exist.
    """
    watched = graph._watched
    distant = {name: _value_at(graph, name) for name in outputs or () if "." in name}
    local = [name for name in outputs or () if "." not in name]
    for name in local:
        graph.plan.require_value(name, "outputs")
    # The owners of distant values watch them during this call.
    before = [(part.owner, part.owner._watched) for part in distant.values() if part.owner is not None]
    for part in distant.values():
        assert part.owner is not None
        part.owner._watched |= {part.segment}
    try:
        wanted = watched | frozenset(local)
        result, values = _variant(graph, wanted)(graph, *inputs) if wanted else (graph.forward(*inputs), {})
        if watched:
            graph._captured = {name: values[name] for name in watched}
        for name, part in distant.items():
            assert part.owner is not None
            values[name] = part.owner._captured.get(part.segment)
    finally:
        for owner, names in reversed(before):
            owner._watched = names
            owner._captured = {name: value for name, value in owner._captured.items() if name in names}
    return result if outputs is None else (result, {name: values[name] for name in outputs})


def _variant(graph: GraphCore, names: frozenset[str]) -> Callable[..., Any]:
    """Return a forward pass that returns ``(result, {name: value})`` for at least one name."""
    if torch.compiler.is_compiling():
        # A graph cannot be changed while a compiler traces it. The compiler drops the unused values.
        return type(graph)._forward_captured
    function = graph._variants.get(names)
    if function is None:
        function = graph._variants[names] = compile_forward(forward_source(graph.plan, names))
    return function


def _value_at(graph: GraphCore, path: str) -> Part:
    part = part_at(graph, path)
    if part.owner is None or part.owner.plan.value_of(part.segment) is None:
        raise GraphPathError(
            f"path {path!r}: {part.segment!r} is neither a tag nor a node of a graph, so it has no value",
            path=path,
            segment=part.segment,
        )
    return part
