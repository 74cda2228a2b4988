"""Models that are graphs, with memory or without, trained by the Trainer; modules given as they are."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl import FlowBuilder
from flodl.data import DataLoader, TensorRows
from flodl.errors import TrainError
from flodl.train import Trainer, sgd
from flodl.train.saving.reading import list_checkpoints, read_checkpoint

torch.set_num_threads(1)


class Mix(nn.Module):
    """Adds what the last call left."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, memory=None):
        return torch.tanh(self.inner(x if memory is None else x + 0.5 * memory))


def remembering():
    torch.manual_seed(3)
    return FlowBuilder(Mix()).using("memory").tag("memory").through(nn.Linear(3, 1)).tag("out").build()


def plain():
    torch.manual_seed(3)
    return FlowBuilder(nn.Linear(3, 4)).through(nn.Tanh()).tag("hidden").through(nn.Linear(4, 1)).build()


def data():
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(24, 3, generator=g), "y": torch.randn(24, 1, generator=g)}


def step(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def run(model, **settings):
    return Trainer.builder(model, sgd(0.05), step).dataset(data()).set(**{"batch_size": 4, "num_epochs": 2, **settings})


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Holder(nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def forward(self, x):
        return self.graph(x)


@pytest.mark.parametrize("held", [False, True])
def test_a_graph_with_memory_is_trained_as_a_loop_by_hand_does(held):
    graph = remembering()
    assert graph.has_state()
    trained = run(Holder(graph) if held else graph).run()
    by_hand = remembering()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.05)
    for epoch in range(2):
        order = DataLoader(TensorRows(data()), 4, seed=42).plan(epoch)
        for rows in order:
            chosen = torch.as_tensor(rows)
            by_hand.detach_state()
            mse_loss(by_hand(data()["x"][chosen]), data()["y"][chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(weights(trained.model), weights(by_hand))
    assert (graph.step_count(), graph.epoch_count()) == (12, 2)


@pytest.mark.parametrize("cut", [{"micro_batch_size": 2}, {"accumulate": 2}])
def test_memory_over_micro_batches(cut):
    found = run(remembering(), **cut).run()
    assert all(torch.isfinite(p).all() for p in found.model.parameters())


def test_steps_and_epochs_of_a_graph_without_memory_are_ended_too():
    graph = plain()
    run(graph).run()
    assert (graph.step_count(), graph.epoch_count()) == (12, 2)


def test_evaluation_has_a_memory_of_its_own():
    alone, judged = run(remembering()).run(), remembering()
    seen = []

    def score(model):
        first = model(data()["x"][:4])
        model.reset_state()
        model(data()["x"][4:7])  # of another size: what is left of it would not fit the next batch
        seen.append(first.sum().item())
        return {"score": 0.0}

    run(judged).eval_fn(score).set(eval_every=2).run()
    assert len(seen) == 6
    assert torch.equal(weights(alone.model), weights(judged))
    first = remembering()
    first.load_state_dict(judged.state_dict())
    assert first(data()["x"][:4]).sum().item() == pytest.approx(seen[-1])


def test_what_is_remembered_is_in_checkpoints(tmp_path: Path):
    whole = run(remembering()).run()
    run(remembering(), max_steps=4).checkpoints(str(tmp_path)).run()
    saved = read_checkpoint(list_checkpoints(tmp_path)[-1])
    assert [name for name in saved.tensors["rank-0"] if name.startswith("remembered/")]
    rest = run(remembering()).checkpoints(str(tmp_path)).run()
    assert torch.equal(weights(whole.model), weights(rest.model))


def test_a_loop_of_ones_own_may_step_with_memory():
    graph = remembering()
    trainer = Trainer.setup(graph, optimizer=sgd(0.05), batch_size=4)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(TensorRows(data())):
            trainer.backward(step(graph, batch))
            trainer.step()
    assert math.isfinite(weights(graph).sum().item())


# ---- what is given to the builder --------------------------------------------------------------------


def test_a_module_is_taken_as_well_as_a_factory():
    def factory(device):
        return plain()

    model = plain()
    one, other = run(model).run(), run(factory).run()
    assert one.model is model
    assert torch.equal(weights(one.model), weights(other.model))


def test_a_module_is_trained_on_several_devices():
    model = plain()
    before = weights(model)
    trained = run(model).devices(2, start="fork").policy("sync").run()
    assert trained.model is model
    assert not torch.equal(weights(model), before)
    assert torch.equal(weights(model), weights(trained.load_into(plain())))


class Rows:
    def __len__(self):
        return 8

    def get(self, i):
        return {"x": torch.zeros(3), "y": torch.zeros(1)}


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.zeros(3), torch.zeros(1)


ROWS = {
    "columns": lambda: data(),
    "tensor rows": lambda: TensorRows(data()),
    "own rows": Rows,
    "torch data set": Items,
    "tensor data set": lambda: torch.utils.data.TensorDataset(*data().values()),
    "tensor": lambda: data()["x"],
    "array": lambda: np.zeros((8, 3)),
    "list of rows with a label": lambda: [(torch.zeros(3), 1), (torch.zeros(3), 0)],
    "list of rows with a text": lambda: [{"text": "a", "label": 0}],
    "list of rows with a scalar": lambda: [{"x": torch.zeros(3), "y": torch.tensor(1.0)}],
    "list of numbers": lambda: [1.0, 2.0],
}
BATCHES = {
    "list of batches": lambda: [{"x": torch.zeros(4, 3), "y": torch.zeros(4, 1)}],
    "batches with a count": lambda: [{"x": torch.zeros(4, 3), "y": torch.zeros(4, 1), "n": 4}],
    "torch loader": lambda: torch.utils.data.DataLoader(
        [{"x": x, "y": y} for x, y in zip(*data().values(), strict=True)], batch_size=4
    ),
    "our loader": lambda: DataLoader(TensorRows(data()), 4),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_without_a_batch_size_are_refused(kind):
    with pytest.raises(TrainError, match="batch_size") as caught:
        Trainer.builder(plain(), sgd(0.05), step).dataset(ROWS[kind]()).run()
    assert caught.value.missing == ["batch_size"]


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_need_no_batch_size(kind):
    Trainer.builder(plain(), sgd(0.05), step).dataset(BATCHES[kind]()).run()
