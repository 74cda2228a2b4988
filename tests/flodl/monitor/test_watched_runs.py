"""Runs that are watched: what their record says, what may be asked of them, and that they compute the same."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import DataLoader, TensorRows
from flodl.distributed import RankError
from flodl.errors import TrainError
from flodl.monitor import Monitor, read_record
from flodl.train import Callback, Loss, Trainer, adamw
from flodl.train.events import Event, LayersTimed, RunDone, RunFailed, Saved

torch.set_num_threads(1)
ROWS = 96


def data(rows: int = ROWS) -> TensorRows:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 6, generator=g)
    return TensorRows({"x": x, "y": (x.sum(1) > 0).long()})


def make_model(device: torch.device | None = None) -> nn.Module:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Sequential(*blocks), nn.Linear(8, 2))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).sum()
    return Loss(cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]), {"accuracy": (hits, len(logits))})


def judge(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, object]:
    time.sleep(0.002)  # long enough to be seen where seconds have four places
    return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}


def quiet(**options) -> Monitor:
    return Monitor(quiet=True, **{"resources_s": 0, "interval_s": 0.02, **options})


def builder(monitor, train_step=step, **settings):
    made = Trainer.builder(make_model, adamw(1e-2), train_step).dataset(data()).batch_size(8).num_epochs(2)
    return made.evaluate(judge, data(), batch_size=32).set(monitor=monitor, progress=False, **settings)


def test_a_run_is_told_from_beginning_to_end(tmp_path):
    with quiet(folder=tmp_path, name="first") as monitor:
        builder(monitor).run()
        record = monitor.record
    assert record.state["status"] == "finished"
    assert (record.state["step"], record.state["total"], record.state["epoch"]) == (24, 24, 2.0)
    assert [point[0] for point in record.series["train/loss"].points] == list(range(1, 25))
    assert [point[0] for point in record.series["eval/accuracy"].points] == [12, 24]
    assert {"train/lr", "train/grad_norm", "train/accuracy", "speed/step_ms"} <= set(record.series)
    assert [(row["epoch"], row["step"], row["samples"]) for row in record.epochs] == [(1, 12, 96), (2, 24, 96)]
    assert record.facts["model"]["parameters"] == sum(p.numel() for p in make_model().parameters())
    about = {"policy": "sync", "policy_reason": "there is one rank"}
    assert record.facts["run"] == {"ranks": 1, **about, "epochs": 2, "steps": 24, "steps_per_epoch": 12}
    lane = record.lanes.ranks["0"]
    assert sum(bin_[0] for bin_ in lane["bins"]) > 0
    spent = [sum(bin_[place] for bin_ in lane["bins"]) for place in range(4)]
    assert sum(spent) <= record.t + 0.01  # which has two decimals
    assert spent[3] > 0  # two evaluations
    blocks = record.model["parts"][3]["parts"][0]
    assert blocks["folded"] == ["3.0", "3.1", "3.2"]
    time_of, gradient = record.heat["time"]["of"], record.heat["gradient"]["of"]
    assert {"0", "3", "3.1", "3.1.0", "4"} <= set(time_of)
    assert time_of["3"] >= time_of["3.0"] > 0
    # the parts of a whole: squares add up
    assert sum(gradient[f"3.{i}"] ** 2 for i in range(3)) == pytest.approx(gradient["3"] ** 2, rel=1e-2)
    # the same from the file
    assert read_record(tmp_path).snapshot() == json.loads(json.dumps(record.snapshot()))


def test_the_gradient_of_a_look_is_that_of_the_step():
    class Norms(Callback):
        def on_step_end(self, trainer, result):
            norms.append(result.grad_norm)

    norms: list[float] = []
    looks: list[LayersTimed] = []
    with quiet() as monitor:
        builder(monitor, callbacks=(Norms(),)).subscribe(looks.append, LayersTimed).run()
    [look] = looks
    squares = sum(look.gradients[path] ** 2 for path in ("0", "1", "3", "4"))
    assert squares**0.5 == pytest.approx(norms[look.step - 1], rel=1e-3)


@pytest.mark.parametrize("recorded", [False, True])
def test_looking_on_changes_no_number(monkeypatch, recorded):
    class Repeats:
        """Stands in for capture where there is no CUDA."""

        def watch(self, run):
            return run(), None

        def capture(self, run):
            return run

        def beside(self, ranks):
            return self, "nothing is launched beside here"

    if recorded:
        monkeypatch.setattr("flodl.train.step.route.make_capturer", lambda device, settings: Repeats())
    monkeypatch.setattr("flodl.train.rank_activity.MEASURE_EVERY_S", 0.0)
    monkeypatch.setattr("flodl.train.rank_activity.IDLE_RATIO", 0.0)
    plain = builder(None).run()
    looks: list[LayersTimed] = []
    with quiet() as monitor:
        watched = builder(monitor).subscribe(looks.append, LayersTimed).run()
        assert "layers cannot" not in json.dumps(monitor.record.log)
        heat = monitor.record.heat
    assert len(looks) > 10
    # Bytes are counted once, beside a recorded step; a step of a processor as it runs is left alone.
    assert [bool(look.memory) for look in looks] == [recorded] + [False] * (len(looks) - 1)
    assert set(heat) == {"time", "gradient", "memory"} if recorded else {"time", "gradient"}
    if recorded:
        assert heat["memory"]["of"]["3"] >= sum(heat["memory"]["of"][f"3.{i}"] for i in range(3)) / 2 > 0
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name


def test_true_is_a_page_of_this_machine(capfd):
    import urllib.request

    seen: list[str] = []

    class Looks(Callback):
        def on_epoch_end(self, trainer, epoch):
            url = capfd.readouterr().err.partition("watch this run at ")[2].split()
            until = time.monotonic() + 300.0
            while url and time.monotonic() < until:  # what happened reaches the page a moment later
                with urllib.request.urlopen(url[0] + "api/runs", timeout=120) as answer:
                    runs = json.load(answer)["runs"]
                if runs and runs[0]["state"].get("status") == "running":
                    seen.append(runs[0]["name"])
                    break
                time.sleep(0.02)

    builder(True, callbacks=(Looks(),)).run()
    assert len(seen) == 1


@pytest.mark.parametrize("wrong", ["yes", -1, 70_000, 1.5, object()])
def test_other_choices_are_refused(wrong):
    with pytest.raises(TrainError, match="monitor"):
        builder(wrong).run()


def test_a_loop_of_ones_own_is_watched(tmp_path):
    with quiet(folder=tmp_path) as monitor:
        trainer = Trainer.setup(make_model(), optimizer=adamw(1e-2), monitor=monitor, progress=False)
        for _ in trainer.epochs(2):
            for batch in trainer.batches(DataLoader(data(), batch_size=8)):
                cross_entropy(trainer.model(batch["x"]), batch["y"]).backward()
                trainer.step()
        record = monitor.record
    assert record.state["status"] == "finished"
    assert len(record.series["train/loss"]) == 24
    assert "3.1.0" in record.heat["gradient"]["of"]


def test_an_error_is_the_end_that_is_told(tmp_path):
    def failing(model, batch):
        count.append(1)
        if len(count) > 5:
            raise ValueError("no more <script>alert(1)</script>")
        return step(model, batch)

    count: list[int] = []
    with quiet(folder=tmp_path) as monitor:
        monitor.save_html(tmp_path / "run.html")
        with pytest.raises(ValueError, match="no more"):
            builder(monitor, failing).run()
    record = read_record(tmp_path)
    assert record.state["status"] == "failed"
    assert record.state["reason"].startswith("ValueError: no more")
    assert record.log[-1][2] == "error"
    assert "<script>alert" not in (tmp_path / "run.html").read_text()


def test_a_run_that_goes_on_adds_to_its_record(tmp_path):
    class Leaves(Callback):
        def on_step_end(self, trainer, result):
            if trainer.policy.steps == 9:
                os.kill(os.getpid(), signal.SIGTERM)

    def again(*callbacks, resume=True):
        made = builder(monitor, callbacks=callbacks).checkpoints(tmp_path / "saved", every=4, resume=resume)
        return made.run()

    with quiet(folder=tmp_path) as monitor, pytest.raises(SystemExit):
        again(Leaves())
    left = read_record(tmp_path)
    assert left.state["status"] == "signal"
    with quiet(folder=tmp_path) as monitor:
        again()
    record = read_record(tmp_path)
    assert record.id == left.id
    assert record.state["status"] == "finished"
    assert [point[0] for point in record.series["train/loss"].points] == list(range(1, 25))
    assert any("resumed from step" in line[3] for line in record.log)
    # a run that begins anew keeps the record of the one before under another name
    with quiet(folder=tmp_path) as monitor:
        builder(monitor).run()
    assert len(list(tmp_path.glob("run*.jsonl"))) == 2
    assert read_record(tmp_path).id != left.id


def test_a_disk_that_fails_ends_no_run(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with quiet(folder=tmp_path / "file" / "inside") as monitor:
        builder(monitor).run()
        record = monitor.record
    assert record.state["status"] == "finished"
    assert any("no record is written" in line[3] for line in record.log)


def test_two_runs_of_one_monitor_stand_side_by_side():
    with quiet() as monitor:
        for _ in range(2):
            builder(monitor).run()
        runs = json.loads(monitor.store.to_json())["runs"]
    assert [run["state"]["status"] for run in runs] == ["finished", "finished"]
    assert runs[0]["id"] != runs[1]["id"]


class Strange(Event):
    """An event that no monitor knows."""

    def to_dict(self):
        return {"event": "Strange", "message": "look", "size": 3}


class Figures(Event):
    def to_dict(self):
        return {"event": "Figures", "step": 4, "values": {"a": 1.5, "b": "no number"}}


def test_unknown_events_are_kept_too():
    with quiet() as monitor:
        monitor(Strange())
        monitor(Figures())
        record = monitor.record
    [line] = [line[3] for line in record.log]
    assert line.startswith("Strange ")
    assert '"size": 3' in line
    assert record.series["observed/a"].latest == 1.5
    assert "observed/b" not in record.series


# ---- several ranks ---------------------------------------------------------------------------------------


def ranks_of(monitor, policy: str, train_step=step, **settings):
    return builder(monitor, train_step, timeout_s=300, **settings).devices(2, start="fork").policy(policy)


def napping(model, batch):
    time.sleep(0.01)
    return step(model, batch)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_each_rank_has_a_lane(policy):
    with quiet() as monitor:
        ranks_of(monitor, policy, napping, anchor=2).run()
        record = monitor.record
    assert set(record.lanes.ranks) == {"0", "1"}
    for lane in record.lanes.ranks.values():
        assert sum(bin_[0] for bin_ in lane["bins"]) > 0
        assert lane["about"] == "cpu"
        assert 0 < lane["share"] < 1
    assert bool(record.lanes.meetings) == (policy == "cadence")
    told = [line[3] for line in record.log if "summed" in line[3]]
    assert told == ["gradients were summed by gloo"] * (policy == "sync")
    assert record.facts["run"]["ranks"] == 2
    assert (record.facts["run"]["policy"], record.facts["run"]["policy_reason"]) == (policy, "it was requested")
    assert record.state["status"] == "finished"


def dying(model, batch):
    if os.environ.get("LOCAL_DEATH") == str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return step(model, batch)


class Dies(Callback):
    def on_step_end(self, trainer, result):
        if trainer.ranks.rank == 1 and trainer.policy.steps == 5:
            os.environ["LOCAL_DEATH"] = str(os.getpid())


def test_a_rank_that_dies_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("flodl.train.rank_activity.SEND_EVERY_S", 0.01)
    failures: list[RunFailed] = []
    with quiet(folder=tmp_path) as monitor:
        run = ranks_of(monitor, "sync", dying, callbacks=(Dies(),)).subscribe(failures.append, RunFailed)
        with pytest.raises(RankError):
            run.run()
    record = read_record(tmp_path)
    assert record.state["status"] == "failed"
    assert "rank 1 of 2" in record.state["reason"]
    assert "SIGKILL" in record.state["reason"]
    assert record.lanes.ranks["1"]["end"] is not None
    assert record.lanes.ranks["0"]["end"] is None
    assert failures[-1].failed_rank == 1


class DiesOnce(Callback):
    def on_step_end(self, trainer, result):
        if trainer.ranks.rank == 1 and trainer.policy.steps == 15 and not trainer.ranks.attempt:
            os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_are_started_again_go_on_in_the_same_record(tmp_path):
    with quiet() as monitor:
        run = ranks_of(monitor, "sync", callbacks=(DiesOnce(),), max_restarts=1)
        run.checkpoints(tmp_path, every=5).run()
        record = monitor.record
    assert record.state["status"] == "finished"
    assert record.state["reason"] is None
    assert [point[0] for point in record.series["train/loss"].points] == list(range(1, 25))


# ---- what is asked ---------------------------------------------------------------------------------------


class AsksAt(Callback):
    """Asks as the page does, from another thread of the process that has the monitor."""

    def __init__(self, wishes):
        self.wishes = wishes

    def on_step_end(self, trainer, result):
        if trainer.ranks.rank == 0 and trainer.policy.lr_step >= 6:
            while self.wishes:
                trainer.ask(self.wishes.pop())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("wish", ["stop", "save", "evaluate"])
def test_a_run_heeds_what_it_is_asked_for(tmp_path, ranks, policy, wish):
    if ranks == 1 and policy == "cadence":
        pytest.skip("one rank has nobody to meet")
    events: list[Event] = []
    with quiet() as monitor:
        run = builder(monitor, napping, callbacks=(AsksAt([wish]),), timeout_s=300, anchor=2).checkpoints(tmp_path)
        if ranks > 1:
            run = run.devices(ranks, start="fork").policy(policy)
        run.subscribe(events.append).run()
        record = monitor.record
    assert record.state["orders"] == ["evaluate", "save", "stop"]
    saved = [event.step for event in events if isinstance(event, Saved)]
    [done] = [event for event in events if isinstance(event, RunDone)]
    judged = [point[0] for point in record.series["eval/accuracy"].points]
    assert (done.reason == "stopped") == (wish == "stop")
    assert (done.step < 24) == (wish == "stop")
    if policy == "cadence":  # ranks that meet at the end of the epoch next do there what they do anyway
        assert saved[0] >= 6
        assert judged[0] >= 6
        return
    soon = range(6, 12)
    assert bool([at for at in saved if at in soon]) == (wish != "evaluate")
    assert bool([at for at in judged if at in soon]) == (wish != "save")


def test_ranks_in_processes_are_asked_from_the_process_that_started_them(tmp_path):
    def nap(model, batch):
        time.sleep(0.02)
        return step(model, batch)

    events: list[Event] = []
    with quiet() as monitor:
        monitor.serve(0, control=True)

        def ask(event):
            if type(event).__name__ == "StepDone" and event.step == 4:
                assert monitor._on_command("stop")[0] == 202

        # A hundred epochs: on a busy machine many steps may pass before the ranks hear of it.
        ranks_of(monitor, "sync", nap).num_epochs(100).subscribe(events.append).subscribe(ask).run()
        assert monitor._on_command("stop")[0] == 409
    [done] = [event for event in events if isinstance(event, RunDone)]
    assert done.reason == "stopped"
    assert 4 < done.step < 1200


def test_words_that_are_no_wish_are_refused():
    class Asks(Callback):
        def on_train_begin(self, trainer):
            with pytest.raises(TrainError, match="ask"):
                trainer.ask("dance")

    builder(None, callbacks=(Asks(),)).run()
