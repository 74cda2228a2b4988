"""A run that was ended and taken up again has the best model, the recipe and the history of one left alone."""

import json
import math
import os
import shutil
import signal
import time
from typing import Any

import pytest
import torch
from test_resume import _damage, apart, builder, finished, make_model, same_bits

from flodl.errors import CheckpointError, TrainError
from flodl.train import Saved, SaveFailed, Warned, adamw
from flodl.train.saving import keeper
from flodl.train.saving.reading import list_checkpoints, read_checkpoint, read_manifest

torch.set_num_threads(1)


def judged(folder, *, figures=None, told=(), **settings):
    """A run of 24 steps whose figure is a function of its weights."""

    def score(model):
        value = float(next(model.parameters()).detach().double().sum())
        return {"score": math.sin(50 * value) if figures is None else next(figures)}

    run = builder(folder, **{"keep_best": "score", "keep_last": 1, **settings}).eval_fn(score)
    for call in told:
        run.subscribe(call)
    return run


def best_of(folder):
    manifests = [json.loads((p / "manifest.json").read_text()) for p in list_checkpoints(folder)]
    return max((m["metrics"]["score"], -m["step"]) for m in manifests if "score" in m["metrics"])


@pytest.mark.parametrize(("save", "judge"), [(7, 5), (5, 7), (3, 2), (100, 5), (4, 4)])
def test_figures_stand_beside_the_weights_that_they_were_taken_of(tmp_path, save, judge):
    seen = {}
    judged(
        tmp_path, save_every=save, eval_every=judge, told=[lambda e: seen.update({e.step: e.metrics["score"]})
        if type(e).__name__ == "EvalDone" else None]
    ).run()  # fmt: skip
    assert best_of(tmp_path) == max((value, -step) for step, value in seen.items())
    for path in list_checkpoints(tmp_path):
        saved = read_checkpoint(path)
        assert dict(saved.metrics) == ({"score": seen[saved.step]} if saved.step in seen else {})
        if saved.metrics:
            first = make_model("cpu")
            first.load_state_dict(saved.tensors["model"])
            value = float(next(first.parameters()).detach().double().sum())
            assert math.sin(50 * value) == saved.metrics["score"]


def stop_after(number):
    def stop(event):
        if type(event).__name__ == "StepDone" and event.step == number:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@pytest.mark.parametrize("settings", [{}, {"eval_every": 3, "save_every": 5}], ids=str)
def test_runs_ended_at_any_step_choose_the_same_best_and_know_their_history(tmp_path, settings):
    whole = []
    judged(tmp_path / "whole", told=[whole.append], **settings).run()
    losses = [e.loss for e in whole if type(e).__name__ == "StepDone"]
    for number in (2, 7, 8, 20):
        folder, events = tmp_path / str(number), []
        for stops in (number, number + 6):
            process = apart(lambda f=folder, n=stops: judged(f, told=[stop_after(n)], **settings).run())
            process.join()
            assert process.exitcode == (143 if stops < 24 else 0)
        judged(folder, told=[events.append], **settings).run()
        assert same_bits(finished(folder), finished(tmp_path / "whole"))
        assert best_of(folder) == best_of(tmp_path / "whole")
        started = next(e for e in events if type(e).__name__ == "RunStarted")
        rest = [e.loss for e in events if type(e).__name__ == "StepDone"]
        assert [*started.past.losses, *rest] == losses
        evaluations = [{"step": e.step, "epoch": e.epoch, **e.metrics} for e in whole if hasattr(e, "metrics")
                       and type(e).__name__ == "EvalDone"]  # fmt: skip
        later = [{"step": e.step, "epoch": e.epoch, **e.metrics} for e in events if type(e).__name__ == "EvalDone"]
        assert [*map(dict, started.past.evaluations), *later] == evaluations
        assert started.past.seconds > 0


def test_two_ranks_that_are_ended_choose_the_same_best(tmp_path):
    whole, events = [], []
    judged(tmp_path / "whole", ranks=2, told=[whole.append]).run()
    process = apart(lambda: judged(tmp_path / "cut", ranks=2, told=[stop_after(5)]).run())
    process.join()
    assert process.exitcode == 143
    judged(tmp_path / "cut", ranks=2, told=[events.append]).run()
    assert same_bits(finished(tmp_path / "cut"), finished(tmp_path / "whole"))
    assert best_of(tmp_path / "cut") == best_of(tmp_path / "whole")
    started = next(e for e in events if type(e).__name__ == "RunStarted")
    assert 0 < len(started.past.losses) < 24
    losses = [[e.loss for e in part if type(e).__name__ == "StepDone"] for part in (whole, events)]
    assert [*started.past.losses, *losses[1]] == losses[0]


