"""A captured step is the ordinary step: the same numbers, and nothing trained, lost or repeated by capturing."""

import random
from contextlib import nullcontext
from itertools import pairwise
from threading import Thread

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters
from torch.nn.functional import cross_entropy, mse_loss

from flodl.data import Batch, DataLoader, TensorRows
from flodl.data.batch import lay_out
from flodl.errors import TrainError
from flodl.train import Callback, Loss, RunDone, StepDone, Trainer, Warned, adamw, sgd
from flodl.train.events import Recorded
from flodl.train.schedule import Linear
from flodl.train.step import capture, route
from flodl.train.step.capture import Refused, flatten
from flodl.train.step.device import Step
from flodl.train.step.update import why_unsupported

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
ROWS, WIDTH, CLASSES = 40, 6, 3


class Repeats:
    """Stands in for capturing where there is no CUDA: a replay runs the step again, on the inputs kept for it."""

    def __init__(self, fault=None, waits=0):
        self.fault, self.waits = fault, waits
        self.watched = self.captured = self.replayed = 0

    def watch(self, run):
        self.watched += 1
        return run(), "it waits" if self.watched <= self.waits else None

    def capture(self, run):
        self.captured += 1
        if self.fault is not None:
            self.fault()

        def replay():
            self.replayed += 1
            return run()

        return replay

    def beside(self, ranks):
        return self, "nothing is launched beside here"


def make_model(device=None, dropout=0.0, norm=True):
    torch.manual_seed(7)
    # A bias before a norm has no gradient but rounding, which Adam would make steps of.
    layers = [
        nn.Linear(WIDTH, 8, bias=not norm),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Dropout(dropout),
    ]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES))


def make_data(rows=ROWS, bad=None):
    g = torch.Generator().manual_seed(3)
    data = {"x": torch.randn(rows, WIDTH, generator=g), "y": torch.randint(0, CLASSES, (rows,), generator=g)}
    if bad is not None:
        data["x"][bad] = float("nan")
    return data


