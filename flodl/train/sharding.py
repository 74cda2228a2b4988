"""What a run with sharded weights can be, and what is refused of it by name, before anything is computed."""

from __future__ import annotations

from flodl.errors import TrainError, capped
from flodl.train.evaluate import Callbacks, RankedEval
from flodl.train.settings import Settings

__all__ = ["check_sharding"]


def check_sharding(settings: Settings, callbacks: Callbacks) -> None:
    """Raise where weights are to be sharded and something else of the run cannot be with that.

    Raises:
        TrainError: ``problems`` lists all of it.
    """
    if settings.shard is None:
        return
    refused = {
        f"policy={settings.policy!r}: ranks hold different parts, so they step together; 'sync' does": (
            settings.policy not in (None, "sync")
        ),
        "precision='fp16': its loss scale would differ by rank; use 'bf16'": settings.precision == "fp16",
        "ema: an average of the weights is kept whole on each rank": settings.ema is not None,
        "capture=True: collectives of shards are not captured; leave it at 'auto'": settings.capture is True,
        "compile: torch.compile does not see through the shards' hooks here": settings.compile,
        "micro_batch_size='auto': trials on one rank would wait for the others; give a number": (
            settings.micro_batch_size == "auto"
        ),
        "rules: they change which weights learn": bool(settings.rules),
        "checkpoint_fn: it is called on one rank, which holds a part of the model": callbacks.checkpoint_fn is not None,
        "eval_fn: it is called on one rank, which holds a part of the model; give .evaluate(step, data)": (
            callbacks.eval_fn is not None and not isinstance(callbacks.eval_fn, RankedEval)
        ),
    }
    problems = [what for what, found in refused.items() if found]
    if problems:
        raise TrainError(
            f"shard='fsdp' does not go with:\n{capped(problems)}\nLeave these out, or train without shard.",
            problems=problems,
        )
