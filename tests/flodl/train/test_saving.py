"""Saving beside training: the bytes that are written, and who waits for whom."""

import json
import threading
import time

import pytest
import torch
from safetensors.torch import load as parse_tensors
from torch import nn

from flodl.train import Callback, Saved, SaveFailed, Trainer, sgd
from flodl.train.saving import keeper
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.saving.resume import snapshot
from flodl.train.saving.state import copies, safetensors_chunks

torch.set_num_threads(1)
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_streamed_is_what_was_there_whatever_training_does_meanwhile(device):
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(5_000_001, device=device),
        "turned": torch.randn(7, 3, device=device).t(),
        "one": torch.tensor(3.0, device=device, dtype=torch.float64),
        "none": torch.zeros(0, 4, device=device),
        "half": torch.randn(9, device=device).bfloat16(),
        "flags": torch.tensor([True, False], device=device),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    kept = copies(tensors)
    ready = None
    if device == "cuda":
        assert all(tensor.is_cuda for tensor in kept.values())
        ready = torch.cuda.Event()
        ready.record()
    for tensor in tensors.values():
        tensor.zero_()
    found = parse_tensors(b"".join(map(bytes, safetensors_chunks(kept, ready))))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class TakesCheckpoint(Callback):
    """Takes the contents of a checkpoint after the first epoch, as a run does before its worker writes them."""

    def on_epoch_begin(self, trainer, epoch):
        if epoch == 1:
            self.run = snapshot(trainer, None)["run"]
            self.text = json.dumps(self.run)


def test_the_contents_of_a_checkpoint_do_not_change_while_it_is_written():
    taken, loss = TakesCheckpoint(), lambda model, batch: model(batch["x"]).square().sum()
    run = Trainer(nn.Linear(2, 1), sgd(0.01), loss, num_epochs=3, progress=False, callbacks=[taken])
    run.fit([{"x": torch.ones(3, 2)}])
    assert json.dumps(taken.run) == taken.text


class SlowDisk:
    """Holds back every file from the second checkpoint on until it is let go."""

    def __init__(self, monkeypatch, free=2):
        self.go, self.count, self.free = threading.Event(), 0, free
        write = keeper._write

        def held(path, chunks):
            if path.name == "manifest.json":
                self.count += 1
            if self.count >= self.free:
                self.go.wait(20)
            return write(path, chunks)

        monkeypatch.setattr(keeper, "_write", held)


def mean(model, batch):
    return model(batch["x"]).square().mean()


def run(folder, *, epochs=5, figures=None, at_epoch=None, **settings):
    made = (
        Trainer.builder(lambda device: nn.Linear(4, 2), sgd(0.1), mean)
        .dataset({"x": torch.ones(8, 4)})
        .checkpoints(str(folder), keep_last=9, keep_best="score" if figures else None)
        .set(batch_size=4, num_epochs=epochs, **settings)
    )
    if figures:
        made.eval_fn(lambda model: {"score": next(figures)})
    if at_epoch is not None:
        made.epoch_fn(at_epoch)
    saved = []
    trained = made.subscribe(saved.append, Saved).run()
    assert [event.step for event in saved] == [read_checkpoint(path).step for path in list_checkpoints(folder)]
    return trained, [event.step for event in saved]


def test_an_epoch_is_not_saved_while_the_one_before_is_still_being_written(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch, free=1)  # all of the first save but its beginning waits

    def watch(epoch, trainer):
        if epoch == 3:  # three epochs went by beside one save
            assert not trainer.saves._saving.done()
            disk.go.set()
            trainer.saves.join()

    trained, steps = run(tmp_path, save_epochs="idle", at_epoch=watch)
    assert steps == [2, 8, 10]
    last = read_checkpoint(list_checkpoints(tmp_path)[-1])
    assert torch.equal(last.tensors["model"]["weight"], trained.parameters["weight"])


