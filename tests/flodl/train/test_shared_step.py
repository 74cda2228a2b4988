"""Steps of all ranks decided on the device: those decided on the host, whoever captures, lacks data or gradients."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.distributed import RankError, gradients
from flodl.distributed.peer_memory import SWITCH
from flodl.train import Loss, RunDone, StepDone, Trainer, adamw, sgd
from flodl.train.schedule import Linear
from flodl.train.step import route
from flodl.train.step.cuda_graphs import fault_of

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # what it imports takes longer than these runs
ROWS, WIDTH, CLASSES = 43, 6, 3


class Repeats:
    """Stands in for capturing where there is no CUDA: a replay runs the step again, on the inputs kept for it."""

    def watch(self, run):
        return run(), None

    def capture(self, run):
        return run

    def beside(self, ranks) -> tuple[Any, Any]:
        return self, "nothing is launched beside here"


class Early(Repeats):
    """As above, with sums that wait for buckets of gradients."""

    def beside(self, ranks):
        return Repeats(), Beside()


class Beside:
    """Stands in for launching beside; notes what happens in which order."""

    fault = "this stands in for devices"

    def __init__(self):
        self.seen, self.events, self.end = [], 0, self

    def event(self):
        self.events += 1
        return Mark(self.seen, self.events)

    def record(self):
        self.seen.append("part done")

    def wait(self):
        assert self.seen.index("part done") < len(self.seen)
        self.seen.append("waits for part")

    def beside(self, replay):
        return replay()


class Mark:
    def __init__(self, seen, number):
        self.seen, self.number = seen, number

    def record(self):
        self.seen.append(("full", self.number))

    def wait(self):
        assert ("full", self.number) in self.seen
        self.seen.append(("sent", self.number))


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


def run(capturer, monkeypatch, *, ranks=2, model=with_norm, train_step=plain, optimizer=None, bad=None, **settings):
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    steps, ends = [], []
    trained = (
        Trainer.builder(model, optimizer or adamw(1e-2), train_step)
        .dataset(make_data(bad))
        .set(**{"batch_size": 8, "num_epochs": 2, "seed": 1, "policy": "sync", "timeout_s": 300, **settings})
        .devices(ranks, start="fork")
        .subscribe(steps.append, StepDone)
        .subscribe(ends.append, RunDone)
        .run()
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
    "inflated": {"micro_batch_size": 4, "sum_of_means": True},
    "counted on the device": {"train_step": counted},
    "unequal": {"shares": (3.0, 1.0), "train_step": counted},
    "one has nothing": {"shares": (1.0, 0.0), "max_grad_norm": 0.1},
    "through the host": {"backend": "cpu"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_decided_on_the_device_and_on_the_host_are_one(monkeypatch, recipe):
    settings = {"check_every": 1, **RECIPES[recipe]}  # ranks stay equal to the bit
    host, expected, _ = run(None, monkeypatch, **settings)
    steps, trained, ends = run(Repeats(), monkeypatch, capture="auto", **settings)
    assert [end.to_dict()["summed"] for end in ends] == [{"by": "gloo", "reason": None}]
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in host], rel=1e-5)
    assert [(s.count, s.samples) for s in steps] == [(s.count, s.samples) for s in host]
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=2e-4, atol=2e-5)
    assert trained.metrics[-1].metrics == pytest.approx(expected.metrics[-1].metrics)


@pytest.mark.parametrize("recipe", ["plain", "accumulated", "clip", "one has nothing", "three ranks"])
def test_sums_that_begin_early_are_the_same_to_the_bit(monkeypatch, recipe):
    settings = {"check_every": 1, **RECIPES[recipe]}
    steps, trained, _ = run(Repeats(), monkeypatch, **settings)
    early, found, _ = run(Early(), monkeypatch, **settings)
    assert [s.loss for s in early] == [s.loss for s in steps]
    for name, tensor in trained.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def layered(device):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def looks(epoch, trainer):
    """Compare what happened in the epoch before with what is to happen in each of its steps."""
    if epoch == 0:
        gradients.CAPTURED_BUCKET = 80  # each layer travels alone
        first = trainer.model[0].weight
        first.register_hook(lambda grad: trainer.step_.device.end.overlap.seen.append("the last gradient comes"))
        return
    seen = trainer.step_.device.end.overlap.seen
    one = [("full", 1), ("full", 2), "the last gradient comes", ("full", 3), "part done"]
    one += [("sent", 1), ("sent", 2), ("sent", 3), "waits for part"]
    assert seen == one * (len(seen) // len(one))
    assert len(seen) >= 5 * len(one)


def test_buckets_are_full_before_the_pass_is_over_and_sent_in_order(monkeypatch):
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Early())
    built = Trainer.builder(layered, adamw(1e-2), plain).dataset(make_data()).batch_size(8).num_epochs(2)
    built.policy("sync").epoch_fn(looks).devices(2, start="fork").run()


class BreaksOnOne(Repeats):
    """Cannot capture the end of a step on rank 1."""

    def beside(self, ranks):
        made = Repeats()
        if ranks.rank == 1:
            made.capture = self._fail
        return made, "nothing is launched beside here"

    def _fail(self, run):
        raise RuntimeError("not permitted")


def test_where_one_rank_cannot_record_the_end_of_a_step_none_does_and_the_numbers_are_the_same(monkeypatch):
    expected, found = (run(capturer(), monkeypatch, check_every=1) for capturer in (Repeats, BreaksOnOne))
    assert [s.loss for s in found[0]] == [s.loss for s in expected[0]]
    for name, tensor in expected[1].state_dict().items():
        assert torch.equal(found[1].state_dict()[name], tensor), name


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_captured_graphs_are_ordered_by_events():
    assert fault_of(torch.device("cuda", 0)) is None


def tells(epoch, trainer):
    """Leave word of what is captured on this rank."""
    step = trainer.step_
    if epoch == 1 and step.device is not None:
        overlap, room = step.device.end.overlap is not None, step.sums.room is not None
        told = f"{step.device.end.num_graphs} {overlap} {room}"
        Path(os.environ["FLODL_TEST_TOLD"], str(trainer.ranks.rank)).write_text(told)


@TWO
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["plain", "accumulated", "clip", "one has nothing", "plain, by NCCL"])
def test_on_two_gpus_captured_sums_are_those_of_ordinary_steps(monkeypatch, tmp_path, recipe):
    monkeypatch.setenv("FLODL_TEST_TOLD", str(tmp_path))
    recipe, *by_nccl = recipe.split(", ")
    if by_nccl:
        monkeypatch.setenv(SWITCH, "0")
    found = []
    for capture in (False, True):
        settings = {"batch_size": 8, "num_epochs": 6, "seed": 1, "policy": "sync", "check_every": 1, "log_every": 3}
        chosen = {**settings, **RECIPES[recipe], "capture": capture}
        train_step = chosen.pop("train_step", plain)
        losses = []
        built = Trainer.builder(layered, adamw(1e-2), train_step).dataset(make_data()).set(**chosen)
        built.subscribe(lambda event, losses=losses: losses.append(event.loss), StepDone)
        trained = built.epoch_fn(tells).devices(2).run()
        found.append((losses, trained.state_dict()))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        assert torch.equal(found[1][1][name], tensor), name
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [f"1 True {not by_nccl}"] * 2


@TWO
@pytest.mark.gpu
def test_on_two_gpus_what_is_trained_may_change_between_epochs():
    found = []
    for capture in (False, True):
        built = Trainer.builder(layered, adamw(1e-2), plain).dataset(make_data()).batch_size(8).num_epochs(4)
        built.set(seed=1, capture=capture, policy="sync").epoch_fn(freezes_first)
        found.append(built.devices(2).run().state_dict())
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


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
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Repeats())
    built = Trainer.builder(with_norm, adamw(1e-2), plain).dataset(make_data()).batch_size(8).num_epochs(9)
    seen = []
    built.set(log_every=1)  # figures are told when all ranks have them, one step late
    built.policy("sync").epoch_fn(StopsAt(4)).subscribe(seen.append, StepDone).devices(2, start="fork").run()
    assert [event.step for event in seen] == [1, 2, 3, 4, 5, 6]


def freezes_first(epoch, trainer):
    next(trainer.model.parameters()).requires_grad_(epoch != 1)


def freezes(epoch, trainer):
    trainer.model.seldom.requires_grad_(epoch != 1)


def test_what_is_trained_may_change_between_epochs(monkeypatch):
    found = []
    for capturer in (None, Repeats()):
        monkeypatch.setattr(route, "make_capturer", lambda device, settings, capturer=capturer: capturer)
        built = Trainer.builder(without_norm, adamw(1e-2), counted).dataset(make_data()).batch_size(8).num_epochs(3)
        found.append(built.set(check_every=1).epoch_fn(freezes).devices(2, start="fork").run())
    for name, tensor in found[0].parameters.items():
        torch.testing.assert_close(found[1].parameters[name], tensor, rtol=2e-4, atol=2e-5)
