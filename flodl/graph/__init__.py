"""Graphs of modules, written as a chain and run as straight-line Python."""

from flodl.graph.flow import FlowBuilder
from flodl.graph.function import Function
from flodl.graph.gate import Gate
from flodl.graph.graph import Graph
from flodl.graph.halts import LearnedHalt, ThresholdHalt
from flodl.graph.heat import Heat
from flodl.graph.loop import ForLoop, TraceEmit, UntilLoop, WhileLoop, forward_via_step
from flodl.graph.map import MapRows, MapSlices, MapWhole
from flodl.graph.nodes import Fault, Input, Node, Plan, Reference
from flodl.graph.picture import dot, svg
from flodl.graph.routers import ArgmaxSelector, FixedSelector, Reshape, SigmoidRouter, SoftmaxRouter, StateAdd
from flodl.graph.switch import Switch
from flodl.graph.tree import PathKind

__all__ = [
    "ArgmaxSelector",
    "Fault",
    "FixedSelector",
    "FlowBuilder",
    "ForLoop",
    "Function",
    "Gate",
    "Graph",
    "Heat",
    "Input",
    "LearnedHalt",
    "MapRows",
    "MapSlices",
    "MapWhole",
    "Node",
    "PathKind",
    "Plan",
    "Reference",
    "Reshape",
    "SigmoidRouter",
    "SoftmaxRouter",
    "StateAdd",
    "Switch",
    "ThresholdHalt",
    "TraceEmit",
    "UntilLoop",
    "WhileLoop",
    "dot",
    "forward_via_step",
    "svg",
]
