"""Rules of a run: stopping, freezing, thawing and rates by trends; on ranks, in captured steps, and resumed."""

import pytest
import torch
from test_capture import Repeats
from test_watching import data, make_model, step
from torch import nn

from flodl.errors import ConfigError, GraphPathError, TrainError
from flodl.graph.tree import parameters_at
from flodl.monitor import above, after_epochs, after_steps, below, no_better, stalled
from flodl.train import (
    Callback,
    Decided,
    EvalDone,
    RunDone,
    StepDone,
    Trainer,
    Warned,
    adamw,
    freeze_when,
    set_rate,
    sgd,
    stop_when,
    thaw_when,
)
from flodl.train.rules import Rule, parse_rule
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.schedule import Linear
from flodl.train.step import route

torch.set_num_threads(1)


def run(*rules, model=None, optimizer=None, train_step=step, **settings):
    return (
        Trainer.builder(model if model is not None else make_model(), optimizer or sgd(0.05), train_step)
        .dataset(data())
        .set(**{"batch_size": 4, "num_epochs": 4, "progress": False, "rules": rules, **settings})
    )


def told(builder):
    """Return the decisions and the end of a run, and its handle."""
    seen = []
    handle = builder.subscribe(seen.append, Decided, RunDone, StepDone, EvalDone, Warned).run()
    return seen, handle


def decisions(seen):
    return [(event.action, event.path, event.step) for event in seen if isinstance(event, Decided)]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_run_stops_when_a_rule_says_so():
    seen, handle = told(run(stop_when(below("loss", 100.0) & after_epochs(2))))
    assert decisions(seen) == [("stop", "", 12)]
    done = seen[-1]
    assert (done.reason, done.step, done.epoch) == ("stopped", 12, 2)
    decided = next(event for event in seen if isinstance(event, Decided))
    assert decided.rule == "stop when below(loss, 100) and after_epochs(2)"
    assert "loss is" in decided.reason
    assert "2 epochs are done" in decided.reason
    short = run(num_epochs=2).run()
    assert all(torch.equal(p, q) for p, q in zip(handle.model.parameters(), short.model.parameters(), strict=True))


class Watch(Callback):
    """Keeps the weights after each step."""

    def __init__(self):
        self.after = {}

    def on_step_end(self, trainer, result):
        self.after[trainer.policy.steps] = weights(trainer.model)


def test_what_is_frozen_stays_and_what_is_thawed_moves():
    look = Watch()
    rules = (freeze_when("encoder", after_epochs(1)), thaw_when("encoder", after_epochs(3)))
    seen, handle = told(run(*rules, callbacks=[look], optimizer=adamw(1e-2)))
    assert decisions(seen) == [("freeze", "encoder", 6), ("thaw", "encoder", 18)]
    name, head = next(iter(parameters_at(handle.model, "encoder"))), next(iter(parameters_at(handle.model, "head_0")))
    moved = [s for s in range(2, 25) if not torch.equal(look.after[s][name], look.after[s - 1][name])]
    assert moved == [*range(2, 7), *range(19, 25)]
    assert all(not torch.equal(look.after[s][head], look.after[s - 1][head]) for s in range(2, 25))


def test_what_is_frozen_from_the_start_is_thawed_though_the_optimiser_skips_frozen_parameters():
    model = make_model()
    model.freeze("encoder")
    before = weights(model)
    seen, _ = told(run(thaw_when("encoder", after_epochs(1)), model=model, num_epochs=1))
    assert decisions(seen) == [("thaw", "encoder", 6)]
    assert all(torch.equal(p, before[name]) for name, p in parameters_at(model, "encoder").items())
    model.freeze("encoder")
    told(run(thaw_when("encoder", after_epochs(1)), model=model, num_epochs=2))
    assert not any(torch.equal(p, before[name]) for name, p in parameters_at(model, "encoder").items())


def test_ranges_and_modules_of_models_without_graphs():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    before = weights(model)
    seen, _ = told(run(freeze_when("0-2", after_steps(1)), model=model, trend_every=1, max_steps=3))
    assert decisions(seen) == [("freeze", "0-2", 1)]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"3.weight", "3.bias"}
    assert not torch.equal(model[3].weight, before["3.weight"])


def test_rates_by_path_with_and_without_a_schedule():
    for schedule in (None, Linear(0.05, 0.0, 24)):
        look, twin = Watch(), Watch()
        seen, _ = told(run(set_rate("encoder", 0.5, after_epochs(1)), callbacks=[look], schedule=schedule))
        told(run(callbacks=[twin], schedule=schedule))
        assert decisions(seen) == [("rate", "encoder", 6)]
        for name in weights(make_model()):
            assert torch.equal(look.after[6][name], twin.after[6][name])
            moved = look.after[7][name] - look.after[6][name]
            usual = twin.after[7][name] - twin.after[6][name]
            wanted = 0.5 * usual if name in parameters_at(make_model(), "encoder") else usual
            torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-7)


