"""Rules: actions of a run when its trends meet a condition: stop, freeze, thaw, change a learning rate.

A rule is an action and a condition (`flodl.monitor.conditions`), in Python or as text:
``freeze_when("encoder", stalled("loss", 3))`` and ``freeze encoder when stalled(loss, 3)``. Each rule acts once, where
all ranks have the same figures: after an evaluation, after an epoch, and every ``trend_every`` steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.errors import ConfigError, TrainError, nearest
from flodl.graph.tree import parameters_at
from flodl.monitor.conditions import Condition, RuleContext, parse_condition
from flodl.monitor.trend import Trend
from flodl.train.events import Decided

KINDS = ("training", "watched", "evaluation")
FORMS = "stop when ..., freeze PATH when ..., thaw PATH when ..., or rate PATH SCALE when ..."
_TEXT = re.compile(
    r"(stop|freeze\s+(?P<a>\S+)|thaw\s+(?P<b>\S+)|rate\s+(?P<c>\S+)\s+(?P<scale>\S+))\s+when\s+(?P<when>.+)"
)
Question = Condition | Callable[[RuleContext], bool]


@dataclass(frozen=True)
class Rule:
    """One rule; made by the functions of this module, or read by `parse_rule`.

    Attributes:
        action: ``"stop"``, ``"freeze"``, ``"thaw"`` or ``"rate"``.
        condition: when; the answer of rank 0 counts.
        path: dotted path in the model that the action applies to; empty for ``"stop"``.
        scale: ``"rate"``: factor of the learning rate.

    Raises:
        ConfigError: an invalid condition, path or scale.
    """

    action: str
    condition: Question
    path: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        problems = []
        if not callable(self.condition):
            problems.append(f"found {self.condition!r}; expected a condition such as stalled('loss', 3), or a function")
        if self.action != "stop" and (not isinstance(self.path, str) or not re.fullmatch(r"\S+", self.path)):
            problems.append(f"found the path {self.path!r}; expected one such as encoder.layers.0-3")
        if not isinstance(self.scale, (int, float)) or not 0 < self.scale < math.inf:
            problems.append(f"found the scale {self.scale!r}; expected a number above 0")
        if problems:
            raise ConfigError(f"rule: {'; '.join(problems)}", problems=problems)

    def __str__(self) -> str:
        parts = [self.action, *([self.path] if self.path else []), *([repr(self.scale)] * (self.action == "rate"))]
        return f"{' '.join(parts)} when {_text_of(self.condition)}"

    def why(self, context: RuleContext) -> str:
        """Return the figures that meet the condition."""
        return self.condition.why(context) if isinstance(self.condition, Condition) else _text_of(self.condition)


def _text_of(condition: Question) -> str:
    if isinstance(condition, Condition):
        return str(condition)
    return getattr(condition, "__qualname__", type(condition).__qualname__)


def stop_when(condition: Question) -> Rule:
    """Return a rule that ends the run, with its state saved.

    Args:
        condition: one of `flodl.monitor.conditions`, or ``condition(context) -> bool``, which must be picklable where
            ranks are processes; a resumed run identifies it by its qualified name.
    """
    return Rule("stop", condition)


def freeze_when(path: str, condition: Question) -> Rule:
    """Return a rule that stops the training of parameters.

    Args:
        path: of tags, sub-graphs, nodes or modules; ``encoder.layers.0-3`` is a range.
        condition: as for `stop_when`.
    """
    return Rule("freeze", condition, path)


def thaw_when(path: str, condition: Question) -> Rule:
    """Return a rule that starts the training of frozen parameters; arguments as for `freeze_when`."""
    return Rule("thaw", condition, path)


def set_rate(path: str, scale: float, condition: Question) -> Rule:
    """Return a rule that multiplies the learning rate of parameters by ``scale``, whatever the schedule returns."""
    return Rule("rate", condition, path, float(scale) if isinstance(scale, int) else scale)


def as_rule(rule: Rule | str) -> Rule:
    """Return a rule that may be given as text.

    Raises:
        ConfigError: it is neither a rule nor the text of one.
    """
    if isinstance(rule, str):
        return parse_rule(rule)
    if not isinstance(rule, Rule):
        raise ConfigError(
            f"rules: found a {type(rule).__name__}; expected stop_when(...) and the like, or a text: {FORMS}",
            problems=[repr(rule)],
        )
    return rule


def parse_rule(text: str) -> Rule:
    """Return the rule of a text, such as ``rate encoder 0.1 when worsening(eval_loss, 2)``.

    Raises:
        ConfigError: the text is not a rule.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        actions = ("stop", "freeze", "thaw", "rate")
        word = text.split()[0] if text.split() else ""
        near = "" if word in actions else nearest(word, actions)
        raise ConfigError(f"rule: found {text!r}{near}; expected {FORMS}", problems=[text])
    try:
        scale = float(found["scale"] or 1.0)
    except ValueError:
        scale = math.nan
    path = found["a"] or found["b"] or found["c"] or ""
    return Rule(text.split()[0], parse_condition(found["when"]), path, scale)


