"""A learning-rate finder, micro-batches that fit, a profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.errors import ConfigError, TrainError
from flodl.train import Callback, Loss, Profiler, RateSearch, Trainer, Warned, adamw, sgd
from flodl.train.schedule import Constant

torch.set_num_threads(1)


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=g)
    return {"x": x, "y": (x.sum(1) > 0).long()}


def make_model(device: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def step(model: nn.Module, batch: Any) -> Loss:
    logits = model(batch["x"])
    return Loss(cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]))


def judge(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}


def builder(model: Any = make_model, train_step: Any = step, **settings: Any) -> Any:
    made = Trainer.builder(model, adamw(1e-2), train_step).dataset(TensorRows(tensors())).batch_size(12)
    return made.num_epochs(1).set(**settings)


# ---- the learning-rate finder -----------------------------------------------------------------------------


def test_the_finder_rises_stops_where_the_loss_explodes_and_touches_nothing(tmp_path: Path) -> None:
    model = make_model("cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = Trainer.builder(lambda device: model, sgd(0.1), lambda m, b: step(m, b)).dataset(TensorRows(tensors()))
    made.batch_size(12).num_epochs(1).set(schedule=Constant(1.0), callbacks=[Callback()], ema=0.9)
    made.checkpoints(str(tmp_path / "run"), keep_best="-loss").eval_fn(lambda model: {"loss": 0.0})
    found = made.find_lr(1e-4, 1e4, 60)
    assert found.rates[0] == pytest.approx(1e-4)
    ratios = [b / a for a, b in zip(found.rates, found.rates[1:], strict=False)]
    assert max(ratios) == pytest.approx(min(ratios))
    assert len(found.rates) < 60
    assert found.losses[-1] > 4 * min(found.losses)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 100
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "run").exists()
    assert json.loads(json.dumps(found.to_dict()))["suggestion"] == found.suggestion
    assert repr(found) == f"RateSearch(suggestion={found.suggestion!r})"


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10.0**i for i in range(-20, 0)]
    losses = [1.0] * 8 + [0.9, 0.7, 0.4, 0.2, 0.15, 0.12, 0.2, 0.5, 1.0, 3.0, 9.0, 9.0]
    found = RateSearch.of(rates, losses)
    assert found.suggestion is not None
    assert 1e-12 <= found.suggestion <= 1e-8
    assert RateSearch.of(rates, [1.0 + i for i in range(20)]).suggestion is None
    assert RateSearch.of([], []).suggestion is None


@pytest.mark.parametrize(("low", "high", "steps"), [(0.0, 1.0, 10), (1.0, 0.1, 10), (1e-3, 1.0, 3)])
def test_rates_that_do_not_rise_are_refused(low: float, high: float, steps: int) -> None:
    with pytest.raises(ConfigError, match="rates above 0 that rise"):
        builder().find_lr(low, high, steps)


def test_a_loss_that_is_never_finite_is_told() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).sum() * float("nan")

    with pytest.raises(TrainError, match="not finite at a learning rate"):
        builder(train_step=broken).find_lr(steps=8)


# ---- dry runs -----------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_is_needed_and_leaves_all_as_it_was(tmp_path: Path) -> None:
    model, judged = make_model("cpu"), []

    def judging(model: nn.Module, batch: Any) -> dict[str, Any]:
        judged.append(len(batch["y"]))
        return judge(model, batch)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = builder(lambda device: model).num_epochs(7).checkpoints(str(tmp_path / "run"), keep_best="accuracy")
    made.evaluate(judging, TensorRows(tensors()), batch_size=10, every=1)
    found = made.dry_run()
    assert (found.steps, found.rows_at_once, found.fits, found.device) == (35, 12, True, "cpu")
    assert found.parameters == found.learned == sum(p.numel() for p in model.parameters())
    assert found.seconds == pytest.approx(35 * found.step_seconds)
    assert judged == [10]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "run").exists()
    assert "35 steps of" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["peak_bytes"] is None
    assert made.set(max_steps=9).dry_run().steps == 9


def test_a_dry_run_finds_what_does_not_fit() -> None:
    found = builder(lambda device: Small(5)).dry_run()
    assert not found.fits
    assert "does NOT fit" in str(found)
    assert builder(lambda device: Small(5), micro_batch_size="auto").dry_run().rows_at_once == 3


# ---- micro-batches that fit -------------------------------------------------------------------------------


class Small(nn.Module):
    """Has room for a few rows at once, as a device with little memory has."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.inner = room, make_model("cpu")
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        if len(x) > self.room and self.training:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(x)


@pytest.mark.parametrize(("room", "size"), [(99, None), (7, 6), (6, 6), (5, 3), (2, 3)])
def test_auto_finds_as_many_rows_as_fit_and_changes_nothing_else(room: int, size: int | None) -> None:
    warned: list[str] = []
    model = Small(room if room != 2 else 3)
    made = builder(lambda device: model, micro_batch_size="auto").subscribe(lambda e: warned.append(e.message), Warned)
    found = made.run().state_dict()
    plain = builder(lambda device: Small(99), micro_batch_size=size).run().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    assert (f"micro_batch_size: {size} rows" in warned[0]) if size else warned == []


def test_two_ranks_agree_on_the_size() -> None:
    warned: list[str] = []

    def model(device: Any) -> nn.Module:
        import os

        return Small(3 if int(os.environ.get("FLODL_TEST_RANK", "0")) else 99)

    made = builder(lambda device: Small(3), micro_batch_size="auto").devices(2, start="fork").policy("sync")
    made.subscribe(lambda e: warned.append(e.message), Warned).run()
    assert "micro_batch_size: 3 rows" in warned[0]
    assert model("cpu") is not None


def test_a_row_that_does_not_fit_and_words_that_are_none() -> None:
    with pytest.raises(TrainError, match=r"2 row\(s\) of the heaviest batch exceed"):
        builder(lambda device: Small(1), micro_batch_size="auto").run()
    with pytest.raises(TrainError, match="expected an integer of 1 or more, or 'auto'"):
        builder(micro_batch_size="some").run()
    with pytest.raises(TrainError, match="a loop of your own"):
        Trainer.setup(make_model("cpu"), optimizer=sgd(0.1), micro_batch_size="auto", batch_size=4)


# ---- profiler ---------------------------------------------------------------------------------------------


def test_the_profiler_writes_a_trace_of_some_steps(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, skip=1, warmup=1, steps=2)
    builder(callbacks=[profiler]).run()
    (path,) = profiler.written
    assert path.name == "rank-0-step-4.json"
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 2


def test_a_run_that_fails_stops_the_profiler(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> Any:
        raise ValueError("boom")

    for _ in range(2):  # torch allows one profiler at a time
        with pytest.raises(ValueError, match="boom"):
            builder(train_step=broken, callbacks=[Profiler(tmp_path, skip=0, warmup=1)]).run()
