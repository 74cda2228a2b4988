"""The settings of a training run with their defaults, in one frozen record, and their invalid combinations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal

import torch
from torch import nn

from flodl.checked_fields import Values, check_fields, choice, listed, number, of_kind, pair, path, text, truth, whole
from flodl.devices import training_devices
from flodl.distributed.policy import POLICIES
from flodl.distributed.rounds import Knobs
from flodl.errors import TrainError, capped, nearest
from flodl.train.callback import Callback, CheckpointFunction
from flodl.train.events import Subscriber
from flodl.train.optim.ema import Ema
from flodl.train.rules import Rule, as_rule
from flodl.train.trackers import TRACKERS, make_tracker

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")

# Settings that may differ when a run resumes; all others are compared with the checkpoint.
#
# They determine the length of the run, what it saves and reports, and how long ranks wait; or they change numbers only
# by rounding (another device), or by measured times (when ranks average).
MAY_CHANGE = frozenset((
    "num_epochs", "max_steps", "early_stopping", "folder", "save_every", "save_epochs", "save_end", "keep_last",
    "keep_best", "resume", "allow_change", "max_restarts", "timeline", "progress", "log_every", "monitor", "trackers",
    "tracker_folder", "watch", "deterministic", "prepare_model", "compile", "backend", "devices", "capture",
    "timeout_s", "slowdown", "check_every", "anchor", "max_anchor", "overhead_target", "speed_hint", "max_batch_diff",
    "max_overshoot", "divergence_threshold",
))  # fmt: skip

# Names of other libraries with equal meaning.
ALIASES: Mapping[str, str] = {
    "max_epochs": "num_epochs", "epochs": "num_epochs", "num_train_epochs": "num_epochs",
    "gradient_accumulation_steps": "accumulate", "accumulate_grad_batches": "accumulate",
    "gradient_clip_val": "max_grad_norm", "clip_grad_norm": "max_grad_norm",
    "resume_from_checkpoint": "resume", "logger": "trackers", "scheduler": "schedule", "lr_scheduler": "schedule",
    "log_every_n_steps": "log_every", "default_root_dir": "folder", "output_dir": "folder",
    "partition_ratios": "shares", "enable_progress_bar": "progress",
}  # fmt: skip
PRECISION_NAMES: Mapping[Any, str] = {
    "bf16-mixed": "bf16", "16-mixed": "fp16", "fp16-mixed": "fp16", "32-true": "fp32", "32": "fp32", 32: "fp32",
    "no": "fp32", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
}  # fmt: skip
# Names that are not settings, with what to use instead.
REPLACED: Mapping[str, str] = {
    **dict.fromkeys(("lr", "learning_rate"), "the optimiser has the rate: adamw(1e-3)"),
    **dict.fromkeys(("shuffle", "drop_last"), "pass them with the data: fit(data, shuffle=False), dataset(data, ...)"),
    "accelerator": "use devices: 'cpu', 'cuda:0', 'auto' or a number",
    "strategy": "use policy='sync', 'cadence' or 'async', or shard='fsdp'",
    "weight_decay": "the optimiser has it: adamw(1e-3, weight_decay=0.01)",
    "val_check_interval": "use eval_every, in steps",
    "eval_steps": "use eval_every",
    "save_steps": "use save_every",
}


def _is_monitor(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return 0 <= value < 65536
    from flodl.monitor import Monitor

    return isinstance(value, Monitor)


_TEXTS = listed("a list of texts", text.fits)
_DEVICES = of_kind(
    "a number of devices, names of devices, or 'auto'",
    lambda value: whole(1).fits(value) or text.fits(value) or (_TEXTS.fits(value) and bool(value)),
)

# Valid values of each field of `Settings`.
VALUES: Mapping[str, Values] = {
    "num_epochs": whole(0),
    **dict.fromkeys(("accumulate", "keep_last", "log_every"), whole(1)),
    "seed": of_kind("an integer", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    **dict.fromkeys(("max_steps", "batch_size", "save_every", "eval_every", "trend_every"), whole(1) | None),
    "micro_batch_size": whole(1) | choice("auto") | None,
    **dict.fromkeys(("sum_of_means", "deterministic", "resume", "compile"), truth),
    "progress": truth | None,
    "devices": _DEVICES | None,
    "policy": choice(*POLICIES) | None,
    "shard": choice("fsdp") | None,
    "knobs": of_kind("flodl.distributed.rounds.Knobs", lambda value: isinstance(value, Knobs)),
    "precision": choice(*PRECISIONS),
    "on_nan": choice("stop", "skip"),
    "capture": truth | choice("auto"),
    "max_grad_norm": number(above=0) | None,
    "ema": number(above=0, below=1) | of_kind("Ema(decay)", lambda value: isinstance(value, Ema)) | None,
    "lr_scale_ratio": number(),
    **dict.fromkeys(("prepare_model", "parameter_groups"), of_kind("a function of the model", callable) | None),
    "schedule": of_kind(
        "a function of the step that returns a factor, a torch LRScheduler, or an object with lr(step)",
        lambda value: callable(value) or callable(getattr(value, "lr", None)) or callable(getattr(value, "step", None)),
    )
    | None,
    **dict.fromkeys(("folder", "timeline", "tracker_folder"), path | None),
    "save_epochs": truth | choice("idle"),
    "save_end": truth | replace(number(least=0), expected="seconds of 0 or more"),
    "keep_best": text | None,
    "early_stopping": pair("a metric and a patience, such as ('accuracy', 3)", text, whole(1)) | None,
    "identity": of_kind("a map of names to values", lambda v: isinstance(v, Mapping) and all(map(text.fits, v))),
    **dict.fromkeys(("allow_change", "watch"), _TEXTS),
    "callbacks": listed(
        "instances of flodl.train.Callback; pass functions that read events to subscribe()",
        lambda value: isinstance(value, Callback),
    ),
    "rules": listed("a list of rules of flodl.train.rules, or of their texts", lambda value: True),
    "trackers": listed(
        f"one of {', '.join(TRACKERS)}, or an object that is called with events, for each",
        lambda v: callable(v) or v in TRACKERS,
    ),
    "monitor": truth | of_kind("a port, or a flodl.monitor.Monitor", _is_monitor) | None,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. None of them depends on the number of ranks.

    Attributes:
        num_epochs: number of epochs.
        max_steps: bound of optimiser steps; None for no bound.
        batch_size: samples of a batch. Under Sync a batch is one optimiser step of all ranks together; under Cadence
            and Async each rank steps on its own batches.
        accumulate: batches of one optimiser step.
        micro_batch_size: maximum of samples in one forward pass; bounds memory and changes numbers by rounding only.
            ``"auto"`` finds before the first step how many fit into the memory of the device.
        seed: determines the order of data and, with the rank, all random generators.
        devices: number of devices, their names, or ``"auto"`` for all; each gets a process. Not needed under torchrun.
        policy: ``"sync"``, ``"cadence"`` or ``"async"``; None selects Sync, or Cadence for unequal devices.
        shard: ``"fsdp"`` splits weights, gradients and optimiser state over the ranks (`flodl.distributed.sharded`).
        knobs: options of runs with several ranks; each may also be passed as a setting.
        precision: ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``.
        max_grad_norm: clip the gradient of the whole step to this 2-norm.
        on_nan: ``"stop"`` or ``"skip"`` for a loss or gradient that is not finite. A skipped step changes no weights,
            no optimiser state and no ``ema``, and its loss is in no mean. It still counts as a step for ``schedule``,
            ``max_steps``, ``save_every`` and ``eval_every``.
        sum_of_means: add the means of micro-batches and ranks without a division, which makes the gradient too large by
            accumulation times processes; for recipes that were tuned to it.
        deterministic: use deterministic kernels of torch, and fail where there is none.
        prepare_model: called with the model before training; may return a function that reverts the change.
        schedule: ``step -> factor`` of the optimiser's learning rate; a torch ``LRScheduler``, its class with bound
            options or a function of the optimiser that returns one; or an object with ``lr(step)``. See
            `flodl.train.schedule`.
        lr_scale_ratio: multiply the learning rate by ``1 + (ranks - 1) * ratio``.
        parameter_groups: ``groups(model)`` returns the argument of the optimiser factory; None for one group of all
            trainable parameters.
        folder: where checkpoints are written; None for no checkpoints.
        save_every: steps between checkpoints; None saves after epochs only.
        save_epochs: save after each epoch. ``"idle"`` skips an epoch that ends while the previous checkpoint is still
            being written, unless it is the best so far (``keep_best``).
        save_end: save at the end of the run. With a number the save is skipped if less than so many seconds passed
            since the newest complete checkpoint.
        keep_last: number of checkpoints that are kept.
        keep_best: metric whose best checkpoint is kept in addition; a leading ``-`` where less is better.
        resume: resume from the newest complete checkpoint in ``folder``.
        allow_change: settings that may differ from the checkpoint, named as in the error of a refused resume.
        identity: further JSON values that determine the numbers of the run; they are compared when it resumes.
        eval_every: steps between evaluations; None evaluates after each epoch. The last model is always evaluated.
        early_stopping: ``(metric, patience)``; stop after so many evaluations without improvement.
        timeline: path without suffix of the timeline files (``.json``, ``.csv``, ``.html``).
        capture: ``"auto"`` captures steps on CUDA as graphs where possible and logs the reason where not; True raises
            instead; False never captures.
        compile: pass the model through ``torch.compile``.
        progress: True shows the progress, None shows it after one second, False never.
        log_every: steps between reads of figures from a CUDA device.
        monitor: a page of the run: True, a port, or a `flodl.monitor.Monitor`.
        callbacks: see `flodl.train.callback`.
        watch: paths of values inside of the model that each step collects, with a reduction if not the mean
            (``"encoder.features:norm"``); reported as `flodl.train.Observed`.
        rules: rules of `flodl.train.rules`, or their texts; reported as `flodl.train.Decided`.
        trend_every: steps between values of the trends that rules read; None for one value an epoch.
        trackers: ``"csv"``, ``"jsonl"``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, or objects that are called with
            events; see `flodl.train.trackers`.
        tracker_folder: where trackers write; None for ``<folder>.logs``, or ``runs`` without a folder.
        ema: decay of an exponential moving average of the weights, or `flodl.train.Ema`; the average is evaluated and
            is the final model.

    Raises:
        TrainError: invalid values; ``problems`` lists all of them.
        ConfigError: an invalid rule.
    """

    num_epochs: int = 1
    max_steps: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    micro_batch_size: int | str | None = None
    seed: int = 42
    devices: int | str | Sequence[str] | None = None
    policy: str | None = None
    shard: str | None = None
    knobs: Knobs = field(default_factory=Knobs)
    precision: str = "fp32"
    max_grad_norm: float | None = None
    on_nan: str = "stop"
    sum_of_means: bool = False
    deterministic: bool = False
    prepare_model: Callable[[nn.Module], Any] | None = None
    schedule: Any = None
    lr_scale_ratio: float = 0.0
    parameter_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    folder: str | None = None
    save_every: int | None = None
    save_epochs: bool | Literal["idle"] = True
    save_end: bool | float = True
    keep_last: int = 2
    keep_best: str | None = None
    resume: bool = False
    allow_change: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    eval_every: int | None = None
    early_stopping: tuple[str, int] | None = None
    timeline: str | None = None
    capture: str | bool = "auto"
    compile: bool = False
    progress: bool | None = None
    log_every: int = 20
    monitor: Any = None
    callbacks: Sequence[Callback] = ()
    watch: Sequence[str] = ()
    rules: Sequence[Rule | str] = ()
    trend_every: int | None = None
    trackers: Sequence[str | Subscriber] = ()
    tracker_folder: str | None = None
    ema: float | Ema | None = None

    def __post_init__(self) -> None:
        """Raise for invalid values."""
        check_fields(self, VALUES, "settings")
        for rule in self.rules:
            as_rule(rule)

    @property
    def average(self) -> Ema | None:
        """The options of the moving average."""
        return Ema(self.ema) if isinstance(self.ema, (int, float)) else self.ema

    @property
    def device_names(self) -> tuple[str | None, ...]:
        """Name of the device of each rank; None for the usual one."""
        found = training_devices(self.devices)
        if isinstance(found, list):
            return tuple(found)
        return (found,) if isinstance(found, str) else (None,) * (found or 1)

    def made_trackers(self) -> list[Subscriber]:
        """Return the trackers of the run.

        Raises:
            TrainError: a tracker does not exist, or its package is not installed.
        """
        length = {"num_epochs": self.num_epochs, "max_steps": self.max_steps, "batch_size": self.batch_size}
        shown = {name: value for name, value in {**length, **self.recipe()}.items() if value is not None}
        folder = self.tracker_folder or (f"{self.folder}.logs" if self.folder else "runs")
        return [one if callable(one) else make_tracker(one, folder, shown) for one in self.trackers]

    def recipe(self) -> dict[str, Any]:
        """Return the settings that determine the numbers of a run as JSON values, for the comparison on resume."""
        names = ("accumulate", "micro_batch_size", "seed", "precision", "max_grad_norm", "on_nan", "lr_scale_ratio")
        values = {name: getattr(self, name) for name in names} | dict(self.identity)
        if self.shard is not None:
            values["shard"] = self.shard
        if self.sum_of_means:
            values["sum_of_means"] = True
        if self.average is not None:
            values["ema"] = f"{self.average.decay}{'' if self.average.warmup else ', no warmup'}"
        if self.rules:
            values["rules"] = [str(as_rule(rule)) for rule in self.rules]
            values["trend_every"] = self.trend_every
            values |= self.eval_times()
        return values

    def eval_times(self) -> dict[str, Any]:
        """Return when evaluations take place, which determines numbers if rules or a schedule read them."""
        return {"eval_every": self.eval_every, "eval_delay": 0}  # of a former setting


