"""A run killed anywhere and resumed ends with the same bits as one left alone."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.distributed import RankError
from flodl.errors import CheckpointError, TrainError, TrainInterrupted
from flodl.train import Loss, Saved, SaveFailed, Settings, StepDone, Trainer, Warned, adamw, sgd
from flodl.train.saving import keeper
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.schedule import Cosine, Plateau

torch.set_num_threads(1)
# The first optimiser of a process pays for imports; paid here, children that are forked below do not.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


class Rows:
    """Rows with random augmentation that draws from all three generators, the hardest case to resume."""

    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(44, 6, generator=g), torch.randint(0, 3, (44,), generator=g)

    def __len__(self):
        return 44

    def get(self, i):
        noise = torch.randn(6) * 0.1 + float(np.random.rand()) * 0.1 + random.random() * 0.1
        return {"x": self.x[i] + noise, "y": self.y[i]}


def make_model(device):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def step(model, batch):
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).sum()
    return Loss(
        cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]), {"accuracy": (hits, len(batch["y"]))}
    )


def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9)


def builder(folder, *, ranks=1, optimizer=None, **settings):
    base = {"save_every": 3, "seed": 11, "max_grad_norm": 1.0, "schedule": Cosine(1e-2, 1e-4, 24)}
    made = Trainer.builder(make_model, optimizer or adamw(1e-2), step).dataset(Rows()).batch_size(6).num_epochs(3)
    made.checkpoints(str(folder)).set(**{**base, **settings})
    return made if ranks == 1 else made.devices(ranks, start="fork").policy(settings.get("policy", "sync"))


def apart(call, *args):
    """Start ``call`` in a process of its own, ready to be killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=_quietly, args=(call, *args))
        process.start()
    return process


def _quietly(call, *args):
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    call(*args)


