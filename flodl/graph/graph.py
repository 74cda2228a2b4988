"""The graph as users hold it: what runs, with the verbs for paths, steps, files, observation and pictures.

How a graph runs is decided in `core`, what a path means in `tree`, what the source looks like in `source`, what is
measured in `flodl.monitor`, and how files look in `flodl.checkpoint`; the methods here only lead there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from flodl.errors import GraphError, GraphPathError
from flodl.graph import saving, summary, traces, tree
from flodl.graph.core import GraphCore
from flodl.graph.fingerprint import structural_hash
from flodl.graph.heat import Heat
from flodl.graph.tag_values import run_captured
from flodl.graph.tree import PathKind

if TYPE_CHECKING:
    from flodl.checkpoint import LoadReport
    from flodl.monitor.observer import Observer
    from flodl.monitor.trend import Trend, TrendGroup

__all__ = ["Graph"]


class Graph(GraphCore):
    """A built graph. Make one by `FlowBuilder`, not by calling this class.

    Call it as ``graph(x)``, with further declared inputs in order or by name: ``graph(x, mask=m)``. With
    ``outputs=["tag", "child.tag"]`` it returns ``(result, {"tag": value, ...})``. Values pass through
    untouched, whatever they are.

    Children are named by ``name=``, else by tag, else by node id, so ``state_dict()`` reads
    ``<node name>.<leaf>``.
    """

    def _observed_forward(self, outputs: Sequence[str] | None, *inputs: Any) -> Any:
        return run_captured(self, outputs, inputs)

    # steps and epochs

    def end_step(self) -> None:
        """Close a training step: cut histories, count it, and collect timings when profiling."""
        self.detach_state()
        self._step_count += 1
        if self._observer is not None and self._observer.profiling():
            self._observer.collect_timings()

    def end_epoch(self) -> None:
        """Close an epoch: flush observations and timings, and count it."""
        self.observe.end_epoch()
        self._epoch_count += 1

    def step_count(self) -> int:
        """Return how often `end_step` was called."""
        return self._step_count

    def epoch_count(self) -> int:
        """Return how often `end_epoch` was called."""
        return self._epoch_count

    # what the graph is

    def structural_hash(self) -> str:
        """Return the SHA-256 of the structure, 64 hex digits; neither weights nor label are in it."""
        return structural_hash(self)

    def short_hash(self) -> str:
        """Return the first 8 digits of the structural hash."""
        return self.structural_hash()[:8]

    def traces(self, name: str) -> list[Tensor]:
        """Return what a loop left under ``name``: the tag of a loop whose body traces, or a published name.

        Raises:
            GraphError: when the name means two things, or nothing.
        """
        return traces.read(self, name)

    def traces_named(self, name: str) -> list[Tensor]:
        """Return the trace that a loop body published as ``name``."""
        return traces.read_named(self, name)

    def traces_by_node(self, node_id: str) -> list[Tensor]:
        """Return what the body's ``trace()`` left in the loop with this node id."""
        return traces.read_node(self, node_id)

    def last_trace(self, name: str) -> Tensor | None:
        """Return the last element of a trace, or None when it is empty."""
        found = self.traces(name)
        return found[-1] if found else None

    # places in the tree

    def subgraph(self, path: str) -> Self:
        """Return the graph at a path.

        Raises:
            GraphPathError: when the path leads nowhere, or to something that is not a graph.
        """
        return cast("Self", tree.subgraph(self, path))

    def validate_path(self, path: str) -> PathKind:
        """Return what a path names.

        Raises:
            GraphPathError: when it names nothing.
        """
        return tree.resolve(self, path)[0].kind

    def parameters_at(self, *paths: str) -> list[nn.Parameter]:
        """Return the parameters at the paths, each once."""
        return list({id(p): p for target in self._targets(paths) for p in tree.target_parameters(target)}.values())

    def named_parameters_at(self, path: str) -> dict[str, Tensor]:
        """Return parameters by name: a graph's in its own namespace, a tag's as ``tag.leaf``."""
        return tree.named_tensors(tree.resolve(self, path), "parameters")

    def named_buffers_at(self, path: str) -> dict[str, Tensor]:
        """Return buffers by name, as `named_parameters_at` does."""
        return tree.named_tensors(tree.resolve(self, path), "buffers")

    def freeze(self, *paths: str) -> None:
        """Stop gradients for every parameter at the paths; nothing is changed when one of them is wrong."""
        tree.set_frozen(self._targets(paths), True)

    def thaw(self, *paths: str) -> None:
        """Let gradients flow again for every parameter at the paths."""
        tree.set_frozen(self._targets(paths), False)

    def is_frozen(self, path: str) -> bool:
        """Return whether there are parameters at the path and none of them takes gradients."""
        found = [p for t in tree.resolve(self, path) if t.module is not None for p in t.module.parameters()]
        return bool(found) and not any(p.requires_grad for p in found)

    def set_training_at(self, path: str, mode: bool) -> None:
        """Switch train or eval mode at a path only; a later ``train()`` of the whole graph overrides it."""
        for module in [tree.target_module(target) for target in tree.resolve(self, path)]:
            module.train(mode)

    def set_training(self, mode: bool) -> None:
        """Switch train or eval mode of the whole graph."""
        self.train(mode)

    def set_device(self, device: torch.device | str) -> None:
        """Move the whole graph."""
        self.to(device)

    def tagged_at(self, path: str) -> Any:
        """Return what `tagged` of the graph that owns the tag returns.

        Raises:
            GraphPathError: when the path is bad or names a graph.
        """
        target = tree.resolve_one(self, path)
        if target.kind is not PathKind.TAG:
            raise GraphPathError(f"path {path!r} names a {target.kind}, not a tag", path=path, segment=target.segment)
        return target.owner.tagged(target.segment)

    def _targets(self, paths: tuple[str, ...]) -> list[tree.Target]:
        return [target for path in paths for target in tree.resolve(self, path)]

    def tree_summary(self) -> str:
        """Return the tree as indented text: label, hash, counts, tags."""
        return summary.tree_summary(self)

    def param_summary(self) -> str:
        """Return a table of parameter elements, for each child and the rest, trainable and frozen."""
        return summary.param_summary(self)

    # files

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and buffers with the structural hash; the format follows the file's ending."""
        saving.save(self, path, self.source_config())

    def load_checkpoint(self, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> LoadReport:
        """Copy a checkpoint into this graph and return what was loaded, skipped and missing.

        Raises:
            CheckpointError: made for another structure, or NaN or infinite unless allowed; nothing is copied.
        """
        return saving.load(self, path, allow_nonfinite=allow_nonfinite)

    def load_subgraph_checkpoint(self, path: str, file: str | os.PathLike[str]) -> LoadReport:
        """Copy a checkpoint of a graph saved alone into the sub-graph at ``path``.

        Raises:
            GraphPathError: when the path is not a graph.
            CheckpointError: when the file was made for another structure; then nothing is copied.
        """
        return saving.load(self.subgraph(path), file)

    def set_source_config(self, config: str) -> None:
        """Remember a configuration (JSON text) that `save_checkpoint` writes beside the file."""
        self._source_config = config

    def source_config(self) -> str | None:
        """Return the remembered configuration."""
        return self._source_config

    def clear_source_config(self) -> None:
        """Forget the remembered configuration."""
        self._source_config = None

    # observation: the graph only forwards to its observer

    @property
    def observe(self) -> Observer:
        """The observer of this graph, made when first asked for; copies and pickles start without one."""
        from flodl.monitor.observer import observer_of

        return observer_of(self)

    def record(self, tag: str, values: Iterable[float | Tensor]) -> None:
        """Append values that are no outputs of the graph to the buffer of ``tag``."""
        self.observe.record(tag, values)

    def record_scalar(self, tag: str, value: float) -> None:
        """Append a value that is no output of the graph, such as a loss, to the buffer of ``tag``."""
        self.observe.record_scalar(tag, value)

    def collect(self, *tags: Any) -> None:
        """Append the scalar values of tags to their buffers; what is named here is watched from then on."""
        self.observe.collect(*tags)

    def collect_with(self, *tags_and_reduce: Any, reduce: Any = None) -> None:
        """Append values of tags, reduced to one number by ``reduce``, to their buffers."""
        self.observe.collect_with(*tags_and_reduce, reduce=reduce)

    def flush(self, *tags: Any) -> None:
        """Move the mean of each buffer to its history, here and in labelled children."""
        self.observe.flush(*tags)

    def trend(self, tag: str) -> Trend:
        """Return the history of one metric."""
        return self.observe.trend(tag)

    def trends(self, *tags: Any) -> TrendGroup:
        """Return the histories of several metrics, groups opened."""
        return self.observe.trends(*tags)

    def latest_metrics(self) -> list[tuple[str, float]]:
        """Return the last value of each metric: own ones, then those of children as ``label.metric``."""
        return self.observe.latest_metrics()

    def record_at(self, path: str, value: float) -> None:
        """Append a value to a metric of a sub-graph; the last segment is the metric's name."""
        self.observe.record_at(path, value)

    def collect_at(self, *paths: Any) -> None:
        """Do what `collect` does for tags anywhere in the tree."""
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
            open: paths of modules whose inside is shown; True for every sub-graph.
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
        """Return a picture of the graph as SVG text, and write it to ``path`` if one is given.

        The other arguments and errors are those of `dot`.
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
        seconds: dict[str, float] = {}
        for node in profile.nodes:
            seconds[node.name] = seconds.get(node.name, 0.0) + node.seconds
        return Heat("time", seconds, profile.total_s)

    def _repr_html_(self) -> str:
        return self.svg()