def test_trends_have_a_value_an_epoch_or_every_so_many_steps():
    asked = []

    def look(outlook):
        asked.append((outlook.steps, outlook.trend("loss").values(), outlook.trend("out").values()))
        return False

    seen, _ = told(run(stop_when(look), watch=["out"], num_epochs=2))
    losses = [event.loss * event.count for event in seen if isinstance(event, StepDone)]
    rows = [4, 4, 4, 4, 4, 2]
    assert [steps for steps, *_ in asked] == [6, 12]
    assert asked[-1][1] == pytest.approx([sum(losses[:6]) / 22, sum(losses[6:]) / 22])
    asked.clear()
    told(run(stop_when(look), watch=["out"], num_epochs=2, trend_every=4))
    assert [steps for steps, *_ in asked] == [4, 8, 12]
    counts = rows + rows
    wanted = [sum(losses[i : i + 4]) / sum(counts[i : i + 4]) for i in (0, 4, 8)]
    assert asked[-1][1] == pytest.approx(wanted)
    assert len(asked[-1][2]) == 3


def test_figures_of_evaluations_are_trends_and_decide_between_epochs():
    scores = iter([0.5, 0.6, 0.55, 0.54, 0.53, 0.5, 0.5, 0.5])
    rules = (stop_when(no_better("score", 2, "max")),)
    seen, _ = told(run(*rules).eval_fn(lambda model: {"score": next(scores), "loss": 9.0}).set(eval_every=4))
    assert [e.metrics["score"] for e in seen if isinstance(e, EvalDone)] == [0.5, 0.6, 0.55, 0.54]
    assert decisions(seen) == [("stop", "", 16)]
    assert seen[-1].step == 16


def test_metrics_of_training_and_of_evaluation_of_one_name_are_kept_apart():
    known = []

    def look(outlook):
        known.append({name: outlook.trend(name).latest() for name in ("loss", "eval_loss", "hits", "train/hits")})
        return False

    def counting(model, batch):
        return step(model, batch) * len(batch["x"]), len(batch["x"])

    def with_metric(model, batch):
        from flodl.train import Loss

        return Loss(*counting(model, batch), {"hits": (3.0, 1.0)})

    told(run(stop_when(look), train_step=with_metric, num_epochs=1).eval_fn(lambda model: {"hits": 7.0, "loss": 9.0}))
    assert known[-1]["hits"] == 7.0
    assert known[-1]["train/hits"] == 3.0
    assert known[-1]["eval_loss"] == 9.0
    assert known[-1]["loss"] < 9.0


class Counts(Repeats):
    """Tells at which captured graphs what learned."""

    def __init__(self, model):
        super().__init__()
        self.model, self.learned = model, []

    def capture(self, run):
        self.learned.append(sum(p.requires_grad for p in self.model.parameters()))
        return super().capture(run)