def test_the_best_epoch_is_saved_even_if_it_must_be_waited_for(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch, free=1)

    def later(epoch, trainer):
        if epoch == 2:
            threading.Timer(0.2, disk.go.set).start()

    figures = iter([0.5, 0.4, 0.9, 0.1])
    _, steps = run(tmp_path, epochs=4, figures=figures, save_epochs="idle", at_epoch=later)
    assert 4 not in steps  # no better than the first, and the first was still being written
    assert {2, 6, 8} <= set(steps)


def test_every_epoch_is_saved_where_that_was_asked_for(tmp_path, monkeypatch):
    write = keeper._write

    def slow(path, chunks):
        time.sleep(0.01)
        return write(path, chunks)

    monkeypatch.setattr(keeper, "_write", slow)
    assert run(tmp_path, epochs=3)[1] == [2, 4, 6]


def small(device):
    return nn.Linear(4, 2)


def ended(folder, *, ranks=1, epochs=1, figures=None, **settings):
    """Return the steps that were saved, failures to save, and the trained weights."""
    made = (
        Trainer.builder(small, sgd(0.1), mean)
        .dataset({"x": torch.ones(8, 4)})
        .checkpoints(str(folder), keep_last=9, keep_best="score" if figures else None)
        .set(batch_size=4, num_epochs=epochs, seed=3, **settings)
    )
    if figures:
        made.eval_fn(lambda model: {"score": next(figures)})
    if ranks > 1:
        made.devices(["cpu"] * ranks)
    failed = []
    trained = made.subscribe(failed.append, SaveFailed).run()
    assert not list(folder.glob(".stage-*"))
    return [read_checkpoint(path).step for path in list_checkpoints(folder)], failed, trained.parameters["weight"]


@pytest.mark.parametrize(("save_end", "steps"), [(True, [2]), (0.0, [2]), (1e9, []), (False, [])])
@pytest.mark.parametrize("save_epochs", [True, False, "idle"])
def test_the_end_of_a_run_is_saved_where_too_much_would_be_lost(tmp_path, save_end, steps, save_epochs):
    found, failed, weight = ended(tmp_path / "a", save_end=save_end, save_epochs=save_epochs)
    assert (found, failed) == (steps, [])
    assert torch.equal(weight, ended(tmp_path / "b")[2])


@pytest.mark.parametrize(("save_end", "steps"), [(True, [2]), (False, [])])
def test_two_ranks_save_the_end_of_a_run_or_leave_it_out(tmp_path, save_end, steps):
    found, failed, weight = ended(tmp_path, ranks=2, save_end=save_end, save_epochs="idle")
    assert (found, failed) == (steps, [])
    # All rows are equal, so that the mean over ranks is that of one rank.
    assert torch.allclose(weight, ended(tmp_path / "one")[2])


def test_a_run_that_leaves_its_end_out_gives_up_what_is_being_written(tmp_path, monkeypatch):
    go, write, end = threading.Event(), keeper._write, keeper.Keeper.end

    def held(path, chunks):
        assert go.wait(20)
        return write(path, chunks)

    def ended_before_the_disk(self):
        end(self)
        go.set()

    monkeypatch.setattr(keeper, "_write", held)
    monkeypatch.setattr(keeper.Keeper, "end", ended_before_the_disk)
    assert ended(tmp_path, epochs=2, save_epochs="idle", save_end=False)[:2] == ([], [])


@pytest.mark.parametrize("save_end", [False, 1e9])
@pytest.mark.parametrize(("figures", "steps"), [((0.9, 0.1, 0.2), {2}), ((0.1, 0.9, 0.9), {4})])
def test_the_best_is_kept_where_the_end_is_left_out(tmp_path, figures, steps, save_end):
    found, failed, _ = ended(tmp_path, epochs=3, figures=iter(figures), save_epochs="idle", save_end=save_end)
    assert steps <= set(found)
    assert 6 not in found
    assert not failed
