"""Every setting of a training run with its default, in one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal

from torch import nn

from flodl.checked_fields import Values, check_fields, choice, listed, number, of_kind, pair, path, text, truth, whole
from flodl.distributed.group import FROZEN_S
from flodl.distributed.policy import POLICIES
from flodl.distributed.rounds import Knobs
from flodl.errors import TrainError, nearest
from flodl.train.callback import Callback
from flodl.train.events import Subscriber
from flodl.train.precision import PRECISIONS
from flodl.train.rules import Rule, as_rule
from flodl.train.trackers import TRACKERS, make_trackers

__all__ = ["MAY_CHANGE", "VALUES", "Settings", "make_settings"]

_LENGTH = "how long the run is; a schedule that was made for a length is compared"
_SAVING = "which checkpoints there are"
_SHOWN = "what is told of the run"
_ROUNDING = "how the same is computed: it rounds another way at most, as another device does"
_WAITING = "how long ranks wait"
_MEETING = "when ranks meet that step on their own, which follows measured times: no two such runs are alike"
MAY_CHANGE: Mapping[str, str] = {
    **dict.fromkeys(("num_epochs", "max_steps", "early_stopping"), _LENGTH),
    **dict.fromkeys(
        ("folder", "save_every", "save_epochs", "save_end", "keep_last", "keep_best", "checkpoint_every"), _SAVING
    ),
    **dict.fromkeys(("resume", "allow_change", "max_restarts"), "how a run is taken up again"),
    **dict.fromkeys(("remarks", "timeline", "progress", "log_every", "monitor", "trackers", "tracker_folder"), _SHOWN),
    **dict.fromkeys(("watch", "eval_start"), f"{_SHOWN}; rules are compared"),
    **dict.fromkeys(("deterministic", "checkpoint_activations", "arrange", "compile", "backend"), _ROUNDING),
    **dict.fromkeys(("capture", "capture_num_rows"), "captured steps are those that are not, to the bit"),
    **dict.fromkeys(("timeout_s", "frozen_after_s", "slowdown"), _WAITING),
    **dict.fromkeys(("anchor", "max_anchor", "overhead_target", "speed_hint"), _MEETING),
    **dict.fromkeys(("max_batch_diff", "max_overshoot", "divergence_threshold"), _MEETING),
    "check_every": "it compares ranks, and changes nothing",
}
"""Fields of `Settings` and `Knobs` that a run which is taken up again may have otherwise, and why; all others are
compared with those of its checkpoint, as far as they are in use."""


def _is_monitor(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return 0 <= value < 65536
    from flodl.monitor import Monitor

    return isinstance(value, Monitor)


def _is_schedule(value: Any) -> bool:
    return callable(getattr(value, "lr", None)) or callable(value)


_CALLED = of_kind("something that is called with the model", callable)
_FACTORS = of_kind(
    "a map of ranks to factors, such as {1: 2.0}",
    lambda value: (
        isinstance(value, Mapping)
        and all(whole(0).fits(rank) and number(above=0).fits(factor) for rank, factor in value.items())
    ),
)
_NAMED = of_kind("a map of names to values", lambda value: isinstance(value, Mapping) and all(map(text.fits, value)))
_TEXTS = listed("a list of texts", text.fits)

VALUES: Mapping[str, Values] = {
    "num_epochs": whole(0),
    **dict.fromkeys(("accumulate", "keep_last", "log_every"), whole(1)),
    **dict.fromkeys(("eval_delay", "max_restarts"), whole(0)),
    "seed": of_kind("an integer", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    **dict.fromkeys(
        ("max_steps", "batch_size", "save_every", "eval_every", "checkpoint_every", "trend_every"), whole(1) | None
    ),
    "micro_batch_size": whole(1) | choice("auto") | None,
    **dict.fromkeys(("shuffle", "drop_last", "sum_of_means", "deterministic", "resume", "eval_start"), truth),
    **dict.fromkeys(("capture_num_rows", "compile", "ema_warmup"), truth),
    "progress": truth | None,
    "policy": choice(*POLICIES) | None,
    "shard": choice("fsdp") | None,
    "knobs": of_kind("flodl.distributed.rounds.Knobs", lambda value: isinstance(value, Knobs)),
    "precision": choice(*PRECISIONS),
    "on_nan": choice("stop", "skip"),
    "capture": truth | choice("auto"),
    "max_grad_norm": number(above=0) | None,
    "ema": number(above=0, below=1) | None,
    "lr_scale_ratio": number(),
    **dict.fromkeys(("timeout_s", "frozen_after_s"), number(above=0)),
    **dict.fromkeys(("checkpoint_activations", "arrange", "parameter_groups"), _CALLED | None),
    "schedule": of_kind("an object with lr(step), or a function of the number of ranks", _is_schedule) | None,
    "schedule_metric": text,
    **dict.fromkeys(("folder", "timeline", "tracker_folder"), path | None),
    "save_epochs": truth | choice("idle"),
    "save_end": truth | replace(number(least=0), expected="seconds of 0 or more"),
    "keep_best": text | None,
    "early_stopping": pair("a metric and a patience, such as ('accuracy', 3)", text, whole(1)) | None,
    "identity": _NAMED,
    "slowdown": _FACTORS,
    **dict.fromkeys(("allow_change", "remarks", "watch"), _TEXTS),
    "callbacks": listed(
        "instances of flodl.train.Callback; a function that looks on subscribes to events",
        lambda value: isinstance(value, Callback),
    ),
    "rules": listed("a list of rules of flodl.train.rules, or of their texts", lambda value: True),
    "trackers": listed(
        f"one of {', '.join(TRACKERS)}, or what can be called with events, for each",
        lambda v: callable(v) or v in TRACKERS,
    ),
    "monitor": truth | of_kind("a port, or a flodl.monitor.Monitor", _is_monitor) | None,
}
"""What each field of `Settings` may hold."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is done. Nothing here changes by itself with the number of ranks.

    Attributes:
        num_epochs: passes over the data.
        max_steps: stop after this many optimiser steps; None for no bound.
        batch_size: samples of one batch. Under Sync that is one optimiser step of all ranks together;
            under Cadence and Async each rank steps on batches of its own.
        accumulate: batches in one optimiser step.
        micro_batch_size: at most this many samples go through the model at once; bounds memory and
            changes no number beyond rounding. ``"auto"`` tries before the first step how many fit into the
            device's memory.
        shuffle: a new order each epoch.
        drop_last: leave out the ragged last batch; off, since nothing is dropped unasked.
        seed: decides the order of data and, with the rank, all random generators.
        policy: ``"sync"``, ``"cadence"``, ``"async"``; None chooses Sync, or Cadence where the names of devices differ.
        shard: ``"fsdp"`` cuts weights, gradients and the optimiser's state into a part for each rank
            (`flodl.distributed.sharded`); with one rank it changes nothing. None has all of them on every rank.
        knobs: settings of the policy.
        precision: ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``.
        max_grad_norm: clip the whole gradient to this 2-norm.
        on_nan: ``"stop"`` or ``"skip"`` when loss or gradient is not finite. A step that is left out, for that or for a
            float16 gradient that overflowed, changes neither weights nor the optimiser's state (its own step count
            included) nor ``ema``, and its loss is in no mean. It counts as a step in all else, as in a loop around
            ``torch.amp.GradScaler``: ``schedule``, ``max_steps``, ``save_every``, ``eval_every``, and it is told.
        sum_of_means: add up the means of micro-batches and ranks without dividing, so that the gradient is too large
            by accumulation times processes; for recipes that were tuned to it.
        deterministic: ask torch for deterministic kernels, and fail where there is none.
        checkpoint_activations: called with the model before training, to switch gradient
            checkpointing on in it.
        arrange: called with the model, on its device, when training begins, to have it computed another
            way; returns what undoes that.
        schedule: has ``lr(step)``; or a function of the number of ranks that returns such an object.
        schedule_metric: the figure that a schedule with ``observe`` is told after each epoch.
        lr_scale_ratio: multiply the learning rate by ``1 + (ranks - 1) * ratio``.
        parameter_groups: ``groups(model)`` gives what the optimiser factory takes; None for the
            trainable parameters in one group.
        folder: where checkpoints go; None for none.
        save_every: steps between checkpoints; None saves after epochs only.
        save_epochs: save after each epoch; ``"idle"`` leaves out epochs whose end comes while the save before is still
            being written, unless they are the best so far (``keep_best``), so that training never waits for the
            disk. The end of a run is saved either way.
        save_end: save where a run ends, False where the model goes elsewhere at once. Seconds leave it out where less
            than that was worked since the newest checkpoint that is written, or the start; a checkpoint that is being
            written is then given up as well, unless it is the best.
        keep_last: checkpoints kept.
        keep_best: metric whose best checkpoint is kept as well; a leading ``-`` where less is better.
        resume: go on from the newest whole checkpoint in ``folder`` if there is one.
        allow_change: settings that may differ from the checkpoint's, by the names that its refusal gives.
        remarks: lines that are told when the run begins, as `Warned`.
        identity: further values by name that decide the numbers of the run (of the loss, of the data), as JSON values;
            a resumed run compares them.
        eval_every: steps between evaluations; None evaluates after each epoch. The last model is always evaluated.
        eval_start: evaluate before the first step too; these figures are told and decide nothing.
        eval_delay: no evaluation before so many steps, but for the one at the end.
        early_stopping: ``(metric, patience)``: stop after so many evaluations without improvement.
        checkpoint_every: epochs between calls of ``checkpoint_fn``.
        slowdown: ``{rank: factor}``, simulated slow ranks for experiments.
        timeline: file without suffix that gets the timeline as ``.json``, ``.csv`` and ``.html``: when each rank
            computed, met and waited, and what the machine did meanwhile.
        timeout_s: how long a collective waits for a live rank.
        frozen_after_s: silence after which a stopped rank is given up.
        capture: ``"auto"`` captures the steps of a run on CUDA as graphs, one for each shape of batch, where it
            can, and says once why where it cannot; True refuses to run otherwise; False never captures.
        capture_num_rows: capture apart what differs in `flodl.data.Batch.num_rows` alone; False where ``train_step``
            does not read it, so that a captured graph serves batches of any number of rows.
        compile: pass the model through ``torch.compile`` first.
        progress: True shows how far the run is, None where it takes longer than a second, False nothing.
        log_every: steps whose figures are read from a CUDA device together.
        monitor: a page beside the run: True, a port of this machine, or a `flodl.monitor.Monitor`; its record is kept
            in ``folder``.
        callbacks: take part in the run, step by step; see `flodl.train.callback`.
        watch: what to collect inside of the model in each step, by dotted paths of tags, groups and modules, each
            with a reduction if not the mean (``"encoder.features:norm"``); besides what its graphs watch already.
            Told as `flodl.train.Observed`.
        rules: what the run does by itself when its trends say so, as `flodl.train.rules` makes it, or as text
            (``"freeze encoder.layers.0-3 when stalled(loss, 3)"``). Told as `flodl.train.Decided`.
        trend_every: steps between the values of trends that rules ask about; None: one an epoch. Figures of evaluations
            have a value for each evaluation.
        trackers: keep the figures of the run elsewhere, by name (``"csv"``, ``"jsonl"``, ``"tensorboard"``,
            ``"wandb"``, ``"mlflow"``), or anything that can be called with events; the first rank's are told. See
            `flodl.train.trackers`.
        tracker_folder: where trackers write; None: beside ``folder``, else ``runs``.
        ema: keep an exponential moving average of the weights with this decay; it is what is evaluated and what
            the model holds in the end. See `flodl.train.optim.ema`.
        ema_warmup: let the average follow faster at first.
        max_restarts: how often ranks that we started are started again after a failure.

    Raises:
        TrainError: a value of the wrong kind or out of range; ``problems`` lists all of them.
        ConfigError: a rule that is none.
    """

    num_epochs: int = 1
    max_steps: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    micro_batch_size: int | str | None = None
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 42
    policy: str | None = None
    shard: str | None = None
    knobs: Knobs = field(default_factory=Knobs)
    precision: str = "fp32"
    max_grad_norm: float | None = None
    on_nan: str = "stop"
    sum_of_means: bool = False
    deterministic: bool = False
    checkpoint_activations: Callable[[nn.Module], Any] | None = None
    arrange: Callable[[nn.Module], Callable[[], Any]] | None = None
    schedule: Any = None
    schedule_metric: str = "loss"
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
    remarks: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    eval_every: int | None = None
    eval_start: bool = False
    eval_delay: int = 0
    early_stopping: tuple[str, int] | None = None
    checkpoint_every: int | None = None
    slowdown: Mapping[int, float] = field(default_factory=dict)
    timeline: str | None = None
    timeout_s: float = 600.0
    frozen_after_s: float = FROZEN_S
    capture: str | bool = "auto"
    capture_num_rows: bool = True
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
    ema: float | None = None
    ema_warmup: bool = True
    max_restarts: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot be, before anything is read or trained."""
        check_fields(self, VALUES, "settings")
        for rule in self.rules:
            as_rule(rule)

    def made_trackers(self) -> list[Subscriber]:
        """Return the trackers of the run, their packages found.

        Raises:
            TrainError: a tracker does not exist, or its package is not installed.
        """
        folder = self.tracker_folder or (f"{self.folder}.logs" if self.folder else "runs")
        length = {"num_epochs": self.num_epochs, "max_steps": self.max_steps, "batch_size": self.batch_size}
        return make_trackers(
            self.trackers, folder, {k: v for k, v in {**length, **self.recipe()}.items() if v is not None}
        )

    def recipe(self) -> dict[str, Any]:
        """Return the settings that decide the numbers of a run, as JSON values; a resumed run compares them."""
        names = (
            "accumulate",
            "micro_batch_size",
            "seed",
            "precision",
            "max_grad_norm",
            "on_nan",
            "lr_scale_ratio",
        )
        values = {name: getattr(self, name) for name in names} | dict(self.identity)
        if self.shard is not None:
            values["shard"] = self.shard
        if self.sum_of_means:
            values["sum_of_means"] = True
        if self.ema is not None:
            values["ema"] = f"{self.ema}{'' if self.ema_warmup else ', no warmup'}"
        if self.rules:
            values["rules"] = [str(as_rule(rule)) for rule in self.rules]
            values["trend_every"] = self.trend_every
            values |= self.judging()
        return values

    def judging(self) -> dict[str, Any]:
        """Return when figures are taken, which decide numbers where rules or a schedule go by them."""
        return {"eval_every": self.eval_every, "eval_delay": self.eval_delay}


def make_settings(given: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Return ``base`` with the given values; names of `Knobs` fields go there.

    Raises:
        TrainError: a name that is neither (``names`` lists them), or a value that cannot be (``problems``).
    """
    base = base or Settings()
    known, knobs = {f.name for f in fields(Settings)}, {f.name for f in fields(Knobs)}
    unknown = [name for name in given if name not in known | knobs]
    if unknown:
        shown = ", ".join(f"{name!r}{nearest(name, known | knobs)}" for name in unknown)
        raise TrainError(
            f"settings: there is no {shown}. Expected fields of Settings or of its policy's Knobs.", names=unknown
        )
    own = {name: value for name, value in given.items() if name in known}
    own["knobs"] = replace(own.get("knobs", base.knobs), **{n: v for n, v in given.items() if n in knobs})
    return replace(base, **own)