def step(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def counted(model, batch):
    logits = model(batch["x"])
    kept = (batch["y"] != 0).sum()
    value = cross_entropy(logits, batch["y"], ignore_index=0)
    right = (logits.argmax(-1) == batch["y"]).sum()
    return Loss.mean(value, kept, {"accuracy": (right, len(logits))})


def run(
    capturer, monkeypatch, *, model=make_model, train_step=step, data=None, optimizer=None, device="cpu", **settings
):
    """Return the losses, the weights and the warnings of a run whose steps go through ``capturer``."""
    if capturer == "cuda":
        monkeypatch.undo()
    elif not settings.pop("recorder_is_cuda", False):
        monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    losses, said = [], []
    builder = (
        Trainer.builder(model, optimizer or adamw(1e-2), train_step)
        .dataset(data if data is not None else make_data(), **settings.pop("options", {}))
        .set(**{"batch_size": 8, "num_epochs": 4, "seed": 1, **settings})
        .devices(device)
        .subscribe(lambda event: losses.append(event.loss), StepDone)
        .subscribe(lambda event: said.append(event.message), Warned)
    )
    trained = builder.run()
    return losses, trained.state_dict(), said


def captures_of(model, optimizer, capturer, warn):
    """Return the captures of a step that is decided on the device."""
    made = Step(model, optimizer, step)
    assert made.decide_on_device(capturer, warn, deferred=True) is None
    return made.device.captures


def same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        assert torch.equal(a[1][name], b[1][name]), name


# ---- bookkeeping, without a GPU ------------------------------------------------------------------------


RECIPES = {
    "plain": {},
    "clip": {"max_grad_norm": 0.1},
    "schedule": {"schedule": Linear(1e-2, 1e-3, 20)},
    "momentum": {"optimizer": sgd(0.05, momentum=0.9, weight_decay=0.01)},
    "accumulated": {"accumulate": 2, "train_step": counted},
    "cut": {"micro_batch_size": 3, "model": lambda device: make_model(norm=False)},
    "inflated": {"micro_batch_size": 4, "sum_of_means": True},
    "counted on the device": {"train_step": counted},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_replayed_decided_on_the_device_and_decided_on_the_host_are_one(monkeypatch, recipe):
    settings = RECIPES[recipe]
    capturer = Repeats()
    replayed = run(capturer, monkeypatch, **settings)
    eager = run(Repeats(), monkeypatch, capture=False, **settings)
    host = run(None, monkeypatch, **settings)
    same(replayed, eager)
    assert capturer.replayed > 0
    assert len(host[0]) == len(replayed[0]) == 20 // settings.get("accumulate", 1) + (recipe == "accumulated") * 2
    assert replayed[0] == pytest.approx(host[0], rel=1e-5)
    for name, tensor in host[1].items():
        torch.testing.assert_close(replayed[1][name], tensor, rtol=2e-4, atol=2e-5)
    assert replayed[2] == host[2] == []


def test_one_capture_a_shape_after_one_ordinary_run(monkeypatch):
    capturer = Repeats()
    run(capturer, monkeypatch, data=make_data(rows=44), num_epochs=3)  # 5 batches of 8 and one of 4
    assert (capturer.watched, capturer.captured) == (2, 2)
    assert capturer.replayed == 3 * 6 - 2


def test_more_shapes_than_there_is_room_for_run_ordinarily(monkeypatch):
    said = []
    model = make_model()
    optimizer = adamw(1e-3)(model.parameters())
    capturer = Repeats()
    monkeypatch.setattr(capture.StepCaptures, "most", 2)
    captures = captures_of(model, optimizer, capturer, said.append)
    data = make_data()
    for size in (4, 5, 6, 7) * 3:
        captures.run([{name: part[:size] for name, part in data.items()}])
    assert captures.num_graphs == 2
    assert len(said) == 1
    assert "2 shapes" in said[0]
    assert (captures.recorded.steps, captures.recorded.replayed) == (12, 4)
    assert "because there are more shapes than 2" in str(captures.recorded)


def test_a_shape_that_comes_seldom_is_captured_when_ordinary_steps_have_cost_as_much():
    model = make_model()
    optimizer = adamw(1e-3)(model.parameters())
    capturer, data = Repeats(), make_data()
    captures = captures_of(model, optimizer, capturer, lambda text: None)
    captured = []
    for number in range(1, 201):
        size = 5 if number % 25 == 0 else 8
        before = capturer.captured
        captures.run([{name: part[:size] for name, part in data.items()}])
        captured += [(number, size)] * (capturer.captured - before)
    assert captured == [(2, 8), (125, 5)]
    assert captures.recorded.replayed == 200 - 1 - 4


def test_a_key_sees_modes_frozen_parts_options_and_plain_values():
    model = make_model()
    optimizer = adamw(1e-3)(model.parameters())
    capturer = Repeats()
    captures = captures_of(model, optimizer, capturer, lambda text: None)
    batch = make_data(8)

    def runs():
        before = capturer.watched
        captures.run([batch])
        return capturer.watched - before

    assert (runs(), runs(), runs()) == (1, 0, 0)
    model[3].eval()
    assert (runs(), runs()) == (1, 0)
    model[0].weight.requires_grad_(False)
    assert (runs(), runs()) == (1, 0)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert (runs(), runs()) == (1, 0)
    batch["longest"] = 3
    assert (runs(), runs()) == (1, 0)
    batch["longest"] = 4
    assert runs() == 1
    model[0].weight.data = model[0].weight.data.clone()
    captures.invalidate_if_changed()
    assert captures.num_graphs == 0


def test_batches_of_all_kinds_lie_flat_and_strange_ones_are_refused():
    a, b = torch.zeros(2, 3), torch.ones(4)
    tensors = []
    first = flatten(Batch({"a": a, "more": [b, (1, "x", None)]}, 2), tensors)
    assert [t is o for t, o in zip(tensors, (a, b), strict=True)] == [True, True]
    assert hash(first) != hash(flatten(Batch({"a": a, "more": [b, (2, "x", None)]}, 2), []))
    assert flatten(Batch({"a": a}, 2), []) != flatten(Batch({"a": a}, 1), [])
    assert flatten(Batch({"a": a}, 2), [], rows=False) == flatten(Batch({"a": a}, 1), [], rows=False)
    with pytest.raises(Refused, match="object"):
        flatten([object()], [])


def test_a_batch_in_one_piece_is_one_input_and_told_apart_by_what_lies_where():
    def batch(rows, width=WIDTH):
        made = Batch({"x": torch.randn(rows, width), "y": torch.zeros(rows, dtype=torch.int64), "k": 2}, rows)
        piece = lay_out(made.items())
        assert piece is not None
        return made.over(piece)

    model = make_model(norm=False)
    optimizer = adamw(1e-3)(model.parameters())
    capturer = Repeats()
    captures = captures_of(model, optimizer, capturer, pytest.fail)
    assert flatten(batch(8), tensors := []) == flatten(batch(8), [])
    assert len(tensors) == 1
    assert flatten(batch(8), []) != flatten(batch(9), [])
    found = []
    for number in range(4):
        made = batch(8)
        want = float(step(model, made).detach())
        found.append((float(captures.run([made]).row[0]), want))
        assert captures.num_graphs == (number > 0)
    assert all(got == want for got, want in found)
    assert capturer.replayed == 3


def fails():
    raise RuntimeError("operation not permitted when stream is capturing")


def draws():
    random.random()
    torch.rand(1)


@pytest.mark.parametrize(
    ("capturer", "text"),
    [(Repeats(fails), "not permitted"), (Repeats(draws), "random numbers"), (Repeats(waits=9), "it waits")],
    ids=["fails", "draws on the host", "waits"],
)
def test_what_cannot_be_captured_runs_on_with_the_same_numbers_and_one_line(monkeypatch, capturer, text):
    found = run(capturer, monkeypatch, num_epochs=5)
    same(found, run(Repeats(), monkeypatch, num_epochs=5))
    assert len(found[2]) == 1
    assert text in found[2][0]
    assert capturer.captured <= 1


def test_a_first_run_that_waits_is_forgiven(monkeypatch):
    capturer = Repeats(waits=1)
    assert run(capturer, monkeypatch)[2] == []
    assert capturer.watched == 2
    assert capturer.replayed == 18


def test_asked_for_and_impossible_is_refused(monkeypatch):
    for fault, text in ((Repeats(fails), "not permitted"), (None, "cpu")):
        with pytest.raises(TrainError, match=text):
            run(fault, monkeypatch, capture=True)
    with pytest.raises(TrainError, match="float16"):
        run(Repeats(), monkeypatch, capture=True, precision="fp16")
    with pytest.raises(TrainError, match="capture: found 'always'"):
        run(Repeats(), monkeypatch, capture="always")


def test_a_loop_of_ones_own_cannot_ask_for_capture():
    with pytest.raises(TrainError, match="your own"):
        Trainer.setup(make_model(), optimizer=adamw(1e-2), capture=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda ps: torch.optim.RMSprop(ps, lr=0.1), "RMSprop"),
        (lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True), "another kernel"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5), "dampening"),
    ],
)
def test_other_optimizers_are_left_alone_with_one_line(monkeypatch, make, text):
    found = run(Repeats(), monkeypatch, optimizer=make)
    same(found[:2], run(None, monkeypatch, optimizer=make)[:2])
    assert [text in line for line in found[2]] == [True]
    assert why_unsupported(make(make_model().parameters())) is not None


