"""A run's weights taken while it goes on, and the handle to ranks that train."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from test_watching import data, make_model, step

from flodl.distributed.board import PHASES
from flodl.errors import CheckpointError, TrainError
from flodl.train import Callback, Ema, ModelSnapshot, RunDone, StepDone, Trainer, adamw

torch.set_num_threads(1)


def run(model=None, train_step=step, **settings):
    return (
        Trainer.builder(model if model is not None else make_model(), adamw(1e-2), train_step)
        .dataset(data())
        .set(**{"batch_size": 4, "num_epochs": 3, "progress": False, **settings})
    )


class Asks(Callback):
    """Asks for a snapshot at some steps, and keeps the weights of every step to compare."""

    def __init__(self, *steps):
        self.steps, self.asked, self.after = steps, {}, {}

    def on_step_end(self, trainer, result):
        now = trainer.policy.steps
        self.after[now] = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        if now in self.steps:
            self.asked[now] = trainer.snapshot()


@pytest.mark.parametrize("settings", [{}, {"capture": False, "log_every": 1}])
def test_a_snapshot_has_the_weights_of_its_step_and_changes_nothing(settings):
    looks, plain = Asks(3, 7, 18), Asks()
    trained = run(callbacks=[looks], **settings).eval_fn(lambda model: {"score": 0.5}).run()
    untouched = run(callbacks=[plain], **settings).eval_fn(lambda model: {"score": 0.5}).run()
    for number, asked in looks.asked.items():
        found = asked.result(timeout=300)
        assert found.step == number
        assert found.epoch == (number - 1) // 6
        assert all(torch.equal(found.state_dict()[name], t) for name, t in looks.after[number].items())
        assert ("score" in found.metrics) == (number > 6)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, untouched.model.state_dict()[name])


def test_a_snapshot_is_saved_and_read_and_loaded(tmp_path):
    looks = Asks(4)
    run(callbacks=[looks], max_steps=5).run()
    found = looks.asked[4].result(timeout=300)
    found.save(tmp_path / "at.safetensors")
    again = ModelSnapshot.load(tmp_path / "at.safetensors")
    assert (again.step, again.epoch, again.metrics) == (found.step, found.epoch, found.metrics)
    assert again.parameters.keys() == found.parameters.keys()
    fresh = again.load_into(make_model())
    assert all(torch.equal(fresh.state_dict()[name], t) for name, t in looks.after[4].items())
    found.save(tmp_path / "at.fdl")
    with pytest.raises(CheckpointError, match="expected a file of ModelSnapshot"):
        ModelSnapshot.load(tmp_path / "at.fdl")
    with pytest.raises(CheckpointError, match="missing"):
        found.load_into(torch.nn.Linear(2, 2))


def test_buffers_are_apart_and_the_average_is_what_is_taken():
    def make():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    looks = Asks(9)
    run(make(), callbacks=[looks], ema=Ema(0.5, warmup=False)).run()
    found = looks.asked[9].result(timeout=300)
    assert found.buffers.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert found.buffers["1.num_batches_tracked"] == 9
    average = make().state_dict()["0.weight"]
    for number in range(1, 10):
        average = average.lerp(looks.after[number]["0.weight"], 0.5)
    torch.testing.assert_close(found.parameters["0.weight"], average)


def test_another_thread_may_ask_and_whoever_asks_too_late_is_told():
    kept, ready = {}, threading.Event()

    class Hands(Callback):
        def on_train_begin(self, trainer):
            kept["trainer"] = trainer
            ready.set()

    def asking():
        assert ready.wait(20)
        kept["found"] = kept["trainer"].snapshot().result(timeout=300)

    thread = threading.Thread(target=asking)
    thread.start()
    run(callbacks=[Hands(), Slow()]).run()
    thread.join(timeout=300)
    assert kept["found"].parameters
    with pytest.raises(TrainError, match="the run is over"):
        kept["trainer"].snapshot()


def test_whoever_waits_when_a_run_fails_is_told():
    asked = []

    class Breaks(Callback):
        def on_step_end(self, trainer, result):
            asked.extend((trainer.snapshot(), trainer.snapshot()))
            asked[0].cancel()
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        run(callbacks=[Breaks()]).run()
    with pytest.raises(TrainError, match="ended by ValueError"):
        asked[1].result(timeout=300)


class Slow(Callback):
    """Leaves time to ask."""

    def on_step_end(self, trainer, result):
        time.sleep(0.02)


# With the longer anchor ranks meet where epochs end and nowhere else, as busy ones do.
@pytest.mark.parametrize(("policy", "anchor"), [("sync", 2), ("cadence", 2), ("cadence", 100)])
def test_a_run_of_ranks_is_looked_at_and_stopped_through_its_handle(policy, anchor, tmp_path):
    seen = []
    made = run(num_epochs=500, callbacks=[Slow()]).devices(2, start="fork").policy(policy)
    made.set(anchor=anchor, max_anchor=anchor)
    handle = made.subscribe(seen.append, StepDone, RunDone).checkpoints(str(tmp_path)).start()
    assert handle.poll()
    assert handle.svg().startswith("<svg")
    first = handle.snapshot(timeout_s=600)
    assert handle.poll(timeout_s=0.1)
    second = handle.snapshot(timeout_s=600)
    assert first.step > 0
    assert (first.step, first.epoch) < (second.step, second.epoch)
    name = next(iter(first.parameters))
    assert not torch.equal(first.parameters[name], second.parameters[name])
    status = handle.ranks()
    assert [one.rank for one in status] == [0, 1]
    assert all(one.alive and one.phase in PHASES and one.step > 0 and one.silent_s < 30 for one in status)
    while not handle.rank_metrics():
        assert handle.poll(timeout_s=0.5)
    by_rank = handle.rank_metrics()
    assert len(by_rank) == 2
    assert sum(figures["samples"] for figures in by_rank) == 22
    assert all(figures["compute_ms"] > 0 for figures in by_rank)
    assert all(("loss" in figures) == (policy == "cadence") for figures in by_rank)
    handle.stop()
    trained = handle.join()
    assert seen[-1].reason == "stopped"
    assert seen[-1].step < 500 * 6
    assert not handle.poll()
    with pytest.raises(TrainError, match="the run is over"):
        handle.snapshot()
    assert trained.parameters.keys() == second.parameters.keys()


def test_a_snapshot_asked_for_at_the_end_is_of_the_end():
    made = run(num_epochs=1, callbacks=[Slow()]).devices(2, start="fork").policy("sync")
    handle = made.start()
    found = handle.snapshot()
    trained = handle.join()
    assert found.parameters.keys() == trained.parameters.keys()
    assert 0 < found.step <= 6


def test_a_run_on_one_device_starts_in_the_background_too():
    handle = run(num_epochs=1).devices(["cpu"], start="fork").start()
    assert handle.devices == ["cpu"]
    assert handle.world_size == len(handle.ranks()) == 1
    trained = handle.join()
    assert trained.model.state_dict().keys() == trained.state_dict().keys()
    with pytest.raises(TrainError, match="the run is over"):
        handle.snapshot()


def test_what_is_asked_before_the_ranks_are_ready_is_done_when_they_are():
    handle = run(num_epochs=500, callbacks=[Slow()]).devices(2, start="fork").policy("sync").start()
    handle.stop()
    assert len(handle.join().metrics) <= 1


LEAVES = """
import sys
sys.path[:0] = {paths!r}
from test_snapshots import Slow, run
handle = run(num_epochs=500, callbacks=[Slow()]).devices(2, start="fork").policy("sync").start()
while not handle.rank_metrics():
    handle.poll(0.1)
