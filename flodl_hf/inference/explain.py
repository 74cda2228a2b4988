"""Explain a model on a device in a precision: the table of each layer, kernels, recording, and reasons if slower.

The answers use the functions that decide at run time: the tables' `lacks`, `flodl_hf.nn.kernels.self_test` and the
CPU's capabilities. No weight is read, so a graph on the ``meta`` device can be explained too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flodl.devices import parse_device
from flodl.graph import Graph
from flodl_hf.inference.options import Precision, check_name, check_precision, dtype_of
from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.nn.adapter_layers import folded
from flodl_hf.nn.backends.choose import layers_of, prediction_sizes, splits
from flodl_hf.nn.backends.cpu import plain_parts
from flodl_hf.nn.backends.cuda import FEWEST, GATES, HEAD_WIDTHS, SHORT, CudaTable
from flodl_hf.nn.backends.cuda_training import TrainingTable
from flodl_hf.nn.backends.self_tests import LayerSizes, prediction
from flodl_hf.nn.kernels.self_test import trusted

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model import GraphModel


@dataclass(frozen=True)
class LayerGroup:
    """Layers that run alike.

    Attributes:
        table: which operations compute them: "torch", "processor", "cuda" or "cuda-training".
        layers: their paths.
        reason: why it is torch's; None where a device's own table runs them.
    """

    table: str
    layers: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What runs a model on a device.

    Attributes:
        device: where.
        precision: what products are computed in.
        training: whether training steps are explained rather than prediction.
        groups: the layers, by table and reason.
        kernels: what computes their parts.
        recorded: whether passes are recorded and replayed, or why not.
    """

    device: str
    precision: str
    training: bool
    groups: tuple[LayerGroup, ...]
    kernels: tuple[str, ...]
    recorded: str

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        layers = [{"table": g.table, "layers": list(g.layers), "reason": g.reason} for g in self.groups]
        shown = {"device": self.device, "precision": self.precision, "training": self.training, "layers": layers}
        return {**shown, "kernels": list(self.kernels), "recorded": self.recorded}

    def __str__(self) -> str:
        what = "training" if self.training else "prediction"
        lines = [f"{what} on {self.device} in {self.precision}"]
        for group in self.groups:
            names = group.layers[0] if len(group.layers) == 1 else f"{group.layers[0]} to {group.layers[-1]}"
            count = f"{len(group.layers)} layer{'s' * (len(group.layers) > 1)}"
            lines.append(f"  {count} ({names}): {group.table}" + (f", because {group.reason}" if group.reason else ""))
        lines += [f"  {kernel}" for kernel in self.kernels]
        return "\n".join([*lines, f"  recorded: {self.recorded}"])


def explain(
    model: GraphModel,
    device: str | torch.device | None = None,
    precision: Precision | None = None,
    *,
    training: bool = False,
) -> Explanation:
    """Return what runs a model where, see `EncoderModel.explain`."""
    where = model.device if device is None else parse_device(device)
    precision = check_name(precision)
    dtype = dtype_of(precision) or model.dtype
    if training or precision == "exact":
        return explain_graph(model.graph, where, dtype, precision, training=training)
    graph = shadow(model.graph)
    merged = folded(graph, merge=False)
    found = explain_graph(graph, where, dtype, precision)
    if not merged:
        return found
    summary = f"adapter: merged into copies of {merged} weights, at no cost per call"
    return replace(found, kernels=(*found.kernels, summary))


def explain_graph(
    graph: Graph, device: torch.device, dtype: torch.dtype, precision: Precision | None, *, training: bool = False
) -> Explanation:
    """Return what runs a graph.

    Args:
        graph: of a model; its tensors are not read.
        device: where it would run.
        dtype: of its weights there.
        precision: precision of prediction; None for the weights' own dtype.
        training: explain training steps.

    Raises:
        PredictError: the precision is unknown, or the device lacks it.
    """
    present = device.type != "cuda" or torch.cuda.is_available()
    if present and not training:
        check_precision(precision, device)
    named = precision or str(dtype).removeprefix("torch.")
    if training:
        return _training(graph, device, named, dtype, present)
    paths = [path for path, _ in layers_of(graph)]
    if precision == "exact":
        groups = _grouped(dict.fromkeys(paths, "precision='exact' repeats the reference arithmetic"), "torch")
        return Explanation(str(device), named, False, groups, (), "no: exact passes are launched one by one")
    if device.type == "cuda":
        return _cuda(graph, device, named, dtype, precision, present)
    if device.type == "cpu":
        return _processor(graph, named, precision)
    groups = _grouped(dict.fromkeys(paths, f"there is no table for {device.type} devices"), "torch")
    return Explanation(str(device), named, False, groups, (), f"no: {device.type} devices record nothing here")


