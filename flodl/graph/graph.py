"""`Graph`: the class of built graphs, with paths, steps, files, observation and pictures.

Execution is in `core`, paths in `tree`, the generated source in `source`, measurements in `flodl.monitor`, files in
`flodl.checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flodl.errors import GraphError
from flodl.graph import tree
from flodl.graph.control import read_traces
from flodl.graph.core import GraphCore, nearest_graphs
from flodl.graph.nodes import offered
from flodl.graph.picture import Heat
from flodl.graph.source import compile_forward, forward_source
from flodl.graph.tree import PathKind, part_at

if TYPE_CHECKING:
    from flodl.checkpoint.files import LoadReport
    from flodl.monitor.observer import Observer
    from flodl.monitor.trend import Trend, TrendGroup


class Graph(GraphCore):
    """A built graph, an ordinary ``nn.Module``. Use `FlowBuilder` to build one.

    Call it as ``graph(x)``, with further declared inputs in order or as keywords: ``graph(x, mask=m)``. With
    ``outputs=["tag", "child.tag"]`` it returns ``(result, {"tag": value, ...})``. Values of any type pass
    through unchanged.

    Children are named by ``name=``, else by tag, else by node id, so ``state_dict()`` has the keys
    ``<node name>.<leaf>``.
    """

    def _observed_forward(self, outputs: Sequence[str] | None, *inputs: Any) -> Any:
        """Run with watched values, or with requested ones: ``outputs`` are tags, here or by path in graphs inside."""
        watched = self._watched
        distant = {name: _value_at(self, name) for name in outputs or () if "." in name}
        local = [name for name in outputs or () if "." not in name]
        for name in local:
            self.plan.require_value(name, "outputs")
        # The owners of distant values watch them during this call.
        before = [(owner, owner._watched) for owner, _ in distant.values()]
        for owner, segment in distant.values():
            owner._watched |= {segment}
        try:
            wanted = watched | frozenset(local)
            result, values = _variant(self, wanted)(self, *inputs) if wanted else (self.forward(*inputs), {})
            if watched:
                self._captured = {name: values[name] for name in watched}
            for name, (owner, segment) in distant.items():
                values[name] = owner._captured.get(segment)
        finally:
            for owner, names in reversed(before):
                owner._watched = names
                owner._captured = {name: value for name, value in owner._captured.items() if name in names}
        return result if outputs is None else (result, {name: values[name] for name in outputs})

    # steps and epochs

    def end_step(self) -> None:
        """End a training step: detach kept values, count the step, and collect timings if profiling is on."""
        self.detach_state()
        self._step_count += 1
        if self._observer is not None and self._observer.profiling():
            self._observer.collect_timings()

    def end_epoch(self) -> None:
        """End an epoch: flush observations and timings, and count the epoch."""
        self.observe.flush()
        self._epoch_count += 1

    def step_count(self) -> int:
        """Return the number of calls of `end_step`."""
        return self._step_count

    def epoch_count(self) -> int:
        """Return the number of calls of `end_epoch`."""
        return self._epoch_count

    # structure

    def structural_hash(self) -> str:
        """Return the SHA-256 of the structure, 64 hex digits.

        It covers the nodes in the order of execution (id, kind, name, parameter and buffer names with shapes, the
        hashes of graphs inside), edges, references, tags, inputs and the output; not weights, dtypes and the label.
        """
        plan = self.plan
        nodes = []
        for index in plan.order:
            node = plan.nodes[index]
            module = self._modules.get(node.name) if node.name else None
            references = [[r.keyword, r.tag, r.source] for r in node.references]
            structure = None if module is None else _structure(module)
            nodes.append([node.id, node.kind, node.name, node.mode, list(node.inputs), references, structure])
        record = {
            "nodes": nodes,
            "tags": sorted(plan.tags.items()),
            "inputs": [[i.name, i.node, i.required, repr(i.default)] for i in plan.inputs],
            "output": plan.output,
            "memory": list(plan.memory),
        }
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def traces(self, name: str) -> list[Tensor]:
        """Return the trace that a loop body published under a name.

        Raises:
            GraphError: no loop published the name, or several did.
        """
        return read_traces(self, name)

    def tree_summary(self) -> str:
        """Return one line for each graph, children indented: label, short hash, modules, parameters, tags."""
        plan = self.plan
        tags = ", ".join(tag for tag in plan.tags if tag not in plan.internal)
        line = f"{self.label or '(unlabelled)'} [{self.structural_hash()[:8]}] {len(plan.calls)} modules"
        line += f", {sum(p.numel() for p in self.parameters()):,} parameters"
        line += f", tags: {tags}" if tags else ""
        line += f", {len(plan.internal)} internal" if plan.internal else ""
        return "\n".join([line, *(indent(child.tree_summary(), "  ") for child in self.tree_children().values())])

    def param_summary(self) -> str:
        """Return a table of the parameters of labelled children, the rest and the total.

        Counts are elements, tied parameters once; a parameter of two children counts for the first.
        """
        seen: set[int] = set()
        rows: list[tuple[str, list[nn.Parameter]]] = []
        for label, child in (*self.tree_children().items(), ("(own)", self)):
            rows.append((label, [p for p in child.parameters() if id(p) not in seen]))
            seen.update(map(id, rows[-1][1]))
        rows.append(("total", list(self.parameters())))
        width = max(len(label) for label, _ in rows)
        lines = [f"{'part':<{width}}  {'elements':>14}  {'trainable':>14}  {'frozen':>14}  state"]
        for label, parameters in rows:
            total = sum(p.numel() for p in parameters)
            trainable = sum(p.numel() for p in parameters if p.requires_grad)
            state = "none" if not total else {total: "trainable", 0: "frozen"}.get(trainable, "partly frozen")
            lines.append(f"{label:<{width}}  {total:>14,}  {trainable:>14,}  {total - trainable:>14,}  {state}")
        return "\n".join(lines)

    # paths

    def subgraph(self, path: str) -> Self:
        """Return the graph at a path.

        Raises:
            GraphPathError: the path names nothing, or something that is not a graph.
        """
        return cast("Self", tree.subgraph(self, path))

    def validate_path(self, path: str) -> PathKind:
        """Return whether a path names a graph, a tag or another module.

        Raises:
            GraphPathError: the path names nothing.
        """
        return tree.parts_at(self, path)[0].kind

    def parameters_at(self, *paths: str) -> list[nn.Parameter]:
        """Return the parameters at the paths, each once; useful as parameter groups.

        Raises:
            GraphPathError: a path names nothing, or a value that is not the output of one module.
        """
        return list({id(p): p for module in self._modules_at(paths) for p in module.parameters()}.values())

    def freeze(self, *paths: str) -> None:
        """Exclude the parameters at the paths from training; errors as for `parameters_at`."""
        for parameter in self.parameters_at(*paths):
            parameter.requires_grad_(False)

    def thaw(self, *paths: str) -> None:
        """Include the parameters at the paths in training again; errors as for `parameters_at`."""
        for parameter in self.parameters_at(*paths):
            parameter.requires_grad_(True)

    def is_frozen(self, path: str) -> bool:
        """Return whether the path has parameters and all of them are frozen."""
        parts = [part.module for part in tree.parts_at(self, path) if part.module is not None]
        found = [parameter for module in parts for parameter in module.parameters()]
        return bool(found) and not any(parameter.requires_grad for parameter in found)

    def set_training_at(self, path: str, mode: bool) -> None:
        """Set train or eval mode at a path; a later ``train()`` of the whole graph overrides it."""
        for module in self._modules_at((path,)):
            module.train(mode)

    def _modules_at(self, paths: tuple[str, ...]) -> list[nn.Module]:
        return [tree.module_at(part) for path in paths for part in tree.parts_at(self, path)]

    # files

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write parameters, buffers and the structural hash; the suffix of the file selects the format."""
        from flodl.checkpoint import save_tensors
        from flodl.files import write_atomically

        tensors = {name: value.detach() for name, value in self._stored_tensors().items()}
        save_tensors(path, tensors, structural_hash=self.structural_hash())
        if self._source_config is not None:
            file = Path(path)
            name = file.name.removesuffix(".gz").removesuffix(".fdl").removesuffix(".safetensors")
            write_atomically(file.with_name(f"{name}.config.json"), [self._source_config.encode()])

    def load_checkpoint(self, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> LoadReport:
        """Load a checkpoint and return the loaded, skipped and missing names.

        Raises:
            CheckpointError: another structure, or values that are NaN or infinite. Nothing is copied then.
        """
        from flodl.checkpoint import load_into, load_tensors

        return load_into(
            self._stored_tensors(),
            load_tensors(path),
            expected_hash=self.structural_hash(),
            allow_nonfinite=allow_nonfinite,
        )

    def load_subgraph_checkpoint(self, path: str, file: str | os.PathLike[str]) -> LoadReport:
        """Load the checkpoint of a separate graph into the sub-graph at ``path``.

        Raises:
            GraphPathError: the path is not a graph.
            CheckpointError: the file is of another structure. Nothing is copied then.
        """
        return self.subgraph(path).load_checkpoint(file)

    def set_source_config(self, config: str | None) -> None:
        """Set the configuration (JSON text) that `save_checkpoint` writes next to the file; None for none."""
        self._source_config = config

    def _stored_tensors(self) -> dict[str, Tensor]:
        """Return the named parameters and persistent buffers; tied ones only under their first name."""
        state = self.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(state.items())}
        return {name: value for name, value in state.items() if isinstance(value, Tensor) and first[id(value)] == name}

    # observation

    @property
    def observe(self) -> Observer:
        """The observer of this graph; copies and pickles start without one."""
        from flodl.monitor.observer import observer_of

        return observer_of(self)

    def record(self, tag: str, values: Iterable[float | Tensor]) -> None:
        """Append values from outside the graph to the buffer of ``tag``."""
        self.observe.record(tag, values)

    def record_scalar(self, tag: str, value: float) -> None:
        """Append a value from outside the graph, such as a loss, to a buffer."""
        self.observe.record_scalar(tag, value)

    def collect(self, *tags: Any) -> None:
        """Append the scalar values of tags to their buffers; the tags are watched from the next call on."""
        self.observe.collect(*tags)

    def collect_with(self, *tags: Any, reduce: Any) -> None:
        """Append values of tags, reduced to one number by ``reduce``, to their buffers."""
        self.observe.collect_with(*tags, reduce=reduce)

    def flush(self, *tags: Any) -> None:
        """Move buffer means to the histories, also in labelled children."""
        self.observe.flush(*tags)

    def trend(self, tag: str) -> Trend:
        """Return the history of one metric."""
        return self.observe.trend(tag)

    def trends(self, *tags: Any) -> TrendGroup:
        """Return the histories of several metrics; a tag group stands for its members."""
        return self.observe.trends(*tags)

    def latest_metrics(self) -> list[tuple[str, float]]:
        """Return the last value of each metric; a metric of a child is named ``label.metric``."""
        return self.observe.latest_metrics()

    def record_at(self, path: str, value: float) -> None:
        """Append a value to a metric of a sub-graph; the last segment of the path is the metric."""
        self.observe.record_at(path, value)

    def collect_at(self, *paths: Any) -> None:
        """Append the scalar values of tags at these paths, as `collect` does."""
        self.observe.collect_at(*paths)

    def trend_at(self, path: str) -> Trend:
        """Return the history of a metric of a sub-graph."""
        return self.observe.trend_at(path)

    # pictures

    def dot(
        self,
        *,
        profiled: bool = False,
        heat: Heat | None = None,
        open: Sequence[str] | bool = (),
        fold: bool = True,
    ) -> str:
        """Return a picture of the graph as DOT text for Graphviz.

        Args:
            profiled: colour by the times of the last call, if it was profiled.
            heat: other measurements to colour by: ``look.memory`` of `flodl.monitor.look_at`.
            open: paths of modules to draw with their contents; True for every sub-graph.
            fold: draw equal neighbours as one box with their number.

        Raises:
            GraphError: a path in ``open`` is not a module with children, or two measurements are given.
        """
        from flodl.graph import picture

        return picture.dot(self, heat=self._heat(profiled, heat), open=open, fold=fold)

    def svg(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        profiled: bool = False,
        heat: Heat | None = None,
        open: Sequence[str] | bool = (),
        fold: bool = True,
    ) -> str:
        """Return a picture of the graph as SVG text; with ``path`` also write it.

        Other arguments and errors as for `dot`.
        """
        from flodl.files import write_atomically
        from flodl.graph import picture

        text = picture.svg(self, heat=self._heat(profiled, heat), open=open, fold=fold)
        if path is not None:
            write_atomically(path, [text.encode()])
        return text

    def _heat(self, profiled: bool, heat: Heat | None) -> Heat | None:
        if profiled and heat is not None:
            raise GraphError("picture: found profiled=True and heat=, expected one of them. A box has one colour.")
        profile = self.observe.profile() if profiled else None
        if profile is None:
            return heat
        return Heat("time", {node.name: node.seconds for node in profile.nodes}, profile.total_s)

    def _repr_html_(self) -> str:
        return self.svg()


