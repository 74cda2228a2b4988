"""Loops, which apply one body repeatedly, and the traces that their bodies leave.

The body receives the state, and the loop's references as keyword arguments, in every iteration. A body with
``step(x, emit, **references)`` may publish named traces.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flodl.errors import GraphError, nearest
from flodl.graph.core import GraphCore
from flodl.graph.nodes import call_inside, check_callable, check_forward, offered


class TraceEmit:
    """Receives the traces of a loop body."""

    def __init__(self, traces: dict[str, list[Tensor]] | None = None) -> None:
        self._traces = traces
        self._seen: set[str] = set()

    def publish(self, name: str, value: Tensor) -> None:
        """Append ``value`` to the trace ``name``.

        Raises:
            GraphError: ``name`` was published before in the same iteration.
        """
        if name in self._seen:
            raise GraphError(f"trace {name!r}: published twice in one iteration. Publish it once.", trace=name)
        self._seen.add(name)
        if self._traces is not None:
            self._traces.setdefault(name, []).append(value)


def forward_via_step(body: nn.Module, x: Any, **references: Any) -> Any:
    """Return ``body.step(x, ...)`` without its traces; use it to define `forward` of a loop body."""
    return body.step(x, TraceEmit(), **references)  # pyright: ignore[reportCallIssue]


class ForLoop(nn.Module):
    """Applies its body a fixed number of times.

    Args:
        body: the module applied in each iteration; its output is its next input.
        count: the number of iterations, or the largest number if a condition ends the loop.
        condition: ends the loop if the first element of its output is positive.
    """

    checks_before = False
    checks_after = False

    def __init__(self, body: nn.Module, count: int, condition: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        if condition is not None:
            self.condition = condition
        self.count = count
        self.traces: dict[str, list[Tensor]] = {}

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the state after the last iteration."""
        body = self.body
        before, after, last = self.checks_before, self.checks_after, self.count - 1
        reset, step = offered(body, "reset"), offered(body, "step")
        if reset is not None:
            reset()
        if step is not None:
            self.traces = {}
        i = 0
        try:
            for i in range(self.count):
                if before and self._halts(x):
                    break
                x = body(x, **references) if step is None else step(x, TraceEmit(self.traces), **references)
                if after and i < last and self._halts(x):
                    break
        except Exception as error:
            error.add_note(f"in iteration {i + 1} of a loop of at most {self.count}")
            raise
        return x

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the body or the condition does not accept."""
        if offered(self.body, "step"):
            problems = check_callable(self.body.step, f"{type(self.body).__name__}.step", ("x", "emit"), keywords)
        else:
            problems = check_forward(self.body, keywords)
        return problems + (check_forward(self.condition, ()) if "condition" in self._modules else [])

    def structure(self) -> str:
        """Return what identifies the loop in a structural hash."""
        return f"{type(self).__name__}({self.count})"

    def reset(self) -> None:
        """Clear the traces and reset the modules inside."""
        self.traces = {}
        call_inside(self, "reset")

    def detach_state(self) -> None:
        """Detach the traces and the kept values of the modules inside."""
        self.traces = {name: [value.detach() for value in kept] for name, kept in self.traces.items()}
        call_inside(self, "detach_state")

    def __getstate__(self) -> dict[str, Any]:
        # Traces belong to the last call; tensors with a history can be neither copied nor pickled.
        return {**self.__dict__, "traces": {}}

    def _halts(self, x: Any) -> bool:
        return bool(self.condition(x).reshape(-1)[0].item() > 0)


class WhileLoop(ForLoop):
    """Evaluates its condition before each iteration, so the body may run 0 times."""

    checks_before = True


class UntilLoop(ForLoop):
    """Evaluates its condition after each iteration; the body runs at least once."""

    checks_after = True


def read_traces(graph: GraphCore, name: str) -> list[Tensor]:
    """Return the trace published under a name; empty before the first call.

    Raises:
        GraphError: several loops published the name, or none did.
    """
    loops = [(node.id, module) for node in graph.plan.calls if isinstance(module := graph._modules[node.name], ForLoop)]
    found = [(owner, loop.traces[name]) for owner, loop in loops if name in loop.traces]
    if len(found) > 1:
        owners = " and ".join(owner for owner, _ in found)
        raise GraphError(f"traces({name!r}): found in {owners}, expected one loop. Rename a trace.", trace=name)
    known = sorted({trace for _, loop in loops for trace in loop.traces})
    if not loops or (known and not found):
        hint = f"{nearest(name, known)}; the graph has {known}"
        raise GraphError(f"traces: found no trace {name!r}{hint}", trace=name, known=known)
    return list(found[0][1]) if found else []
