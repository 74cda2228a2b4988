"""Ranks under Sync, Cadence and Async: every sample once, averages by work, one model at the end."""

import json
import multiprocessing
import time

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from flodl.data import DataLoader, TensorRows
from flodl.distributed import RankError, launch
from flodl.distributed import policy as policies
from flodl.distributed.average import BufferMean, ParameterMean, check_equal
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.policy import Sync, make_policy
from flodl.distributed.rounds import Knobs
from flodl.errors import TrainError
from flodl.train import (
    Callback,
    EpochMetrics,
    Loss,
    Replicas,
    RunDone,
    RunStarted,
    Saved,
    Synced,
    Trainer,
    adamw,
    sgd,
)

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
ROWS = 203
MARKS = torch.randint(0, 1 << 20, (ROWS,), generator=torch.Generator().manual_seed(3))


def make_data(rows=ROWS):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 6, generator=g)
    return TensorRows({"x": x, "y": (x.sum(1) > 0).long(), "mark": MARKS[:rows]})


def make_model(device):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def step(model, batch):
    loss = cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    mark, n = batch["mark"].double(), len(batch["y"])
    return Loss(loss, n, {"marks": (mark.sum(), n), "squares": (mark.square().sum(), n)})


def napping_step(model, batch):
    time.sleep(0.004)
    return step(model, batch)


def run(ranks, policy, *, train_step=step, rows=ROWS, optimizer=None, **settings):
    made = Trainer.builder(make_model, optimizer or adamw(1e-2), train_step).dataset(make_data(rows)).batch_size(8)
    made.num_epochs(3).devices(ranks, start="fork").policy(policy).set(**{"timeout_s": 300, **settings})
    events = []
    trained = made.subscribe(events.append).run()
    return trained, events