def test_a_step_is_captured_and_replayed_without_a_trainer():
    batch, capturer, weights = make_data(8), Repeats(), []
    for captures in (False, True):
        model = make_model(norm=False)
        one = Step(model, adamw(1e-2)(model.parameters()), step)
        if captures:
            assert one.decide_on_device(capturer, pytest.fail, deferred=False, strict=True) is None
        results = [one(batch) for _ in range(4)]
        assert all(result.applied for result in results)
        assert results[-1].loss < results[0].loss
        weights.append(model[0].weight.detach())
    assert capturer.replayed == 3
    assert (one.recorded().steps, one.recorded().replayed) == (4, 3)
    torch.testing.assert_close(*weights, rtol=2e-4, atol=2e-5)


def test_capture_of_a_step_returns_why_the_host_decides():
    model = make_model(norm=False)
    assert "RMSprop" in Step(model, torch.optim.RMSprop(model.parameters(), lr=0.1), step).capture()
    one = Step(model, adamw(1e-2)(model.parameters()), step)
    assert one.capture() is None
    assert one(make_data(8)).applied


# ---- figures in windows, and numbers that are none ----------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 7, 100])
def test_figures_come_in_order_whatever_the_window(monkeypatch, every):
    whole = run(Repeats(), monkeypatch, log_every=1)
    same(run(Repeats(), monkeypatch, log_every=every), whole)


