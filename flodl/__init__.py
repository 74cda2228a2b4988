"""flodl: a graph builder for PyTorch, trees of named sub-graphs, training, and a monitor."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flodl.errors import FlodlError, GraphBuildError, GraphError, GraphPathError

if TYPE_CHECKING:
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
    # Graphs and training import torch, so they are imported on first use.
    if name in __all__:
        found = getattr(import_module("flodl.train" if name == "Trainer" else "flodl.graph"), name)
        globals()[name] = found
        return found
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("flodl-hf")  # one distribution contains both packages
        except PackageNotFoundError:
            return "not installed"
    raise AttributeError(f"module 'flodl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