class RuleEngine:
    """The rules of one run, its trends, and which rules have acted.

    Args:
        model: the model that rules act on.
        ranks: all of them act alike.
        rules: rules, or their texts.

    Attributes:
        rules: the rules in the order given, in which they act.
        acted: the step at which each rule acted, by its position.
        values: the figures of trends, by kind and name. If kinds share a name, evaluation has priority, then watched
            values.

    Raises:
        ConfigError: an invalid rule.
        GraphPathError: a path without parameters.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, rules: Sequence[Rule | str] = ()) -> None:
        self.model, self.ranks = model, ranks
        self.rules = tuple(as_rule(rule) for rule in rules)
        self.acted: dict[int, int] = {}
        self.values: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
        self._parameters = [list(parameters_at(model, r.path).values()) if r.path else [] for r in self.rules]
        self._optimizer: torch.optim.Optimizer | None = None
        self._has_new_values = False

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """Unfreeze inside all parameters that a rule may thaw, so that the optimiser includes them."""
        frozen = [
            p
            for rule, parameters in zip(self.rules, self._parameters, strict=True)
            for p in parameters
            if rule.action == "thaw" and not p.requires_grad
        ]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Put parameters with a changing rate into separate groups.

        Raises:
            TrainError: the optimiser lacks a parameter that a rule thaws or whose rate it changes.
        """
        self._optimizer = optimizer
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for rule, parameters in zip(self.rules, self._parameters, strict=True):
            lacking = sum(id(p) not in known for p in parameters)
            if lacking and (rule.action == "thaw" or (rule.action == "rate" and lacking == len(parameters))):
                raise TrainError(
                    f"rules: {str(rule)!r} acts on {lacking} parameters that the optimiser does not have; expected all "
                    "of them. Pass the optimiser as a factory, or include frozen parameters in its groups.",
                    rule=str(rule),
                )
            if rule.action == "rate":
                _split(optimizer, {id(p) for p in parameters})

    # ---- trends --------------------------------------------------------------------------------------

    def note(self, kind: str, figures: Mapping[str, float]) -> None:
        """Add the newest values of trends, equal on all ranks."""
        if self.rules:
            for name, value in figures.items():
                self.values[kind].setdefault(name, []).append(float(value))
            self._has_new_values = True

    def check_names(self, allowed: Sequence[str] = ()) -> None:
        """Check that the figures of all rules exist, once all figures have a value.

        Args:
            allowed: names that may get their first value later.

        Raises:
            TrainError: a rule names a figure that does not exist.
        """
        known = {name for kind in KINDS for name in self.values[kind]}
        for rule in self.rules:
            for name in rule.condition.names if isinstance(rule.condition, Condition) else ():
                if name not in known and name not in allowed:
                    raise TrainError(
                        f"rules: {str(rule)!r} reads {name!r}{nearest(name, known)}, which has no value; expected one "
                        f"of {', '.join(sorted(known))}.",
                        name=name,
                    )

    # ---- acting --------------------------------------------------------------------------------------

    def decide(self, step: int, epochs: int) -> list[Decided]:
        """Apply the rules with a true condition, and return them; all ranks call this at the same points.

        Args:
            step: steps that are done.
            epochs: epochs that are done.
        """
        if not self._has_new_values:
            return []
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

    @property
    def stopped(self) -> bool:
        """Whether a rule ended the run."""
        return any(self.rules[position].action == "stop" for position in self.acted)

    def _act(self, position: int) -> None:
        rule, parameters = self.rules[position], self._parameters[position]
        for parameter in parameters if rule.action in ("freeze", "thaw") else ():
            parameter.requires_grad_(rule.action == "thaw")
            parameter.grad = None
        if rule.action == "rate":
            assert self._optimizer is not None
            chosen = {id(p) for p in parameters}
            for group in self._optimizer.param_groups:
                if group["params"] and all(id(p) in chosen for p in group["params"]):
                    group["lr_scale"] = group.get("lr_scale", 1.0) * rule.scale
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].mul_(rule.scale)
                    else:
                        group["lr"] = group["lr"] * rule.scale

    # ---- in checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return trends and applied rules as JSON values."""
        acted = {str(self.rules[position]): step for position, step in self.acted.items()}
        return {"values": self.values, "acted": acted} if self.rules else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, and freeze and thaw again; rates are in the state of the optimiser."""
        for kind, series in state.get("values", {}).items():
            self.values[kind] = {name: list(values) for name, values in series.items()}
        acted = state.get("acted", {})
        self.acted = {place: acted[str(rule)] for place, rule in enumerate(self.rules) if str(rule) in acted}
        for position in sorted(self.acted, key=lambda position: (self.acted[position], position)):
            if self.rules[position].action in ("freeze", "thaw"):
                self._act(position)


def _split(optimizer: torch.optim.Optimizer, chosen: set[int]) -> None:
    """Split groups of which only some parameters are chosen."""
    for group in list(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in chosen]
        if inside and len(inside) < len(group["params"]):
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
            optimizer.add_param_group({**group, "params": inside})