def test_a_bad_step_stops_the_run_at_the_next_telling_and_no_step_after_it_moved(monkeypatch):
    kept = {}

    def keep(epoch, trainer):
        kept["model"] = trainer.model

    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Repeats())
    built = Trainer.builder(make_model, adamw(1e-2), step).dataset(make_data(bad=29), shuffle=False)
    with pytest.raises(TrainError, match="step 4: the loss is nan"):
        built.set(batch_size=8, num_epochs=4).epoch_fn(keep).run()
    whole = run(Repeats(), monkeypatch, options={"shuffle": False}, max_steps=3)
    for name, parameter in kept["model"].named_parameters():
        assert torch.equal(parameter, whole[1][name]), name


@pytest.mark.parametrize("capture", ["auto", False])
def test_a_bad_step_is_left_out_where_that_was_asked_for(monkeypatch, capture):
    settings = {"data": make_data(bad=29), "on_nan": "skip", "num_epochs": 2}
    settings["model"] = lambda device: make_model(norm=False)
    found = run(Repeats(), monkeypatch, capture=capture, options={"shuffle": False}, **settings)
    host = run(None, monkeypatch, options={"shuffle": False}, **settings)
    assert [line for line in found[2] if "not applied" in line] == [
        f"step {number}: not applied, loss is not finite" for number in (4, 9)
    ]
    for name, tensor in host[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=2e-4, atol=2e-5)


def test_a_step_in_which_nothing_counts_is_no_fault(monkeypatch):
    data = make_data()
    data["y"][8:16] = 0  # which `counted` ignores
    found = run(Repeats(), monkeypatch, data=data, train_step=counted, options={"shuffle": False}, num_epochs=2)
    assert [line for line in found[2] if "nothing was counted" in line] == found[2]
    assert len(found[2]) == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found[1].values())


def test_a_rate_set_by_hand_reaches_the_device(monkeypatch):
    def slower(epoch, trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0 if epoch == 1 else 1e-2

    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Repeats())
    states = []
    built = Trainer.builder(lambda device: make_model(norm=False), adamw(1e-2, weight_decay=0.0), step)
    built.dataset(make_data()).set(batch_size=8, num_epochs=3).epoch_fn(slower)
    built.checkpoint_fn(lambda done, model: states.append({k: v.clone() for k, v in model.state_dict().items()})).run()
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(states)]
    assert moved == [False, True]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_run_that_is_over_keeps_no_captures(monkeypatch, breaks):
    seen = []

    def look(epoch, trainer):
        seen.append((trainer, trainer.step_.device.captures.num_graphs))
        if breaks and epoch == 2:
            raise ValueError("enough")

    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Repeats())
    built = Trainer.builder(make_model, adamw(1e-2), step).dataset(make_data())
    built.set(batch_size=8, num_epochs=3).epoch_fn(look)
    with pytest.raises(ValueError, match="enough") if breaks else nullcontext():
        built.run()
    assert [number > 0 for _, number in seen] == [False, True, True]
    assert seen[0][0].step_.device.captures.num_graphs == 0


def test_a_compiled_model_trains_alike_and_is_itself_afterwards(monkeypatch):
    seen = []

    def compile_plainly(module):
        seen.append(module)
        module._compiled_call_impl = torch.compile(module._call_impl, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_plainly)
    limit = torch._dynamo.config.recompile_limit
    same(run(Repeats(), monkeypatch, compile=True, model=Own), run(Repeats(), monkeypatch, model=Own))
    assert [module._compiled_call_impl for module in seen] == [None]
    assert torch._dynamo.config.recompile_limit == limit


