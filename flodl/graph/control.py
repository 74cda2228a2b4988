"""Modules that apply other modules: loops with their traces, gates, switches and maps.

The body of a loop receives the state, and the loop's references as keyword arguments, in every iteration. A body with
``step(x, emit, **references)`` may publish named traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
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


class Gate(nn.Module):
    """A weighted sum of experts, differentiable in the router and in all experts.

    Args:
        router: returns weights of shape ``(..., experts)`` for an input ``(..., features)``.
        experts: modules that take the same input and return outputs of one shape.
    """

    def __init__(self, router: nn.Module, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``sum_k weight_k * expert_k(x)``; leading dimensions of weights and outputs are aligned.

        Raises:
            GraphError: the router does not return one weight for each expert.
        """
        weights = self.router(x, **references)
        experts = self.experts
        if weights.shape[-1] != len(experts):
            raise GraphError(
                f"gate: found {weights.shape[-1]} weights for {len(experts)} experts, expected one for each. "
                "Change the last dimension of the router's output.",
                weights=weights.shape[-1],
                experts=len(experts),
            )
        total: Tensor | None = None
        for weight, expert in zip(weights.split(1, dim=-1), experts, strict=True):
            output = expert(x)
            if output.dim() != weight.dim():
                # The weight of a row is broadcast over all feature dimensions of that row.
                weight = weight.reshape(weight.shape[:-1] + (1,) * (output.dim() - weight.dim() + 1))
            total = output * weight if total is None else total + output * weight
        assert total is not None
        return total

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the router or an expert does not accept."""
        return _check_routed(self.router, self.experts, keywords)


class Switch(nn.Module):
    """Runs the branch that the router selects, one for the whole batch.

    The index is read on the host: it is not differentiable, and `torch.compile` breaks its graph there.

    Args:
        router: returns one index, a tensor of one element.
        branches: modules that take the stream.
    """

    def __init__(self, router: nn.Module, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.router = router
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Any, **references: Any) -> Any:
        """Return the output of the chosen branch.

        Raises:
            GraphError: the router returns several values, or an index without a branch.
        """
        choice: Tensor = self.router(x, **references)
        branches = self.branches
        if choice.numel() != 1:
            raise GraphError(
                f"switch: found {choice.numel()} values of shape {tuple(choice.shape)}, expected one index. "
                "Decide once for the whole batch.",
                shape=tuple(choice.shape),
            )
        index = int(choice.item())
        if not 0 <= index < len(branches):
            raise GraphError(
                f"switch: the router chose branch {index}, expected 0 to {len(branches) - 1}",
                index=index,
                branches=len(branches),
            )
        return branches[index](x)

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the router or a branch does not accept."""
        return _check_routed(self.router, self.branches, keywords)


class MapWhole(nn.Module):
    """Applies its body once to the whole value, all rows together.

    Args:
        body: receives the value, and the map's references unchanged.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``body(x)``."""
        return self.body(x, **references)

    def check_keywords(self, keywords: tuple[str, ...]) -> list[str]:
        """Return the arguments that the body does not accept."""
        return check_forward(self.body, keywords)

    def structure(self) -> str:
        """Return what identifies the map in a structural hash."""
        return type(self).__name__


class MapRows(MapWhole):
    """Applies its body to each row, as a batch of one."""

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return the outputs concatenated along dimension 0; an input without rows is returned unchanged."""
        rows = [self.body(row, **references) for row in x.split(1)] if x.shape[0] else []
        return torch.cat(rows) if rows else x


class MapSlices(MapWhole):
    """Applies its body to equal slices of the last dimension, as one batch.

    Args:
        body: takes ``(rows * count, width / count)``.
        count: number of slices.
    """

    def __init__(self, body: nn.Module, count: int) -> None:
        super().__init__(body)
        self.count = count

    def forward(self, x: Tensor, **references: Any) -> Tensor:
        """Return ``(..., count * out)`` for an input ``(..., width)``.

        Raises:
            GraphError: the input has fewer than two dimensions, or its last one is not divisible.
        """
        if x.dim() < 2 or x.shape[-1] % self.count:
            raise GraphError(
                f"map.slices({self.count}): found shape {tuple(x.shape)}, expected at least two dimensions "
                f"and a last one divisible by {self.count}",
                shape=tuple(x.shape),
                count=self.count,
            )
        leading = x.shape[:-1]
        parts = self.body(x.reshape(-1, x.shape[-1] // self.count), **references)
        return parts.reshape(*leading, self.count * parts.shape[-1])

    def structure(self) -> str:
        """Return what identifies the map in a structural hash."""
        return f"MapSlices({self.count})"


def _check_routed(router: nn.Module, members: Iterable[nn.Module], keywords: tuple[str, ...]) -> list[str]:
    problems = [f"{problem}; `using` feeds the router" for problem in check_forward(router, keywords)]
    return problems + [problem for member in members for problem in check_forward(member, ())]
