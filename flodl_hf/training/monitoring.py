"""Monitoring of a fine-tuning run: recipe, data, model, and operations per step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flodl.devices import described, pick_device
from flodl.errors import ConfigError
from flodl_hf.training.job import Job

if TYPE_CHECKING:
    from flodl.monitor import Monitor

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

    folder = _folder(job, target)
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
    tokens = StepTokens(job)
    monitor.throughput = {"tokens": tokens, "flops": _flops(job), "peak": _peak(job), "total_steps": job.steps}
    config = job.model.config
    sizes = {"layers": int(config.num_layers), "hidden_size": int(config.hidden_size)}
    monitor.describe(recipe=recipe, data=_data(job), model={"start": job.name, **sizes})
    if folder is not None and not monitor.pages:
        monitor.save_html(Path(folder) / "run.html")
    if not isinstance(wanted, Monitor):
        url = monitor.serve(None if wanted is True else wanted)
        print(f"watch this run at {url}", file=sys.stderr, flush=True)
    return monitor


def _folder(job: Job, target: Path | None) -> str | None:
    if job.options.log_dir is not None:
        return job.options.log_dir
    return None if target is None else str(target.with_name(target.name + RECORDS))


class StepTokens:
    """Tokens of each optimiser step, padding left out: ``tokens(step)``, the first being 1.

    Where ranks step on their own, they take batches in another order; the sums are the same.
    """

    def __init__(self, job: Job) -> None:
        self._lengths, self._batches = job.rows.lengths, job.batches
        self._accumulate, self._epochs = job.options.accumulate, job.options.epochs
        self._steps = [0]  # at the end of each epoch
        self._epoch: tuple[int, Any] = (-1, None)

    def __call__(self, step: int) -> float | None:
        """Return the tokens of a step; None of one that the run does not have."""
        while step > self._steps[-1] and len(self._steps) <= self._epochs:
            batches = len(self._batches.plan(len(self._steps) - 1))
            self._steps.append(self._steps[-1] + -(-batches // self._accumulate))
        if not 1 <= step <= self._steps[-1]:
            return None
        epoch = next(i for i, end in enumerate(self._steps[1:]) if step <= end)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._of_epoch(epoch))
        return float(self._epoch[1][step - self._steps[epoch] - 1])

    def _of_epoch(self, epoch: int) -> Any:
        plan = self._batches.plan(epoch)
        if not len(plan):
            return np.zeros(0)
        sums = np.concatenate([[0], np.cumsum(self._lengths[plan.order])])[plan.ends]
        ends = sums[[min(i + self._accumulate, len(sums)) - 1 for i in range(0, len(sums), self._accumulate)]]
        return np.diff(ends, prepend=0)


def _flops(job: Job) -> Callable[[float], float]:
    learned, frozen = _parameters(job.model)
    config = job.model.config
    layers, hidden = int(config.num_layers), int(config.hidden_size)
    lengths = job.rows.lengths.astype(float)
    # rows of a batch attend within themselves: a token of a long row costs more
    mean = float((lengths**2).sum() / max(1.0, lengths.sum()))
    return lambda tokens: flops_of_encoder(
        tokens, mean, learned=learned, frozen=frozen, layers=layers, hidden_size=hidden
    )


def _parameters(model: Any) -> tuple[int, int]:
    """Return the number of parameters in matrix products, trained and frozen; shared ones count each time."""
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    counts = [0, 0]
    for module in _calls(model):
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in looked_up:
                counts[0 if parameter.requires_grad else 1] += parameter.numel()
    return counts[0], counts[1]


def _calls(module: nn.Module) -> Any:
    """Yield all modules of the tree; a shared module is repeated."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _calls(child)


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
_COLUMNS = {"fp32": 1, "tf32": 2, "bf16": 3, "fp16": 3}


def peak_of(device: str, precision: str) -> float | None:
    """Return the peak operations per second of a device from its name; None if unknown."""
    for row in _PEAKS:
        if row[0].lower() in device.lower():
            found = row[_COLUMNS[precision]] if precision in _COLUMNS else None
            return found if isinstance(found, float) else None
    return None


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