def every_sample_once(metrics, rows=ROWS):
    marks = MARKS[:rows].double()
    for epoch in metrics:
        assert epoch.samples == rows
        assert epoch.metrics["marks"] == pytest.approx(float(marks.mean()), rel=1e-12)
        assert epoch.metrics["squares"] == pytest.approx(float(marks.square().mean()), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_every_sample_is_used_once_an_epoch_and_the_model_learns(ranks, policy):
    trained, events = run(ranks, policy, anchor=3)
    every_sample_once(trained.metrics)
    assert [m.epoch for m in trained.metrics] == [0, 1, 2]
    assert trained.metrics[-1].loss < 0.85 * trained.metrics[0].loss
    assert sum(trained.metrics[-1].share) == pytest.approx(1)
    assert any(isinstance(event, Synced) for event in events) == (policy != "sync")
    # BatchNorm took part: its statistics are those of the data, not of a fresh layer
    assert trained.buffers["1.running_mean"].abs().max() > 1e-3
    assert trained.buffers["1.num_batches_tracked"] > 0


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_fewer_batches_than_ranks_are_no_problem(rows, policy):
    def without_norm(model, batch):
        given = step(nn.Sequential(model[0], model[2], model[3]), batch)
        return Loss(given.sum + 0 * model[1].weight.sum(), given.count, given.metrics)

    trained, _ = run(3, policy, rows=rows, train_step=without_norm, batch_size=2)
    every_sample_once(trained.metrics, rows)


class OneOfFour(Callback):
    """Lets rank 1 take a step for every three of rank 0, however busy the machine is."""

    def __init__(self):
        self.steps = multiprocessing.get_context("fork").Array("i", 2)

    def on_step_begin(self, trainer, batches):
        rank, board = trainer.ranks.rank, trainer.ranks.board
        with self.steps.get_lock():
            self.steps[rank] += 1
        # A rank 0 that waits for the average must not be waited for.
        while rank == 1 and self.steps[0] < 3 * self.steps[1] and board.phase(0) not in ("averaging", "done"):
            time.sleep(0.001)


@pytest.fixture
def three_times_as_long(monkeypatch):
    """Make the time that is reported for a sample 1 ms on rank 0 and 3 ms on rank 1."""
    for kind in (LocalSteps, Sync):

        def after_step(self, turn, samples, compute_ms, flags, real=kind.after_step):
            return real(self, turn, samples, samples * (1.0, 3.0)[self.ranks.rank], flags)

        monkeypatch.setattr(kind, "after_step", after_step)


@pytest.mark.usefixtures("three_times_as_long")
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_slow_rank_does_less_and_the_controller_knows(policy):
    trained, events = run(2, policy, callbacks=[OneOfFour()], anchor=2, max_anchor=6)
    every_sample_once(trained.metrics)
    assert trained.metrics[-1].share[0] > 0.5
    last = [event for event in events if isinstance(event, Synced)][-1]
    assert last.counts[0] >= 2 * last.counts[1]


@pytest.mark.usefixtures("three_times_as_long")
def test_sync_shares_follow_measured_speed_and_stay_exact():
    trained, _ = run(2, "sync", shares="measured", micro_batch_size=1)
    every_sample_once(trained.metrics)
    assert trained.metrics[-1].share[0] == pytest.approx(0.75, abs=0.02)


def test_fixed_shares_are_kept():
    trained, _ = run(2, "sync", shares=(3.0, 1.0))
    assert trained.metrics[0].share[0] == pytest.approx(0.75, abs=0.02)
    with pytest.raises(TrainError, match="found 3 for 2 ranks"):
        run(2, "sync", shares=(1.0, 1.0, 1.0))


def test_a_speed_hint_and_lockstep_are_accepted():
    for settings in ({"speed_hint": (1, 2.0)}, {"max_batch_diff": 0}, {"max_overshoot": 0}, {"backend": "cpu"}):
        for policy in ("cadence", "async"):
            trained, _ = run(2, policy, anchor=2, **settings)
            every_sample_once(trained.metrics)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_killed_between_epochs_the_next_run_goes_on(tmp_path, policy):
    run(2, policy, folder=str(tmp_path), max_steps=20, save_every=5, anchor=2, max_anchor=2)
    again, events = run(2, policy, folder=str(tmp_path), resume=True, anchor=2, max_anchor=2)
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.resumed_from is not None
    assert 20 <= started.step < 40
    every_sample_once(again.metrics)
    # How far a free-running rank came before the first run stopped depends on the machine.
    epochs = [m.epoch for m in again.metrics]
    assert epochs in ([0, 1, 2], [1, 2])


@pytest.mark.parametrize(
    ("policy", "before", "after"), [("sync", 2, 3), ("sync", 3, 1), ("cadence", 3, 2), ("async", 2, 3)]
)
def test_another_number_of_ranks_takes_up_the_rest_of_the_epoch(tmp_path, policy, before, after):
    run(before, policy, folder=str(tmp_path), max_steps=12, anchor=2, max_anchor=2)
    allowed = ("world_size", "policy")
    trained, events = run(after, policy, folder=str(tmp_path), resume=True, allow_change=allowed, anchor=2)
    assert next(e for e in events if isinstance(e, RunStarted)).resumed_from is not None
    every_sample_once(trained.metrics[1:])
    every_sample_once(trained.metrics[:1])


# ---- the averages themselves ------------------------------------------------------------------------


def averaging(ranks, on_cpu):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("constant", torch.tensor([float("-inf"), 0.1]))
    model[0].bias.requires_grad_(False)
    mean = ParameterMean(ranks, model, on_cpu=on_cpu)
    frozen = model[0].bias.clone()
    with torch.no_grad():
        model[0].weight.fill_(float(ranks.rank))
        model[1].running_mean.fill_(float(ranks.rank))
        model[1].num_batches_tracked.fill_(10 + ranks.rank)
    flight = mean.begin(float(ranks.rank + 1), [ranks.rank, 7.0])
    with torch.no_grad():  # learnt while the average travels
        model[0].weight.add_(100.0)
        model[1].running_mean.add_(50.0)
        model[1].num_batches_tracked.add_(3)
    rows, _ = mean.finish(flight, keep_progress=True)
    return (
        model[0].weight[0, 0].item(),
        model[1].running_mean[0].item(),
        int(model[1].num_batches_tracked),
        model.constant.tolist(),
        torch.equal(frozen, model[0].bias),
        rows,
    )


def averaging_by_samples(ranks, policy):
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(float(ranks.rank))
    steps = make_policy(policy, ranks, model, Knobs())
    work = steps.turns(2)
    [turn], _ = next(work)
    ranks.barrier()  # each has taken one
    steps.after_step(turn, 1 + 2 * ranks.rank, 1.0, [])
    assert next(work, None) is None
    [*_, last] = steps.close_epoch([])
    return model.weight.item(), last.batches, last.all_dry


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_ranks_weigh_by_their_samples(policy):
    for found in launch(averaging_by_samples, (policy,), ranks=2, start="fork").wait():
        assert found == (pytest.approx(0.75), (1, 1), True)


def averaging_equal(ranks):
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(dtype)
        before, mean = model.weight.detach().clone(), ParameterMean(ranks, model)
        model.bias.data.fill_(30.0 + 4 * ranks.rank)
        mean.finish(mean.begin(7000.0 + 777 * ranks.rank, [0.0]), keep_progress=False)
        found.append((torch.equal(model.weight, before), model.bias[0].item()))
    return found


def test_equal_weights_in_half_precision_are_their_own_average():
    for found in launch(averaging_equal, ranks=2, start="fork").wait():
        expected = 30 + 4 * 7777 / 14777
        assert found == [(True, torch.tensor(expected, dtype=t).item()) for t in (torch.bfloat16, torch.float16)]


def test_averages_are_weighted_keep_progress_and_leave_constants_and_frozen_alone():
    # ranks 0, 1, 2 with weights 1, 2, 3: (0 + 2 + 6) / 6
    for weight, mean, count, constant, frozen, rows in launch(averaging, (True,), ranks=3, start="fork").wait():
        assert weight == pytest.approx(100 + 8 / 6)
        assert mean == pytest.approx(50 + 8 / 6)
        assert count == 12 + 3
        assert constant == [float("-inf"), pytest.approx(0.1)]
        assert frozen
        assert rows == [[0, 7], [1, 7], [2, 7]]


def one_odd_bit(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    check_equal(ranks, model, 1)
    if ranks.rank == 2:
        with torch.no_grad():
            model[1].weight.view(torch.int32)[0, 2] ^= 1
    try:
        check_equal(ranks, model, 7)
    except TrainError as error:
        return error.rank, error.tensors, error.step
    return None


def test_one_flipped_bit_on_one_rank_is_found_and_named():
    assert launch(one_odd_bit, ranks=3, start="fork").wait() == [(2, ["1.weight"], 7)] * 3


class Changes(Callback):
    """Changes one parameter on rank 1."""

    def on_step_end(self, trainer, result):
        if trainer.ranks.rank == 1 and trainer.policy.steps == 3:
            trainer.model[0].weight.data[0, 2] += 1.0


def test_check_every_compares_the_parameters_of_ranks_in_a_run():
    with pytest.raises(RankError) as caught:
        run(2, "sync", callbacks=[Changes()], check_every=2)
    assert "step 4" in caught.value.reason
    assert "0.weight" in caught.value.reason
    run(2, "sync", callbacks=[Changes()], check_every=0, max_steps=6)


def unlike_models(ranks):
    Trainer.setup(nn.Linear(4, 2 + ranks.rank), optimizer=sgd(0.1), ranks=ranks)


def test_ranks_that_build_unlike_models_are_told_before_they_talk():
    with pytest.raises(RankError) as caught:
        launch(unlike_models, ranks=2, start="fork").wait()
    assert "model of rank 1" in caught.value.reason


def numbers(names, monkeypatch, ranks=2, **settings):
    """Return the weights and the start of a run whose devices have these names."""
    with monkeypatch.context() as fake:
        fake.setattr(policies, "_device_name", lambda device: names[dist.get_rank()])
        made = Trainer.builder(make_plain, sgd(0.1), double_step).dataset(make_data()).batch_size(8).num_epochs(2)
        events = []
        made.devices(ranks, start="fork").set(timeout_s=300, **settings).subscribe(events.append)
        trained = made.run()
    [start] = [event for event in events if isinstance(event, RunStarted)]
    return torch.cat([trained.parameters[name].flatten() for name in sorted(trained.parameters)]), start


def make_plain(device):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def double_step(model, batch):
    return step(model, {**batch, "x": batch["x"].double()})


SAME, UNLIKE = ("H100", "H100"), ("H100", "A100")


@pytest.mark.parametrize("settings", [{}, {"shares": (3.0, 1.0), "ema": 0.9}, {"slowdown": {1: 1.2}}], ids=str)
def test_equal_devices_share_every_step_with_the_numbers_of_one(settings, monkeypatch):
    alone, start = numbers(SAME, monkeypatch, ranks=1, ema=settings.get("ema"))
    assert (start.policy, start.policy_reason) == ("sync", "there is one rank")
    together, start = numbers(SAME, monkeypatch, **settings)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert start.policy == "sync"
    assert "2 x H100" in start.policy_reason


def test_unlike_devices_choose_cadence_unless_a_setting_needs_common_steps(monkeypatch):
    _, start = numbers(UNLIKE, monkeypatch)
    assert start.policy == "cadence"
    assert "A100, H100" in start.policy_reason
    _, start = numbers(UNLIKE, monkeypatch, ema=0.9)
    assert (start.policy, "ema" in start.policy_reason) == ("sync", True)
    _, start = numbers(UNLIKE, monkeypatch, policy="sync")
    assert (start.policy, start.policy_reason) == ("sync", "it was requested")


# ---- the other tiers on several ranks ---------------------------------------------------------------


def own_loop(ranks, settings):
    torch.manual_seed(0)
    model = make_model(ranks.device)
    trainer = Trainer.setup(model, optimizer=sgd(0.1), ranks=ranks, **settings)
    seen = 0
    for _ in trainer.epochs(2):
        for batch in trainer.batches(DataLoader(make_data(), 8, seed=1)):
            loss = cross_entropy(model(batch["x"]), batch["y"])
            if settings.get("micro_batch_size"):
                trainer.backward(loss)
            else:
                loss.backward()
            seen += batch.num_rows
            trainer.step()
    return seen, [p.detach().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}, {"policy": "cadence", "anchor": 2}], ids=str)
