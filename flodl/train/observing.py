"""Watched values of a run and its rules: trends, averaged over ranks, and what rules do when they meet a condition.

Values inside a model are collected in each forward pass under dotted names. A name is a path in the tree of graphs: of
a tag, of a member of a tag group, of a scalar recorded in a graph, or of a module whose output is watched.
`flodl.train.steplog` emits the values of steps, and `flodl.train.rules` defines rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flodl.distributed.group import Ranks
from flodl.errors import GraphError, GraphPathError, TrainError, nearest
from flodl.graph.core import GraphCore
from flodl.graph.graph import GraphSteps
from flodl.graph.tree import Part, named_graphs, parameters_at, parts_at
from flodl.monitor.collect import Collector, Pair, Reduce, current_collector, reduce_named, set_collector
from flodl.monitor.conditions import Condition, RuleContext
from flodl.monitor.observer import observer_of
from flodl.monitor.trend import Trend
from flodl.train.events import Decided, EpochMetrics, Observed
from flodl.train.rules import as_rule
from flodl.train.settings import Settings
from flodl.train.steplog import Tally, epoch_metrics, means

KINDS = ("training", "watched", "evaluation")


class Observing:
    """Watched values, trends and rules of one run.

    Args:
        model: the trained model.
        ranks: the ranks, which all act alike.
        settings: settings of the run.

    Attributes:
        watching: collects values in forward passes.
        graphs: the graphs in the model; the run ends their steps and epochs.
        rules: rules of the run, in the order in which they act.
        acted: the step at which each rule acted, by its position.
        values: the figures of trends, by kind and name. If kinds share a name, evaluation has priority, then watched
            values.
        epochs: watched values of each epoch, averaged over ranks.
        before: totals of this rank at the end of the last window, as JSON values.

    Raises:
        ConfigError: an invalid rule.
        GraphPathError: a path without parameters.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, settings: Settings) -> None:
        self.model, self.ranks, self.settings = model, ranks, settings
        self.graphs, self.watching = GraphSteps(model), Watching(model, settings.watch)
        self.rules = tuple(as_rule(rule) for rule in settings.rules)
        self._parameters = [list(parameters_at(model, r.path).values()) if r.path else [] for r in self.rules]
        self.acted: dict[int, int] = {}
        self.values: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
        self.epochs: list[dict[str, float]] = []
        self._optimizer: Any = None
        self._has_new_values = False
        self._looked_at = 0
        self.before = Tally().to_dict()

    def optimizer(self, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimiser of ``make()``, with parameters that a rule may thaw, and a group for each own rate.

        Raises:
            TrainError: the optimiser lacks a parameter that a rule thaws or whose rate it changes.
        """
        pairs = list(zip(self.rules, self._parameters, strict=True))
        frozen = [p for rule, found in pairs if rule.action == "thaw" for p in found if not p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            optimizer = self._optimizer = make()
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for rule, parameters in pairs:
            lacking = sum(id(p) not in known for p in parameters)
            if lacking and (rule.action == "thaw" or (rule.action == "rate" and lacking == len(parameters))):
                raise TrainError(
                    f"rules: {str(rule)!r} acts on {lacking} parameters that the optimiser lacks. Pass a factory.",
                    rule=str(rule),
                )
            if rule.action == "rate":
                _split(optimizer, {id(p) for p in parameters})
        return optimizer

    def refresh(self) -> None:
        """Update after a change of the model or of its watched values."""
        self.graphs.refresh()
        self.watching.refresh()

    # ---- trends --------------------------------------------------------------------------------------

    def note(self, kind: str, figures: Mapping[str, float]) -> None:
        """Add the newest values of trends, equal on all ranks."""
        if self.rules:
            for name, value in figures.items():
                self.values[kind].setdefault(name, []).append(float(value))
            self._has_new_values = True

    def end_epoch(self, metrics: EpochMetrics, parts: Sequence[Mapping[str, Any]]) -> Observed | None:
        """End an epoch of all graphs, and return its watched values; None if there are none.

        Args:
            metrics: metrics of the epoch.
            parts: totals of all ranks.

        Raises:
            TrainError: a rule names a figure that does not exist.
        """
        values = means([part["observed"] for part in parts])
        self.epochs.append(values)
        # Negative totals: the first window of the next epoch includes the last steps of this one.
        self.before = _less(self.before, parts[self.ranks.rank])
        self.watching.hand_back(values)
        self.graphs.end_epoch()
        if self.settings.trend_every is None:
            self._note(metrics, values)
        if self.values["training"]:
            self._check_names()
        if not values:
            return None
        return Observed(rank=self.ranks.rank, step=metrics.step, epoch=metrics.epoch, scope="epoch", values=values)

    def _note(self, metrics: EpochMetrics, values: Mapping[str, float]) -> None:
        named = {name: value for found, value in metrics.metrics.items() for name in (found, f"train/{found}")}
        self.note("training", {**named, "loss": metrics.loss})
        self.note("watched", values)

    def _check_names(self) -> None:
        """Check that the figures of all rules exist; watched values may get their first value later."""
        known = {name for kind in KINDS for name in self.values[kind]}
        for rule in self.rules:
            for name in rule.condition.names if isinstance(rule.condition, Condition) else ():
                if name not in known and name not in self.settings.watch:
                    raise TrainError(
                        f"rules: {str(rule)!r} reads {name!r}{nearest(name, known)}, which has no value; expected one "
                        f"of {', '.join(sorted(known))}.",
                        name=name,
                    )

    # ---- rules ---------------------------------------------------------------------------------------

    def apply_rules(self, trainer: Any, flags: Sequence[float] = ()) -> None:
        """Apply the rules if their trends have new values; all ranks call this after the same step."""
        steps, every = trainer.policy.steps, self.settings.trend_every
        if every and self.rules and self._looked_at // every < steps // every:
            trainer.log.settle(trainer.tally)
            tally = trainer.tally.to_dict()
            parts = self.ranks.gather(_less(tally, self.before))
            self._looked_at, self.before = steps, tally
            shared = trainer.step_.share_gradients
            figures = epoch_metrics(parts, shared_loss=shared, epoch=0, step=steps, evaluated={})
            self._note(figures, means([part["observed"] for part in parts]))
        for decided in self._decide(steps, trainer.epoch_number) if self._has_new_values else ():
            trainer.events.emit(decided)
            trainer.step_.loaded()
            trainer.stopping = trainer.stopping or decided.action == "stop"

    def _decide(self, step: int, epochs: int) -> list[Decided]:
        """Act by the rules with a true condition, and return them."""
        self._has_new_values = False
        trends = {name: Trend(values, name) for kind in KINDS for name, values in self.values[kind].items()}
        context = RuleContext(trends, epochs, step)
        waiting = [position for position in range(len(self.rules)) if position not in self.acted]
        answers = [float(self.rules[position].condition(context)) for position in waiting]
        if waiting and not self.ranks.solo:
            answers = self.ranks.table(answers)[0]  # functions of the user may differ between ranks
        decided = []
        for position, answer in zip(waiting, answers, strict=True):
            if not answer:
                continue
            rule = self.rules[position]
            self.acted[position] = step
            self._act(position)
            about: Any = {"rank": self.ranks.rank, "step": step, "epoch": epochs, "rule": str(rule)}
            decided.append(Decided(**about, action=rule.action, path=rule.path, reason=rule.why(context)))
            if rule.action == "freeze" and not any(p.requires_grad for p in self.model.parameters()):
                decided.append(Decided(**about, action="stop", path="", reason="no trainable parameter is left"))
        return decided

    def _act(self, position: int) -> None:
        rule, parameters = self.rules[position], self._parameters[position]
        for parameter in parameters if rule.action in ("freeze", "thaw") else ():
            parameter.requires_grad_(rule.action == "thaw")
            parameter.grad = None
        if rule.action == "rate":
            chosen = {id(p) for p in parameters}
            for group in self._optimizer.param_groups:
                if group["params"] and all(id(p) in chosen for p in group["params"]):
                    group["lr_scale"] = group.get("lr_scale", 1.0) * rule.scale
                    group["lr"] *= rule.scale  # in place if it is a tensor

    # ---- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, as JSON values."""
        acted = {str(self.rules[position]): step for position, step in self.acted.items()}
        trends = {"values": self.values, "acted": acted} if self.rules else {}
        return {"epochs": self.epochs, "looked_at": self._looked_at, **trends}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Restore `state_dict`, the state of this rank and the histories of graphs; freeze and thaw again.

        Learning rates are in the state of the optimiser.
        """
        for kind, series in state.get("values", {}).items():
            self.values[kind] = {name: list(values) for name, values in series.items()}
        acted = state.get("acted", {})
        self.acted = {place: acted[str(rule)] for place, rule in enumerate(self.rules) if str(rule) in acted}
        for position in sorted(self.acted, key=lambda position: (self.acted[position], position)):
            if self.rules[position].action in ("freeze", "thaw"):
                self._act(position)
        self._looked_at = state.get("looked_at", 0)
        self.before = own.get("before", self.before)
        self.epochs = [dict(values) for values in state.get("epochs", ())]
        self.watching.hand_back_all(self.epochs)


def _split(optimizer: torch.optim.Optimizer, chosen: set[int]) -> None:
    """Split groups of which only some parameters are chosen."""
    for group in list(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in chosen]
        if inside and len(inside) < len(group["params"]):
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
            optimizer.add_param_group({**group, "params": inside})


def _less(a: Any, b: Any) -> Any:
    """Return the difference of two results of `Tally.to_dict`; missing values are 0."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        return {key: _less((a or {}).get(key), (b or {}).get(key)) for key in {**(a or {}), **(b or {})}}
    if isinstance(a, list) or isinstance(b, list):
        return [_less(x, y) for x, y in zip(a or [0.0] * len(b), b or [0.0] * len(a), strict=True)]
    return (a or 0) - (b or 0)


class Watching:
    """Collects watched values of one model.

    Args:
        model: a graph, or a module with or without graphs inside.
        wanted: paths to watch in addition to the watched tags of its graphs, each with a reduction if not the mean
            (``"encoder.features:norm"``). A tag or tag group is watched by its value; a node, sub-graph or module by
            its output. A range such as ``layers.0-3`` stands for each of its members.

    Attributes:
        idle: collects logged values if nothing is watched; None otherwise.

    Raises:
        GraphError: an unknown reduction.
        GraphPathError: an unknown path.
    """

    def __init__(self, model: nn.Module, wanted: Sequence[str] = ()) -> None:
        self.model = model
        self._undo: list[Callable[[], Any]] = []
        self._collector = Collector()
        self._before: Collector | None = None
        self._is_inside = False
        for text in wanted:
            path, colon, how = text.partition(":")
            reduce = reduce_named(how, f"watch {text!r}") if colon else Reduce.MEAN
            for part in parts_at(model, path):
                self._watch(part, reduce)
        self.refresh()

    def _watch(self, part: Part, how: Reduce) -> None:
        if part.tag is not None and part.owner is not None and not _is_output_of_module(part):
            owner, tag = part.owner, part.tag
            observer, is_new = observer_of(owner), tag not in owner.watched
            before = list(observer.reductions.get(tag, ())) or ([] if is_new else [Reduce.MEAN])
            observer.reductions[tag] = before
            if how not in before:
                observer.watch(tag, reduce=how)
                self._undo.append(partial(observer.reductions[tag].remove, how))
            if is_new:
                self._undo.append(partial(owner.unwatch, tag))
            return
        if part.module is None:
            raise GraphPathError(f"watch: {part.path!r} has no value", path=part.path, segment="")
        hook = partial(_collect_output, _value_name(part.path, how), how)
        self._undo.append(part.module.register_forward_hook(hook).remove)

    def close(self) -> None:
        """Stop watching values added here."""
        while self._undo:
            self._undo.pop()()

    def refresh(self) -> None:
        """Update after a change of the model or of its watched tags."""
        self._graphs = named_graphs(self.model)
        self._owners = {id(graph): name for name, graph in self._graphs}
        self._tags: list[tuple[GraphCore, list[tuple[str, str, Reduce]]]] = []
        for name, graph in self._graphs:
            prefix = f"{name}." if name else ""
            reductions = {} if graph._observer is None else graph._observer.reductions
            ways = [(tag, how) for tag in sorted(graph.watched) for how in reductions.get(tag) or [Reduce.MEAN]]
            if ways:
                self._tags.append((graph, [(tag, prefix + _value_name(tag, how), how) for tag, how in ways]))
        self.idle: Any = None if self._tags or self._undo else Collector(self._owners)

    def signature(self) -> tuple[Any, ...]:
        """Return a value that differs if other values are watched; a captured step depends on it."""
        return tuple((id(graph), tuple(graph.watched)) for _, graph in named_graphs(self.model))

    # ---- one forward pass ----------------------------------------------------------------------------

    def __enter__(self) -> Watching:
        """Collect from now on in this thread."""
        for graph, _ in self._tags:
            graph._captured = {}  # values of an earlier call
        self._collector = Collector(self._owners)
        before = set_collector(self._collector)
        self._before, self._is_inside = self._before if self._is_inside else before, True
        return self

    def __exit__(self, *error: object) -> None:
        """Stop collecting; may be called twice."""
        if self._is_inside:
            set_collector(self._before)
            self._is_inside, self._before = False, None

    def take(self) -> dict[str, Pair]:
        """Return names, sums and weights of the collected values."""
        collector, self._collector = self._collector, Collector()
        reported = set(collector.pairs)
        for graph, tags in self._tags:
            captured = graph._captured
            for tag, name, how in tags:
                value = captured.get(tag)
                if name not in reported and isinstance(value, (Tensor, float, int)):
                    _add(collector, name, value, how)
            graph._captured = {tag: v.detach() if isinstance(v, Tensor) else v for tag, v in captured.items()}
        return collector.pack()

    def take_idle(self) -> dict[str, Pair]:
        """Return names, sums and weights of values logged while nothing was watched."""
        collector, self.idle = self.idle, Collector(self._owners)
        return collector.pack()

    def holding(self) -> Callable[[], object] | None:
        """Return a function that restores the present values of tags after a replay; None without watched tags."""
        kept = [(graph, graph._captured) for graph, _ in self._tags]

        def restore() -> None:
            for graph, captured in kept:
                graph._captured = captured

        return restore if kept else None

    # ---- after an epoch ------------------------------------------------------------------------------

    def hand_back(self, values: Mapping[str, float]) -> None:
        """Store the values of an epoch in the observers of their graphs."""
        owners = sorted(self._graphs, key=lambda pair: -len(pair[0]))
        for name, value in values.items():
            for prefix, graph in owners:
                if not prefix or name.startswith(f"{prefix}."):
                    observer_of(graph).replace(name[len(prefix) + 1 :] if prefix else name, value)
                    break

    def hand_back_all(self, epochs: Iterable[Mapping[str, float]]) -> None:
        """Store the values of earlier epochs in the observers of graphs, unless these have a history."""
        observers = [observer_of(graph) for _, graph in self._graphs]
        if not any(observer.trends() for observer in observers):
            for values in epochs:
                self.hand_back(values)
                for observer in observers:
                    observer.flush_own()


def _is_output_of_module(part: Part) -> bool:
    """Return whether the value of a tag is the output of a module that the graph calls once.

    Its output is read by a hook, so its memory is free afterwards; a tag keeps its value until the step ends.
    """
    owner, tag = part.owner, part.tag
    if owner is None or tag is None or part.module is None or tag in owner.watched:
        return False
    return sum(owner._modules.get(node.name) is part.module for node in owner.plan.calls) == 1


def _value_name(path: str, how: Reduce) -> str:
    return path if how is Reduce.MEAN else f"{path}:{how}"


def _collect_output(name: str, how: Reduce, module: nn.Module, args: Any, output: Any) -> None:
    collector = current_collector()
    if collector is None:
        return
    value = output
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, (Tensor, float, int)):
        raise GraphError(
            f"watch {name!r}: the output of {type(module).__name__} is {type(output).__name__}, expected a tensor.",
            tag=name,
        )
    _add(collector, name, value, how)


def _add(collector: Collector, name: str, value: Tensor | float, how: Reduce) -> None:
    if not isinstance(value, Tensor):
        collector.add(name, float(value))
    elif value.numel():
        collector.add_tensor(name, value, how)
