"""What a fine-tuning run watches and decides, from options as they are written: short paths, rules as text.

``layers.0-3`` is a part of the encoder here, as for ``freeze``; the Trainer knows it by its whole path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, GraphPathError, capped
from flodl.graph import parts_at

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.training.job import Job

__all__ = ["observed_of", "whole_path"]

ENCODER = "encoder"


def observed_of(job: Job) -> dict[str, Any]:
    """Return the settings of the Trainer for what is watched and decided in a planned run.

    Raises:
        ConfigError: a path leads nowhere, or a rule asks about a figure that there will not be; ``problems`` lists all.
    """
    options, problems = job.options, []
    if not options.watch and not options.rules:
        return {}
    from flodl.train.rules import parse_rule

    def whole(path: str) -> str:
        try:
            return whole_path(job.model, path)
        except GraphPathError as fault:
            problems.append(fault.message)
            return path

    watch = {}
    for text in options.watch:
        path, colon, how = text.partition(":")
        watch[text] = f"{whole(path)}{colon}{how}"
    rules = []
    for text in options.rules:
        rule = parse_rule(text)
        asked: Any = rule.condition
        rules.append(replace(rule, path=whole(rule.path) if rule.path else "", condition=asked.renamed(watch)))
        problems += [f"rules: {text!r}: {fault}" for name in asked.names if (fault := _fault(job, name))]
    if problems:
        raise ConfigError(f"finetune: options that cannot be:\n{capped(problems)}", problems=problems)
    return {"watch": tuple(watch.values()), "rules": tuple(rules), "trend_every": options.trend_every}


def _fault(job: Job, name: str) -> str | None:
    """Return why there will be no figure of this name; None where there will be, or may be."""
    if name == "loss" or name.startswith("train/") or job.own.loss is not None or job.options.watch:
        return None  # what is watched, and what a loss of the user's own tells, has names of its own
    if job.evaluation is None:
        return f"{name!r} would be a figure of held-out data, and there are none; expected loss, or give eval="
    try:
        known = job.evaluation.check_metric(name).removeprefix("-")
    except ConfigError as fault:
        return fault.message.removeprefix("metric: ")
    return None if known == name else f"{name!r} is called {known!r} here"


def whole_path(model: EncoderModel, path: str) -> str:
    """Return the path of a part from the model's graph on; that of the encoder's parts may be left out.

    Raises:
        GraphPathError: nothing lies there.
    """
    try:
        parts_at(model.graph, path)
        return path
    except GraphPathError:
        parts_at(model.graph, f"{ENCODER}.{path}")
        return f"{ENCODER}.{path}"
