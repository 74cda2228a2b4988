"""The contents of a checkpoint, and the comparison of settings when a run resumes from it.

Rank 0 writes everything equal on all ranks: weights, counters, settings, and under Sync the optimiser. Each rank writes
its random states, its unfinished steps, and under Cadence and Async its optimiser.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import torch

from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Choice
from flodl.distributed.rounds import Knobs
from flodl.distributed.sharded import local, whole_parts
from flodl.errors import TrainError, capped
from flodl.train.events import Past
from flodl.train.saving import state
from flodl.train.saving.reading import Checkpoint
from flodl.train.settings import MAY_CHANGE
from flodl.train.steplog import Tally

OPTIMIZER = f"{state.SHARDS}optimizer/"  # prefix of the names of shards of optimiser state
MEMORY = "remembered/"  # prefix of the names of values that graphs keep between calls


def recipe(trainer: Any) -> dict[str, Any]:
    """Return everything that determines the numbers of a run, as flat JSON values."""
    settings, metric, around = trainer.settings, trainer.rates.metric, trainer.hooks.around
    data = trainer.feed.identity() if trainer.feed is not None else {}
    found = {
        **settings.recipe(),
        **trainer.identity,
        **{f"data.{name}": value for name, value in data.items()},
        "policy": trainer.policy.name,
        "world_size": trainer.ranks.world,
        "optimizer": type(trainer.optimizer).__name__,
        **({} if metric is None else {"schedule_metric": metric, **settings.eval_times()}),
        **({} if trainer.ranks.solo else _knobs(settings.knobs)),
        **({"callbacks": [type(c).__name__ for c in around]} if around else {}),
    }
    # As read from a file, where tuples are lists.
    return json.loads(json.dumps(found))


def _knobs(knobs: Knobs) -> dict[str, Any]:
    """Return the options of the policy that differ from the defaults and may not change."""
    usual = vars(Knobs())
    return {n: value for n, value in vars(knobs).items() if n not in MAY_CHANGE and value != usual[n]}


def past_of(trainer: Any) -> Past:
    """Return the past of the run, with the parts before a resume."""
    seconds = trainer.earlier_s + time.monotonic() - trainer.began_s
    return Past(tuple(trainer.log.losses), tuple(trainer.evaluator.history), seconds, tuple(trainer.changes))


def snapshot(trainer: Any, best: dict[str, Any] | None) -> dict[str, Any]:
    """Return the files of this rank by stem; tensors are copied on their device if the copies fit.

    The host does not wait for the device, nor do ranks for each other.

    Args:
        trainer: the trainer.
        best: value, step and metric of the best checkpoint.
    """
    model, rank, shared = trainer.model, trainer.ranks.rank, trainer.policy.shares_gradients
    own_tensors, random_rest = state.random_state(trainer.ranks.device)
    own_tensors |= {f"{MEMORY}{name}": tensor for name, tensor in trainer.graphs.tensors().items()}
    own: dict[str, Any] = {
        "random": random_rest,
        "tally": trainer.tally.to_dict(),
        "policy": trainer.policy.own_state(),
        "observing": {"before": trainer.observing.before},
    }
    files: dict[str, Any] = {}
    shards: dict[str, torch.Tensor] = {}
    if trainer.sharded or not shared or rank == 0:
        own["precision"] = trainer.precision.state_dict()
        tensors, rest = state.optimizer_state(model, trainer.optimizer)
        if trainer.sharded:
            # Each rank writes its shards, and rank 0 everything that is not sharded.
            shards = {f"{state.MODEL}{n}": t for n, t in state.learned_tensors(model).items() if local(t) is not t}
            shards |= {f"{OPTIMIZER}{name}": tensor for name, tensor in tensors.items()}
            own_tensors |= state.copies({name: local(tensor) for name, tensor in shards.items()})
        elif shared:
            files["optimizer"] = state.copies(tensors) or {"empty": torch.zeros(0)}
        else:
            own_tensors |= {f"optimizer/{name}": tensor for name, tensor in state.copies(tensors).items()}
            own["optimizer"] = rest
        if shared and rank == 0:
            files["optimizer-options"] = rest
    if rank == 0:
        weights = {n: t for n, t in state.learned_tensors(model).items() if f"{state.MODEL}{n}" not in shards}
        observing = trainer.observing
        by_rule = any(observing.rules[position].action == "stop" for position in observing.acted)
        files["model"] = state.copies(weights) or {"empty": torch.zeros(0)}
        if trainer.average is not None:
            files["ema"] = state.copies(trainer.average.tensors())
        run = {
            "epoch": trainer.epoch_number,
            "policy": trainer.policy.state_dict(),
            "schedule": trainer.rates.state_dict(),
            "evaluator": trainer.evaluator.state_dict(),
            "callbacks": trainer.hooks.state_dict(),
            "observing": observing.state_dict(),
            "stopped": trainer.stopping and (trainer.evaluator.is_spent or by_rule),
            "recipe": recipe(trainer),
            "best": best,
            **({"ema updates": trainer.average.updates} if trainer.average is not None else {}),
        }
        files["run"] = copy.deepcopy(run)  # training continues, and changes these lists, before they are written
        past = past_of(trainer)
        files["losses"] = {"losses": torch.tensor(past.losses, dtype=torch.float64)}
        files["past"] = {"evaluations": past.evaluations, "seconds": past.seconds, "changes": past.changes}
    return {**files, f"rank-{rank}": own_tensors, f"rank-{rank}-state": own}


def restore(trainer: Any, saved: Checkpoint) -> None:
    """Load an opened checkpoint into the trainer.

    Raises:
        CheckpointError: it does not fit the model or the optimiser.
        TrainError: a setting differs and is not in ``allow_change``; ``problems`` lists each.
    """
    run, world, rank = saved.values["run"], saved.world, trainer.ranks.rank
    states = [saved.values[f"rank-{number}-state"] for number in range(world)]
    policy = run["recipe"]["policy"]
    if trainer.settings.policy is None and not trainer.ranks.solo and policy != trainer.policy.name:
        trainer.use_policy(Choice(policy, "the checkpoint was written with it"))
    weights = state.whole_model(saved.tensors)
    state.check_fits(trainer.model, weights)
    changes = _compare(trainer, run["recipe"], saved)
    if policy == trainer.policy.name:
        trainer.policy.load_state_dict(run["policy"], [one["policy"] for one in states])
    elif run["policy"].get("position", run["policy"].get("cursor")) == 0:
        trainer.policy.steps = run["policy"]["steps"]
    else:
        raise TrainError(
            f"resume: {saved.path} was written inside an epoch under policy {policy!r}; its position in the data "
            f"is of no use for {trainer.policy.name!r}. Resume with {policy!r}, or from a checkpoint between epochs.",
            path=str(saved.path),
        )
    own = states[min(rank, world - 1)]
    stored = saved.tensors[f"rank-{min(rank, world - 1)}"]
    tensors = {name: tensor[...] for name, tensor in stored.items() if not name.startswith(state.SHARDS)}
    state.load_model(trainer.model, weights)
    trainer.hooks.load_state_dict(run.get("callbacks", []))
    if trainer.average is not None:
        average = saved.tensors.get("ema", saved.tensors["model"])
        updates = run.get("ema updates", run["policy"]["steps"])  # earlier versions counted every step
        trainer.average.load_state_dict({name: tensor[...] for name, tensor in average.items()}, updates)
    if "optimizer" in own:
        part = {name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")}
    else:
        whole: Any = saved.tensors.get("optimizer") or whole_parts(saved.tensors, OPTIMIZER)
        part = {name: t for name, t in whole.items() if name != "empty"}
    rest = own.get("optimizer") or saved.values["optimizer-options"]
    accepted = {str(change["name"]).removeprefix("optimizer.") for change in changes}
    state.load_optimizer(trainer.model, trainer.optimizer, part, rest, accepted)
    trainer.precision.load_state_dict(own.get("precision", states[0]["precision"]))
    trainer.rates.load_state_dict(run["schedule"])
    trainer.evaluator.load_state_dict(run["evaluator"])
    trainer.observing.load_state_dict(run.get("observing", {}), own.get("observing", {}))
    trainer.epoch_number, trainer.stopping = run["epoch"], run["stopped"]
    trainer.graphs.load({name.removeprefix(MEMORY): t for name, t in tensors.items() if name.startswith(MEMORY)})
    if rank < world:
        trainer.tally = Tally(**own["tally"])
        state.load_random(trainer.ranks.device, tensors, own["random"])
    else:
        trainer.warn(f"the checkpoint was written by {world} ranks; rank {rank} starts new random states")
    for gone in states[trainer.ranks.world :] if rank == 0 else ():
        trainer.tally.take_over(Tally(**gone["tally"]), shared_loss=trainer.policy.shares_gradients)
    past = saved.values.get("past", {})  # old versions lack it
    if "losses" in saved.tensors:
        trainer.log.losses = saved.tensors["losses"]["losses"][...].tolist()
    trainer.evaluator.history = [dict(row) for row in past.get("evaluations", ())]
    trainer.earlier_s, trainer.changes = past.get("seconds", 0.0), [*past.get("changes", ()), *changes]
    trainer.step_.loaded()
    if isinstance(trainer.policy, LocalSteps):
        trainer.policy.mean.buffers.refresh()


def _compare(trainer: Any, saved: dict[str, Any], checkpoint: Checkpoint) -> list[dict[str, object]]:
    """Return the settings that differ from the saved ones.

    Raises:
        TrainError: one of them is not in ``allow_change``.
    """
    present, path, step = recipe(trainer), checkpoint.path, checkpoint.step
    if not trainer.feed:
        saved = {name: value for name, value in saved.items() if not name.startswith("data.")}
    names = saved.keys() | present.keys()
    unknown = sorted(present.keys() - saved.keys())
    if unknown and "dropout" not in saved:  # earlier versions did not write as much
        names -= set(unknown)
        trainer.warn(f"resume: {path.name} is of an older version without {', '.join(unknown)}; not compared")
    changed = [name for name in sorted(names) if saved.get(name) != present.get(name)]
    refused = [name for name in changed if name not in trainer.settings.allow_change]
    problems = [f"{name}: was {saved.get(name)!r}, is {present.get(name)!r}" for name in refused]
    if problems:
        raise TrainError(
            f"resume: settings differ from the checkpoint {path}:\n{capped(problems)}\nRestore these settings, or "
            f"accept the differences with allow_change={refused!r}.",
            problems=problems,
            names=refused,
            path=str(path),
        )
    return [{"step": step, "name": name, "was": saved.get(name), "is": present.get(name)} for name in changed]
