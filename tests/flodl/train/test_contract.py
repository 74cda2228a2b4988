"""What users know of a training run from loops of their own: it holds here, or is refused in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.distributed import launch
from flodl.errors import TrainError
from flodl.train import Callback, Loss, Replicas, Saved, StepDone, Trainer, Warned, sgd
from flodl.train.optim.ema import averaged_state
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.saving.state import load_model
from flodl.train.schedule import Plateau

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # what it imports takes longer than these runs
ROWS, BATCH, LR = 22, 5, 0.1
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = {"x": X, "y": (X.sum(1) > 0).long()}


class Tied(nn.Module):
    """Two layers that share a weight, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def step(model: nn.Module, batch: Any) -> Any:
    return cross_entropy(model(batch["x"]), batch["y"])


def made(model: Any = None, optimizer: Any = None, train_step: Any = step, **settings: Any) -> Any:
    run = (
        Trainer.builder(model or Tied(), optimizer or sgd(LR), train_step).dataset(DATA, shuffle=False).progress(False)
    )
    return run.set(**{"batch_size": BATCH, "num_epochs": 2, "policy": "sync", **settings})


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- what learns -----------------------------------------------------------------------------------------


def head_alone(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[-2:], lr=LR)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_what_the_optimiser_does_not_have_are_those_of_a_step(ranks: int) -> None:
    model, norms, told = Tied(), [], []
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            model.zero_grad()
            part = {name: column[start : start + BATCH] for name, column in DATA.items()}
            step(model, part).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
            torch.optim.SGD(model.head.parameters(), lr=LR).step()
    run = made(Tied(), head_alone, max_grad_norm=0.2).subscribe(told.append, StepDone)
    state = (run if ranks == 1 else run.devices(2, start="fork")).run().parameters
    assert [event.grad_norm for event in told] == pytest.approx(norms, rel=1e-9)
    torch.testing.assert_close(state["head.weight"], model.head.weight.detach(), rtol=1e-9, atol=1e-12)
    assert torch.equal(state["first.weight"], Tied().first.weight)


def frozen_first() -> nn.Module:
    model = Tied()
    model.first.requires_grad_(False)
    return model


@pytest.mark.parametrize("added", [False, True])
def test_what_is_to_learn_later_learns_or_is_refused(added: bool) -> None:
    def thaw(epoch: int, trainer: Any) -> None:
        if epoch == 1:
            trainer.model.first.requires_grad_(True)
            if added:
                trainer.optimizer.add_param_group({"params": list(trainer.model.first.parameters())})

    run = made(frozen_first()).epoch_fn(thaw)
    if added:
        trained = run.run().parameters
        assert not torch.equal(trained["first.weight"], Tied().first.weight)
        return
    with pytest.raises(TrainError, match=r"epoch 1: first\.weight, first\.bias require gradients") as caught:
        run.run()
    assert caught.value.names == ["first.weight", "first.bias"]


