"""The fluent verbs. They only record their arguments; `build()` checks the whole chain and raises.

What a recorded step turns into is decided in `wire`, what is wrong with it in `wire` and `check`, and how
the result runs in `source`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn

from flodl.errors import GraphBuildError
from flodl.graph.check import check_graph
from flodl.graph.graph import Graph
from flodl.graph.nodes import VerbCall
from flodl.graph.wire import Draft

__all__ = ["FlowBuilder", "LoopVerb", "MapVerb"]

_ABSENT = object()

Step = nn.Module | Callable[..., Any]
"""What a verb runs."""


class FlowBuilder:
    """Collects the steps of a graph and turns them into a `Graph`.

    A chain has a current stream (what the next module reads) and a target (what `using` feeds).
    Every verb returns the builder. Faults are found by `build()`, all at once. A verb that takes a module also takes a
    function, which becomes a `flodl.graph.Function`.

    Args:
        first: the first module; without it the graph starts with its own input.
        entry: name of the graph's first argument.
        name: name of the first module among the graph's children.

    Example:
        >>> graph = FlowBuilder(nn.Linear(4, 8)).through(nn.GELU()).also(nn.Linear(8, 8)).tag("mixed").build()
    """

    def __init__(self, first: Step | None = None, *, entry: str = "input", name: str | None = None) -> None:
        self._entry = entry
        self._steps: list[VerbCall] = []
        self._verbose = False
        self._record("from_", module=first, name=name)

    @classmethod
    def from_(cls, first: Step, *, entry: str = "input", name: str | None = None) -> FlowBuilder:
        """Return a builder whose chain starts with ``first``."""
        return cls(first, entry=entry, name=name)

    def through(self, module: Step, *, name: str | None = None) -> FlowBuilder:
        """Send the stream through ``module``; its output becomes the stream."""
        return self._record("through", module=module, name=name)

    def fork(self, module: Step, *, name: str | None = None) -> FlowBuilder:
        """Run ``module`` on the stream beside it; the stream stays, and a `tag` right after names it."""
        return self._record("fork", module=module, name=name)

    def also(self, module: Step, *, name: str | None = None) -> FlowBuilder:
        """Add ``module(stream)`` to the stream: a residual. `using` feeds the module, `tag` names the sum."""
        return self._record("also", module=module, name=name)

    def also_with(
        self, skip: Step, main: Step, *, name: str | None = None, skip_name: str | None = None
    ) -> FlowBuilder:
        """Replace the stream by ``skip(stream) + main(stream)``; `using` feeds ``main``."""
        return self._record("also_with", skip=skip, main=main, name=name, skip_name=skip_name)

    def split(self, *modules: Step | Iterable[Step], names: Sequence[str] | None = None) -> FlowBuilder:
        """Open one stream for each module, all reading the current one; `using` then feeds all of them."""
        return self._record("split", modules=_flat(modules), names=names)

    def merge(
        self, how: Literal["add", "mean", "concat"] | Step = "add", *, dim: int = -1, name: str | None = None
    ) -> FlowBuilder:
        """Close the open streams into one.

        Args:
            how: ``"add"`` for their sum, ``"mean"`` for the sum times one over their number, ``"concat"`` to join them,
                or a function or module that is called with all streams in order, such as ``torch.maximum``.
            dim: the dimension of ``"concat"``; the last by default.
            name: name of a function or module among the graph's children.
        """
        return self._record("merge", how=how, dim=dim, name=name)

    def tag(self, name: str) -> FlowBuilder:
        """Name the pending fork's output, or else the stream, so that `using` and paths can refer to it."""
        return self._record("tag", tag=name)

    def tag_group(self, name: str) -> FlowBuilder:
        """Tag the open streams ``name_0``, ``name_1``, ... and remember them as the group ``name``."""
        return self._record("tag_group", tag=name)

    def input(self, *names: str | Iterable[str], default: Any = _ABSENT) -> FlowBuilder:
        """Declare further arguments of the graph, each readable by `using`; the stream stays.

        Args:
            names: one name or several.
            default: None or a plain constant; with it the argument may be left out of a call.
        """
        return self._record(
            "input",
            names=_flat(names),
            required=default is _ABSENT,
            default=None if default is _ABSENT else default,
        )

    def using(self, *tags: str | Iterable[str], **renamed: str) -> FlowBuilder:
        """Pass tagged values to the last module as keyword arguments.

        ``using("ctx")`` passes the value tagged ``ctx`` as ``ctx=``; ``using(mask="attention_mask")`` passes
        the value tagged ``attention_mask`` as ``mask=``. A tag that stands later in the chain gives its
        value of the *previous* call: zeros shaped like the module's input at first.
        """
        pairs = [(t, t) for t in _flat(tags)] + list(renamed.items())
        return self._record("using", pairs=tuple(pairs))

    def loop_body(self, body: Step, *, name: str | None = None) -> LoopVerb:
        """Begin a loop over ``body``; end it by ``for_n``, ``while_cond`` or ``until_cond``."""
        self._record("loop_body", body=body, name=name)
        return LoopVerb(self)

    def gate(self, router: Step, *experts: Step | Iterable[Step], name: str | None = None) -> FlowBuilder:
        """Run every expert and sum their outputs weighted by ``router(stream)``; `using` feeds the router."""
        return self._record("gate", router=router, modules=_flat(experts), name=name)

    def switch(self, router: Step, *branches: Step | Iterable[Step], name: str | None = None) -> FlowBuilder:
        """Run the one branch whose index ``router(stream)`` gives; `using` feeds the router."""
        return self._record("switch", router=router, modules=_flat(branches), name=name)

    def map(self, body: Step, *, name: str | None = None) -> MapVerb:
        """Begin applying ``body`` to parts of a value; end it by ``each``, ``over`` or ``slices``."""
        self._record("map", body=body, name=name)
        return MapVerb(self)

    def label(self, name: str) -> FlowBuilder:
        """Name the graph for the tree, the monitor and diagrams; the label is not part of its hash."""
        return self._record("label", label=name)

    def internal(self, *tags: str) -> FlowBuilder:
        """Hide tags from parent graphs. Tags that start with an underscore are hidden anyway."""
        return self._record("internal", tags=tags)

    def verbose(self, on: bool = True) -> FlowBuilder:
        """Print the tree summary to stderr when the graph is built."""
        self._verbose = on
        return self

    def build(self) -> Graph:
        """Return the finished graph.

        Raises:
            GraphBuildError: with every fault of the chain in ``.faults``.
        """
        draft = Draft(self._steps, self._entry)
        order, found = check_graph(draft)
        faults = sorted([*draft.faults, *found], key=lambda fault: fault.position)
        if faults:
            listed = "\n".join(f"  - {fault}" for fault in faults)
            count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
            raise GraphBuildError(f"the graph cannot be built, {count}:\n{listed}", faults=faults)
        modules = {draft.nodes[index].name: module for index, module in draft.modules.items()}
        graph = Graph.from_plan(draft.plan(order), modules)
        if self._verbose:
            print(graph.tree_summary(), file=sys.stderr)
        return graph

    def _record(self, verb: str, **args: Any) -> FlowBuilder:
        self._steps.append(VerbCall(len(self._steps) + 1, verb, args))
        return self


