"""The trainer on one device: its tiers, callbacks, what it refuses, and what it does when numbers go wrong."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import flodl.train
from flodl.data import DataLoader, TensorRows
from flodl.errors import TrainError
from flodl.train import (
    EvalDone,
    Loss,
    RunDone,
    RunStarted,
    Saved,
    Settings,
    StepDone,
    Trainer,
    Warned,
    adamw,
    layerwise_decay,
    parameter_groups,
    sgd,
)
from flodl.train.schedule import Cosine, Plateau
from flodl.train.settings import make_settings

torch.set_num_threads(1)


def make_data(rows=40, bad=None):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 6, generator=g)
    y = (x.sum(1) > 0).long()
    if bad is not None:
        x[bad] = float("nan")
    return TensorRows({"x": x, "y": y})


def make_model(device=None):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model, batch):
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def builder(data=None, **settings):
    made = Trainer.builder(make_model, sgd(0.5, momentum=0.9), step)
    return made.dataset(make_data() if data is None else data).batch_size(7).num_epochs(2).set(**settings)


def by_hand(rates=None, epochs=2, clip=None):
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    number = 0
    for epoch in range(epochs):
        for rows in DataLoader(data, 7, seed=42).plan(epoch):
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates.lr(number)
            part = data.get_batch(torch.as_tensor(rows))
            cross_entropy(model(part["x"]), part["y"]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
    return model.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("rates", "clip"), [(None, None), (Cosine(0.5, 0.0, 12), 0.3)])
def test_a_run_is_the_plain_loop_to_the_bit(rates, clip):
    trained = builder(schedule=rates, max_grad_norm=clip).run()
    assert same(trained.state_dict(), by_hand(rates, clip=clip))


@pytest.mark.parametrize("exact", [False, True], ids=["loss.backward()", "trainer.backward(loss)"])
def test_a_loop_of_ones_own_is_the_plain_loop(exact):
    model = make_model()
    trainer = Trainer.setup(model, optimizer=sgd(0.5, momentum=0.9))
    for _ in trainer.epochs(2):
        for batch in trainer.batches(DataLoader(make_data(), 7, seed=42)):
            loss = cross_entropy(model(batch["x"]), batch["y"])
            if exact:
                trainer.backward(loss)
            else:
                loss.backward()
            trainer.step()
    expected = by_hand()
    if exact:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    else:
        assert same(model.state_dict(), expected)


def test_a_loop_of_ones_own_accumulates_exactly_and_resumes(tmp_path):
    def go(folder, epochs):
        model = make_model()
        settings = {"folder": str(tmp_path / folder), "resume": True, "micro_batch_size": 3, "max_grad_norm": 1.0}
        trainer = Trainer.setup(model, optimizer=adamw(1e-2), **settings)
        steps = 0
        for _ in trainer.epochs(epochs):
            for batch in trainer.batches(DataLoader(make_data(), 7, seed=42)):
                trainer.backward(step(model, batch))
                steps += trainer.step() is not None
        return model.state_dict(), steps

    whole, steps = go("a", 3)
    assert steps == 18
    assert go("b", 1)[1] == 6
    rest, steps = go("b", 3)
    assert steps == 12
    assert same(whole, rest)


def test_setup_takes_an_object_with_a_graph():
    class Head:
        def __init__(self):
            self._graph = make_model()

        def graph(self):
            return self._graph

    head = Head()
    assert Trainer.setup(head, optimizer=sgd(0.1)).model is head.graph()


def test_plain_backward_on_one_of_several_micro_batches_is_refused():
    model = make_model()
    trainer = Trainer.setup(model, optimizer=sgd(0.5), micro_batch_size=3)

    def go():
        for batch in trainer.batches(DataLoader(make_data(), 7)):
            cross_entropy(model(batch["x"]), batch["y"]).backward()
            trainer.step()

    with pytest.raises(TrainError, match=r"trainer\.backward"):
        go()


def test_a_torch_loader_and_a_list_of_batches_serve_as_data():
    data = make_data()
    batches = [(data.tensors["x"][i : i + 7], data.tensors["y"][i : i + 7]) for i in range(0, 40, 7)]

    def pair(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    rows = torch.utils.data.TensorDataset(data.tensors["x"], data.tensors["y"])
    results = [
        Trainer.builder(make_model, sgd(0.5), pair).dataset(source).num_epochs(2).run()
        for source in (batches, torch.utils.data.DataLoader(rows, batch_size=7))
    ]
    for name, value in results[0].state_dict().items():
        torch.testing.assert_close(value, results[1].state_dict()[name])
    assert results[0].metrics[0].samples == 40
    with pytest.raises(flodl.errors.DataError, match="length"):
        Trainer.builder(make_model, sgd(0.5), pair).dataset(iter(batches)).run()


# ---- numbers that are none ----------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run_before_the_step():
    model = make_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    made = Trainer.builder(lambda device: model, sgd(0.5), step).dataset(make_data(bad=3)).batch_size(40)
    with pytest.raises(TrainError) as caught:
        made.run()
    assert (caught.value.rank, caught.value.step) == (0, 0)
    assert "not applied" in str(caught.value)
    assert same(model.state_dict(), before)
    assert pickle.loads(pickle.dumps(caught.value)).step == 0


def test_skip_leaves_out_just_the_step_with_the_bad_row():
    events = []
    trained = builder(make_data(bad=3), on_nan="skip").subscribe(events.append).run()
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.epoch for event in steps if event.skipped] == [0, 1]
    assert sum(isinstance(event, Warned) and "not finite" in event.message for event in events) == 2
    assert all(torch.isfinite(value).all() for value in trained.state_dict().values())
    assert all(math.isfinite(m.loss) for m in trained.metrics)


def test_an_infinite_gradient_under_a_finite_loss_is_seen():
    def root(model, batch):
        return Loss(model(batch["x"]).abs().mul(0).sqrt().sum(), 1)

    with pytest.raises(TrainError, match="the gradient is"):
        Trainer.builder(make_model, sgd(0.5), root).dataset(make_data()).batch_size(7).run()


# ---- callbacks -----------------------------------------------------------------------------------------


def test_callbacks_come_in_order_and_their_errors_are_told_once(tmp_path):
    seen, events = [], []

    def bad(*args):
        seen.append("bad")
        raise ValueError("broken callback")

    made = builder(num_epochs=3).epoch_fn(lambda epoch, trainer: seen.append(epoch)).checkpoint_fn(bad)
    made.metrics_fn(lambda m: seen.append(f"m{m.epoch}")).subscribe(events.append).run()
    assert seen == [0, "bad", "m0", 1, "bad", "m1", 2, "bad", "m2"]
    told = [event.message for event in events if isinstance(event, Warned)]
    assert len(told) == 1
    assert "checkpoint_fn" in told[0]
    assert "broken callback" in told[0]


def test_an_error_in_epoch_fn_ends_the_run():
    def bad(epoch, trainer):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        builder().epoch_fn(bad).run()


def test_checkpoint_fn_gets_the_number_of_epochs_done():
    seen = []
    builder(num_epochs=5).checkpoint_fn(lambda done, model: seen.append(done), every=2).run()
    assert seen == [2, 4]


def test_metrics_fn_stops_the_run_by_returning_false():
    trained = builder(num_epochs=9).metrics_fn(lambda m: m.epoch < 2).run()
    assert [m.epoch for m in trained.metrics] == [0, 1, 2]


def test_a_subscriber_that_raises_is_reported_once_and_forgotten():
    def bad(event):
        raise ValueError("broken subscriber")

    with pytest.warns(RuntimeWarning, match="broken subscriber") as caught:
        builder().subscribe(bad).run()
    assert len(caught) == 1


def test_evaluation_shares_early_stopping_and_modes():
    modes, events = [], []

    def evaluate(model, batch):
        modes.append(model.training)
        hits = (model(batch["x"]).argmax(1) == batch["y"]).sum()
        return {"accuracy": (hits, len(batch["y"]))}

    made = builder(num_epochs=30).evaluate(evaluate, make_data(rows=23), batch_size=5).early_stopping("accuracy", 2)
    trained = made.subscribe(events.append, EvalDone, RunDone).run()
    assert set(modes) == {False}
    scores = [event.metrics["accuracy"] for event in events if isinstance(event, EvalDone)]
    assert scores == [m.eval["accuracy"] for m in trained.metrics]
    best = max(range(len(scores)), key=lambda i: scores[i])
    assert len(scores) == best + 3 < 30
    assert events[-1].reason == "stopped"
    assert all(0 <= score <= 1 for score in scores)


def test_an_evaluation_every_few_steps():
    steps = []
    made = builder(eval_every=4).eval_fn(lambda model: {"one": 1.0})
    made.subscribe(lambda event: steps.append(event.step), EvalDone).run()
    assert steps == [4, 8, 12]
    steps.clear()
    builder(eval_every=5).eval_fn(lambda model: {"one": 1.0}).subscribe(
        lambda event: steps.append(event.step), EvalDone
    ).run()
    assert steps == [5, 10, 12]  # the last model is always evaluated


def test_results_that_are_no_numbers_are_details_of_an_evaluation():
    found = {
        "accuracy": np.float32(0.5), "whole": torch.tensor([2]), "sure": True, "matrix": np.array([[1, 2], [3, 4]]),
        "report": {"no": {"f1-score": 0.25, "names": ["a"]}, "accuracy": 0.5}, "note": "text", 7: None,
    }  # fmt: skip
    events = []
    builder(keep_best=None).eval_fn(lambda model: found).subscribe(events.append, EvalDone).run()
    assert events[-1].metrics == {
        "accuracy": 0.5, "whole": 2.0, "sure": 1.0, "report/no/f1-score": 0.25, "report/accuracy": 0.5
    }  # fmt: skip
    assert events[-1].details == {
        "matrix": [[1, 2], [3, 4]], "report/no/names": ["a"], "note": "text", "7": None
    }  # fmt: skip


def test_a_plateau_of_an_evaluation_counts_evaluations_as_they_come():
    rates = []
    scores = iter([1.0, 0.5, 0.4, 0.3])
    run = builder(schedule=Plateau(0.5, 2, 0.1, mode="max", metric="score"), eval_every=3)
    run.eval_fn(lambda model: {"score": next(scores)}).subscribe(lambda event: rates.append(event.lr), StepDone).run()
    assert rates == pytest.approx([0.5] * 9 + [0.05] * 3)


def test_plateau_is_told_the_loss_and_asked_by_name():
    builder(schedule=Plateau(0.5, 1)).run()
    with pytest.raises(TrainError, match="no figure 'accuracy'"):
        builder(schedule=Plateau(0.5, 1, metric="accuracy")).run()


def test_max_steps_ends_inside_an_epoch():
    steps = []
    builder(max_steps=8).subscribe(lambda event: steps.append(event.step), StepDone).run()
    assert steps == list(range(1, 9))


# ---- precision, groups, settings ------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_lower_precisions_train(precision):
    before = torch.get_float32_matmul_precision()
    try:
        trained = builder(precision=precision, num_epochs=4).run()
    finally:
        torch.set_float32_matmul_precision(before)
    assert trained.metrics[-1].loss < trained.metrics[0].loss
    assert all(value.dtype == torch.float32 for value in trained.parameters.values())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"embeddings": nn.Embedding(3, 2), "layers": nn.ModuleList([nn.Linear(2, 2)] * 1)})
        self.encoder["layers"] = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.final_norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 1)


def test_layerwise_decay_gives_each_depth_its_rate_and_no_decay_to_biases_and_norms():
    model = Encoder()
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in layerwise_decay(model, 1.0, 0.5):
        for parameter in group["params"]:
            found[names[id(parameter)]] = (group["lr"], group.get("weight_decay"))
    assert found["encoder.embeddings.weight"] == (0.5**4, None)
    assert [found[f"encoder.layers.{i}.weight"] for i in range(3)] == [(0.125, None), (0.25, None), (0.5, None)]
    assert found["head.weight"] == (1.0, None)
    assert found["head.bias"] == (1.0, 0.0)
    assert found["final_norm.weight"] == (1.0, 0.0)
    assert len(found) == len(names)
    with pytest.raises(TrainError, match="layers="):
        layerwise_decay(model, 1.0, 0.5, layers="blocks")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_schedule_keeps_the_ratios_of_groups(on_device):
    model = Encoder()
    optimizer = adamw(0.1)(layerwise_decay(model, 0.1, 0.5))
    if on_device:
        for group in optimizer.param_groups:
            group.setdefault("lr_scale", group["lr"] / 0.1)
            group["lr"] = torch.tensor(group["lr"])
    rates = flodl.train.schedule.Rates(optimizer, Cosine(0.1, 0.0, 10), 3, 0.5)
    rates.set(0)
    assert all(isinstance(group["lr"], torch.Tensor) == on_device for group in optimizer.param_groups)
    assert sorted({round(float(group["lr"]), 6) for group in optimizer.param_groups}) == [0.0125, 0.025, 0.05, 0.1, 0.2]


def test_groups_by_path_cover_each_trainable_parameter_once_and_refuse_unknown_paths():
    model = make_model()
    model[0].bias.requires_grad_(False)
    groups = parameter_groups(model, [("*", {"lr": 1.0}), ("2", {"lr": 2.0})])
    flat = [id(p) for group in groups for p in group["params"]]
    assert sorted(flat) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    with pytest.raises(TrainError, match=r"encoder\.layer"):
        parameter_groups(model, [("encoder.layer", {"lr": 1.0})])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"precision": "fp8"}, "fp8"),
        ({"policy": "hogwild"}, "hogwild"),
        ({"on_nan": "ignore"}, "ignore"),
        ({"schedule": object()}, r"lr\(step\)"),
    ],
)
def test_values_that_mean_nothing_are_refused(change, text):
    with pytest.raises(TrainError, match=text):
        builder(**change).run()


def test_unknown_settings_are_refused_with_a_near_name():
    with pytest.raises(TrainError, match="num_epochs"):
        make_settings({"num_epoch": 3})
    assert make_settings({"anchor": 3, "seed": 1}).knobs.anchor == 3
    assert make_settings({}) == Settings()
    with pytest.raises(TrainError, match="dataset"):
        Trainer.builder(make_model, sgd(0.1), step).run()


@pytest.mark.parametrize("given", [None, "loss", {"loss": 1}, torch.zeros(3, requires_grad=True)])
def test_a_train_step_that_returns_something_else_is_told_so(given):
    with pytest.raises(TrainError, match="train_step"):
        Trainer.builder(make_model, sgd(0.1), lambda m, b: given).dataset(make_data()).batch_size(7).run()


def test_a_loss_without_gradient_is_told_so():
    with pytest.raises(TrainError, match="depend on any trainable"):
        Trainer.builder(make_model, sgd(0.1), lambda m, b: torch.tensor(1.0)).dataset(make_data()).batch_size(7).run()


def test_the_trained_state_goes_into_a_fresh_model():
    trained = builder().run()
    model = trained.load_into(make_model())
    assert same(model.state_dict(), trained.state_dict())
    with pytest.raises(flodl.errors.CheckpointError):
        trained.load_into(nn.Linear(6, 2))


def test_all_names_exist():
    for module in (flodl.train, flodl.distributed):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert len(set(module.__all__)) == len(module.__all__)


def own_loop_events(tmp_path, with_epochs=True, **settings):
    """Return the events and the trainer of a loop of three epochs over five batches."""
    events = []
    trainer = Trainer.setup(make_model(), optimizer=adamw(1e-2), folder=str(tmp_path), **settings)
    trainer.events.subscribe(events.append)
    loader = DataLoader(make_data(), 8, seed=3)
    for _ in trainer.epochs(3) if with_epochs else range(3):
        for batch in trainer.batches(loader):
            trainer.backward(step(trainer.model, batch))
            trainer.step()
    trainer.saves.close()
    return events, trainer


@pytest.mark.parametrize("with_epochs", [True, False])
@pytest.mark.parametrize("save_end", [True, False])
def test_a_loop_of_ones_own_reports_its_length_and_saves_each_epoch(tmp_path, with_epochs, save_end):
    events, _ = own_loop_events(tmp_path, with_epochs, save_end=save_end)
    [start] = [event for event in events if isinstance(event, RunStarted)]
    assert (start.epochs, start.steps_per_epoch) == (3 if with_epochs else 0, 5)
    assert start.total_steps == (15 if with_epochs else 0)
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert saved == ([5, 10, 15] if save_end or not with_epochs else [5, 10])
    assert [event.reason for event in events if isinstance(event, RunDone)] == ["finished"] * with_epochs


def test_a_loop_of_ones_own_refuses_a_second_update(tmp_path):
    trainer = Trainer.setup(make_model(), optimizer=adamw(1e-2))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for batch in trainer.batches(DataLoader(make_data(), 8, seed=3)):
        trainer.backward(step(trainer.model, batch))
        with pytest.raises(TrainError, match=r"trainer\.step\(\) alone"):
            trainer.optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        break
    trainer.optimizer.step()  # outside of a batch it is the user's own
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("listed", [False, True])
def test_no_micro_batch_has_a_single_row_for_statistics(listed):
    """BatchNorm cannot train on one row, so 11 rows in micro-batches of 5 are 5 and 6."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sizes = []

    def loss(model, batch):
        sizes.append(len(batch["x"]))
        return model(batch["x"]).square().mean()

    rows = {"x": torch.randn(11, 3)}
    built = Trainer.builder(lambda device: model, adamw(1e-2), loss).num_epochs(1).set(micro_batch_size=5)
    (built.dataset([rows]) if listed else built.dataset(TensorRows(rows)).batch_size(11)).run()
    assert sizes == [5, 6]