class Modes(Callback):
    """Notes in which modes the model and its first layer are when a step begins."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        self.seen.append((trainer.model.training, trainer.model.first.training))


def test_an_evaluation_leaves_each_module_in_the_mode_that_it_had() -> None:
    modes, judged = Modes(), []

    def score(model: nn.Module) -> dict[str, float]:
        judged.append(any(module.training for module in model.modules()))
        return {"score": 0.0}

    run = made(callbacks=[modes], eval_every=1).epoch_fn(lambda epoch, trainer: trainer.model.first.eval())
    run.eval_fn(score).run()
    assert judged == [False] * 10
    assert modes.seen == [(True, False)] * 10


# ---- what is saved and taken up --------------------------------------------------------------------------


def test_the_saved_average_has_every_name_of_a_tied_weight(tmp_path: Path) -> None:
    trained = made(ema=0.5).checkpoints(str(tmp_path)).run()
    again = Tied()
    load_model(again, averaged_state(read_checkpoint(list_checkpoints(tmp_path)[-1]).tensors))
    assert torch.equal(flat(again), flat(trained.model))
    assert not torch.equal(flat(again), flat(made().run().model))


def test_a_function_that_keeps_weights_is_given_those_that_were_judged() -> None:
    judged: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []

    class Weights(Callback):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            weights.append(flat(trainer.model))

    def score(model: nn.Module) -> dict[str, float]:
        judged.append(flat(model))
        return {"score": 0.0}

    run = made(ema=0.5, callbacks=[Weights()]).eval_fn(score)
    run.checkpoint_fn(lambda epochs, model: kept.append(flat(model))).run()
    assert len(kept) == 2
    assert all(map(torch.equal, kept, judged))
    assert not any(map(torch.equal, kept, weights))


@pytest.mark.parametrize(
    ("option", "before", "after"), [("lr", LR, 0.5), ("weight_decay", 0.0, 2.0), ("momentum", 0.0, 0.9)]
)
def test_a_change_that_was_accepted_holds(option: str, before: float, after: float, tmp_path: Path) -> None:
    def run(value: float, folder: Path, **settings: Any) -> Any:
        options: dict[str, Any] = {"lr": LR, option: value}
        optimizer = sgd(**options)
        accepted = [f"optimizer.{option}"]
        return made(None, optimizer, **settings).checkpoints(str(folder), allow_change=accepted).run()

    for folder in ("same", "other"):
        run(before, tmp_path / folder, max_steps=4)
    same, other = (run(value, tmp_path / name).model for name, value in (("same", before), ("other", after)))
    assert not torch.equal(flat(same), flat(other))
    saved = read_checkpoint(list_checkpoints(tmp_path / "other")[-1])
    assert saved.values["optimizer-options"]["groups"][0][option] == after


def test_options_that_are_tensors_are_tensors_in_a_run_that_goes_on(tmp_path: Path) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, torch.tensor(1e-2), betas=(torch.tensor(0.9), torch.tensor(0.99)))

    whole = made(None, optimizer).run().model
    for most in (4, None):
        rest = made(None, optimizer, max_steps=most).checkpoints(str(tmp_path)).run().model
    assert torch.equal(flat(whole), flat(rest))


def test_a_rate_that_fell_on_a_plateau_stays_low_in_a_run_that_goes_on(tmp_path: Path) -> None:
    def run(folder: Path, most: int | None) -> Any:
        settings: dict[str, Any] = {"schedule": Plateau(LR, 1, 0.5, mode="max", metric="score")}
        made_of = made(num_epochs=5, max_steps=most, **settings).checkpoints(str(folder))
        return made_of.eval_fn(lambda model: {"score": 0.5}).run()

    whole = run(tmp_path / "whole", None)
    for most in (18, None):  # the rate fell after the second and third epoch
        rest = run(tmp_path / "rest", most)
    assert torch.equal(flat(whole.model), flat(rest.model))


@pytest.mark.parametrize(("then", "epochs_left"), [("score", 1), ("-lost", 4)])
def test_patience_goes_on_and_by_another_metric_begins_anew(then: str, epochs_left: int, tmp_path: Path) -> None:
    figures = {"score": iter([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), "lost": iter([9.0, 8.0, 0.5, 0.4, 0.3, 0.2])}

    def judged(model: nn.Module) -> dict[str, float]:
        return {name: next(values) for name, values in figures.items()}

    said: list[Any] = []
    for metric, epochs in (("score", 2), (then, 6)):
        run = made(early_stopping=(metric, 2), num_epochs=epochs).checkpoints(str(tmp_path), keep_best=metric)
        ended = run.eval_fn(judged).subscribe(said.append, Warned).run()
    assert len(ended.metrics) == epochs_left
    assert said == []
    assert list_checkpoints(tmp_path)[-1].name == f"step-000000{10 + 5 * epochs_left}"


def test_what_is_as_good_as_the_best_is_not_saved_again(tmp_path: Path) -> None:
    saved: list[int] = []
    run = made(save_epochs=False, eval_every=2, folder=str(tmp_path), keep_best="score", keep_last=9)
    figures = iter([0.5, 0.5, 0.7, 0.7, 0.1])
    run.eval_fn(lambda model: {"score": next(figures)}).subscribe(lambda event: saved.append(event.step), Saved)
    run.run()
    assert saved == [2, 6, 10]


# ---- figures ---------------------------------------------------------------------------------------------


def test_a_step_that_is_left_out_is_in_no_figure() -> None:
    def spoilt(model: nn.Module, batch: Any) -> Loss:
        each = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        each = torch.where(batch["x"][:, 0] == X[7, 0], math.nan, each)  # the second batch
        return Loss(each.sum(), len(each), {"again": (each.sum(), len(each))})

    told: list[Any] = []
    run = made(None, sgd(0.0), spoilt, on_nan="skip", num_epochs=1).subscribe(told.append, StepDone)
    [epoch] = run.run().metrics
    assert [event.skipped for event in told] == [False, True, False, False, False]
    kept = torch.cat([X[:5], X[10:]]), torch.cat([DATA["y"][:5], DATA["y"][10:]])
    assert epoch.loss == pytest.approx(cross_entropy(Tied()(kept[0]), kept[1]).item(), rel=1e-12)
    assert epoch.metrics["again"] == pytest.approx(epoch.loss, rel=1e-12)


# ---- a loop of one's own ---------------------------------------------------------------------------------


def looped(body: Any, model: Any = None, ranks: Any = None, **settings: Any) -> Any:
    """Train by ``body(trainer, batch, number)`` and return the trainer."""
    trainer = Trainer.setup(
        model or Tied(), optimizer=sgd(LR), ranks=ranks,
        **{"batch_size": BATCH, "progress": False, **settings},
    )  # fmt: skip
    for _ in trainer.epochs(1):
        for number, batch in enumerate(trainer.batches(DATA, shuffle=False)):
            body(trainer, batch, number)
            trainer.step()
    return trainer


def plainly(trainer: Any, batch: Any, number: int) -> None:
    step(trainer.model, batch).backward()


def twice(trainer: Any, batch: Any, number: int) -> None:
    for _ in range(2):
        trainer.backward(step(trainer.model, batch) / 2)


def both(trainer: Any, batch: Any, number: int) -> None:
    plainly(trainer, batch, number)
    trainer.backward(step(trainer.model, batch))


@pytest.mark.parametrize(
    ("body", "settings", "says"),
    [
        (twice, {}, "a second call for one batch"),
        (both, {}, "gradients of loss.backward"),
        (plainly, {"precision": "bf16"}, "precision='bf16' without"),
        (plainly, {"precision": "fp16"}, "precision='fp16' without"),
    ],
)
def test_a_loop_that_would_learn_something_else_is_refused(body: Any, settings: Any, says: str) -> None:
    with pytest.raises(TrainError, match=says):
        looped(body, **settings)


def test_a_loop_has_its_precision_where_it_says_so() -> None:
    seen: list[torch.dtype] = []

    def body(trainer: Any, batch: Any, number: int) -> None:
        with trainer.precision.context():
            logits = trainer.model(batch["x"].float())
            seen.append(logits.dtype)
            loss = cross_entropy(logits, batch["y"])
        trainer.backward(loss)

    def plain(trainer: Any, batch: Any, number: int) -> None:
        with trainer.precision.context():
            loss = step(trainer.model, {**batch, "x": batch["x"].float()})
        loss.backward()

    looped(body, Tied().float(), precision="bf16")
    assert set(seen) == {torch.bfloat16}
    assert torch.isfinite(flat(looped(body, Tied().float(), precision="fp16").model)).all()
    with pytest.raises(TrainError, match="without the scale that float16 needs"):
        looped(plain, Tied().float(), precision="fp16")


@pytest.mark.parametrize("cut", [{"micro_batch_size": 2}, {"accumulate": 2}])
def test_a_batch_that_is_passed_over_weighs_nothing(cut: Any) -> None:
    """Weights of labels are counts, and need not be whole numbers."""
    weights = 0.25 + X[:, 0].abs()

    def total(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        each = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        own = 0.25 + batch["x"][:, 0].abs()
        return (each * own).sum(), own.sum().item()

    def body(trainer: Any, batch: Any, number: int) -> None:
        if number % 4 != 1:
            value, count = total(trainer.model, batch)
            trainer.backward(value / count, count)

    size = 2 if "micro_batch_size" in cut else BATCH
    model, number = Tied(), 0
    for start in range(0, ROWS, BATCH * cut.get("accumulate", 1)):
        losses, counts = [], []
        end = min(ROWS, start + BATCH * cut.get("accumulate", 1))
        for first in range(start, end, size):
            if number % 4 != 1:
                value, count = total(model, {name: part[first : min(first + size, end)] for name, part in DATA.items()})
                losses.append(value)
                counts.append(count)
            number += 1
        model.zero_grad()
        (torch.stack(losses).sum() / sum(counts)).backward()
        torch.optim.SGD(model.parameters(), lr=LR).step()
    assert weights.min() < 1
    torch.testing.assert_close(flat(looped(body, **cut).model), flat(model), rtol=1e-10, atol=1e-12)


def test_gradients_of_nothing_stay_nothing() -> None:
    model = Tied()
    step(model, DATA).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    bare = Replicas([model])
    for count, share in ((3.0, 1.0), (0.0, 0.0)):
        bare.weighted_all_reduce_gradients(count)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.allclose(a, share * b, rtol=1e-12) for a, b in zip(found, before, strict=True))


def told_losses(ranks: Any) -> list[float]:
    told: list[float] = []

    trainer = Trainer.setup(Tied(), optimizer=sgd(LR), ranks=ranks, batch_size=1, progress=False, max_steps=2)
    trainer.events.subscribe(lambda event: told.append(event.loss), StepDone)
    for _ in trainer.epochs(1):
        for number, batch in enumerate(trainer.batches(DATA, shuffle=False)):
            plainly(trainer, batch, number)
            trainer.step()
    return told


def test_ranks_without_a_row_know_as_much_of_a_loss_as_others() -> None:
    for told in launch(told_losses, ranks=2, start="fork").wait():
        assert [math.isnan(loss) for loss in told] == [True, True]