def finished(folder):
    """The last checkpoint's tensors: weights, optimiser, random states of every rank."""
    last = list_checkpoints(folder)[-1]
    saved = read_checkpoint(last)
    return {f"{file}/{name}": t for file, tensors in saved.tensors.items() for name, t in tensors.items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs by number of ranks."""
    made = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"whole{ranks}")
        process = apart(lambda f=folder, r=ranks: builder(f, ranks=r).run())
        process.join()
        assert process.exitcode == 0
        made[ranks] = finished(folder)
    return made


def die_at_step(folder, ranks, number, victim=0):
    """Train, and kill the process of ``victim`` by SIGKILL when it has done step ``number``."""

    def boom(epoch, trainer):
        def fall(event):
            if type(event).__name__ == "StepDone" and event.step == number and trainer.ranks.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.events.subscribe(fall)

    builder(folder, ranks=ranks).epoch_fn(boom).run()


# A checkpoint comes after every third step, an epoch ends with every eighth: those around the first and the last of each
# are tried in every run of the tests.
QUICK = (1, 2, 3, 4, 7, 8, 9, 16, 23, 24)


@pytest.mark.parametrize("number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 25)])
def test_killed_at_any_step_and_resumed(whole, tmp_path, number):
    process = apart(die_at_step, tmp_path, 1, number)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    builder(tmp_path).run()
    assert same_bits(finished(tmp_path), whole[1])


@pytest.mark.parametrize(("number", "victim"), [(1, 1), (4, 0), (7, 1), (9, 0), (13, 1), (23, 1)])
def test_two_ranks_one_killed_at_a_step_and_resumed(whole, tmp_path, number, victim):
    with pytest.raises(RankError) as caught:
        die_at_step(tmp_path, 2, number, victim)
    assert caught.value.rank == victim
    assert "SIGKILL" in caught.value.reason
    builder(tmp_path, ranks=2).run()
    assert same_bits(finished(tmp_path), whole[2])


def die_in_save(folder, number):
    """Kill this process in its ``number``-th call of write, rename or fsync of a folder."""
    count = [0]

    def fatal(call):
        def torn(*args):
            count[0] += 1
            if count[0] == number:
                if call is keeper_write:
                    Path(args[0]).write_bytes(b"torn")
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return torn

    keeper_write = keeper._write
    keeper._write, os.rename, keeper.sync_folder = fatal(keeper._write), fatal(os.rename), fatal(keeper.sync_folder)
    builder(folder).run()


@pytest.mark.parametrize("number", [*range(1, 21), 27, 33, 41])
def test_killed_inside_a_save_and_resumed(whole, tmp_path, number):
    process = apart(die_in_save, tmp_path, number)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    builder(tmp_path).run()
    assert same_bits(finished(tmp_path), whole[1])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith((".stage", ".gone"))]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "runs"), [(1, 30), (2, 15)])
def test_killed_ten_times_at_random_moments_and_resumed(whole, tmp_path, ranks, runs):
    chance = random.Random(ranks)
    for run in range(runs):
        folder = tmp_path / str(run)
        for _ in range(10):
            process = apart(lambda f=folder: builder(f, ranks=ranks).run())
            process.join(timeout=chance.uniform(0.02, 0.35 if ranks == 1 else 0.9))
            process.kill()
            process.join()
        builder(folder, ranks=ranks).run()
        assert same_bits(finished(folder), whole[ranks]), run
        shutil.rmtree(folder)


@pytest.mark.parametrize("optimizer", [sgd(1e-2, momentum=0.9), rmsprop], ids=["sgd", "rmsprop"])
@pytest.mark.parametrize(
    "settings", [{"accumulate": 3}, {"precision": "bf16"}, {"schedule": Plateau(1e-2, 1)}], ids=str
)
def test_stopped_and_resumed_under_other_recipes(tmp_path, optimizer, settings):
    builder(tmp_path / "a", optimizer=optimizer, **settings).run()
    builder(tmp_path / "b", optimizer=optimizer, max_steps=4, **settings).run()
    builder(tmp_path / "b", optimizer=optimizer, **settings).run()
    assert same_bits(finished(tmp_path / "a"), finished(tmp_path / "b"))


def test_fp16_keeps_its_loss_scale_over_a_resume(tmp_path):
    builder(tmp_path / "a", precision="fp16").run()
    builder(tmp_path / "b", precision="fp16", max_steps=7).run()
    builder(tmp_path / "b", precision="fp16").run()
    assert same_bits(finished(tmp_path / "a"), finished(tmp_path / "b"))
    state = json.loads((list_checkpoints(tmp_path / "b")[-1] / "rank-0-state.json").read_text())
    assert state["precision"]["scale"] > 0


def test_epoch_figures_do_not_notice_the_interruption(tmp_path):
    straight = builder(tmp_path / "a").run().metrics
    builder(tmp_path / "b", max_steps=11).run()
    resumed = builder(tmp_path / "b").run().metrics
    for one, other in zip(straight[-len(resumed) :], resumed, strict=True):
        assert (one.epoch, one.loss, dict(one.metrics), one.samples) == (
            other.epoch,
            other.loss,
            dict(other.metrics),
            other.samples,
        )
    assert len(resumed) == 2


def test_a_parameter_named_empty_is_resumed(tmp_path):
    class Named(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.empty = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return super().forward(x) * self.empty

    def made(folder, **settings):
        trainer = Trainer.builder(lambda device: Named(), adamw(1e-2), step).dataset(Rows()).batch_size(6)
        return trainer.checkpoints(str(folder)).set(num_epochs=3, seed=11, **settings)

    made(tmp_path / "a").run()
    made(tmp_path / "b", max_steps=11).run()
    made(tmp_path / "b").run()
    assert same_bits(finished(tmp_path / "a"), finished(tmp_path / "b"))


# ---- damage ------------------------------------------------------------------------------------------


def _damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "one bit"])
def test_a_damaged_checkpoint_is_never_used_and_the_one_before_it_is(whole, tmp_path, how):
    source = tmp_path / "source"
    builder(source, max_steps=9).run()
    [older, newest] = list_checkpoints(source)
    for file in sorted(p.name for p in newest.iterdir()):
        folder = tmp_path / f"{how} {file}"
        shutil.copytree(source, folder)
        _damage(folder / newest.name / file, how)
        with pytest.raises(CheckpointError):
            read_checkpoint(folder / newest.name)
        said = []
        builder(folder).subscribe(said.append, Warned).run()
        assert newest.name in said[0].message
        assert "before it" in said[0].message
        assert same_bits(finished(folder), whole[1])
    for path in (older, newest):
        (path / "run.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2"):
        builder(source).run()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 12}, "seed"),
        ({"batch_size": 4}, "data.order.batch_size"),
        ({"accumulate": 2}, "accumulate"),
        ({"max_grad_norm": None}, "max_grad_norm"),
        ({"schedule": Cosine(1e-2, 1e-4, 25)}, "schedule"),
    ],
)
def test_another_recipe_is_refused_by_name_unless_allowed(tmp_path, change, named):
    builder(tmp_path, max_steps=4).run()
    with pytest.raises(TrainError) as caught:
        builder(tmp_path, **change).run()
    assert any(problem.startswith(f"{named}:") for problem in caught.value.problems), caught.value.problems
    names = [problem.split(":")[0] for problem in caught.value.problems]
    builder(tmp_path, **change).set(allow_change=tuple(names), max_steps=5).run()


def test_another_optimizer_or_model_is_refused(tmp_path):
    builder(tmp_path, max_steps=4).run()
    with pytest.raises(TrainError, match="optimizer"):
        builder(tmp_path, optimizer=sgd(0.1)).run()
    other = Trainer.builder(lambda d: nn.Linear(6, 3), adamw(1e-2), step).dataset(Rows()).batch_size(6).num_epochs(3)
    with pytest.raises(CheckpointError) as caught:
        other.checkpoints(str(tmp_path)).set(seed=11, max_grad_norm=1.0, schedule=Cosine(1e-2, 1e-4, 24)).run()
    assert any("0.weight" in problem for problem in caught.value.problems)


# ---- disk ------------------------------------------------------------------------------------------


def test_a_full_disk_fails_the_save_and_neither_the_run_nor_earlier_checkpoints(whole, tmp_path, monkeypatch):
    write = keeper._write

    def limited(path, chunks):
        # By what is there, for a save is told of some time after it.
        if (tmp_path / "step-00000006").exists():
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(keeper, "_write", limited)
    events = []
    trained = builder(tmp_path).subscribe(events.append, Saved, SaveFailed).run()
    failed = [event for event in events if isinstance(event, SaveFailed)]
    assert failed
    assert "No space left" in failed[0].reason
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000006"]
    assert not list(tmp_path.glob(".stage*"))
    expected = {k.removeprefix("model/"): v for k, v in whole[1].items() if k.startswith("model/")}
    assert same_bits(trained.state_dict(), expected)


def test_the_last_n_and_the_best_stay(tmp_path):
    figures = iter([0.2, 0.9, 0.1, 0.3, 0.4])
    run = builder(tmp_path, save_every=None, num_epochs=5, schedule=None, keep_last=2, keep_best="score")
    run.eval_fn(lambda model: {"score": next(figures)}).run()
    names = [p.name for p in list_checkpoints(tmp_path)]
    assert names == ["step-00000016", "step-00000032", "step-00000040"]


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    held = keeper.lock_folder(tmp_path)
    with pytest.raises(TrainError, match="another run"):
        keeper.lock_folder(tmp_path, timeout_s=0.2)
    os.close(held)
    os.close(keeper.lock_folder(tmp_path, timeout_s=0.2))


# ---- signals ---------------------------------------------------------------------------------------


def leaving_as_a_shell_reports(run):
    """Run; an interruption leaves with the status that a shell reports."""
    try:
        run()
    except TrainInterrupted:
        sys.exit(128 + signal.SIGINT)


def slowly(folder, ranks):
    def nap(epoch, trainer):
        def rest(event):
            if type(event).__name__ == "StepDone":
                (folder / f"rank {trainer.ranks.rank} has begun").touch()
                time.sleep(0.03)

        trainer.events.subscribe(rest)

    run = builder(folder, ranks=ranks, save_every=None, save_epochs=False).epoch_fn(nap)
    leaving_as_a_shell_reports(lambda: run.run())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_leaves(whole, tmp_path, ranks, number, code):
    process = apart(slowly, tmp_path, ranks)
    until = time.monotonic() + 600
    while len(list(tmp_path.glob("*begun"))) < ranks and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(timeout=600)
    assert process.exitcode == code
    [saved] = list_checkpoints(tmp_path)
    assert 0 < read_checkpoint(saved).step < 24
    builder(tmp_path, ranks=ranks, save_every=None, save_epochs=False).run()
    assert same_bits(finished(tmp_path), whole[ranks])


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_raises_an_interruption_that_has_the_trained_weights(whole, tmp_path, ranks, saved):
    steps = []

    def press(event):
        steps.append(event.step)
        if event.step == 5:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored in the background of a shell
    run = builder(tmp_path, ranks=ranks, save_every=None, save_epochs=False)
    if not saved:
        run.set(folder=None)
    with pytest.raises(TrainInterrupted) as caught:
        run.subscribe(press, StepDone).run()
    stop = caught.value
    assert isinstance(stop, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert 5 <= stop.step < 24
    assert pickle.loads(pickle.dumps(stop)).step == stop.step
    if not saved:
        assert stop.folder is None
        return
    [path] = list_checkpoints(stop.folder)
    stored = read_checkpoint(path)
    assert stored.step == stop.step
    assert all(torch.equal(stop.trained.state_dict()[name], value) for name, value in stored.tensors["model"].items())
    builder(tmp_path, ranks=ranks, save_every=None, save_epochs=False).run()
    assert same_bits(finished(tmp_path), whole[ranks])


def test_ctrl_c_in_a_loop_of_ones_own_leaves_the_average_in_the_model():
    model = torch.nn.Linear(2, 1)
    trainer = Trainer.setup(model, optimizer=sgd(0.1), ema=0.5)
    seen = []

    def loop():
        for _ in trainer.epochs(3):
            for number, x in enumerate(trainer.batches([torch.ones(4, 2)] * 5)):
                if number == 3:
                    signal.raise_signal(signal.SIGINT)
                trainer.backward(model(x).square().mean())
                trainer.step()
                seen.append(model.weight.detach().clone())

    with pytest.raises(TrainInterrupted) as caught:
        loop()
    assert caught.value.step == 4
    assert torch.equal(caught.value.trained.parameters["weight"], model.weight)
    assert not any(torch.equal(model.weight, weight) for weight in seen[1:])


def test_settings_have_a_meaning_for_every_field():
    text = Settings.__doc__ or ""
    assert [name for name in Settings.__dataclass_fields__ if f"        {name}:" not in text] == []