class _OpenVerb:
    """A loop or a map whose end is still to come. Other verbs are recorded, so that `build` reports the missing end."""

    def __init__(self, flow: FlowBuilder) -> None:
        self._flow = flow

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._flow, name)


class LoopVerb(_OpenVerb):
    """A loop whose number of iterations is still to come."""

    def for_n(self, count: int) -> FlowBuilder:
        """Apply the body exactly ``count`` times."""
        return self._flow._record("for_n", count=count)

    def while_cond(self, condition: Step, max_iterations: int) -> FlowBuilder:
        """Apply the body until ``condition(state)`` is positive beforehand: 0 to ``max_iterations`` times."""
        return self._flow._record("while_cond", condition=condition, count=max_iterations)

    def until_cond(self, condition: Step, max_iterations: int) -> FlowBuilder:
        """Apply the body until ``condition(state)`` is positive afterwards: 1 to ``max_iterations`` times."""
        return self._flow._record("until_cond", condition=condition, count=max_iterations)


class MapVerb(_OpenVerb):
    """A map whose parts are still to come."""

    _batched = False

    def batched(self) -> MapVerb:
        """Apply the body once to the whole value, for bodies that treat rows independently."""
        self._batched = True
        return self

    def each(self) -> FlowBuilder:
        """Apply the body to every row of the stream, each kept as a batch of one, and concatenate."""
        return self._flow._record("each", batched=self._batched)

    def over(self, tag: str) -> FlowBuilder:
        """Apply the body to every row of the tagged value; the result becomes the stream."""
        return self._flow._record("over", tag=tag, batched=self._batched)

    def slices(self, count: int) -> FlowBuilder:
        """Cut the last dimension into ``count`` equal slices, apply the body to all at once, join again."""
        return self._flow._record("slices", count=count)


def _flat(items: Iterable[Any]) -> tuple[Any, ...]:
    """Return the items with lists opened, so that ``f(a, b)`` and ``f([a, b])`` mean the same."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, (list, tuple, nn.ModuleList)) or (
            isinstance(item, Iterable) and not isinstance(item, (str, nn.Module))
        ):
            found.extend(item)
        else:
            found.append(item)
    return tuple(found)