class GraphSteps:
    """The graphs inside a model that a trainer runs: steps and epochs, and values kept between calls.

    A graph with a forward reference reads a value of its previous call. The trainer detaches such values before each
    step, isolates them during evaluation, and stores them in checkpoints.

    Args:
        model: a graph, or a module with or without graphs inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Find the graphs again after the model or watched values changed."""
        self._graphs = [graph for _, graph in nearest_graphs(self.model) if isinstance(graph, Graph)]
        self._keeping = [graph for graph in self._graphs if _keeps(graph)]

    @property
    def remembers(self) -> bool:
        """Whether a call depends on the previous one."""
        return bool(self._stateful())

    def cut(self) -> None:
        """Detach the kept values."""
        for graph in self._keeping:
            graph.detach_state()

    def end_step(self) -> None:
        """End a step in every graph."""
        for graph in self._graphs:
            if graph in self._keeping or (graph._observer is not None and graph._observer.profiling()):
                graph.end_step()
            else:
                graph._step_count += 1

    def end_epoch(self) -> None:
        """End an epoch in every graph."""
        for graph in self._graphs:
            graph.end_epoch()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Start with empty kept values, and restore the previous ones afterwards."""
        before = [(graph, list(graph._memory)) for graph in self._stateful().values()]
        for graph, memory in before:
            graph._memory[:] = [None] * len(memory)
        try:
            yield
        finally:
            for graph, memory in before:
                graph._memory[:] = memory

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the kept values with their names."""
        return {
            f"{name}/{i}": value.detach().clone()
            for name, graph in self._stateful().items()
            for i, value in enumerate(graph._memory)
            if isinstance(value, Tensor)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`, on the devices of the graphs' parameters."""
        for name, graph in self._stateful().items():
            device = next((p.device for p in graph.parameters()), None)
            for i in range(len(graph._memory)):
                value = tensors.get(f"{name}/{i}")
                graph._memory[i] = None if value is None else value.clone().to(device)

    def _stateful(self) -> dict[str, Graph]:
        """Return the graphs with kept values by module path."""
        modules = self.model.named_modules()
        return {name: module for name, module in modules if isinstance(module, Graph) and module.has_state()}


def _keeps(module: nn.Module) -> bool:
    """Return whether a module, or a module inside it, keeps values from one call to the next."""
    # Watched values of tags are detached when they are collected.
    return any(
        part.has_state() if isinstance(part, Graph) else callable(getattr(type(part), "detach_state", None))
        for part in module.modules()
    )


def _variant(graph: GraphCore, names: frozenset[str]) -> Callable[..., Any]:
    """Return a forward pass that returns ``(result, {name: value})`` for at least one name."""
    if torch.compiler.is_compiling():
        # A graph cannot be changed while a compiler traces it. The compiler drops the unused values.
        return type(graph)._forward_captured
    function = graph._variants.get(names)
    if function is None:
        function = graph._variants[names] = compile_forward(forward_source(graph.plan, names))
    return function


def _value_at(graph: GraphCore, path: str) -> tuple[GraphCore, str]:
    """Return the graph that owns a value, and the name of the value there."""
    part = part_at(graph, path)
    if part.owner is None or part.owner.plan.value_of(part.segment) is None:
        problem = f"{part.segment!r} is neither a tag nor a node of a graph, so it has no value"
        raise tree.path_fault(path, part.segment, problem)
    return part.owner, part.segment


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
        [cast("Graph", inner).structural_hash() for _, inner in nearest_graphs(module)],
    ]


def _shape(tensor: Any) -> list[int] | str:
    return "lazy" if is_lazy(tensor) else list(tensor.shape)