class Own(nn.Module):
    """A module that is not torch's own, which are left as they are."""

    def __init__(self, device=None):
        super().__init__()
        self.layers = make_model(norm=False)

    def forward(self, x):
        return self.layers(x)


class Compiles(Repeats):
    """Waits while ``torch.compile`` translates, as its folding of constants does on a device."""

    def __init__(self, slow=False):
        super().__init__()
        self.slow, self.translated = slow, 0

    def watch(self, run):
        before = dict(dynamo_counters["stats"])
        outcome, _ = super().watch(run)
        new = dict(dynamo_counters["stats"]) != before
        self.translated += new
        return outcome, "it waits" if new or self.slow else None


@pytest.mark.parametrize("slow", [False, True])
def test_waits_while_a_model_is_translated_are_not_the_steps(monkeypatch, slow):
    torch._dynamo.reset()
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda module: setattr(module, "_compiled_call_impl", torch.compile(module._call_impl, backend="eager")),
    )
    capturer = Compiles(slow)
    settings = {"model": Own, "compile": True, "data": make_data(rows=46), "batch_size": 16, "num_epochs": 6}
    found = run(capturer, monkeypatch, **settings)  # batches of 16 and of 14: the second size is translated anew
    assert capturer.translated >= 2
    assert (capturer.captured == 0) == slow
    assert len(found[2]) == slow
    if not slow:
        assert capturer.captured == 2


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw(1e-2), sgd(1e-2, momentum=0.9)], ids=["adamw", "sgd"])
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_to_the_bit(monkeypatch, tmp_path, optimizer):
    settings = {"optimizer": optimizer, "schedule": Linear(1e-2, 1e-3, 20), "max_grad_norm": 0.5}
    whole = run(Repeats(), monkeypatch, **settings)
    folder = str(tmp_path / "run")
    first = run(Repeats(), monkeypatch, folder=folder, max_steps=8, **settings)
    second = run(Repeats(), monkeypatch, folder=folder, resume=True, **settings)
    same((first[0] + second[0], second[1]), whole)


def test_a_run_saved_where_steps_are_captured_goes_on_where_they_are_not(monkeypatch, tmp_path):
    folder = str(tmp_path / "run")
    run(Repeats(), monkeypatch, folder=folder, max_steps=8)
    found = run(None, monkeypatch, folder=folder, resume=True)
    whole = run(None, monkeypatch)
    assert found[0] == pytest.approx(whole[0][8:], rel=1e-5)


# ---- on CUDA -----------------------------------------------------------------------------------------------

GPU = [
    ("plain", {}),
    ("clip, schedule", {"max_grad_norm": 0.1, "schedule": Linear(1e-2, 1e-3, 40)}),
    ("momentum", {"optimizer": sgd(0.05, momentum=0.9, weight_decay=0.01)}),
    ("accumulated", {"accumulate": 2, "train_step": counted}),
    ("dropout", {"model": lambda device: make_model(dropout=0.3)}),
    ("bf16", {"precision": "bf16"}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "settings"), GPU, ids=[name for name, _ in GPU])
def test_graphs_give_the_bits_of_ordinary_steps(monkeypatch, name, settings):
    """Weights, statistics and losses; with dropout the masks are the same ones, so none comes twice."""
    settings = {"device": "cuda", "num_epochs": 8, "capture": True, **settings}
    replayed = run("cuda", monkeypatch, **settings)
    eager = run("cuda", monkeypatch, **{**settings, "capture": False})
    same(replayed, eager)
    assert len(replayed[0]) >= 20
    assert replayed[2] == []


@pytest.mark.gpu
def test_on_a_gpu_the_numbers_are_those_of_a_cpu(monkeypatch):
    cpu = run(None, monkeypatch, max_grad_norm=0.5)
    gpu = run("cuda", monkeypatch, max_grad_norm=0.5, device="cuda", capture=True)
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-3)