print(*[rank.pid for rank in handle.ranks()], flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "raise SystemExit(3)",
        pytest.param("del handle; print('gone'); import time; time.sleep(1); sys.exit(3)", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_leaves_without_waiting_ends_its_ranks(end):
    script = LEAVES.format(paths=[str(Path(__file__).parent)], end=end)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert found.returncode == 3, found.stderr
    pids = [int(word) for word in found.stdout.split() if word.isdecimal()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_result_shares_neither_memory_nor_descriptors():
    def opened():
        return len(list(Path("/proc/self/fd").iterdir()))

    before, results = opened(), []
    for _ in range(3):
        results.append(run(num_epochs=1).devices(["cpu"], start="fork").start().join())
    assert opened() == before
    weights = results[0].state_dict()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in weights.values())
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    if (child := os.fork()) == 0:
        for tensor in weights.values():
            tensor.add_(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in weights.items())


def test_a_run_without_a_result_is_reported():
    handle = run(num_epochs=500, callbacks=[Slow()]).devices(["cpu"], start="fork").start()
    handle.abort()
    for _ in range(2):
        with pytest.raises(TrainError):
            handle.join()


def test_a_cancelled_request_leaves_the_others():
    requested = []

    class Cancels(Callback):
        def on_step_end(self, trainer, result):
            if trainer.policy.steps == 2:
                requested.extend(trainer.snapshot() for _ in range(2))
                requested[0].cancel()

    run(num_epochs=1, callbacks=[Cancels()]).run()
    assert requested[0].cancelled()
    assert requested[1].result(timeout=300).step == 2


def squared(model, batch):
    return model(batch["x"]).square().mean()


def test_a_request_of_a_model_with_further_state_ends_with_the_run():
    class Further(torch.nn.Linear):
        def get_extra_state(self):
            return {"count": 1}

        def set_extra_state(self, state):
            pass

    asks = Asks()
    asks.on_step_end = lambda trainer, result: asks.asked.setdefault(0, trainer.snapshot())
    with pytest.raises(TrainError) as fault:
        run(Further(3, 1), callbacks=[asks], train_step=squared).run()
    assert "checkpoint" not in str(fault.value)
    assert isinstance(asks.asked[0].exception(timeout=300), TrainError)


def test_a_snapshot_leaves_out_fixed_tensors_as_a_result_does():
    class Partly(torch.nn.Linear):
        def fixed_names(self):
            return ("bias",)

    asks = Asks(2)
    run(Partly(3, 1), callbacks=[asks], train_step=squared).run()
    found = asks.asked[2].result(timeout=300)
    assert found.state_dict().keys() == {"weight"}
    assert torch.equal(found.load_into(Partly(3, 1)).weight, found.parameters["weight"])
