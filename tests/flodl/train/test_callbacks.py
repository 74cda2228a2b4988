"""Callbacks inside the loop, and an average of the weights: exact however a step is cut, resumed to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.distributed.group import join_ranks
from flodl.errors import TrainError
from flodl.train import Callback, Ema, EvalDone, Loss, RunStarted, Trainer, adamw, sgd
from flodl.train.optim.ema import WeightAverage, averaged_state
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.step import route

torch.set_num_threads(1)
CUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 5},
    {"batch_size": 6, "accumulate": 2},
    {"devices": 2},
    {"devices": 2, "micro_batch_size": 4},
]


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=g, dtype=torch.float64)
    return {"x": x, "y": (x.sum(1) > 0).long()}


def data() -> TensorRows:
    return TensorRows(tensors())


def make_model(device: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def step(model: nn.Module, batch: Any) -> Loss:
    logits = model(batch["x"])
    return Loss(cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]))


def judge(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"score": (model(batch["x"]).sum(), len(batch["y"]))}


def builder(devices: int = 1, batch_size: int = 12, **settings: Any) -> Any:
    # shuffling would put rows together in another way where batches are smaller
    made = (
        Trainer.builder(make_model, sgd(0.3, momentum=0.9), step).dataset(data(), shuffle=False).batch_size(batch_size)
    )
    made.num_epochs(2).set(**settings)
    return made if devices == 1 else made.devices(devices, start="fork").policy("sync")


def flat(trained: Any) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(trained.state_dict().items())])


class Doubles(Callback):
    """Changes numbers at all three places, in ways that a plain loop can repeat."""

    def before_backward(self, trainer: Any, loss: Loss) -> Loss:
        return Loss(loss.as_sum() * 2, loss.count)

    def before_optimizer_step(self, trainer: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad.tanh_()


class Notes(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.seen.append("begin")

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        self.seen.append(f"epoch {epoch}")

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        self.seen.append(f"step of {len(batches)}")

    def after_backward(self, trainer: Any) -> None:
        self.seen.append("backward")

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.seen.append(f"done {trainer.policy.steps}")

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        self.seen.append("evaluated")

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self.seen.append(f"epoch {epoch} over")

    def on_train_end(self, trainer: Any) -> None:
        self.seen.append("end")

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = ["before"] * state["count"]


def test_callbacks_are_called_in_the_order_of_the_loop() -> None:
    notes = Notes()
    builder(batch_size=40, micro_batch_size=20, callbacks=[notes]).evaluate(judge, data()).num_epochs(1).run()
    assert notes.seen == [
        "begin", "epoch 0",
        "step of 2", "backward", "backward", "done 1",
        "step of 1", "backward", "done 2",
        "evaluated", "epoch 0 over", "end",
    ]  # fmt: skip


def test_callbacks_act_in_a_loop_of_your_own() -> None:
    model, notes = make_model("cpu"), Notes()
    trainer = Trainer.setup(model, optimizer=sgd(0.1), callbacks=[notes, Doubles()], batch_size=30)
    for _ in trainer.epochs(1):
        for batch in trainer.batches(data()):
            trainer.backward(step(model, batch))
            trainer.step()
    middle = ["step of 1", "backward", "done 1", "step of 1", "backward", "done 2"]
    assert notes.seen == ["begin", "epoch 0", *middle, "epoch 0 over", "end"]


class Zeroes(Callback):
    """Changes gradients as soon as a backward pass has added to them, so that doing it twice changes nothing."""

    def after_backward(self, trainer: Any) -> None:
        trainer.model[2].bias.grad.zero_()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "extra", [{"callbacks": [Doubles()]}, {"callbacks": [Zeroes()]}, {"ema": 0.9}, {"ema": Ema(0.9, warmup=False)}]
)
def test_what_they_do_is_the_same_however_a_step_is_cut(cut: dict[str, Any], extra: dict[str, Any]) -> None:
    whole = flat(builder(**extra).run())
    assert not torch.equal(whole, flat(builder().run()))
    torch.testing.assert_close(flat(builder(**cut, **extra).run()), whole, rtol=1e-10, atol=1e-12)


def test_what_acts_around_the_backward_pass_is_seen_by_a_plain_loop() -> None:
    model = make_model("cpu")
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), tensors()
    for _ in range(2):
        for first in range(0, 60, 12):
            batch = {name: column[first : first + 12] for name, column in rows.items()}
            (2 * cross_entropy(model(batch["x"]), batch["y"])).backward()
            for parameter in model.parameters():
                parameter.grad.tanh_()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    plain = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    torch.testing.assert_close(flat(builder(callbacks=[Doubles()]).run()), plain, rtol=1e-10, atol=1e-12)


def test_the_average_is_that_of_the_weights_after_each_step() -> None:
    class Weights(Callback):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_train_begin(self, trainer: Any) -> None:
            self.on_step_end(trainer, None)

        def on_step_end(self, trainer: Any, result: Any) -> None:
            self.seen.append(torch.cat([p.detach().flatten() for _, p in sorted(trainer.model.named_parameters())]))

    weights = Weights()
    averaged = flat(builder(ema=0.8, callbacks=[weights]).run())
    expected = weights.seen[0]
    for number, seen in enumerate(weights.seen[1:], start=1):
        expected = torch.lerp(expected, seen, 1 - min(0.8, (1 + number) / (10 + number)))
    assert torch.equal(averaged, expected)
    assert torch.equal(weights.seen[-1], flat(builder().run()))  # training itself is as without


def test_the_average_is_judged_and_saved_beside_the_weights(tmp_path: Any) -> None:
    told: list[Any] = []
    made = builder(ema=0.9).evaluate(judge, data()).subscribe(told.append, EvalDone).checkpoints(str(tmp_path))
    trained = made.run()
    saved = read_checkpoint(list_checkpoints(tmp_path)[-1])
    state = averaged_state(saved.tensors)
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.state_dict().items())
    assert not torch.equal(saved.tensors["model"]["0.weight"], state["0.weight"])
    model = trained.load_into(make_model("cpu"))
    score = float(model(tensors()["x"]).detach().sum() / 60)
    assert told[-1].metrics["score"] == pytest.approx(score, rel=1e-12)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_resumed_run_has_the_same_average_and_callbacks_go_on(tmp_path: Any, devices: int) -> None:
    straight = flat(builder(devices, ema=0.95).run())
    for most, notes in ((3, Notes()), (None, Notes())):
        made = builder(devices, ema=0.95, max_steps=most, callbacks=[notes]).checkpoints(str(tmp_path))
        resumed = flat(made.run())
    assert torch.equal(resumed, straight)
    if devices == 1:
        assert notes.seen[0] == "before"
    with pytest.raises(Exception, match=r"ema: was '0.95', is '0.9'"):
        builder(devices, ema=0.9, callbacks=[Notes()]).checkpoints(str(tmp_path)).num_epochs(3).run()


def test_callbacks_that_change_the_step_are_part_of_what_a_run_is(tmp_path: Any) -> None:
    builder(callbacks=[Doubles()], max_steps=2).checkpoints(str(tmp_path)).run()
    with pytest.raises(TrainError, match="callbacks: was"):
        builder().checkpoints(str(tmp_path)).run()


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(TrainError, match=r"expected instances of flodl\.train\.Callback"):
        builder(callbacks=[print]).run()
    for decay in (0.0, 1.0):
        with pytest.raises(TrainError, match="above 0 and below 1"):
            Ema(decay)


def test_a_16_bit_model_is_averaged_in_float32() -> None:
    model = make_model("cpu").bfloat16()
    average = WeightAverage(model, 0.999, warmup=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for number in range(50):
        average.update(number + 1)
    before = [p.detach().clone() for p in model.parameters()]
    moved = average.tensors()["0.weight"]
    assert moved.dtype == torch.float32
    torch.testing.assert_close(before[0].float() - moved, torch.full_like(moved, 0.999**50), atol=1e-2, rtol=0)
    with average.applied():
        assert torch.equal(next(model.parameters()), moved.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_capturing_goes_on_with_an_average_and_lookers_on_and_not_around_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What would be captured on CUDA is decided in `choose_route`; a capturer stands in for the device's."""
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: object())
    for callbacks, ema, refused in (((), 0.9, False), ((Notes(),), None, True), ((Doubles(),), None, True)):
        trainer = Trainer(make_model("cpu"), adamw(1e-3), step, callbacks=callbacks, ema=ema, capture=True)
        trainer.prepare(join_ranks(device="cpu"))
        if refused:
            with pytest.raises(TrainError, match="acts around the backward pass"):
                route.choose_route(trainer)
        else:
            route.choose_route(trainer)
            assert trainer.step_.device.captures is not None


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [5, 10]),
        ({"eval_every": 3}, [3, 6, 9, 10]),
        ({"max_steps": 7}, [5, 7]),
    ],
)
def test_evaluation_after_epochs_and_steps_and_at_the_end(settings: dict[str, Any], steps: list[int]) -> None:
    told: list[int] = []
    made = builder(**settings).evaluate(judge, data(), every=settings.get("eval_every"))
    made.subscribe(lambda event: told.append(event.step), EvalDone).run()
    assert told == steps


def test_totals_are_those_of_the_run() -> None:
    told: list[Any] = []
    for most in (None, 3, 99):
        builder(max_steps=most).subscribe(told.append, RunStarted).run()
    assert [event.total_steps for event in told] == [10, 3, 10]


def test_several_sets_are_evaluated_each_by_its_name() -> None:
    told: list[Any] = []
    made = builder().evaluate(judge, data(), name="all", batch_size=7).evaluate(judge, half(), name="half")
    made.subscribe(told.append, EvalDone).early_stopping("half/score", 99).run()
    assert list(told[-1].metrics) == ["all/score", "half/score"]
    alone: list[Any] = []
    builder().evaluate(judge, half()).subscribe(alone.append, EvalDone).run()
    assert alone[-1].metrics == {"score": told[-1].metrics["half/score"]}


def half() -> TensorRows:
    return TensorRows({name: column[:30] for name, column in tensors().items()})