def test_a_loop_of_ones_own_shares_batches_and_ends_with_one_model(settings):
    (a, first), (b, second) = launch(own_loop, (settings,), ranks=2, start="fork").wait()
    assert a + b == 2 * ROWS
    assert first == second


def gan(ranks):
    torch.manual_seed(ranks.rank)
    one, two = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    both = Replicas([one, two], ranks)
    start = one.weight.sum().item()
    x = torch.arange(12.0).view(4, 3) / 12
    mine = x[:3] if ranks.rank == 0 else x[3:]
    mse_loss(one(mine), torch.zeros(len(mine), 3)).backward()
    both.weighted_all_reduce_gradients(len(mine))
    grad = one.weight.grad.clone()
    one.zero_grad()
    mse_loss(one(x), torch.zeros(4, 3)).backward()
    with torch.no_grad():
        two[1].running_mean.fill_(float(ranks.rank))
    both.sync_buffers()
    return start, torch.allclose(grad, one.weight.grad), both.world_size, two[1].running_mean.item()


def test_replicas_gives_the_bare_collectives():
    (start_a, same_a, world, mean_a), (start_b, same_b, _, mean_b) = launch(gan, ranks=2, start="fork").wait()
    assert start_a == start_b
    assert same_a
    assert same_b
    assert world == 2
    assert mean_a == mean_b == 0.5