@pytest.mark.parametrize("optimizer", [adamw(1e-2), sgd(0.05, momentum=0.9)])
def test_captured_steps_are_captured_anew_and_compute_the_same(monkeypatch, optimizer):
    rules = (
        freeze_when("encoder", after_epochs(1)),
        thaw_when("encoder", after_epochs(2)),
        set_rate("head_0", 0.1, after_epochs(3)),
    )
    plain, reference = told(run(*rules, optimizer=optimizer, capture=False))
    model = make_model()
    capturer = Counts(model)
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    captured, handle = told(run(*rules, model=model, optimizer=optimizer))
    assert (
        decisions(captured)
        == decisions(plain)
        == [("freeze", "encoder", 6), ("thaw", "encoder", 12), ("rate", "head_0", 18)]
    )
    assert capturer.learned == [6, 4, 6, 6]  # batches of 4 in each epoch; the one of 2 comes once and is not captured
    for p, q in zip(handle.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_ranks_decide_alike(policy):
    rules = ("freeze encoder when after_epochs(1)", "rate head_0 0.5 when after_epochs(2)", "stop when after_epochs(3)")
    seen, handle = told(run(*rules).devices(2, start="fork").policy(policy))
    assert [d[:2] for d in decisions(seen)] == [("freeze", "encoder"), ("rate", "head_0"), ("stop", "")]
    assert seen[-1].epoch == 3
    assert handle.parameters


def from_rank(outlook):
    """Answers another thing on each rank, as nobody should."""
    import torch.distributed as dist

    return dist.get_rank() == 1


def test_where_a_function_of_the_user_answers_differently_the_first_rank_counts():
    seen, _ = told(run(stop_when(from_rank), num_epochs=2).devices(2, start="fork").policy("sync"))
    assert decisions(seen) == []
    assert seen[-1].epoch == 2


RULES = (
    freeze_when("encoder", after_epochs(1)),
    set_rate("head_0", 0.5, stalled("loss", 2, 10.0)),
    thaw_when("encoder", after_epochs(3)),
    stop_when(no_better("loss", 9)),
)


@pytest.mark.parametrize("cut", [4, 8, 12, 15, 20])
def test_a_run_that_goes_on_decides_as_one_left_alone(tmp_path, cut):
    whole, reference = told(run(*RULES, optimizer=adamw(1e-2), watch=["out"]))
    assert [d[0] for d in decisions(whole)] == ["freeze", "rate", "thaw"]
    first, _ = told(run(*RULES, optimizer=adamw(1e-2), watch=["out"], max_steps=cut).checkpoints(str(tmp_path)))
    rest, handle = told(run(*RULES, optimizer=adamw(1e-2), watch=["out"]).checkpoints(str(tmp_path)))
    assert decisions(first) + decisions(rest) == decisions(whole)
    for p, q in zip(handle.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert handle.model.trend("out").values() == pytest.approx(reference.model.trend("out").values())


def test_windows_of_steps_go_on_too(tmp_path):
    rules = ("freeze encoder when stalled(loss, 3, 100)", "stop when no_better(loss, 50)")
    whole, reference = told(run(*rules, trend_every=4))
    told(run(*rules, trend_every=4, max_steps=7).checkpoints(str(tmp_path)))
    rest, handle = told(run(*rules, trend_every=4).checkpoints(str(tmp_path)))
    assert decisions(rest) == decisions(whole) == [("freeze", "encoder", 12)]
    assert all(torch.equal(p, q) for p, q in zip(handle.model.parameters(), reference.model.parameters(), strict=True))


def test_a_run_that_a_rule_stopped_stays_stopped_and_other_rules_are_another_run(tmp_path):
    stopping = ("stop when after_epochs(2)",)
    told(run(*stopping).checkpoints(str(tmp_path)))
    again, _ = told(run(*stopping).checkpoints(str(tmp_path)))
    assert (again[-1].step, decisions(again)) == (12, [])
    saved = read_checkpoint(list_checkpoints(tmp_path)[-1])
    assert saved.values["run"]["observing"]["acted"] == {"stop when after_epochs(2)": 12}
    with pytest.raises(TrainError, match="rules: was"):
        run("stop when after_epochs(3)").checkpoints(str(tmp_path)).run()


def test_a_run_in_which_nothing_is_left_to_learn_ends():
    model = make_model()
    seen, _ = told(run(*(freeze_when(path, after_epochs(1)) for path in ("encoder", "head_0", "head_1")), model=model))
    assert decisions(seen)[-2:] == [("freeze", "head_1", 6), ("stop", "", 6)]
    assert seen[-1].reason == "stopped"


def test_decisions_are_told_in_the_log(capsys):
    from flodl.train.audience import ShowProgress

    show = ShowProgress(True)
    run("freeze encoder when after_epochs(1)", num_epochs=2).subscribe(show).run()
    show.close()
    assert "step 6: freeze encoder when after_epochs(1) (1 epochs are done)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "rule",
    [
        stop_when(above("f1", 0.9)),
        freeze_when("encoder.layers.0-3", stalled("loss", 3)),
        thaw_when("encoder", after_epochs(1) & below("loss", 0.5)),
        set_rate("encoder", 0.1, no_better("eval_loss", 2)),
        set_rate("encoder", 1e-05, after_steps(3)),
    ],
    ids=str,
)
def test_rules_are_read_back_from_what_they_say(rule):
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("stop", "found 'stop'; expected stop when"),
        ("stop encoder when after_epochs(1)", "expected stop when"),
        ("freeze when after_epochs(1)", "expected stop when"),
        ("frieze a when after_epochs(1)", "did you mean 'freeze'"),
        ("rate encoder when after_epochs(1)", "expected stop when"),
        ("rate encoder fast when after_epochs(1)", "expected a number above 0"),
        ("rate encoder -1 when after_epochs(1)", "expected a number above 0"),
        ("rate encoder nan when after_epochs(1)", "expected a number above 0"),
        ("stop when stalled(loss)", "'window'"),
    ],
)
def test_texts_that_are_no_rules_are_refused(text, part):
    with pytest.raises(ConfigError) as caught:
        run(text).run()
    assert part in str(caught.value)


def test_rules_that_cannot_act_are_refused_before_training():
    with pytest.raises(GraphPathError, match="did you mean 'encoder'"):
        run("freeze encoders when after_epochs(1)").run()
    with pytest.raises(GraphPathError, match="no parameters"):
        run("freeze out when after_epochs(1)").run()
    model = make_model()
    model.freeze("encoder")
    ready = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(TrainError, match="acts on 2 parameters"):
        run("thaw encoder when after_epochs(1)", model=model, optimizer=ready).run()
    with pytest.raises(ConfigError, match="found 3; expected a rule"):
        run(3).run()


def test_a_rule_about_a_figure_that_nobody_tells_ends_the_run_after_the_first_epoch():
    with pytest.raises(TrainError, match="did you mean 'loss'") as caught:
        run("stop when stalled(los, 2)").run()
    assert caught.value.name == "los"


def test_rules_are_values():
    assert freeze_when("a", after_epochs(1)) == Rule("freeze", after_epochs(1), "a")
    assert str(stop_when(from_rank)) == "stop when from_rank"
