"""The contents of a checkpoint, and the comparison of settings when a run resumes from it.

Rank 0 writes everything equal on all ranks: weights, counters, settings, and under Sync the optimiser. Each rank writes
its random states, its unfinished steps, and under Cadence and Async its optimiser.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from flodl.distributed.policy import Choice
from flodl.distributed.rounds import Knobs
from flodl.distributed.sharded import local, whole_parts
from flodl.errors import TrainError, capped
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
from flodl.train.steplog import Tally

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts


OPTIMIZER = f"{SHARDS}optimizer/"  # prefix of the names of shards of optimiser state


def recipe(trainer: TrainerParts) -> dict[str, Any]:
    """Return everything that determines the numbers of a run, as flat JSON values."""
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
    # As read from a file, where tuples are lists.
    return json.loads(json.dumps(found))


def _schedule(trainer: TrainerParts) -> dict[str, Any]:
    """Return which figures a schedule reads, if it reads any."""
    metric = trainer.rates.metric
    return {} if metric is None else {"schedule_metric": metric, **trainer.settings.eval_times()}


def _knobs(knobs: Knobs) -> dict[str, Any]:
    """Return the options of the policy that differ from the defaults and may not change."""
    usual = vars(Knobs())
    return {n: value for n, value in vars(knobs).items() if n not in MAY_CHANGE and value != usual[n]}


def snapshot(trainer: TrainerParts, past: Past, best: Any) -> dict[str, Any]:
    """Return the files of this rank by stem; tensors are copied on their device if the copies fit.

    The host does not wait for the device, nor do ranks for each other.

    Args:
        trainer: the trainer.
        past: the past of the run.
        best: `flodl.train.saving.keeper.Keeper.best_record`.
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
        # Each rank writes its shards, and rank 0 everything that is not sharded.
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
    """Return the past of the run; empty for checkpoints of old versions."""
    past = saved.values.get("past", {})
    losses = saved.tensors["losses"]["losses"].tolist() if "losses" in saved.tensors else []
    return Past(
        tuple(losses), tuple(past.get("evaluations", ())), past.get("seconds", 0.0), tuple(past.get("changes", ()))
    )


def restore(trainer: TrainerParts, saved: Checkpoint) -> list[dict[str, object]]:
    """Load a checkpoint into the trainer, and return the settings that have changed since.

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
            f"resume: {saved.path} was written inside an epoch under policy {policy!r}, whose position in the data "
            f"{trainer.policy.name!r} cannot use. Resume with {policy!r}, or from a checkpoint between epochs.",
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
    """Return the settings that differ from the saved ones.

    Raises:
        TrainError: one of them is not in ``allow_change``.
    """
    present = recipe(trainer)
    if not trainer.feed:
        saved = {name: value for name, value in saved.items() if not name.startswith("data.")}
    names = saved.keys() | present.keys()
    unknown = sorted(present.keys() - saved.keys())
    if unknown and "dropout" not in saved:  # earlier versions did not write as much
        names -= set(unknown)
        message = f"resume: {where.path.name} is of an older version without {', '.join(unknown)}; not compared"
        trainer.events.emit(Warned(rank=trainer.ranks.rank, step=where.step, message=message))
    changed = [name for name in sorted(names) if saved.get(name) != present.get(name)]
    refused = [name for name in changed if name not in trainer.settings.allow_change]
    problems = [f"{name}: was {saved.get(name)!r}, is {present.get(name)!r}" for name in refused]
    if problems:
        raise TrainError(
            f"resume: settings differ from the checkpoint {where.path}:\n{capped(problems)}\nRestore these settings, "
            f"or accept the differences with allow_change={refused!r}.",
            problems=problems,
            names=refused,
            path=str(where.path),
        )
    return [{"step": where.step, "name": name, "was": saved.get(name), "is": present.get(name)} for name in changed]
