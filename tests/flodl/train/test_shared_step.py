"""Steps of all ranks decided on the device: those decided on the host, whoever records, lacks data or gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.distributed import RankError
from flodl.train import Loss, RunDone, StepDone, Trainer, adamw, route, sgd
from flodl.train.schedule import Linear

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # what it imports takes longer than these runs
ROWS, WIDTH, CLASSES = 43, 6, 3


class Repeats:
    """Stands in for recording where there is no CUDA: a replay runs the step again, on the inputs kept for it."""

    def watch(self, run):
        return run(), None

    def record(self, run):
        return run


class Net(nn.Module):
    """With a norm, a layer that a batch uses or not, and one that no batch uses."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(7)
        # A bias before a norm has no gradient but rounding, which Adam would make steps of.
        self.stem = nn.Linear(WIDTH, 8, bias=not norm)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.seldom, self.never, self.head = nn.Linear(8, 8), nn.Linear(2, 2), nn.Linear(8, CLASSES)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.stem(x)))
        if bool(x[0, 0] > 0):
            hidden = hidden + self.seldom(hidden)
        return self.head(hidden)


def with_norm(device):
    return Net(True)


def without_norm(device):
    return Net(False)


def plain(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def counted(model, batch):
    logits, kept = model(batch["x"]), (batch["y"] != 0).sum()
    total = cross_entropy(logits, batch["y"], ignore_index=0, reduction="sum")
    return Loss(total, kept, {"accuracy": ((logits.argmax(-1) == batch["y"]).sum(), len(logits))})


def make_data(bad=None):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=g)
    if bad is not None:
        x[bad] = float("nan")
    return TensorRows({"x": x, "y": torch.randint(0, CLASSES, (ROWS,), generator=g)})


def run(recorder, monkeypatch, *, ranks=2, model=with_norm, train_step=plain, optimizer=None, bad=None, **settings):
    monkeypatch.setattr(route, "make_recorder", lambda device, settings: recorder)
    steps, ends = [], []
    trained = (
        Trainer.builder(model, optimizer or adamw(1e-2), train_step)
        .dataset(make_data(bad))
        .set(**{"batch_size": 8, "num_epochs": 2, "seed": 1, "policy": "sync", "timeout_s": 30, **settings})
        .devices(ranks, start="fork")
        .subscribe(steps.append, StepDone)
        .subscribe(ends.append, RunDone)
        .run()
        .join()
    )
    return steps, trained, ends


RECIPES = {
    "plain": {},
    "three ranks": {"ranks": 3},
    "clip": {"max_grad_norm": 0.1},
    "schedule": {"schedule": Linear(1e-2, 1e-3, 20)},
    "momentum": {"optimizer": sgd(0.05, momentum=0.9, weight_decay=0.01)},
    "accumulated": {"accumulate": 2, "train_step": counted},
    "cut": {"micro_batch_size": 3, "model": without_norm},
    "inflated": {"micro_batch_size": 4, "compat": "transformers"},
    "counted on the device": {"train_step": counted},
    "unequal": {"shares": (3.0, 1.0), "train_step": counted},
    "one has nothing": {"shares": (1.0, 0.0), "max_grad_norm": 0.1},
    "through the host": {"backend": "cpu"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_decided_on_the_device_and_on_the_host_are_one(monkeypatch, recipe):
    settings = {"check_every": 1, **RECIPES[recipe]}  # ranks stay equal to the bit
    host, expected, _ = run(None, monkeypatch, **settings)
    steps, trained, _ = run(Repeats(), monkeypatch, capture="auto", **settings)
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in host], rel=1e-5)
    assert [(s.count, s.samples) for s in steps] == [(s.count, s.samples) for s in host]
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=2e-4, atol=2e-5)
    assert trained.metrics[-1].metrics == pytest.approx(expected.metrics[-1].metrics)


def test_a_layer_that_nobody_uses_is_left_alone(monkeypatch):
    _, trained, _ = run(Repeats(), monkeypatch, optimizer=adamw(1e-2, weight_decay=0.5))
    assert torch.equal(trained.parameters["never.weight"], Net(True).never.weight)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_loss_that_is_no_number_moves_no_rank(monkeypatch, on_nan):
    if on_nan == "stop":
        with pytest.raises(RankError, match="is nan"):
            run(Repeats(), monkeypatch, bad=5, on_nan=on_nan)
        return
    steps, trained, _ = run(Repeats(), monkeypatch, bad=5, on_nan=on_nan, model=without_norm, check_every=1)
    assert [s.skipped for s in steps].count(True) == 2  # once an epoch
    assert all(math.isfinite(s.loss) for s in steps if not s.skipped)
    assert all(bool(tensor.isfinite().all()) for tensor in trained.parameters.values())


class StopsAt:
    """Has one rank ask for the end."""

    def __init__(self, step):
        self.step = step

    def __call__(self, epoch, trainer):
        if trainer.ranks.rank == 1:
            trainer.events.subscribe(lambda event: trainer.stop() if event.step == self.step else None, StepDone)


def test_one_rank_that_wishes_to_stop_stops_all(monkeypatch):
    monkeypatch.setattr(route, "make_recorder", lambda device, settings: Repeats())
    built = Trainer.builder(with_norm, adamw(1e-2), plain).dataset(make_data()).batch_size(8).num_epochs(9)
    seen = []
    built.set(log_every=1)  # figures are told when all ranks have them, one step late
    built.policy("sync").epoch_fn(StopsAt(4)).subscribe(seen.append, StepDone).devices(2, start="fork").run().join()
    assert [event.step for event in seen] == [1, 2, 3, 4, 5, 6]


def freezes(epoch, trainer):
    trainer.model.seldom.requires_grad_(epoch != 1)


def test_what_is_trained_may_change_between_epochs(monkeypatch):
    found = []
    for recorder in (None, Repeats()):
        monkeypatch.setattr(route, "make_recorder", lambda device, settings, recorder=recorder: recorder)
        built = Trainer.builder(without_norm, adamw(1e-2), counted).dataset(make_data()).batch_size(8).num_epochs(3)
        found.append(built.set(check_every=1).epoch_fn(freezes).devices(2, start="fork").run().join())
    for name, tensor in found[0].parameters.items():
        torch.testing.assert_close(found[1].parameters[name], tensor, rtol=2e-4, atol=2e-5)