@pytest.mark.parametrize("how", ["zeroed manifest", "gone", "one bit of the weights"])
def test_a_best_checkpoint_that_is_lost_is_told_and_no_unjudged_one_takes_its_place(tmp_path, how):
    figures = [0.1, 0.9, 0.5, 0.3, 0.2, 0.1]
    judged(tmp_path, figures=iter(figures), eval_every=4, save_every=5, max_steps=14, save_epochs=False).run()
    best = next(p for p in list_checkpoints(tmp_path) if read_checkpoint(p).metrics.get("score") == 0.9)
    if how == "gone":
        shutil.rmtree(best)
    else:
        _damage(best / ("manifest.json" if "manifest" in how else "model.safetensors"), "one bit")
        if "manifest" in how:
            (best / "manifest.json").write_bytes(bytes((best / "manifest.json").stat().st_size))
    said = []
    judged(tmp_path, figures=iter(figures[3:]), eval_every=4, save_every=5, told=[said.append]).run()
    warned = " ".join(e.message for e in said if isinstance(e, Warned))
    assert "best checkpoint, step 8 (score 0.9)" in warned
    assert how in ("gone", "zeroed manifest") or str(best) in warned
    left = [read_checkpoint(p) for p in list_checkpoints(tmp_path) if p != best]
    assert max(checkpoint.metrics.get("score", -1) for checkpoint in left) == 0.3


def test_a_figure_that_changed_in_a_manifest_makes_no_best(tmp_path):
    figures = [0.1, 0.9, 0.5, 0.3, 0.2, 0.1]
    judged(tmp_path, figures=iter(figures), eval_every=4, save_every=4, keep_last=9, max_steps=14).run()
    other = next(p for p in list_checkpoints(tmp_path) if read_checkpoint(p).metrics.get("score") == 0.5)
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"score": 0.5', '"score": 0.95'))
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        read_checkpoint(other)
    said = []
    judged(tmp_path, figures=iter(figures[3:]), eval_every=4, keep_last=1, told=[said.append]).run()
    assert not [e for e in said if isinstance(e, Warned) and "best" in e.message]
    kept = [path for path in list_checkpoints(tmp_path) if path != other]
    assert max(read_checkpoint(path).metrics.get("score", 0.0) for path in kept) == 0.9


def test_checkpoints_from_before_manifests_were_sealed_go_on(tmp_path):
    for folder in ("whole", "cut"):
        judged(tmp_path / folder, figures=iter([0.1, 0.9]), eval_every=4, max_steps=8).run()
    for path in list_checkpoints(tmp_path / "cut"):
        (path / "manifest.json").write_text(json.dumps(read_manifest(path)))
    for folder in ("whole", "cut"):
        judged(tmp_path / folder, figures=iter([0.5, 0.3, 0.2, 0.1]), eval_every=4).run()
    assert same_bits(finished(tmp_path / "cut"), finished(tmp_path / "whole"))
    assert best_of(tmp_path / "cut") == best_of(tmp_path / "whole") == (0.9, -8)


def test_a_first_figure_that_is_no_number_is_no_best(tmp_path):
    figures = [math.nan, 0.5, 0.7, math.nan, 0.6, 0.1]
    events = []
    run = judged(tmp_path, figures=iter(figures), eval_every=4, early_stopping=("score", 3), told=[events.append])
    run.run()
    assert best_of(tmp_path) == (0.7, -12)
    assert [e.step for e in events if type(e).__name__ == "EvalDone"][-1] == 24


@pytest.mark.parametrize("setting", ["early_stopping", "keep_best"])
def test_a_figure_that_is_not_there_is_refused_at_the_first_evaluation(tmp_path, setting):
    value: Any = ("scoer", 2) if setting == "early_stopping" else "-scoer"
    with pytest.raises(TrainError, match=f"{setting}: found no figure 'scoer'.*'score'") as caught:
        judged(tmp_path / "a", **{setting: value}).run()
    assert caught.value.found == ["score"]
    with pytest.raises(TrainError, match=f"{setting}.*no evaluation"):
        builder(tmp_path / "b", **{setting: value}).run()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_decay": 0.1}, "optimizer.weight_decay"),
        ({"betas": (0.8, 0.999)}, "optimizer.betas"),
        ({"eps": 1e-6}, "optimizer.eps"),
    ],
)
def test_options_of_the_optimiser_are_part_of_a_run(tmp_path, change, named):
    builder(tmp_path, optimizer=adamw(1e-2), max_steps=4).run()
    with pytest.raises(TrainError) as caught:
        builder(tmp_path, optimizer=adamw(1e-2, **change)).run()
    assert caught.value.names == [named]
    builder(tmp_path, optimizer=adamw(1e-2, **change), allow_change=(named,), max_steps=5).run()
    [newest] = list_checkpoints(tmp_path)[-1:]
    [told] = read_checkpoint(newest).values["past"]["changes"]
    assert (told["step"], told["name"]) == (4, named)


