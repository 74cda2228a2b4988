"""Loops: one body applied again and again, and the traces it leaves.

The body receives the state, and the loop's references as keyword arguments, at every iteration.
A body with ``step(x, emit, **references)`` is called by that and may publish traces; one with
``trace()`` leaves one tensor an iteration. How traces are read from a graph is decided in `traces`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph.halts import says_halt
from flodl.graph.nodes import check_callable, check_forward
from flodl.graph.protocol import call_inside, offered

__all__ = ["ForLoop", "Loop", "TraceEmit", "UntilLoop", "WhileLoop", "forward_via_step"]


class TraceEmit:
    """What a loop body publishes traces to, at most once a name and iteration."""

    def __init__(self, traces: dict[str, list[Tensor]] | None = None) -> None:
        self._traces = traces
        self._seen: list[str] = []

    @classmethod
    def discard(cls) -> TraceEmit:
        """Return an emit that keeps nothing, for calls outside a loop."""
        return cls(None)

    def publish(self, name: str, value: Tensor) -> None:
        """Append ``value`` to the trace ``name``.

        Raises:
            GraphError: when ``name`` was published before in the same iteration.
        """
        if name in self._seen:
            raise GraphError(f"trace {name!r} is published twice in one iteration; publish it once a step", trace=name)
        self._seen.append(name)
        if self._traces is not None:
            self._traces.setdefault(name, []).append(value)


def forward_via_step(body: nn.Module, x: Any, **references: Any) -> Any:
    """Return ``body.step(x, ...)`` with its traces discarded, so that such a body has a `forward`."""
    return body.step(x, TraceEmit.discard(), **references)  # pyright: ignore[reportCallIssue]


class Loop(nn.Module):
    """A body and what is kept while it runs; the three kinds of loop differ in `forward`.

    Args:
        body: the module applied at each iteration; its output is its next input.
        count: number of iterations, or the largest number where a condition decides.
        condition: its first element positive means stop.
    """

    def __init__(self, body: nn.Module, count: int, condition: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        if condition is not None:
            self.condition = condition
        self.count = count
        self.named_traces: dict[str, list[Tensor]] = {}
        self.legacy_traces: list[Tensor] = []

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return what the body would not accept, and what the condition would not."""
        if offered(self.body, "step"):
            problems = check_callable(self.body.step, f"{type(self.body).__name__}.step", ("x", "emit"), keywords)
        else:
            problems = check_forward(self.body, keywords)
        return problems + (check_forward(self.condition, ()) if "condition" in self._modules else [])

    def structure(self) -> str:
        """Return what a structural hash has to know beyond the parts."""
        return f"{type(self).__name__}({self.count})"

    def reset(self) -> None:
        """Forget the traces and reset the modules inside."""
        self._forget()
        call_inside(self, "reset")

    def detach_state(self) -> None:
        """Cut the history of the traces and of what the modules inside keep."""
        self.named_traces = {name: [t.detach() for t in kept] for name, kept in self.named_traces.items()}
        self.legacy_traces = [t.detach() for t in self.legacy_traces]
        call_inside(self, "detach_state")

    def extra_repr(self) -> str:
        """Return the number of iterations."""
        return f"count={self.count}"

    def __getstate__(self) -> dict[str, Any]:
        # Traces belong to the last run and may hold history, which can be neither copied nor pickled.
        return {**self.__dict__, "named_traces": {}, "legacy_traces": []}

    def _forget(self) -> None:
        self.named_traces = {}
        self.legacy_traces = []

    def _begin(self) -> bool:
        """Prepare a run; True when iterations go through `_apply_once` because the body leaves traces."""
        body = self.body
        reset = offered(body, "reset")
        if reset is not None:
            reset()
        if offered(body, "step") is None and offered(body, "trace") is None:
            return False
        self._forget()
        return True

    def _apply_once(self, x: Any, references: dict[str, Any]) -> Any:
        body = self.body
        step = offered(body, "step")
        if step is not None:
            return step(x, TraceEmit(self.named_traces), **references)
        x = body(x, **references)
        trace = offered(body, "trace")
        if trace is not None:
            value = trace()
            if value is not None:
                self.legacy_traces.append(value)
        return x


class ForLoop(Loop):
    """Applies its body a fixed number of times."""

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the state after ``count`` iterations."""
        traced = self._begin()
        body = self.body
        i = 0
        try:
            if traced:
                for i in range(self.count):  # noqa: B007 - read in the handler
                    x = self._apply_once(x, references)
            else:
                for i in range(self.count):  # noqa: B007 - read in the handler
                    x = body(x, **references)
        except Exception as error:
            error.add_note(f"in iteration {i + 1} of {self.count} of a loop")
            raise
        return x


class WhileLoop(Loop):
    """Asks its condition before each iteration, so the body may run 0 times."""

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the state when the condition says stop, after at most ``count`` iterations."""
        traced = self._begin()
        i = 0
        try:
            for i in range(self.count):  # noqa: B007 - read in the handler
                if says_halt(self.condition(x)):
                    break
                x = self._apply_once(x, references) if traced else self.body(x, **references)
        except Exception as error:
            error.add_note(f"in iteration {i + 1} of at most {self.count} of a loop")
            raise
        return x


class UntilLoop(Loop):
    """Asks its condition after each iteration but the last permitted one, so the body runs at least once."""

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the state when the condition says stop, after at most ``count`` iterations."""
        traced = self._begin()
        i = 0
        try:
            for i in range(self.count):
                x = self._apply_once(x, references) if traced else self.body(x, **references)
                if i + 1 < self.count and says_halt(self.condition(x)):
                    break
        except Exception as error:
            error.add_note(f"in iteration {i + 1} of at most {self.count} of a loop")
            raise
        return x