@pytest.mark.gpu
def test_masks_differ_between_replays(monkeypatch):
    seen = []

    def noisy(model, batch):
        kept = nn.functional.dropout(torch.ones(64, device=batch["x"].device), 0.5)
        seen.append(kept)
        return Loss.mean(step(model, batch), 8, {"mask": ((kept * torch.arange(64, device=kept.device)).sum(), 1)})

    sums = []
    monkeypatch.undo()
    built = Trainer.builder(make_model, adamw(1e-3), noisy).dataset(make_data()).devices("cuda")
    built.set(batch_size=8, num_epochs=6, capture=True).subscribe(
        lambda event: sums.append(event.metrics["mask"]), StepDone
    ).run()
    assert len(seen) == 2  # once ordinarily, once captured
    assert len(set(sums)) > 25


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["waits", "branches", "draws"])
def test_a_model_that_cannot_be_captured_trains_on_a_gpu_like_any_other(monkeypatch, how):
    def odd(model, batch):
        loss = step(model, batch)
        if how == "waits":
            loss.item()
        if how == "branches" and bool(loss > 1.0):
            loss = loss * 2
        if how == "draws":
            loss = loss * (1 + random.random())
        return loss

    found = run("cuda", monkeypatch, train_step=odd, device="cuda", model=lambda device: make_model(dropout=0.3))
    plain = run(
        "cuda", monkeypatch, train_step=odd, device="cuda", capture=False, model=lambda device: make_model(dropout=0.3)
    )
    same(found, plain)
    assert len(found[2]) == 1


@pytest.mark.gpu
def test_waits_of_another_thread_do_not_prevent_a_capture(monkeypatch):
    tensors = []

    def reads(model, batch):
        loss = step(model, batch)
        if not tensors:
            tensors.append(torch.ones(3, device="cuda"))
            thread = Thread(target=tensors[0].cpu)
            thread.start()
            thread.join()
        return loss

    assert run("cuda", monkeypatch, train_step=reads, device="cuda", capture=True)[2] == []


@pytest.mark.gpu
def test_a_capture_that_breaks_leaves_the_device_usable(monkeypatch):
    calls = []

    def breaks(model, batch):
        calls.append(1)
        loss = step(model, batch)
        if len(calls) == 2:  # while it is captured
            torch.cuda.synchronize()
        return loss

    settings = {"device": "cuda", "model": lambda device: make_model(dropout=0.3)}
    found = run("cuda", monkeypatch, train_step=breaks, **settings)
    same(found, run("cuda", monkeypatch, train_step=step, capture=False, **settings))
    assert len(found[2]) == 1
    # and another run captures again
    assert run("cuda", monkeypatch, capture=True, **settings)[2] == []


@pytest.mark.gpu
def test_on_a_gpu_a_run_resumed_in_the_middle_goes_on_to_the_bit(monkeypatch, tmp_path):
    settings = {"device": "cuda", "model": lambda device: make_model(dropout=0.3), "capture": True}
    whole = run("cuda", monkeypatch, **settings)
    folder = str(tmp_path / "run")
    first = run("cuda", monkeypatch, folder=folder, max_steps=8, **settings)
    second = run("cuda", monkeypatch, folder=folder, resume=True, **settings)
    same((first[0] + second[0], second[1]), whole)


@pytest.mark.gpu
def test_batches_made_ahead_by_another_thread_do_not_disturb_capture(monkeypatch):
    rows = make_data(400)
    loader = DataLoader(TensorRows(rows), batch_size=8, device="cuda", mode="streaming", seed=1)
    settings = {"device": "cuda", "data": loader, "batch_size": None}
    replayed = run("cuda", monkeypatch, capture=True, **settings)
    same(replayed, run("cuda", monkeypatch, capture=False, **settings))


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_between_tellings_nobody_waits_for_the_device(capture):
    def strict(epoch, trainer):
        if epoch == 1:
            torch.cuda.set_sync_debug_mode("error")

    def lenient(metrics):
        torch.cuda.set_sync_debug_mode("default")

    data = {name: part.cuda() for name, part in make_data(160).items()}
    built = Trainer.builder(make_model, adamw(1e-2), step).dataset(data).devices("cuda").metrics_fn(lenient)
    built.set(batch_size=8, num_epochs=2, log_every=5, capture=capture, schedule=Linear(1e-2, 1e-3, 40))
    try:
        built.epoch_fn(strict).run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_regression_in_float64_is_captured_too(monkeypatch):
    def squares(model, batch):
        return mse_loss(model(batch["x"].double()).sum(-1), batch["y"].double())

    settings = {"device": "cuda", "train_step": squares, "model": lambda device: make_model().double()}
    same(run("cuda", monkeypatch, capture=True, **settings), run("cuda", monkeypatch, capture=False, **settings))