def test_a_rate_without_a_schedule_and_what_a_user_names_are_part_of_a_run(tmp_path):
    builder(tmp_path, optimizer=adamw(1e-2), schedule=None, max_steps=4, identity={"rows": "a1"}).run()
    with pytest.raises(TrainError) as caught:
        builder(tmp_path, optimizer=adamw(2e-2), schedule=None, identity={"rows": "b2"}).run()
    assert caught.value.names == ["optimizer.lr", "rows"]


class Falling:
    """A schedule without a repr of its own."""

    def __init__(self, first):
        self.first = first

    def lr(self, step):
        return self.first / (1 + step)


def test_a_schedule_is_known_by_its_values_and_not_by_where_it_lies(tmp_path):
    builder(tmp_path / "a", schedule=Falling(1e-2)).run()
    builder(tmp_path / "b", schedule=Falling(1e-2), max_steps=5).run()
    with pytest.raises(TrainError, match="schedule"):
        builder(tmp_path / "b", schedule=Falling(2e-2)).run()
    with pytest.raises(TrainError, match="schedule"):
        builder(tmp_path / "b", schedule=lambda ranks: Falling(2e-2)).run()
    builder(tmp_path / "b", schedule=Falling(1e-2)).run()
    assert same_bits(finished(tmp_path / "a"), finished(tmp_path / "b"))


def refusing(monkeypatch, broken):
    """Have the disk refuse checkpoints of these steps, after the next evaluations."""
    write = keeper._write

    def limited(path, chunks):
        if any(f".stage-{step:08d}-" in str(path) for step in broken):
            time.sleep(0.2)
            raise OSError(28, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(keeper, "_write", limited)


FIGURES = {4: 0.1, 8: 0.9, 12: 0.5, 16: 0.3, 20: 0.7, 24: 0.2}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("broken", "kept", "last"), [((), 8, 24), ((8,), 20, 24), ((8, 20), 12, 24), ((8, 12, 20), 16, 24)]
)
def test_a_best_that_could_not_be_written_is_none(tmp_path, monkeypatch, ranks, broken, kept, last):
    refusing(monkeypatch, broken)
    said = []
    settings = {"figures": iter(FIGURES.values()), "eval_every": 4, "save_every": None, "save_epochs": False}
    judged(tmp_path, ranks=ranks, told=[said.append], **settings).run()
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [kept, last]
    failed = [event for event in said if isinstance(event, SaveFailed)]
    assert {event.step for event in failed} == set(broken)
    assert all("would have been the best (score) and does not count as that" in event.reason for event in failed)


def test_a_last_best_that_could_not_be_written_is_tried_again(tmp_path, monkeypatch):
    write, left = keeper._write, [24]

    def limited(path, chunks):
        if left and f"-{left[0]:08d}-" in str(path):
            left.clear()
            raise OSError(28, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(keeper, "_write", limited)
    judged(tmp_path, figures=iter([0.1, 0.2, 0.9]), save_every=None, save_epochs=False).run()
    assert best_of(tmp_path) == (0.9, -24)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_ranks_that_meet_now_and_then_know_what_was_not_written(tmp_path, monkeypatch, policy):
    write, left = keeper._write, [True, True]

    def limited(path, chunks):
        if path.name == "manifest.json" and left and left.pop():
            raise OSError(28, "No space left on device")
        return write(path, chunks)

    monkeypatch.setattr(keeper, "_write", limited)
    said, figures = [], iter([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    judged(tmp_path, ranks=2, policy=policy, figures=figures, eval_every=4, save_every=None, told=[said.append]).run()
    failed = {event.step for event in said if isinstance(event, SaveFailed)}
    figures = {event.step: event.metrics["score"] for event in said if type(event).__name__ == "EvalDone"}
    assert len(failed) == 2
    best = max((value, -step) for step, value in figures.items() if step not in failed)
    assert best_of(tmp_path) == best


def test_a_best_that_is_gone_is_none(tmp_path):
    def remove(event):
        if isinstance(event, Saved) and event.step == 8:
            shutil.rmtree(event.path)

    settings = {"figures": iter(FIGURES.values()), "eval_every": 4, "save_epochs": False}
    judged(tmp_path, told=[remove], **settings).run()
    assert best_of(tmp_path) == (0.7, -20)
