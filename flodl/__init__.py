"""flodl: a fluent graph builder for PyTorch, a tree of named sub-graphs, observation, and training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flodl.errors import FlodlError, GraphBuildError, GraphError, GraphPathError
from flodl.graph import (
    ArgmaxSelector,
    FixedSelector,
    FlowBuilder,
    Graph,
    LearnedHalt,
    Reshape,
    SigmoidRouter,
    SoftmaxRouter,
    StateAdd,
    ThresholdHalt,
    TraceEmit,
    forward_via_step,
)

if TYPE_CHECKING:
    from flodl.train import Trainer

__all__ = [
    "ArgmaxSelector",
    "FixedSelector",
    "FlodlError",
    "FlowBuilder",
    "Graph",
    "GraphBuildError",
    "GraphError",
    "GraphPathError",
    "LearnedHalt",
    "Reshape",
    "SigmoidRouter",
    "SoftmaxRouter",
    "StateAdd",
    "ThresholdHalt",
    "TraceEmit",
    "Trainer",
    "forward_via_step",
]


def __getattr__(name: str) -> Any:
    # Training is imported by those who train: predicting must not pay for it.
    if name == "Trainer":
        from flodl.train import Trainer

        return Trainer
    raise AttributeError(f"module 'flodl' has no attribute {name!r}")
