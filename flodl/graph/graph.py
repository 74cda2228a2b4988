"""`Graph`: the class of built graphs, with paths, steps, files, observation and pictures.

Execution is in `core`, paths in `tree`, the generated source in `source`, measurements in `flodl.monitor`, files in
`flodl.checkpoint`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from torch import Tensor, nn

from flodl.errors import GraphError
from flodl.graph import summary, tree
from flodl.graph.core import GraphCore
from flodl.graph.fingerprint import structural_hash
from flodl.graph.loops import read_traces
from flodl.graph.picture import Heat
from flodl.graph.tag_values import run_captured
from flodl.graph.tree import PathKind

if TYPE_CHECKING:
    from flodl.checkpoint import LoadReport
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
        return run_captured(self, outputs, inputs)

    # steps and epochs

    def end_step(self) -> None:
        """End a training step: detach kept values, count the step, and collect timings if profiling is on."""
        self.detach_state()
        self._step_count += 1
        if self._observer is not None and self._observer.profiling():
            self._observer.collect_timings()

    def end_epoch(self) -> None:
        """End an epoch: flush observations and timings, and count the epoch."""
        self.observe.end_epoch()
        self._epoch_count += 1

    def step_count(self) -> int:
        """Return the number of calls of `end_step`."""
        return self._step_count

    def epoch_count(self) -> int:
        """Return the number of calls of `end_epoch`."""
        return self._epoch_count

    # structure

    def structural_hash(self) -> str:
        """Return the SHA-256 of the structure, 64 hex digits, without weights and label."""
        return structural_hash(self)

    def traces(self, name: str) -> list[Tensor]:
        """Return the trace that a loop body published under a name.

        Raises:
            GraphError: no loop published the name, or several did.
        """
        return read_traces(self, name)

    def tree_summary(self) -> str:
        """Return the tree of graphs as indented text: label, hash, counts, tags."""
        return summary.tree_summary(self)

    def param_summary(self) -> str:
        """Return a table of trainable and frozen parameters by child."""
        return summary.param_summary(self)

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

    def collect_with(self, *tags_and_reduce: Any, reduce: Any = None) -> None:
        """Append values of tags, reduced to one number by ``reduce``, to their buffers."""
        self.observe.collect_with(*tags_and_reduce, reduce=reduce)

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
        layout: str | None = None,
    ) -> str:
        """Return a picture of the graph as SVG text; with ``path`` also write it.

        Other arguments and errors as for `dot`.
        """
        from flodl.files import write_atomically
        from flodl.graph import picture

        if layout is not None:
            warnings.warn("svg: layout= is deprecated. Use dot() with Graphviz.", DeprecationWarning, stacklevel=2)
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
        seconds: dict[str, float] = {}
        for node in profile.nodes:
            seconds[node.name] = seconds.get(node.name, 0.0) + node.seconds
        return Heat("time", seconds, profile.total_s)

    def _repr_html_(self) -> str:
        return self.svg()
