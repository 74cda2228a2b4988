"""Rules: actions of a run when its trends meet a condition: stop, freeze, thaw, change a learning rate.

A rule is an action and a condition (`flodl.monitor.conditions`), in Python or as text:
``freeze_when("encoder", stalled("loss", 3))`` and ``freeze encoder when stalled(loss, 3)``. Each rule acts once, where
all ranks have the same figures: after an evaluation, after an epoch, and every ``trend_every`` steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from flodl.checked_fields import check_fields, number, of_kind
from flodl.errors import ConfigError, nearest
from flodl.monitor.conditions import Condition, RuleContext, parse_condition

FORMS = "stop when ..., freeze PATH when ..., thaw PATH when ..., or rate PATH SCALE when ..."
_TEXT = re.compile(
    r"(stop|freeze\s+(?P<a>\S+)|thaw\s+(?P<b>\S+)|rate\s+(?P<c>\S+)\s+(?P<scale>\S+))\s+when\s+(?P<when>.+)"
)
CONDITION = of_kind("a condition such as stalled('loss', 3), or a function", callable)
PATH = of_kind("a path such as encoder.layers.0-3", lambda value: bool(re.fullmatch(r"\S+", str(value))))
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
        values = {"condition": CONDITION, "scale": number(above=0, below=math.inf)}
        check_fields(self, values if self.action == "stop" else {**values, "path": PATH}, "rule", ConfigError)

    def __str__(self) -> str:
        parts = [self.action, *([self.path] if self.path else []), *([repr(self.scale)] * (self.action == "rate"))]
        return f"{' '.join(parts)} when {_text_of(self.condition)}"

    def why(self, context: RuleContext) -> str:
        """Return the figures that meet the condition."""
        return self.condition.why(context) if isinstance(self.condition, Condition) else _text_of(self.condition)


def _text_of(condition: Question) -> str:
    name = getattr(condition, "__qualname__", type(condition).__qualname__)
    return str(condition) if isinstance(condition, Condition) else name


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
        raise ConfigError(f"rules: found {rule!r}; expected a rule or its text: {FORMS}", problems=[repr(rule)])
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