_KNOBS = {f.name for f in fields(Knobs)}
_FIELDS = {f.name for f in fields(Settings)}


def make_settings(values: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Return ``base`` with these values; options of the policy and names of other libraries are accepted.

    Raises:
        TrainError: unknown names (``names`` lists them), or invalid values (``problems``).
    """
    base = base or Settings()
    found = {ALIASES.get(name, name): value for name, value in values.items()}
    unknown = [name for name in found if name not in _FIELDS | _KNOBS]
    if unknown:
        shown = "; ".join(
            f"{name!r}: {REPLACED[name]}" if name in REPLACED else f"{name!r}{nearest(name, _FIELDS | _KNOBS)}"
            for name in unknown
        )
        raise TrainError(f"settings: found unknown {shown}. Expected fields of flodl.train.Settings.", names=unknown)
    if isinstance(found.get("precision"), (str, int)):
        found["precision"] = PRECISION_NAMES.get(found["precision"], found["precision"])
    if isinstance(found.get("trackers"), str) or callable(found.get("trackers")):
        found["trackers"] = [found["trackers"]]
    own = {name: value for name, value in found.items() if name in _FIELDS}
    own["knobs"] = replace(own.get("knobs", base.knobs), **{n: v for n, v in found.items() if n in _KNOBS})
    return replace(base, **own)


def check_settings(settings: Settings, *, world: int = 1, run: Any = None, own_loop: bool = False) -> None:
    """Raise an error for invalid combinations of settings.

    Args:
        settings: of the run; each value alone is valid.
        world: the number of ranks.
        run: its attributes ``evals``, ``eval_fn`` and ``functions`` are the functions of the run; None if unknown.
        own_loop: whether the user writes the loop (`Trainer.setup`).

    Raises:
        TrainError: ``problems`` lists all faults.
    """
    problems = [*_policy_faults(settings, world), *(_shard_faults(settings, run) if settings.shard else [])]
    wanted = {"early_stopping": settings.early_stopping and settings.early_stopping[0], "keep_best": settings.keep_best}
    for name, metric in wanted.items():
        if metric and run is not None and not run.evaluates:
            problems.append(f"{name}: found {metric!r} and no evaluation, expected .evaluate(step, data) or .eval_fn")
    if own_loop and settings.micro_batch_size == "auto":
        problems.append("micro_batch_size: found 'auto' in a loop of your own; expected a number")
    if own_loop and settings.capture is True:
        problems.append("capture: found True in a loop of your own, which is not captured; expected 'auto'")
    if len(problems) == 1:
        raise TrainError(problems[0], problems=problems)
    if problems:
        raise TrainError(f"settings that cannot be combined:\n{capped(problems)}", problems=problems)


def _policy_faults(settings: Settings, world: int) -> Iterator[str]:
    knobs = settings.knobs
    if settings.ema is not None and world > 1 and settings.policy in ("cadence", "async"):
        yield (
            f"ema: found {settings.ema} with policy={settings.policy!r} on {world} ranks, where each rank would have "
            "another average; expected policy='sync', one rank, or no ema"
        )
    if isinstance(knobs.shares, tuple) and len(knobs.shares) != world:
        yield f"shares: found {len(knobs.shares)} for {world} ranks, expected one number for each rank"
    if isinstance(knobs.shares, tuple) and not any(knobs.shares):
        yield f"shares: found {knobs.shares}, expected at least one number above 0"
    if knobs.speed_hint is not None and world > 1 and knobs.speed_hint[0] >= world:
        yield f"speed_hint: found rank {knobs.speed_hint[0]}, expected a rank from 0 to {world - 1}"
    if knobs.max_restarts and settings.folder is None and world > 1:
        yield f"max_restarts: found {knobs.max_restarts} and no folder to resume from, expected .checkpoints(folder)"


def _shard_faults(settings: Settings, run: Any) -> list[str]:
    functions, eval_fn = (run.functions, run.eval_fn) if run is not None else ((), None)
    refused = {
        f"policy={settings.policy!r}: ranks have different parts, so they step together; use 'sync'": (
            settings.policy not in (None, "sync")
        ),
        "precision='fp16': its loss scale would differ by rank; use 'bf16'": settings.precision == "fp16",
        "ema: each rank keeps the whole average": settings.ema is not None,
        "capture=True: collectives of shards are not captured; leave it at 'auto'": settings.capture is True,
        "compile: torch.compile does not support the hooks of shards here": settings.compile,
        "micro_batch_size='auto': trials on one rank would wait for the others; use a number": (
            settings.micro_batch_size == "auto"
        ),
        "rules: they change which weights learn": bool(settings.rules),
        "checkpoint_fn: it is called on one rank, which has a part of the model": any(
            isinstance(call, CheckpointFunction) for call in functions
        ),
        "eval_fn: it is called on one rank, which has a part of the model; use .evaluate(step, data)": (
            eval_fn is not None and not hasattr(eval_fn, "on_ranks")
        ),
    }
    return [f"shard={settings.shard!r} with {what}" for what, found in refused.items() if found]


class Precision:
    """The autocast context and the loss scale of one precision.

    Args:
        name: ``"fp32"`` (as the parameters are), ``"tf32"`` (float32 with TF32 matrix products on
            CUDA), ``"bf16"`` or ``"fp16"`` (autocast; float16 with a dynamic loss scale).

    Attributes:
        entered: True after `context` was called.
        products: dtype of matrix products under autocast; None without autocast.

    Raises:
        TrainError: another name.
    """

    entered = False

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in PRECISIONS:
            raise TrainError(f"precision: found {name!r}, expected one of {', '.join(PRECISIONS)}.", found=name)
        self.name, self.device = name, device
        self.products = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if name == "tf32":
            torch.set_float32_matmul_precision("high")

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward and loss run."""
        self.entered = True
        if self.products is not None:
            return torch.autocast(self.device.type, dtype=self.products)
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale as JSON values; empty without one."""
        return dict(self.scaler.state_dict()) if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale of `state_dict`."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
