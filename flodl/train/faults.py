"""Invalid combinations of settings, found before ranks are started and anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flodl.errors import TrainError, capped
from flodl.train.callback import CheckpointFunction
from flodl.train.optim.rates import make_schedule
from flodl.train.settings import Settings


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
    problems = [
        *(_own_loop_faults(settings) if own_loop else []),
        *_policy_faults(settings, world),
        *_schedule_faults(settings),
        *([] if settings.shard is None else _shard_faults(settings, run)),
        *([] if run is None or run.evaluates else _metric_faults(settings)),
    ]
    if len(problems) == 1:
        raise TrainError(problems[0], problems=problems)
    if problems:
        raise TrainError(f"settings that cannot be combined:\n{capped(problems)}", problems=problems)


def _own_loop_faults(settings: Settings) -> Iterator[str]:
    if settings.micro_batch_size == "auto":
        yield "micro_batch_size: found 'auto' in a loop of your own, which has no trial run; expected a number"
    if settings.capture is True:
        yield (
            "capture: found True in a loop of your own (Trainer.setup), whose steps are not captured; expected 'auto', "
            "or Trainer.fit"
        )


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


def _schedule_faults(settings: Settings) -> Iterator[str]:
    schedule = settings.schedule
    if schedule is None or isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        return
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=getattr(schedule, "reference", 1.0) or 1.0)
    try:
        made = make_schedule(schedule, optimizer)
    except TrainError as error:
        if not hasattr(error, "schedule"):  # the rate of the real optimiser is compared later
            yield error.message
        return
    if isinstance(made, torch.optim.lr_scheduler.LRScheduler) and any("rate" in str(r)[:4] for r in settings.rules):
        yield "rules: found set_rate with a torch LRScheduler, which overwrites rates; expected a function of the step"


def _metric_faults(settings: Settings) -> Iterator[str]:
    wanted = {"early_stopping": settings.early_stopping and settings.early_stopping[0], "keep_best": settings.keep_best}
    for name, metric in wanted.items():
        if metric:
            yield f"{name}: found {metric!r} and no evaluation, expected .evaluate(step, data) or .eval_fn(call)"


def _shard_faults(settings: Settings, run: Any) -> list[str]:
    functions, eval_fn = (run.functions, run.eval_fn) if run is not None else ((), None)
    refused = {
        f"policy={settings.policy!r}: ranks hold different parts, so they step together; use 'sync'": (
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