def buffers_of_one(ranks):
    model = nn.BatchNorm1d(2)
    mean = BufferMean(ranks, model)
    mean(1.0)
    return model.running_mean.tolist(), torch.equal(model.running_var, torch.ones(2))


def test_untouched_buffers_keep_their_bits():
    assert launch(buffers_of_one, ranks=2, start="fork").wait() == [([0.0, 0.0], True)] * 2


def test_the_timeline_is_written_with_syncs(tmp_path):
    run(2, "cadence", anchor=3, timeline=str(tmp_path / "runs" / "timeline"))
    body = json.loads((tmp_path / "runs" / "timeline.json").read_text())
    kinds = {span["kind"] for span in body["spans"]}
    assert {"step", "sync", "epoch"} <= kinds
    assert {span["rank"] for span in body["spans"]} == {0, 1}
    assert min(span["begin_ms"] for span in body["spans"]) == 0
    header, *rows = (tmp_path / "runs" / "timeline.csv").read_text().splitlines()
    assert header == "rank,kind,begin_ms,end_ms,step,epoch,wait_ms,divergence"
    assert len(rows) == len(body["spans"])


def test_metrics_come_in_order_to_the_process_that_started_the_run():
    made = Trainer.builder(make_model, adamw(1e-2), step).dataset(make_data()).batch_size(16).num_epochs(3)
    handle = made.devices(2, start="fork").start()
    assert handle.world_size == 2
    while handle.poll(1.0):
        pass
    seen = handle.join().metrics
    assert [m.epoch for m in seen] == [0, 1, 2]
    assert all(isinstance(m, EpochMetrics) for m in seen)
    assert set(handle.join().parameters) == set(dict(make_model(None).named_parameters()))


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_ranks_that_step_on_their_own_stand_still_in_the_middle_of_an_epoch_when_asked(policy, tmp_path):
    """Async meets while it trains on; a checkpoint needs a meeting after which nothing is under way."""
    settings = {"anchor": 2, "max_anchor": 2, "folder": str(tmp_path), "save_every": 6, "keep_last": 99}
    _, events = run(2, policy, train_step=napping_step, **settings)
    whole = -(-ROWS // 8)
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert [step for step in saved if step < whole]
    _, events = run(2, policy, train_step=napping_step, anchor=2, max_anchor=2, max_steps=6)
    assert [event.step < whole for event in events if isinstance(event, RunDone)] == [True]
