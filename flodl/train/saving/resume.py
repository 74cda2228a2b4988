"""Which parts of a trainer make up a checkpoint, and what must agree before one is taken up again.

Rank 0 writes what all ranks share: weights, counters, settings, and under Sync the optimiser. Every
rank writes what is its own: random states, unfinished turns, and under Cadence and Async its optimiser.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from flodl.distributed.policy import Choice
from flodl.distributed.rounds import Knobs
from flodl.distributed.sharded import local, whole_parts
from flodl.errors import TrainError, capped
from flodl.train.epoch_figures import Tally
from flodl.train.events import Past, Warned
from flodl.train.saving.reading import Checkpoint
from flodl.train.saving.state import (
    MODEL,
    SHARDS,
    check_fits,
    learned_tensors,
    load_model,
    load_optimizer,
    load_random,
    optimizer_state,
    random_state,
    whole_model,
)
from flodl.train.saving.tensor_stream import copies
from flodl.train.settings import MAY_CHANGE

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts

__all__ = ["past_of", "restore", "snapshot"]

OPTIMIZER = f"{SHARDS}optimizer/"  # before the names of parts of optimiser state


def recipe(trainer: TrainerParts) -> dict[str, Any]:
    """Return what decides the numbers of a run, as flat JSON values."""
    data = trainer.feed.identity() if trainer.feed is not None else {}
    found = {
        **trainer.settings.recipe(),
        **trainer.identity,
        **{f"data.{name}": value for name, value in data.items()},
        "policy": trainer.policy.name,
        "world_size": trainer.ranks.world,
        "optimizer": type(trainer.optimizer).__name__,
        **_schedule(trainer),
        **({} if trainer.ranks.solo else _knobs(trainer.settings.knobs)),
        **({"callbacks": [type(c).__name__ for c in trainer.hooks.around]} if trainer.hooks.around else {}),
    }
    # As it comes back from a file: tuples are lists there.
    return json.loads(json.dumps(found))


def _schedule(trainer: TrainerParts) -> dict[str, Any]:
    """Return which figures a schedule reads, if it reads any."""
    metric = trainer.rates.metric
    return {} if metric is None else {"schedule_metric": metric, **trainer.settings.eval_times()}


def _knobs(knobs: Knobs) -> dict[str, Any]:
    """Return settings of the policy that are not the usual ones."""
    usual = vars(Knobs())
    return {n: value for n, value in vars(knobs).items() if n not in MAY_CHANGE and value != usual[n]}


def snapshot(trainer: TrainerParts, past: Past, best: Any) -> dict[str, Any]:
    """Return this rank's files of a checkpoint, by name without suffix; contents are copies, on the device if they fit.

    The host does not wait for the device here, nor do other ranks for this one.

    Args:
        past: what the run has done so far.
        best: which checkpoint is the best one, as `flodl.train.saving.keeper.Keeper.best_record` has it.
    """
    rank, shared = trainer.ranks.rank, trainer.policy.shares_gradients
    random_tensors, random_rest = random_state(trainer.ranks.device)
    own_tensors = {**random_tensors, **{f"remembered/{k}": v for k, v in trainer.graphs.tensors().items()}}
    own: dict[str, Any] = {
        "random": random_rest,
        "tally": trainer.tally.to_dict(),
        "policy": trainer.policy.own_state(),
        "observing": trainer.observing.own_state(),
    }
    files: dict[str, Any] = {}
    if trainer.sharded:
        # Each rank writes its part of what is sharded, and rank 0 what is not.
        tensors, rest = optimizer_state(trainer.model, trainer.optimizer)
        parts = {**{f"{OPTIMIZER}{k}": v for k, v in tensors.items()}, **_sharded(trainer)}
        own_tensors |= copies({name: local(tensor) for name, tensor in parts.items()})
        files |= {"optimizer-options": rest} if rank == 0 else {}
        own["precision"] = trainer.precision.state_dict()
    elif not shared or rank == 0:
        tensors, rest = optimizer_state(trainer.model, trainer.optimizer)
        tensors = copies(tensors)
        if shared:
            files["optimizer"] = tensors or {"empty": torch.zeros(0)}
            files["optimizer-options"] = rest
        else:
            own_tensors |= {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
            own["optimizer"] = rest
        own["precision"] = trainer.precision.state_dict()
    if rank == 0:
        learned = learned_tensors(trainer.model)
        if trainer.sharded:
            learned = {name: tensor for name, tensor in learned.items() if f"{MODEL}{name}" not in own_tensors}
        files["model"] = copies(learned) or {"empty": torch.zeros(0)}
        if trainer.average is not None:
            files["ema"] = copies(trainer.average.tensors())
        files["run"] = {
            "epoch": trainer.epoch_number,
            "policy": trainer.policy.state_dict(),
            "schedule": trainer.rates.state_dict(),
            "evaluator": trainer.evaluator.state_dict(),
            "callbacks": trainer.hooks.state_dict(),
            "observing": trainer.observing.state_dict(),
            "stopped": trainer.stopping and (trainer.evaluator.is_spent or trainer.observing.deciding.stopped),
            "recipe": recipe(trainer),
            "best": best,
            **({"ema updates": trainer.average.updates} if trainer.average is not None else {}),
        }
        files["losses"] = {"losses": torch.tensor(past.losses, dtype=torch.float64)}
        files["past"] = {"evaluations": past.evaluations, "seconds": past.seconds, "changes": past.changes}
    return {**files, f"rank-{rank}": own_tensors, f"rank-{rank}-state": own}


def _sharded(trainer: TrainerParts) -> dict[str, torch.Tensor]:
    learned = learned_tensors(trainer.model)
    return {f"{MODEL}{name}": tensor for name, tensor in learned.items() if local(tensor) is not tensor}


def past_of(saved: Checkpoint) -> Past:
    """Return what the run had done; of checkpoints that do not say it, nothing."""
    told = saved.values.get("past", {})
    losses = saved.tensors["losses"]["losses"].tolist() if "losses" in saved.tensors else []
    return Past(
        tuple(losses), tuple(told.get("evaluations", ())), told.get("seconds", 0.0), tuple(told.get("changes", ()))
    )


def restore(trainer: TrainerParts, saved: Checkpoint) -> list[dict[str, object]]:
    """Put the trainer where the checkpoint was taken, and return which settings have changed since.

    Raises:
        CheckpointError: it does not fit the model or the optimiser.
        TrainError: a setting differs and is not in ``allow_change``; ``problems`` lists each.
    """
    run, world = saved.values["run"], saved.world
    own = [saved.values[f"rank-{rank}-state"] for rank in range(world)]
    policy = run["recipe"]["policy"]
    if trainer.settings.policy is None and not trainer.ranks.solo and policy != trainer.policy.name:
        trainer.use_policy(Choice(policy, "the checkpoint was written with it"))
    check_fits(trainer.model, whole_model(saved.tensors))
    changes = _compare(trainer, run["recipe"], saved)
    if policy != trainer.policy.name and not _between_epochs(run["policy"]):
        raise TrainError(
            f"resume: {saved.path} was taken inside an epoch under policy {policy!r}, whose place in the data "
            f"{trainer.policy.name!r} cannot take up. Resume with {policy!r}, or from a checkpoint between epochs.",
            path=str(saved.path),
        )
    mine = min(trainer.ranks.rank, world - 1)
    if trainer.ranks.rank >= world:
        trainer.events.emit(_new_rank(trainer, world))
    tensors: Any = saved.tensors[f"rank-{mine}"]
    load_model(trainer.model, whole_model(saved.tensors))
    trainer.hooks.load_state_dict(run.get("callbacks", []))
    if trainer.average is not None:
        updates = run.get("ema updates", run["policy"]["steps"])  # earlier versions counted every step
        trainer.average.load_state_dict(saved.tensors.get("ema", saved.tensors["model"]), updates)
    if "optimizer" in own[mine]:
        part = {name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")}
        rest = own[mine]["optimizer"]
    else:
        stored = saved.tensors.get("optimizer") or whole_parts(saved.tensors, OPTIMIZER)
        part, rest = {name: t for name, t in stored.items() if name != "empty"}, saved.values["optimizer-options"]
    accepted = {str(change["name"]).removeprefix("optimizer.") for change in changes}
    load_optimizer(trainer.model, trainer.optimizer, part, rest, accepted)
    trainer.precision.load_state_dict(own[mine].get("precision", own[0]["precision"]))
    trainer.rates.load_state_dict(run["schedule"])
    trainer.evaluator.load_state_dict(run["evaluator"])
    trainer.observing.load_state_dict(run.get("observing", {}), own[mine].get("observing", {}))
    trainer.epoch_number = run["epoch"]
    trainer.stopping = run["stopped"]
    if policy == trainer.policy.name:
        trainer.policy.load_state_dict(run["policy"], [part["policy"] for part in own])
    else:
        trainer.policy.steps = run["policy"]["steps"]
    mark = "remembered/"
    trainer.graphs.load({name.removeprefix(mark): t for name, t in tensors.items() if name.startswith(mark)})
    if trainer.ranks.rank < world:
        trainer.tally = Tally(**own[mine]["tally"])
        load_random(trainer.ranks.device, tensors, own[mine]["random"])
    for gone in own[trainer.ranks.world :] if trainer.ranks.rank == 0 else ():
        trainer.tally.take_over(Tally(**gone["tally"]), shared_loss=trainer.policy.shares_gradients)
    trainer.model_was_replaced()
    return changes


def _between_epochs(policy: dict[str, Any]) -> bool:
    return policy.get("position", policy.get("cursor")) == 0


def _new_rank(trainer: TrainerParts, world: int) -> Any:
    return Warned(
        rank=trainer.ranks.rank,
        step=0,
        message=f"the checkpoint was written by {world} ranks; rank {trainer.ranks.rank} starts new random states",
    )


def _compare(trainer: TrainerParts, saved: dict[str, Any], where: Checkpoint) -> list[dict[str, object]]:
    """Return which settings differ from the saved ones, all of them accepted.

    Raises:
        TrainError: one is not.
    """
    present = recipe(trainer)
    if not trainer.feed:
        saved = {name: value for name, value in saved.items() if not name.startswith("data.")}
    names = saved.keys() | present.keys()
    unknown = sorted(present.keys() - saved.keys())
    if unknown and "dropout" not in saved:  # earlier versions did not write as much
        names -= set(unknown)
        message = f"resume: {where.path.name} is of an older version and does not say {', '.join(unknown)}"
        trainer.events.emit(Warned(rank=trainer.ranks.rank, step=where.step, message=f"{message}; not compared"))
    changed = [name for name in sorted(names) if saved.get(name) != present.get(name)]
    refused = [name for name in changed if name not in trainer.settings.allow_change]
    problems = [f"{name}: was {saved.get(name)!r}, is {present.get(name)!r}" for name in refused]
    if problems:
        raise TrainError(
            f"resume: the run in {where.path} was another:\n{capped(problems)}\nRestore these settings, or accept the "
            f"differences with allow_change={refused!r}.",
            problems=problems,
            names=refused,
            path=str(where.path),
        )
    return [{"step": where.step, "name": name, "was": saved.get(name), "is": present.get(name)} for name in changed]
