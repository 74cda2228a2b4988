"""The structural hash of a graph, which does not depend on weights, dtype or device."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from flodl.graph.core import GraphCore, nearest_graphs
from flodl.graph.nodes import offered


def structural_hash(graph: GraphCore) -> str:
    """Return the SHA-256, 64 hex digits, of a graph's structure.

    It covers the nodes in the order of execution (id, kind, name, parameter and buffer names with shapes, the
    hashes of graphs inside), edges, references, tags, inputs and the output.
    """
    plan = graph.plan
    nodes = []
    for index in plan.order:
        node = plan.nodes[index]
        module = graph._modules.get(node.name) if node.name else None
        nodes.append([
            node.id, node.kind, node.name, node.mode, list(node.inputs),
            [[r.keyword, r.tag, r.source] for r in node.references],
            None if module is None else _structure(module),
        ])  # fmt: skip
    record = {
        "nodes": nodes,
        "tags": sorted(plan.tags.items()),
        "inputs": [[i.name, i.node, i.required, repr(i.default)] for i in plan.inputs],
        "output": plan.output,
        "memory": list(plan.memory),
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _structure(module: nn.Module) -> Any:
    own = offered(module, "structural_hash")
    if own is not None:
        return own()
    shape = offered(module, "structure")
    return [
        type(module).__name__,
        shape() if shape is not None else "",
        sorted([name, _shape(p)] for name, p in module.named_parameters(remove_duplicate=False)),
        sorted([name, _shape(b)] for name, b in module.named_buffers(remove_duplicate=False)),
        [structural_hash(inner) for _, inner in nearest_graphs(module)],
    ]


def _shape(tensor: Any) -> list[int] | str:
    return "lazy" if is_lazy(tensor) else list(tensor.shape)
