"""The ways to make a trainer, names of settings of other libraries, schedules as functions, and the background worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_resume import Rows, make_model, step
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

from flodl.background import BackgroundWorker
from flodl.errors import TrainError
from flodl.train import Ema, EvalDone, StepDone, Trainer, adamw, sgd
from flodl.train.schedule import Constant, Cosine, Linear, Plateau, Warmup
from flodl.train.settings import REPLACED, make_settings
from flodl.train.warmed_up import WarmedUp

torch.set_num_threads(1)
SETTINGS: dict[str, Any] = {"batch_size": 6, "num_epochs": 2, "progress": False}


def built(optimizer: Any = None, **settings: Any) -> Any:
    return Trainer.builder(make_model, optimizer or sgd(0.1), step).dataset(Rows()).set(**{**SETTINGS, **settings})


def rates_of(schedule: Any, optimizer: Any = None, **settings: Any) -> list[float]:
    rates: list[float] = []
    built(optimizer, schedule=schedule, **settings).subscribe(lambda event: rates.append(event.lr), StepDone).run()
    return rates


# ---- making a trainer ------------------------------------------------------------------------------------


def test_the_constructor_and_the_builder_are_one_run() -> None:
    trained = Trainer(make_model, sgd(0.1), step, **SETTINGS).fit(Rows())
    same = built().run()
    for name, tensor in same.state_dict().items():
        assert torch.equal(tensor, trained.model.state_dict()[name])


def test_evaluation_data_of_fit_are_evaluated_after_each_epoch() -> None:
    def score(model: nn.Module, batch: Any) -> Any:
        return {"score": (model(batch["x"]).sum(), len(batch["y"]))}

    found: list[Any] = []
    trainer = Trainer(make_model, sgd(0.1), step, **SETTINGS)
    trainer.subscribe(found.append, EvalDone)
    trained = trainer.fit(Rows(), eval_step=score, eval_data=Rows())
    assert [epoch.eval.keys() for epoch in trained.metrics] == [{"score"}] * 2
    assert len(found) == 2


@pytest.mark.parametrize(("train_step", "data", "missing"), [(None, Rows(), ["train_step"]), (step, None, ["data"])])
def test_missing_parts_are_named(train_step: Any, data: Any, missing: list[str]) -> None:
    with pytest.raises(TrainError) as caught:
        Trainer(make_model, sgd(0.1), train_step, **SETTINGS).fit(data)
    assert caught.value.missing == missing


def test_a_loop_of_ones_own_steps_by_its_loss_and_takes_a_holder_of_a_graph() -> None:
    class Holder:
        graph = make_model("cpu")

    def own(**form: Any) -> nn.Module:
        trainer = Trainer.setup(Holder() if form else make_model, optimizer=sgd(0.1), progress=False, batch_size=6)
        for _ in trainer.epochs(2):
            for batch in trainer.batches(Rows()):
                trainer.step(step(trainer.model, batch))
        return trainer.model

    plain = built().run().model
    assert own(held=True) is Holder.graph
    for name, tensor in own().state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name])


def test_the_methods_of_a_loop_of_ones_own_need_setup() -> None:
    with pytest.raises(TrainError, match=r"Trainer\.setup"):
        Trainer(make_model, sgd(0.1), step).step()


# ---- names of settings -----------------------------------------------------------------------------------


def test_names_of_other_libraries_mean_the_same() -> None:
    found = make_settings(
        {
            "max_epochs": 3, "gradient_accumulation_steps": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed",
            "logger": "csv", "devices": 2, "resume_from_checkpoint": True,
        }
    )  # fmt: skip
    assert (found.num_epochs, found.accumulate, found.max_grad_norm, found.precision) == (3, 2, 0.5, "bf16")
    assert (list(found.trackers), found.devices, found.resume) == (["csv"], 2, True)


@pytest.mark.parametrize("name", REPLACED)
def test_a_name_that_is_no_setting_says_what_to_use(name: str) -> None:
    with pytest.raises(TrainError, match=f"'{name}': ") as caught:
        make_settings({name: 1})
    assert caught.value.names == [name]


def test_every_setting_is_a_method_of_the_builder() -> None:
    run = built().accumulate(2).scheduler(Constant()).early_stopping("-loss").speed_hint(1, 2.0).ema(Ema(0.9))
    settings = run.trainer().plan.settings
    assert (settings.accumulate, settings.early_stopping, settings.knobs.speed_hint) == (2, ("-loss", 3), (1, 2.0))
    with pytest.raises(AttributeError):
        run.nothing(1)


# ---- schedules -------------------------------------------------------------------------------------------

FACTORS = [
    lambda step: 0.9**step,
    Cosine(total=6),
    Warmup(Linear(total=5), steps=3),
    WarmedUp("linear", 1.0, 2, 8),
]


@pytest.mark.parametrize("schedule", FACTORS)
def test_a_function_of_the_step_is_a_factor_of_the_optimisers_rate(schedule: Any) -> None:
    rates = rates_of(schedule)
    assert rates == pytest.approx([0.1 * schedule(number) for number in range(len(rates))])
    ours = rates_of(lambda optimizer: LambdaLR(optimizer, schedule))  # torch takes the same functions
    assert ours == pytest.approx(rates)


def test_a_schedule_with_its_own_rate_gives_that_rate_and_may_not_contradict_the_optimiser() -> None:
    assert rates_of(Cosine(0.1, 0.01, 6))[:2] == [0.1, Cosine(0.1, 0.01, 6).lr(1)]
    with pytest.raises(TrainError) as caught:
        rates_of(Constant(1e-5), adamw(1e-2))
    assert (caught.value.schedule, caught.value.optimizer) == (1e-5, 1e-2)


@pytest.mark.parametrize(
    "schedule",
    [partial(CosineAnnealingLR, T_max=5), lambda optimizer: CosineAnnealingLR(optimizer, 5)],
)
def test_schedulers_of_torch_are_stepped_after_each_step(schedule: Any) -> None:
    optimizer = torch.optim.SGD(make_model("cpu").parameters(), lr=0.1)
    expected, scheduler = [], CosineAnnealingLR(optimizer, 5)
    rates = rates_of(schedule)
    for _ in rates:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected)


def test_a_scheduler_of_torch_and_its_optimizer_are_taken_as_objects(tmp_path: Any) -> None:
    def parts() -> Any:
        torch.manual_seed(0)
        model = make_model("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, CosineAnnealingLR(optimizer, 9)

    def run(**settings: Any) -> Any:
        model, optimizer, schedule = parts()
        trainer = Trainer(model, optimizer, step, **{**SETTINGS, "schedule": schedule, **settings})
        return trainer.fit(Rows()).state_dict()

    whole = run()
    run(folder=str(tmp_path), max_steps=3)
    resumed = run(folder=str(tmp_path), resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    with pytest.raises(TrainError, match="another optimizer"):
        run(schedule=parts()[2])


def test_a_plateau_of_torch_gets_the_loss_of_epochs() -> None:
    rates = rates_of(partial(ReduceLROnPlateau, patience=0, threshold=1e9), num_epochs=3)
    assert rates[0] == 0.1
    assert rates[-1] < 0.1


def test_a_schedule_with_a_state_is_copied_for_each_run() -> None:
    run = built(schedule=Plateau(0.1, 1, 0.5, metric="score"), num_epochs=3).eval_fn(lambda model: {"score": 1.0})
    rates: list[float] = []
    run.subscribe(lambda event: rates.append(event.lr), StepDone)
    run.run()
    first, count = rates[-1], len(rates)
    run.run()
    assert first < rates[0]
    assert rates[count:] == rates[:count]


# ---- the background worker -------------------------------------------------------------------------------


def test_the_worker_runs_in_order_keeps_errors_and_drains() -> None:
    seen: list[int] = []
    with BackgroundWorker() as worker:
        futures = [worker.submit(seen.append, number) for number in range(50)]
        broken = worker.submit(lambda: 1 / 0)
    assert seen == list(range(50))
    assert all(future.done() for future in futures)
    assert isinstance(broken.exception(), ZeroDivisionError)
    with pytest.raises(RuntimeError):
        worker.submit(print)
