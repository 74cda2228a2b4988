"""Callbacks that record values inside the model and act on trends: `Watch` and `Rules`.

Paths are short, as for ``freeze``: ``layers.0-3`` is a part of the encoder. The Trainer uses the full path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, GraphPathError, capped
from flodl.graph.tree import parts_at
from flodl.train import Callback

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

ENCODER = "encoder"


@dataclass(frozen=True)
class Watch(Callback):
    """Record the outputs of parts of the model in each step, as `flodl.train.Observed` events.

    Args:
        paths: paths of parts, each with an optional reduction (the default is the mean): ``"layers.0-3:norm"``.
    """

    paths: Sequence[str]


@dataclass(frozen=True)
class Rules(Callback):
    """Freeze, thaw, change rates or stop when a condition on trends is true.

    Args:
        rules: rules as text: ``"freeze layers.0-3 when stalled(loss, 3)"``; actions are freeze, thaw, rate and stop.
        trend_every: number of steps between the values of trends; by default an epoch.
    """

    rules: Sequence[str]
    trend_every: int | None = None


def observed_of(job: Any) -> dict[str, Any]:
    """Return the settings of the Trainer for the `Watch` and `Rules` callbacks of a planned run.

    Raises:
        ConfigError: a rule or path is invalid, or a metric does not exist; ``problems`` lists all.
    """
    watched = [path for callback in job.own.callbacks if isinstance(callback, Watch) for path in callback.paths]
    decided = [callback for callback in job.own.callbacks if isinstance(callback, Rules)]
    if not watched and not decided:
        return {}
    from flodl.train.rules import parse_rule

    problems: list[str] = []

    def whole(path: str) -> str:
        try:
            return whole_path(job.model, path)
        except GraphPathError as fault:
            problems.append(f"watch: {fault.message}")
            return path

    watch = {}
    for text in watched:
        path, colon, how = text.partition(":")
        watch[text] = f"{whole(path)}{colon}{how}"
    rules = []
    for text in [text for callback in decided for text in callback.rules]:
        try:
            rule = parse_rule(text)
        except ConfigError as fault:
            problems.append(f"rules: {fault.message}")
            continue
        condition: Any = rule.condition
        rules.append(replace(rule, path=whole(rule.path) if rule.path else "", condition=condition.renamed(watch)))
        faults = (_metric_fault(job, name, bool(watched)) for name in condition.names)
        problems += [f"rules: {text!r}: {fault}" for fault in faults if fault]
    if problems:
        raise ConfigError(f"finetune: found invalid callbacks:\n{capped(problems)}", problems=problems)
    trend_every = next((callback.trend_every for callback in decided if callback.trend_every), None)
    return {"watch": tuple(watch.values()), "rules": tuple(rules), "trend_every": trend_every}


def _metric_fault(job: Any, name: str, has_watched: bool) -> str | None:
    """Return why no metric of this name exists; None if it exists, or may exist."""
    if name == "loss" or name.startswith("train/") or job.own.loss is not None or has_watched:
        return None  # watched values and losses of the user define further names
    if job.evaluation is None:
        return f"{name!r} is a metric of evaluation data, found none; expected loss, or eval="
    try:
        known = job.evaluation.check_metric(name).removeprefix("-")
    except ConfigError as fault:
        return fault.message.removeprefix("metric: ")
    return None if known == name else f"{name!r} is named {known!r} here"


def whole_path(model: EncoderModel, path: str) -> str:
    """Return the full path of a part of the graph; ``encoder.`` may be omitted.

    Raises:
        GraphPathError: there is no such part.
    """
    try:
        parts_at(model.graph, path)
        return path
    except GraphPathError:
        parts_at(model.graph, f"{ENCODER}.{path}")
        return f"{ENCODER}.{path}"
