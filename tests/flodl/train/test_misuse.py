"""What would train nothing, or be passed by in silence, is told with what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.errors import DataError, TrainError
from flodl.train import Callback, EpochMetrics, StepDone, Trainer, adamw

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
ROWS = TensorRows({"x": X, "y": (X.sum(1) > 0).long()})


class Net(nn.Linear):
    """A model whose first argument is a size."""

    def __init__(self, size: int = 4) -> None:
        super().__init__(size, 2)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return iter(range(24))


class Logs(Callback):
    """Written for another library."""

    def on_log(self, trainer: Any, figures: Any) -> None:
        """Never called."""


def step(model: nn.Module, batch: Any) -> Any:
    return cross_entropy(model(batch["x"]), batch["y"])


def made(model: Any = None, optimizer: Any = None, data: Any = ROWS, **settings: Any) -> Any:
    run = Trainer.builder(model or Net(), optimizer or adamw(1e-2), step).dataset(data).batch_size(8).progress(False)
    return run.set(**settings)


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: made(Net), "found Net; expected a model"),
    "a function of nothing": (lambda: made(lambda: Net()), "or a function of the device"),
    "a name": (lambda: made(optimizer="adamw"), "optimizer: found 'adamw'; expected a factory"),
    "another's": (lambda: made(optimizer=torch.optim.SGD(Net().parameters(), 0.1)), "parameters that the model does not have"),
    "another's beside": (lambda: made(optimizer=lambda own: torch.optim.SGD([*own, nn.Parameter(X)], 0.1)), "1 parameters that the model does not have"),
    "a closure": (lambda: made(optimizer=torch.optim.LBFGS), "found LBFGS"),
    "sparse": (lambda: made(nn.Sequential(nn.Embedding(3, 4, sparse=True), Net())), "found sparse gradients of 0"),
    "frozen": (lambda: made(frozen()), "no trainable parameter"),
    "a float": (lambda: made().evaluate(lambda model, batch: {"a": 0.5}, ROWS), "the figure 'a' is float; expected a sum"),
    "callback": (lambda: made(callbacks=[Logs()]), "Logs.on_log is never called"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_train_is_told(name: str) -> None:
    make, says = CASES[name]
    with pytest.raises(TrainError, match=says):
        make().run()


def test_a_stream_is_no_rows() -> None:
    with pytest.raises(DataError, match="Streamed"):
        made(data=Streamed()).run()


def test_a_factory_that_names_its_device_may_be_a_class() -> None:
    class Placed(Net):
        def __init__(self, device: Any) -> None:
            super().__init__()

    assert made(Placed).run().metrics


def test_a_collate_function_of_rows_alone_is_taken_as_torch_calls_it() -> None:
    rows = [{"x": x, "y": int(x.sum() > 0)} for x in X]

    def alone(rows: Any) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), "y": torch.tensor([row["y"] for row in rows])}

    losses = []
    for collate in (alone, lambda rows, where: alone(rows)):
        torch.manual_seed(0)
        run = Trainer.builder(Net(), adamw(1e-2), step).dataset(rows, collate=collate).batch_size(8).progress(False)
        losses.append(run.run().metrics[-1].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("told", [False, True])
def test_the_loss_of_a_loop_is_told_where_it_is_known(
    told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    for epochs in (1, 2):  # the second goes on from the checkpoint of the first
        trainer = Trainer.setup(
            Net(), optimizer=adamw(1e-2), batch_size=8, progress=True, folder=str(tmp_path), resume=True
        )
        trainer.events.subscribe(seen.append)
        for _ in trainer.epochs(epochs):
            for batch in trainer.batches(ROWS):
                loss = step(trainer.model, batch)
                trainer.backward(loss) if told else loss.backward()
                trainer.step()
    losses = [event.loss for event in seen if isinstance(event, (StepDone, EpochMetrics))]
    assert len(losses) == 8
    assert all((loss > 0) is told for loss in losses)
    assert all(math.isnan(loss) is not told for loss in losses)
    epochs_said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert [("loss" in line) for line in epochs_said] == [told, told]


def loop(own: bool) -> None:
    trainer = Trainer.setup(Net(), optimizer=adamw(1e-2), batch_size=8, progress=False)
    for _ in trainer.epochs(1):
        for batch in trainer.batches(ROWS):
            loss = step(trainer.model, batch)
            if own:  # as loops for torch alone do
                loss.backward()
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            trainer.step()


@pytest.mark.parametrize("own", [False, True])
def test_a_loop_without_gradients_is_told(own: bool) -> None:
    says = r"trainer\.step\(\) alone" if own else "found no gradient"
    with pytest.raises(TrainError, match=says):
        loop(own)


class Ends(torch.utils.data.Dataset[Any]):
    """Rows of an iterator that ends before the stated length."""

    def __init__(self) -> None:
        self.rows = iter([{"x": x, "y": torch.tensor(0)} for x in X[:10]])

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> Any:
        return next(self.rows)


@pytest.mark.parametrize("held_out", [False, True])
def test_data_that_end_early_end_the_run(held_out: bool) -> None:
    def step(net: nn.Module, batch: Any) -> Any:
        return cross_entropy(net(batch["x"]), batch["y"])

    trainer = Trainer(Net(), adamw(1e-2), step, batch_size=4, progress=False)
    with pytest.raises(RuntimeError, match="StopIteration"):
        trainer.fit(ROWS, eval_data=Ends()) if held_out else trainer.fit(Ends())
