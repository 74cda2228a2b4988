"""Graphs of modules: written as a chain, run as straight-line Python."""

from flodl.graph.control import TraceEmit, forward_via_step
from flodl.graph.flow import FlowBuilder
from flodl.graph.graph import Graph
from flodl.graph.picture import Heat, dot, svg
from flodl.graph.routers import (
    ArgmaxSelector,
    FixedSelector,
    GaussianBlur,
    LearnedHalt,
    Reshape,
    SigmoidRouter,
    SoftmaxRouter,
    StateAdd,
    ThresholdHalt,
)

__all__ = [
    "ArgmaxSelector",
    "FixedSelector",
    "FlowBuilder",
    "GaussianBlur",
    "Graph",
    "Heat",
    "LearnedHalt",
    "Reshape",
    "SigmoidRouter",
    "SoftmaxRouter",
    "StateAdd",
    "ThresholdHalt",
    "TraceEmit",
    "dot",
    "forward_via_step",
    "svg",
]
