"""Loaders that are not ours: read again they have the same order, on any rank, and texts count as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.errors import DataError
from flodl.train import Loss, StepDone, Trainer, adamw, sgd

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # what it imports takes longer than these runs
ROWS, BATCH, EPOCHS = 22, 5, 3
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))


class Noisy(torch.utils.data.Dataset[Any]):
    """Rows that draw random numbers where they are read, in the process that trains."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return X[index] + 0.1 * torch.randn(4), int(X[index].sum() > 0), index


class Plain(Noisy):
    """The same without noise."""

    def __getitem__(self, index: int) -> Any:
        return X[index], int(X[index].sum() > 0), index


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def loader(data: Any = None, **options: Any) -> Any:
    return torch.utils.data.DataLoader(data or Noisy(), batch_size=BATCH, **options)


LOADERS = {
    "shuffled": lambda: loader(shuffle=True),
    "by a generator": lambda: loader(shuffle=True, generator=seeded()),
    "by a sampler's generator": lambda: loader(
        sampler=torch.utils.data.RandomSampler(range(ROWS), replacement=True, generator=seeded())
    ),
    "weighted": lambda: loader(sampler=torch.utils.data.WeightedRandomSampler([1.0, 3.0] * (ROWS // 2), ROWS)),
    "in order": lambda: loader(),
}


def step(model: nn.Module, batch: Any) -> Any:
    x, y, rows = batch
    seen = torch.zeros(ROWS, dtype=torch.float64).index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))
    marks = {f"row {row}": (count, 1.0 / ROWS) for row, count in enumerate(seen) if count}
    return Loss(cross_entropy(model(x), y, reduction="sum"), len(y), marks)


def make_model(device: Any = None) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Linear(3, 2))


def run(data: Any, folder: Path | None = None, **settings: Any) -> Any:
    made = Trainer.builder(make_model, adamw(1e-2), step).dataset(data).num_epochs(EPOCHS).set(**settings)
    return (made if folder is None else made.checkpoints(str(folder))).run()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_goes_on_inside_an_epoch_to_the_bit(kind: str, tmp_path: Path) -> None:
    whole = run(LOADERS[kind]())
    for most in (7, None):  # in the second epoch, whose order was drawn in another process
        rest = run(LOADERS[kind](), tmp_path, max_steps=most)
    assert all(torch.equal(whole.parameters[name], value) for name, value in rest.parameters.items())
    assert whole.metrics[-1].loss == rest.metrics[-1].loss


def test_epochs_have_orders_of_their_own() -> None:
    for kind in ("shuffled", "by a generator"):
        data, seen = LOADERS[kind](), []
        trainer = Trainer.setup(make_model(), optimizer=sgd(0.0), progress=False)
        for _ in trainer.epochs(EPOCHS):
            for batch in trainer.batches(data):
                seen += batch[2].tolist()
                trainer.backward(step(trainer.model, batch))
                trainer.step()
        epochs = [tuple(seen[start : start + ROWS]) for start in range(0, len(seen), ROWS)]
        assert len(set(epochs)) == EPOCHS
        assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_ranks_that_shuffle_by_themselves_share_each_row_once(policy: str) -> None:
    made = Trainer.builder(make_model, adamw(1e-2), step).dataset(loader(Plain(), shuffle=True))
    trained = made.devices(2, start="fork").policy(policy).num_epochs(1).set(anchor=1).run()
    [epoch] = trained.metrics
    assert epoch.samples == ROWS
    assert {name for name in epoch.metrics if name.startswith("row ")} == {f"row {row}" for row in range(ROWS)}


class Batches:
    """A loader of these batches that may say it has more."""

    def __init__(self, batches: Any, length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_a_loader_that_ends_before_its_length_is_told() -> None:
    with pytest.raises(DataError, match="found 3 batches in epoch 0") as caught:
        run(Batches(list(loader(Plain()))[:3], 5))
    assert (caught.value.found, caught.value.expected) == (3, 5)


@pytest.mark.parametrize("micro", [None, 2])
def test_rows_are_counted_and_cut_where_texts_come_first(micro: int | None) -> None:
    def judged(model: nn.Module, batch: Any) -> Any:
        assert len(batch["text"]) == len(batch["x"]) == len(batch["flags"])
        return cross_entropy(model(batch["x"]), batch["y"])

    y = (X.sum(1) > 0).long()
    parts = [slice(start, start + BATCH) for start in range(0, ROWS, BATCH)]
    texts = tuple(str(row) for row in range(ROWS))
    batches = [
        {"text": texts[p], "flags": [None] * len(texts[p]), "scale": torch.tensor(2.0), "x": X[p].double(), "y": y[p]}
        for p in parts
    ]
    told: list[Any] = []
    model = nn.Linear(4, 2).double()
    data = Batches(batches, len(batches))
    made = Trainer.builder(model, sgd(0.0), judged).dataset(data).set(accumulate=len(batches))
    made.evaluate(judged, data).set(micro_batch_size=micro).subscribe(told.append, StepDone)
    [epoch] = made.run().metrics
    expected = cross_entropy(model(X.double()), y).item()
    assert epoch.samples == ROWS
    assert [event.loss for event in told] == [pytest.approx(expected, rel=1e-12)]
    assert epoch.eval["eval_loss"] == pytest.approx(expected, rel=1e-12)
