"""When the rules of a run are looked at, and how they act on its model and optimiser.

Rules are looked at where all ranks know the same figures: after an evaluation, after an epoch, and where
``trend_every`` asks, between steps of all ranks. What a rule did is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.errors import TrainError, nearest
from flodl.graph.tree import parameters_at
from flodl.monitor.conditions import Condition, RuleContext
from flodl.monitor.trend import Trend
from flodl.train.events import Decided
from flodl.train.rules import Rule, as_rule

__all__ = ["Deciding"]

KINDS = ("training", "watched", "evaluation")


class Deciding:
    """The rules of one run, its trends, and what was decided so far.

    Args:
        model: whose parts rules act on.
        ranks: who has to decide alike.
        rules: rules, or texts of them.

    Attributes:
        rules: the rules in the order given, which is that in which they act.
        acted: the step at which each rule acted, by its place.
        values: the figures of trends, by kind and name. Where kinds share a name, evaluation wins, then what is
            watched.

    Raises:
        ConfigError: something is no rule.
        GraphPathError: a path that leads nowhere, or to nothing that learns.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, rules: Sequence[Rule | str] = ()) -> None:
        self.model, self.ranks = model, ranks
        self.rules = tuple(as_rule(rule) for rule in rules)
        self.acted: dict[int, int] = {}
        self.values: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
        self._parameters = [list(parameters_at(model, r.path).values()) if r.path else [] for r in self.rules]
        self._optimizer: torch.optim.Optimizer | None = None
        self._news = False

    # ---- before the run ------------------------------------------------------------------------------

    @contextmanager
    def all_that_will_learn(self) -> Iterator[None]:
        """Have parameters that a rule may thaw learn while inside, so that the optimiser takes them in."""
        thawed = [
            p
            for rule, parameters in zip(self.rules, self._parameters, strict=True)
            if rule.action == "thaw"
            for p in parameters
            if not p.requires_grad
        ]
        try:
            for parameter in thawed:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter in thawed:
                parameter.requires_grad_(False)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Have parameters whose rate may change lie in groups of their own.

        Raises:
            TrainError: a parameter that a rule lets learn, or whose rate it changes, is not in the optimiser.
        """
        self._optimizer = optimizer
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for rule, parameters in zip(self.rules, self._parameters, strict=True):
            lacking = sum(id(p) not in known for p in parameters)
            if lacking and (rule.action == "thaw" or (rule.action == "rate" and lacking == len(parameters))):
                raise TrainError(
                    f"rules: {str(rule)!r} acts on {lacking} parameters that the optimiser does not have. Expected "
                    "all of them; give the optimiser as a factory, or let its groups hold frozen parameters too.",
                    rule=str(rule),
                )
            if rule.action == "rate":
                _split(optimizer, {id(p) for p in parameters})

    # ---- what is known -------------------------------------------------------------------------------

    def note(self, kind: str, figures: Mapping[str, float]) -> None:
        """Take in the newest values of trends, the same on all ranks."""
        if self.rules:
            for name, value in figures.items():
                self.values[kind].setdefault(name, []).append(float(value))
            self._news = True

    @property
    def trends(self) -> dict[str, Trend]:
        """The trends that rules ask about."""
        return {name: Trend(values, name) for kind in KINDS for name, values in self.values[kind].items()}

    def check_names(self, allowed: Sequence[str] = ()) -> None:
        """Refuse rules about figures that there are none of, when all have had a value that will have one.

        Args:
            allowed: names that may get their first value later.

        Raises:
            TrainError: a rule names a figure that does not exist.
        """
        known = self.trends
        for rule in self.rules:
            names = rule.condition.names if isinstance(rule.condition, Condition) else []
            for name in names:
                if name not in known and name not in allowed:
                    raise TrainError(
                        f"rules: {str(rule)!r} asks about {name!r}{nearest(name, known)}, which has not been "
                        f"recorded so far. Expected one of {', '.join(known)}.",
                        name=name,
                    )

    # ---- deciding ------------------------------------------------------------------------------------

    def decide(self, step: int, epochs: int) -> list[Decided]:
        """Act on the rules that came true, and return what was done; all ranks call this at the same points.

        Args:
            step: steps that are done.
            epochs: epochs that are done.
        """
        if not self._news:
            return []
        self._news = False
        outlook = RuleContext(self.trends, epochs, step)
        waiting = [place for place in range(len(self.rules)) if place not in self.acted]
        answers = [float(self.rules[place].condition(outlook)) for place in waiting]
        if waiting and not self.ranks.solo:
            answers = self.ranks.table(answers)[0]  # figures are the same on all, functions of the user may not be
        told = []
        for place, answer in zip(waiting, answers, strict=True):
            if not answer:
                continue
            rule = self.rules[place]
            self.acted[place] = step
            self._act(place)
            about: Any = {"rank": self.ranks.rank, "step": step, "epoch": epochs, "rule": str(rule)}
            told.append(Decided(**about, action=rule.action, path=rule.path, reason=rule.why(outlook)))
            if rule.action == "freeze" and not any(p.requires_grad for p in self.model.parameters()):
                told.append(Decided(**about, action="stop", path="", reason="nothing is left that learns"))
        return told

    @property
    def stopped(self) -> bool:
        """Whether a rule ended the run."""
        return any(self.rules[place].action == "stop" for place in self.acted)

    def _act(self, place: int) -> None:
        rule, parameters = self.rules[place], self._parameters[place]
        if rule.action in ("freeze", "thaw"):
            self._learn(parameters, rule.action == "thaw")
        elif rule.action == "rate":
            assert self._optimizer is not None
            wanted = {id(p) for p in parameters}
            for group in self._optimizer.param_groups:
                if group["params"] and all(id(p) in wanted for p in group["params"]):
                    _scale(group, rule.scale)

    def _learn(self, parameters: Sequence[nn.Parameter], learn: bool) -> None:
        for parameter in parameters:
            parameter.requires_grad_(learn)
            parameter.grad = None

    # ---- in checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return trends and decisions as JSON values."""
        if not self.rules:
            return {}
        return {
            "values": self.values,
            "acted": {str(self.rules[place]): step for place, step in self.acted.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, and do again what was decided; rates are in the optimiser's state."""
        for kind, series in state.get("values", {}).items():
            self.values[kind] = {name: list(values) for name, values in series.items()}
        acted = dict(state.get("acted", {}))
        self.acted = {place: acted[str(rule)] for place, rule in enumerate(self.rules) if str(rule) in acted}
        for place in sorted(self.acted, key=lambda place: (self.acted[place], place)):
            if self.rules[place].action in ("freeze", "thaw"):
                self._act(place)


def _split(optimizer: torch.optim.Optimizer, wanted: set[int]) -> None:
    """Cut groups that hold some of the parameters and others too."""
    for group in list(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in wanted]
        if inside and len(inside) < len(group["params"]):
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            optimizer.add_param_group({**group, "params": inside})


def _scale(group: dict[str, Any], scale: float) -> None:
    group["lr_scale"] = group.get("lr_scale", 1.0) * scale
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].mul_(scale)
    else:
        group["lr"] = group["lr"] * scale
