"""What a run does by itself when its trends say so: stop, freeze, thaw, change a learning rate.

A rule is an action and a condition (`flodl.monitor.conditions`), in Python or as text, as recipes and the command line
have it: ``freeze_when("encoder", stalled("loss", 3))`` and ``freeze encoder when stalled(loss, 3)``.
Each rule acts once. When rules are looked at, and how they act, is decided in `flodl.train.rule_actions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flodl.errors import ConfigError, nearest
from flodl.monitor.conditions import Condition, RuleContext, parse_condition

__all__ = ["Rule", "as_rule", "freeze_when", "parse_rule", "set_rate", "stop_when", "thaw_when"]

ACTIONS = ("stop", "freeze", "thaw", "rate")
Question = Condition | Callable[[RuleContext], bool]


@dataclass(frozen=True)
class Rule:
    """One rule; made by the functions of this module, or read by `parse_rule`.

    Attributes:
        action: ``"stop"``, ``"freeze"``, ``"thaw"`` or ``"rate"``.
        condition: when; it is asked where all ranks know the same, and rank 0's answer counts.
        path: what is acted on, a dotted path in the model; nothing for ``"stop"``.
        scale: ``"rate"``: what the learning rate is multiplied by.
    """

    action: str
    condition: Question
    path: str = ""
    scale: float = 1.0

    def __str__(self) -> str:
        asked = str(self.condition) if isinstance(self.condition, Condition) else _called(self.condition)
        parts = [
            self.action,
            *([self.path] if self.path else []),
            *([repr(self.scale)] if self.action == "rate" else []),
        ]
        return f"{' '.join(parts)} when {asked}"

    def why(self, outlook: RuleContext) -> str:
        """Return the figures that made the rule come true."""
        return self.condition.why(outlook) if isinstance(self.condition, Condition) else _called(self.condition)


def stop_when(condition: Question) -> Rule:
    """Return a rule that ends the run; its state is saved as after its last step.

    Args:
        condition: one of `flodl.monitor.conditions`, or ``condition(outlook) -> bool``; where ranks are processes of
            ours it has to be picklable, and a run that goes on knows it by its name.
    """
    return Rule("stop", _asked(condition))


def freeze_when(path: str, condition: Question) -> Rule:
    """Return a rule that stops parameters from learning.

    Args:
        path: of tags, sub-graphs, nodes or modules; ``encoder.layers.0-3`` is a range.
        condition: as for `stop_when`.
    """
    return Rule("freeze", _asked(condition), _path(path))


def thaw_when(path: str, condition: Question) -> Rule:
    """Return a rule that lets parameters learn which were frozen, before the run or by a rule; arguments as there."""
    return Rule("thaw", _asked(condition), _path(path))


def set_rate(path: str, scale: float, condition: Question) -> Rule:
    """Return a rule that multiplies the learning rate of parameters, whatever the schedule makes of it.

    Args:
        path: as for `freeze_when`.
        scale: such as 0.1.
        condition: as for `stop_when`.

    Raises:
        ConfigError: the scale is not a number above 0.
    """
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise ConfigError(f"set_rate {path!r}: found {scale!r}; expected a number above 0", problems=[repr(scale)])
    return Rule("rate", _asked(condition), _path(path), float(scale))


def as_rule(rule: Rule | str) -> Rule:
    """Return a rule that may be given as text.

    Raises:
        ConfigError: it is neither a rule nor the text of one.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str):
        return parse_rule(rule)
    raise ConfigError(
        f"rules: found a {type(rule).__name__}; expected stop_when(...) and the like of flodl.train.rules, or a text "
        "such as 'stop when stalled(loss, 3)'",
        problems=[repr(rule)],
    )


def parse_rule(text: str) -> Rule:
    """Return the rule that a text says.

    ::

        stop when no_better(eval_loss, 3)
        freeze encoder.layers.0-3 when stalled(loss, 3)
        thaw encoder when after_epochs(1) and below(loss, 0.5)
        rate encoder 0.1 when worsening(eval_loss, 2)

    Raises:
        ConfigError: it says none.
    """
    before, when, after = text.partition(" when ")
    words = before.split()
    usual = "stop when ..., freeze PATH when ..., thaw PATH when ..., or rate PATH SCALE when ..."
    if not when or not words:
        raise ConfigError(f"rule {text!r}: found no condition; expected {usual}", problems=[text])
    action, *rest = words
    if action not in ACTIONS:
        raise ConfigError(
            f"rule {text!r}: found {action!r}{nearest(action, ACTIONS)}; expected {usual}", problems=[text]
        )
    wanted = {"stop": 0, "rate": 2}.get(action, 1)
    if len(rest) != wanted:
        raise ConfigError(f"rule {text!r}: found {len(rest)} words after {action!r}; expected {usual}", problems=[text])
    condition = parse_condition(after)
    if action == "stop":
        return stop_when(condition)
    if action == "rate":
        try:
            scale = float(rest[1])
        except ValueError:
            raise ConfigError(
                f"rule {text!r}: found the scale {rest[1]!r}; expected a number", problems=[text]
            ) from None
        return set_rate(rest[0], scale, condition)
    return (freeze_when if action == "freeze" else thaw_when)(rest[0], condition)


def _asked(condition: Question) -> Question:
    if not callable(condition):
        raise ConfigError(
            f"rule: found {condition!r}; expected a condition such as stalled('loss', 3), or a callable",
            problems=[repr(condition)],
        )
    return condition


def _path(path: str) -> str:
    if not isinstance(path, str) or not path or any(char.isspace() for char in path):
        raise ConfigError(
            f"rule: found the path {path!r}; expected one such as encoder.layers.0-3", problems=[repr(path)]
        )
    return path


def _called(condition: Question) -> str:
    return getattr(condition, "__qualname__", type(condition).__qualname__)