def test_an_average_of_the_weights_and_lookers_on_leave_capturing_as_it_is(monkeypatch):
    class Looks(Callback):
        steps = 0

        def on_step_end(self, trainer, result):
            self.steps += 1

    looks, capturer = Looks(), Repeats()
    captured = run(capturer, monkeypatch, ema=0.9, callbacks=[looks])
    assert capturer.replayed > 0
    assert captured[2] == []
    assert looks.steps == len(captured[0])
    plain = run(Repeats(), monkeypatch, ema=0.9, capture=False)
    assert captured[0] == plain[0]
    assert all(torch.equal(captured[1][name], tensor) for name, tensor in plain[1].items())
    weights = run(Repeats(), monkeypatch)[1]
    assert not all(torch.equal(captured[1][name], tensor) for name, tensor in weights.items())


def test_what_acts_around_the_backward_pass_is_not_captured_and_says_so(monkeypatch):
    class Acts(Callback):
        def before_optimizer_step(self, trainer):
            for parameter in trainer.model.parameters():
                parameter.grad.mul_(0.5)

    capturer = Repeats()
    _, _, said = run(capturer, monkeypatch, callbacks=[Acts()])
    assert capturer.captured == 0
    assert len(said) == 1
    assert "Acts acts around the backward pass" in said[0]
    with pytest.raises(TrainError, match="acts around the backward pass"):
        run(Repeats(), monkeypatch, callbacks=[Acts()], capture=True)


@pytest.mark.parametrize("loads", [False, True])
def test_an_optimiser_whose_state_was_loaded_is_captured_anew(monkeypatch, loads):
    """A captured update writes to the averages where they were."""
    capturer, graphs = Repeats(), []

    def reload(epoch, trainer):
        if epoch == 2 and loads:
            state = {kept: dict(values) for kept, values in trainer.optimizer.state_dict().items() if kept == "state"}
            for values in state["state"].values():
                values.update({name: value.clone() for name, value in values.items()})
            trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), **state})
        if epoch:
            graphs.append(capturer.captured)

    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    built = Trainer.builder(make_model, adamw(1e-2), step).dataset(make_data()).batch_size(8).num_epochs(4)
    built.set(seed=1).devices("cpu").epoch_fn(reload).run()
    assert graphs == [1, 1, 2 if loads else 1]


# ---- what is told of it ---------------------------------------------------------------------------------


def ends(monkeypatch, capturer, **settings):
    """Return what the last event of a run says of its steps."""
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    found = []
    builder = Trainer.builder(make_model, adamw(1e-2), step).dataset(make_data())
    builder.set(**{"batch_size": 8, "num_epochs": 4, "seed": 1, **settings}).devices("cpu")
    builder.subscribe(found.append, RunDone).run()
    return found[0].recorded


def test_a_run_ends_with_how_many_steps_were_replayed_and_why_others_were_not(monkeypatch):
    told = ends(monkeypatch, Repeats())
    assert (told.steps, told.replayed, told.shapes, told.reason) == (20, 19, 1, None)
    assert str(told).startswith("95% of 20 steps replayed, 1 shape of batches captured")
    assert "; others were launched one operation at a time, the first of each shape" in str(told)
    waits = ends(monkeypatch, Repeats(waits=9))
    assert (waits.steps, waits.replayed, waits.reason) == (20, 0, "it waits")
    assert str(waits) == "steps were launched one operation at a time, because it waits"
    apart = ends(monkeypatch, Repeats(), batch_size=16)  # a batch of 8 ends each epoch
    assert (apart.replayed, apart.shapes) == (10, 2)
    assert "capture=False" in ends(monkeypatch, Repeats(), capture=False).reason
    assert ends(monkeypatch, None) is None
    assert str(Recorded(0, 0, 0)).startswith("0% of 0 steps")
