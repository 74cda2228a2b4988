"""flodl: a fluent graph builder for PyTorch, a tree of named sub-graphs, observation, and training."""

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
    "forward_via_step",
]
