"""Callbacks that record values inside the model and act on trends, `Watch` and `Rules`, and the monitor of a run.

Paths are short, as for ``freeze``: ``layers.0-3`` is a part of the encoder. The Trainer uses the full path.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flodl.devices import described, pick_device
from flodl.errors import ConfigError, GraphPathError, capped
from flodl.graph.tree import parts_at
from flodl.train import Callback
from flodl_hf.training.job import Job

if TYPE_CHECKING:
    from flodl.monitor import Monitor
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


RECORDS = ".logs"
"""After the name of the folder that a run writes: where its record is kept."""


def monitor_of_job(
    wanted: Any, job: Job, recipe: Mapping[str, Any], target: Path | None, *, is_first: bool = True
) -> Monitor | bool:
    """Return the monitor of a planned job with its page.

    On other ranks than the first it is True: they report their work, without a page.

    Args:
        wanted: True, a port, or a `flodl.monitor.Monitor`.
        recipe: the recipe of the run.
        target: the folder of the result; record and page are written next to it.
        is_first: whether this process is the one that reports.

    Raises:
        ConfigError: ``wanted`` is none of these.
        TrainError: the port is taken.
    """
    if not is_first:
        return True
    from flodl.monitor import Monitor

    folder = job.options.log_dir
    if folder is None and target is not None:
        folder = str(target.with_name(target.name + RECORDS))
    if isinstance(wanted, Monitor):
        monitor = wanted
        monitor.folder = monitor.folder or folder
    elif wanted is True or (isinstance(wanted, int) and 0 <= wanted < 65536):
        monitor = Monitor(folder=folder, quiet=True)
    else:
        raise ConfigError(
            f"monitor: found {wanted!r}; expected True, a port of this machine, or a flodl.monitor.Monitor",
            problems=["monitor"],
        )
    if monitor.name == "Training":
        monitor.name = target.name if target is not None else Path(job.name).name or job.name
    config, lengths = job.model.config, job.rows.lengths.astype(float)
    sizes = {"layers": int(config.num_layers), "hidden_size": int(config.hidden_size)}
    learned, frozen = _parameters(job.model)
    # rows of a batch attend within themselves: a token of a long row costs more
    mean = float((lengths**2).sum() / max(1.0, lengths.sum()))
    flops = partial(flops_of_encoder, mean_length=mean, learned=learned, frozen=frozen, **sizes)
    monitor.throughput = {"tokens": StepTokens(job), "flops": flops, "peak": _peak(job), "total_steps": job.steps}
    monitor.describe(recipe=recipe, data=_data(job), model={"start": job.name, **sizes})
    if folder is not None and not monitor.pages:
        monitor.save_html(Path(folder) / "run.html")
    if not isinstance(wanted, Monitor):
        url = monitor.serve(None if wanted is True else wanted)
        print(f"watch this run at {url}", file=sys.stderr, flush=True)
    return monitor


class StepTokens:
    """Tokens of each optimiser step, padding left out: ``tokens(step)``, the first being 1.

    Where ranks step on their own, they take batches in another order; the sums are the same.
    """

    def __init__(self, job: Job) -> None:
        self._lengths, self._batches = job.rows.lengths, job.batches
        self._accumulate, self._epochs = job.options.accumulate, job.options.epochs
        self._steps = [0]  # at the end of each epoch
        self._epoch, self._sums = -1, np.zeros(0)

    def __call__(self, step: int) -> float | None:
        """Return the tokens of a step; None of one that the run does not have."""
        while step > self._steps[-1] and len(self._steps) <= self._epochs:
            batches = len(self._batches.plan(len(self._steps) - 1))
            self._steps.append(self._steps[-1] + -(-batches // self._accumulate))
        if not 1 <= step <= self._steps[-1]:
            return None
        epoch = next(i for i, end in enumerate(self._steps[1:]) if step <= end)
        if self._epoch != epoch:
            plan = self._batches.plan(epoch)
            sums = np.concatenate([[0], np.cumsum(self._lengths[plan.order])])[plan.ends]
            ends = [*range(self._accumulate - 1, len(sums) - 1, self._accumulate), len(sums) - 1]
            self._epoch, self._sums = epoch, np.diff(sums[ends], prepend=0)
        return float(self._sums[step - self._steps[epoch] - 1])


def _parameters(model: Any) -> tuple[int, int]:
    """Return the number of parameters in matrix products, trained and frozen; shared ones count each time."""
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    used = [module for _, module in model.named_modules(remove_duplicate=False)]
    found = [p for module in used for p in module.parameters(recurse=False) if id(p) not in looked_up]
    learned = sum(p.numel() for p in found if p.requires_grad)
    return learned, sum(p.numel() for p in found) - learned


def _peak(job: Job) -> float | None:
    places, ranks = job.options.places, job.options.ranks or 1
    named = places if isinstance(places, str) else places[0] if isinstance(places, (list, tuple)) else None
    try:
        device = torch.device(named) if named is not None else pick_device(None, 0)
        found = peak_of(described(device), job.options.precision)
    except Exception:  # other code reports missing devices
        return None
    return None if found is None else found * ranks


def _data(job: Job) -> dict[str, Any]:
    lengths = job.rows.lengths
    facts: dict[str, Any] = {"task": job.task.head, "rows": len(job.tables.train)}
    if len(job.rows) != len(job.tables.train):
        facts["rows of tokens"] = len(job.rows)
    for name, rows in job.tables.evals.items():
        facts[f"evaluation {name}".strip()] = len(rows)
    facts |= {
        "tokens": int(lengths.sum()),
        "mean tokens of a row": round(float(lengths.mean()), 1),
        "most tokens of a row": int(lengths.max()),
    }
    if job.task.labels is not None:
        counts = job.task.label_counts(job.rows)
        names = [str(name) for name in job.task.labels][:40]
        facts["labels"] = dict(zip(names, counts, strict=False)) if counts is not None else names
    return facts


# Part of a device's name, then dense operations per second: float32, TF32, half precision. The first match counts.
_PEAKS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    ("H100 PCIe", None, 378.2e12, 756.4e12),
    ("H200", 66.9e12, 494.7e12, 989.4e12),
    ("H100", 66.9e12, 494.7e12, 989.4e12),
    ("A100", 19.5e12, 156e12, 312e12),
    ("RTX 4090", 82.6e12, 82.6e12, 165.2e12),
    ("V100", 15.7e12, None, 125e12),
)


def peak_of(device: str, precision: str) -> float | None:
    """Return the peak operations per second of a device from its name; None if unknown."""
    peaks = next((row[1:] for row in _PEAKS if row[0].lower() in device.lower()), (None, None, None))
    return peaks[{"fp32": 0, "tf32": 1}.get(precision, 2)]


def flops_of_encoder(
    tokens: float, mean_length: float, *, learned: int, frozen: int = 0, layers: int, hidden_size: int
) -> float:
    """Return the floating-point operations of a training step of an encoder.

    A parameter costs 2 operations per token in the forward pass, and twice that in the backward pass if it is trained
    (Kaplan et al. 2020, arXiv:2001.08361); attention costs ``4 x length x hidden_size`` per token and layer, and twice
    that in the backward pass. Embeddings and padding cost nothing.

    Args:
        tokens: number of tokens of the step.
        mean_length: mean number of tokens of a row.
        learned: number of trained parameters of matrix products; layers that are used twice count twice.
        frozen: number of the others.
    """
    return tokens * (6.0 * learned + 2.0 * frozen + 12.0 * mean_length * hidden_size * layers)
