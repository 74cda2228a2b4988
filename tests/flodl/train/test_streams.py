"""Loaders without a length are one epoch of ``max_steps``, with the numbers of the same batches in a list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl.errors import DataError, TrainError
from flodl.train import RunDone, RunStarted, Trainer, Warned, adamw
from flodl.train.feed import StreamFeed

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # children that are forked need not import for it
BATCHES = [{"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(n))} for n in range(5)]


class Endless:
    """Batches without a length."""

    def __init__(self, count: int = 5) -> None:
        self.count = count
        self.passes: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.passes.append(number)

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES[: self.count])


def model(device: Any = None) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 1))


def step(net: nn.Module, batch: Any) -> Any:
    return mse_loss(net(batch["x"]), batch["x"].sum(1, keepdim=True))


def weights(data: Any, *, ranks: int = 1, told: Any = None, **settings: Any) -> torch.Tensor:
    run = Trainer.builder(model, adamw(1e-2), step).dataset(data).progress(False)
    run.set(**{"max_steps": 8, "num_epochs": 9 if isinstance(data, list) else 1, "timeout_s": 300, **settings})
    if ranks > 1:
        run.devices(ranks, start="fork").policy(settings.get("policy", "sync"))
    return run.subscribe(told or (lambda event: None)).run().state_dict()["1.weight"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"micro_batch_size": 4}, {"ranks": 2, "accumulate": 2}],
    ids=str,
)
def test_steps_are_those_of_the_same_batches_again_and_again(settings: Any) -> None:
    stream, events = Endless(), list[Any]()
    assert torch.equal(weights(stream, told=events.append, **settings), weights(BATCHES, **settings))
    (begun,) = (event for event in events if isinstance(event, RunStarted))
    assert (begun.steps_per_epoch, begun.max_steps) == (8, 8)
    if "ranks" not in settings:
        assert stream.passes == ([0, 1, 2] if "accumulate" in settings else [0, 1])


def test_ranks_that_step_on_their_own_share_the_turns() -> None:
    events: list[Any] = []
    weights(Endless(), ranks=2, policy="cadence", told=events.append)
    assert [event.step for event in events if isinstance(event, RunDone)] == [8]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_goes_on_where_it_was_by_the_count_of_steps(accumulate: int, tmp_path: Path) -> None:
    kept: Any = {"folder": str(tmp_path), "accumulate": accumulate}
    weights(Endless(), max_steps=6, **kept)
    assert torch.equal(weights(Endless(), resume=True, **kept), weights(BATCHES, accumulate=accumulate))


def own_loop(data: Any, *, epochs: int = 1, told: Any = None, **settings: Any) -> torch.Tensor:
    trainer = Trainer.setup(model(), optimizer=adamw(1e-2), progress=False, **{"max_steps": 8, **settings})
    trainer.events.subscribe(told or (lambda event: None))
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(data):
            trainer.backward(step(trainer.model, batch))
            trainer.step()
    return trainer.model.get_parameter("1.weight")


def test_in_a_loop_of_ones_own() -> None:
    assert torch.equal(own_loop(Endless(), epochs=3), own_loop(BATCHES, epochs=3))


@pytest.mark.parametrize("train", [weights, own_loop])
def test_what_cannot_begin_anew_ends_the_run_and_says_so(train: Any) -> None:
    events: list[Any] = []
    assert torch.equal(train(iter(BATCHES), told=events.append), train(BATCHES, max_steps=5))
    (said,) = (event.message for event in events if isinstance(event, Warned))
    assert said.startswith("data: the batches ended after step 5")
    assert [(event.step, event.reason) for event in events if isinstance(event, RunDone)] == [(5, "stopped")]


def test_a_stream_is_read_on_and_begun_anew_for_what_is_behind() -> None:
    stream = Endless()
    feed = StreamFeed(stream, torch.device("cpu"), accumulate=2, max_steps=8)
    found = [[(turn, [batch["x"][0, 0].item() for batch in batches]) for turn, batches in feed.work(0, asked, None)]
             for asked in ([0, 1], [3], [2])]  # fmt: skip
    first = [batch["x"][0, 0].item() for batch in BATCHES]
    assert found == [[(0, first[:2]), (1, first[2:4])], [(3, first[:2])], [(2, first[4:])]]
    assert stream.passes == [0, 1, 0]


def test_a_rehearsal_knows_how_long_the_run_is() -> None:
    run = Trainer.builder(model, adamw(1e-2), step).dataset(Endless()).progress(False)
    assert run.set(max_steps=70).dry_run().steps == 70
    with pytest.raises(DataError, match=r"found Endless without a length; expected .* or max_steps"):
        run.set(max_steps=None).dry_run()


@pytest.mark.parametrize(
    "data", [[], torch.utils.data.DataLoader([]), Endless(0)], ids=lambda data: type(data).__name__
)
def test_data_without_a_batch_are_told(data: Any) -> None:
    with pytest.raises(TrainError, match="found no batches in the data"):
        weights(data)
    with pytest.raises(TrainError, match="found no batches in the data"):
        own_loop(data)


def test_a_length_or_a_number_of_steps_is_asked_for() -> None:
    with pytest.raises(
        DataError, match=r"found Endless without a length; .*max_steps, which specifies the number of steps"
    ):
        weights(Endless(), max_steps=None)