def _grouped(reasons: dict[str, str | None], table: str) -> tuple[LayerGroup, ...]:
    """Return groups of layers with one reason each, in order; a reason of None is the table's own."""
    groups: dict[str | None, list[str]] = {}
    for path, reason in reasons.items():
        groups.setdefault(reason, []).append(path)
    return tuple(LayerGroup("torch" if reason else table, tuple(paths), reason) for reason, paths in groups.items())


def _cuda(
    graph: Graph, device: torch.device, named: str, dtype: torch.dtype, precision: Precision | None, present: bool
) -> Explanation:
    table = CudaTable(kernels=False)
    groups = _grouped({path: table.lacks(layer) for path, layer in layers_of(graph)}, "cuda")
    half = dtype in (torch.float16, torch.bfloat16)
    sizes = prediction_sizes(graph)
    kernels: list[str] = []
    if not half and precision in (None, "fp32") and dtype == torch.float32:
        kernels.append(_split(device, sizes, present))
    elif not half:
        kernels.append(f"our kernels: none, they are for float32, bf16 and fp16 and this is {named}")
    elif not sizes:
        kernels.append("our kernels: none of these, attention is of a special kind")
    elif present and not all(trusted("prediction", device, dtype, each, prediction) for each in sizes):
        kernels.append("our kernels: not trusted on this device, torch's own are launched instead")
    else:
        summary = "trusted on this device" if present else "not tried, no CUDA device is available"
        kernels += [f"our kernels: {summary}", *_ours(sizes)]
    recorded = "yes: large batches at their first coming, single texts at their second"
    return Explanation(str(device), named, False, groups, tuple(kernels), recorded)


def _split(device: torch.device, sizes: set[LayerSizes], present: bool) -> str:
    if not present:
        return "products: in fp16 parts if the device is trusted with them; not tried, there is no CUDA device here"
    if splits(device, sizes):
        return f"products: each float32 product as three of fp16 parts, from {FEWEST} tokens on"
    return "products: float32 as a whole; fp16 parts are not trusted on this device"


def _ours(sizes: Iterable[LayerSizes]) -> Iterator[str]:
    """Yield the operations that our kernels compute in half precision."""
    asked = list(sizes)
    others = sorted({each.width // each.heads for each in asked} - set(HEAD_WIDTHS))
    if others:
        found, known = (", ".join(map(str, widths)) for widths in (others, HEAD_WIDTHS))
        yield f"attention: torch's own, since heads of {found} features are none of {known}"
    elif any(each.distances for each in asked):
        yield "attention: one kernel, which reads what distances add from a table made once a pass"
    else:
        near = ", or with a window," if any(each.window is not None for each in asked) else ""
        yield f"attention: one kernel among texts up to {SHORT} tokens{near}; torch's variable-length one for others"
    if any(each.turns == "neighbours, values too" for each in asked):
        yield "rotary positions: a kernel in the product of queries, keys and values"
    elif any(each.turns for each in asked):
        yield "rotary positions: in the kernel of attention; for torch's, a kernel in the product of queries and keys"
    if any(each.gated and each.activation in GATES for each in asked):
        yield "gates: one product with their inputs, one kernel for both"


def _processor(graph: Graph, named: str, precision: Precision | None) -> Explanation:
    from flodl_hf.inference.cpu import missing, products_of

    groups = _grouped({path: plain_parts(layer) for path, layer in layers_of(graph)}, "processor")
    kernels = (f"products: {products_of(precision)}", f"processor: {torch.backends.cpu.get_cpu_capability()}")
    if precision == "fp32" or named == "float32":
        lower = [repr(name) for name in ("bf16", "int8") if missing(name) is None]
        kernels += (f"faster here, and less exact: precision={' or '.join(lower)}",) if lower else ()
    return Explanation("cpu", named, False, groups, kernels, "no: processors record nothing")


def _training(graph: Graph, device: torch.device, named: str, dtype: torch.dtype, present: bool) -> Explanation:
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type != "cuda" or not half:
        reason = "the training table is for CUDA devices in bf16 or fp16"
        groups = _grouped(dict.fromkeys((path for path, _ in layers_of(graph)), reason), "torch")
    else:
        table = TrainingTable(dtype)
        groups = _grouped({path: table.lacks(layer) for path, layer in layers_of(graph)}, "cuda-training")
    recorded = "no: only CUDA devices record steps"
    if device.type == "cuda":
        recorded = (
            "no: fp16 needs a loss scale, which the host decides"
            if dtype == torch.float16
            else "yes: steps with recurring shapes; a run reports how many were, and why others were not"
        )
    kernels = () if present else ("our kernels: not tried, there is no CUDA device here",)
    return Explanation(str(device), named, True, groups, kernels, recorded)
