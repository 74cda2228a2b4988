"""What is watched inside of a model reaches the events of a run: of steps and of epochs, however steps are computed."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from test_capture import Repeats
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from flodl import FlowBuilder
from flodl.data import DataLoader, TensorRows
from flodl.errors import GraphError, GraphPathError
from flodl.monitor import collect, log
from flodl.train import Callback, EpochMetrics, Observed, StepDone, Trainer, Warned, sgd
from flodl.train.step import route

torch.set_num_threads(1)
ROWS = 22  # 5 batches of 4, and one of 2


def data():
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(ROWS, 3, generator=g), "y": torch.randn(ROWS, 1, generator=g)}


def make_model():
    """A tree of two graphs; tags here and there, a group, and a tag that holds one number."""
    torch.manual_seed(3)
    encoder = FlowBuilder(nn.Linear(3, 4)).through(nn.Tanh()).tag("features").label("encoder").build()
    return (
        FlowBuilder(encoder)
        .split([nn.Linear(4, 1), nn.Linear(4, 1)])
        .tag_group("head")
        .merge("mean")
        .tag("out")
        .build()
    )


def step(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def run(model, train_step=step, **settings):
    return (
        Trainer.builder(model, sgd(0.05), train_step)
        .dataset(data())
        .set(**{"batch_size": 4, "num_epochs": 2, "progress": False, **settings})
    )


def watched(builder):
    """Return the events of a run about what was watched, in order, and its handle."""
    seen = []
    handle = builder.subscribe(seen.append, Observed, StepDone, EpochMetrics, Warned).run()
    return seen, handle


def values(seen, scope):
    return [event.values for event in seen if isinstance(event, Observed) and event.scope == scope]


def by_hand(model, epochs=2):
    """Return what `WATCH` comes to, at each step and over each epoch, by a plain loop with hooks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = {}
    encoder = model.subgraph("encoder")
    encoder.register_forward_hook(lambda module, args, out: kept.update(features=out.detach()))
    for name in ("head_0", "head_1"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: kept.update({name: out.detach()})
        )
    steps, ends = [], []
    for epoch in range(epochs):
        sums = {}
        for rows in DataLoader(TensorRows(data()), 4, seed=42).plan(epoch):
            chosen = torch.as_tensor(rows)
            step(model, {name: column[chosen] for name, column in data().items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs = {
                "encoder.features": (kept["features"].sum(), kept["features"].numel()),
                "encoder.features:norm": (kept["features"].norm(), 1),
                "head_0": (kept["head_0"].sum(), kept["head_0"].numel()),
                "head_1:max": (kept["head_1"].max(), 1),
            }
            steps.append({name: float(total) / weight for name, (total, weight) in pairs.items()})
            for name, (total, weight) in pairs.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(total), before[1] + weight
        ends.append({name: total / weight for name, (total, weight) in sums.items()})
    return steps, ends


WATCH = ("encoder.features", "encoder.features:norm", "head_0", "head_1:max")


def close(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-5)


def test_values_of_the_tree_by_dotted_names_as_a_loop_by_hand_finds_them():
    seen, handle = watched(run(make_model(), watch=WATCH))
    steps, epochs = by_hand(make_model())
    close(values(seen, "step"), steps)
    close(values(seen, "epoch"), epochs)
    kinds = [type(event) for event in seen[:2]]
    assert kinds == [StepDone, Observed]  # a step's values come after the step
    assert [(e.step, e.epoch) for e in seen if isinstance(e, Observed) and e.scope == "epoch"] == [(6, 0), (12, 1)]
    assert [type(seen[i + 1]) for i, e in enumerate(seen) if isinstance(e, EpochMetrics)] == [Observed, Observed]
    graph = handle.model
    assert dict(graph.latest_metrics()) == pytest.approx(epochs[-1])
    assert len(graph.trend_at("encoder.features")) == 2
    assert graph.observe.trend("head_1:max").values() == pytest.approx([e["head_1:max"] for e in epochs])
    assert not graph.watched  # the run watched, and watches no more
    assert not graph.subgraph("encoder").watched


def test_what_graphs_watch_already_is_collected_and_groups_are_opened():
    model = make_model()
    model.watch("head")
    model.subgraph("encoder").observe.watch("features", reduce="norm")
    seen, handle = watched(run(model))
    steps = by_hand(make_model())[0]
    assert values(seen, "step")[0].keys() == {"encoder.features:norm", "head_0", "head_1"}
    for name in ("encoder.features:norm", "head_0"):
        assert [v[name] for v in values(seen, "step")] == pytest.approx([s[name] for s in steps], rel=1e-5)
    assert [name for name, _ in handle.model.latest_metrics()] == ["head_0", "head_1", "encoder.features:norm"]
    assert (model.step_count(), model.epoch_count()) == (12, 2)
    assert set(model.watched) == {"head_0", "head_1"}


def test_a_group_may_be_watched_by_its_name():
    seen, _ = watched(run(make_model(), watch=["head:norm"], num_epochs=1))
    assert values(seen, "epoch")[0].keys() == {"head_0:norm", "head_1:norm"}


class Told(nn.Module):
    """An ordinary module that tells a value, once for each layer that it computes."""

    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.last = nn.Linear(3, 1)
        self.recompute = recompute

    def layer(self, layer, x):
        x = torch.tanh(layer(x))
        log("size", x.norm())
        return x

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.layer, layer, x, use_reentrant=False) if self.recompute else self.layer(layer, x)
        log("gate.mean", x.mean(), weight=x.numel())
        return self.last(x)


def test_ordinary_modules_tell_by_log_and_their_outputs_are_watched_by_path():
    seen, _ = watched(run(Told(), watch=["layers.0-1", "last:sum"], num_epochs=1))
    first = values(seen, "step")[0]
    assert first.keys() == {"size", "gate.mean", "layers.0", "layers.1", "last:sum"}
    rows = torch.as_tensor(DataLoader(TensorRows(data()), 4, seed=42).plan(0)[0])
    model, x = Told(), data()["x"][rows]
    a = model.layers[0](x)
    b = model.layers[1](torch.tanh(a))
    wanted = {
        "size": (torch.tanh(a).norm() + torch.tanh(b).norm()) / 2,
        "gate.mean": torch.tanh(b).mean(),
        "layers.0": a.mean(),
        "layers.1": b.mean(),
        "last:sum": model.last(torch.tanh(b)).sum(),
    }
    assert first == pytest.approx({name: v.item() for name, v in wanted.items()}, rel=1e-5)


def test_layers_that_are_computed_again_for_the_backward_pass_tell_once():
    once, _ = watched(run(Told()))
    again, _ = watched(run(Told(recompute=True)))
    own = own_loop(Told(recompute=True))
    assert values(again, "step") == values(once, "step")
    close(own, values(once, "step"))


def test_a_scalar_recorded_in_a_step_belongs_to_the_step():
    def recording(model, batch):
        loss = step(model, batch)
        model.record_scalar("loss here", loss)
        model.record_at("encoder.scale", model.parameters_at("encoder")[0].norm())
        model.observe.collect_with("head", reduce="norm")  # watches from the second step on
        return loss

    seen, handle = watched(run(make_model(), recording, num_epochs=1))
    told = values(seen, "step")
    losses = [event.loss for event in seen if isinstance(event, StepDone)]
    assert [v["loss here"] for v in told] == pytest.approx(losses)
    assert told[0].keys() == {"loss here", "encoder.scale"}
    assert told[1].keys() == {"loss here", "encoder.scale", "head_0", "head_1"}
    assert all(v["head_0"] > 0 for v in told[1:])  # the norm that was asked for, and not the mean of what is watched
    assert [name for name, _ in handle.model.latest_metrics()] == ["loss here", "head_0", "head_1", "encoder.scale"]


@pytest.mark.parametrize("log_every", [1, 4, 100])
def test_captured_steps_tell_what_ordinary_ones_do(monkeypatch, log_every):
    plain, _ = watched(run(make_model(), watch=WATCH, capture=False))
    capturer = Repeats()
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    captured, handle = watched(run(make_model(), watch=WATCH, log_every=log_every))
    assert (capturer.captured, capturer.replayed) == (2, 10)  # two shapes of batch, each run once before it is captured
    close(values(captured, "step"), values(plain, "step"))
    close(values(captured, "epoch"), values(plain, "epoch"))
    assert [e.step for e in captured if isinstance(e, Observed) and e.scope == "step"] == list(range(1, 13))
    assert handle.model.trend("head_0").values() == pytest.approx([v["head_0"] for v in values(plain, "epoch")])


class Static(Repeats):
    """A captured graph whose tensors stay where they are, as those of a CUDA graph do."""

    def capture(self, run):
        self.captured += 1
        made = run()
        return lambda: replace(made)


def test_tags_can_be_asked_for_after_a_replay(monkeypatch):
    """Each capturing writes to tensors of its own, and a graph shows those of the one that was replayed last."""
    shapes = []

    model = make_model()
    model.watch("out")
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: Static())
    trainer = run(model, num_epochs=3)

    class After(Callback):
        def on_step_end(self, trainer, result):
            shapes.append((result.samples, tuple(model.tagged("out").shape), model.tagged("out").requires_grad))

    trainer.set(callbacks=[After()]).run()
    assert all(shape == (rows, 1) and not history for rows, shape, history in shapes)
    assert {rows for rows, _, _ in shapes} == {2, 4}


def test_a_number_of_python_would_stay_what_it_was_so_such_a_step_is_not_captured(monkeypatch):
    capturer = Repeats()
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    counted = iter(range(100))

    def counting(model, batch):
        log("turn", next(counted))
        return step(model, batch)

    seen, _ = watched(run(make_model(), counting))
    assert [v["turn"] for v in values(seen, "step")] == list(range(12))
    assert capturer.captured == 0
    warned = [event.message for event in seen if isinstance(event, Warned)]
    assert len(warned) == 1
    assert "because turn is a Python number" in warned[0]


@pytest.mark.parametrize("cut", [{"micro_batch_size": 2}, {"accumulate": 2}, {"micro_batch_size": 3, "accumulate": 2}])
def test_micro_batches_add_up(cut):
    """Means are weighted by elements, so an epoch comes to the same however its steps are cut."""
    fixed = {"watch": ("encoder.features", "out"), "num_epochs": 1}
    whole, _ = watched(run(make_model(), still, **fixed))
    parts, _ = watched(run(make_model(), still, **fixed, **cut))
    close(values(parts, "epoch"), values(whole, "epoch"))


def still(model, batch):
    """A step that moves nothing, so that runs cut in other ways see the same model."""
    return 0.0 * step(model, batch)


def own_loop(model, **settings):
    trainer = Trainer.setup(model, optimizer=sgd(0.05), batch_size=4, progress=False, **settings)
    seen = []
    trainer.events.subscribe(seen.append, Observed)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(TensorRows(data())):
            step(model, batch).backward()
            trainer.step()
    return values(seen, "step")


def test_a_loop_of_ones_own_tells_the_same():
    close(own_loop(make_model(), watch=WATCH), by_hand(make_model())[0])


def test_a_loop_that_is_left_takes_in_nothing_more():
    model = Told()
    trainer = Trainer.setup(model, optimizer=sgd(0.05), batch_size=4, progress=False)
    for _ in trainer.batches(TensorRows(data())):
        break
    assert collect.current_collector() is None
    for _ in trainer.batches(TensorRows(data())):
        for _ in trainer.batches(TensorRows(data())):
            break
        break
    assert collect.current_collector() is None


class FirstRankFirst(Callback):
    """Has the other ranks wait until rank 0 has taken a step, so that they do not take all turns of the epoch."""

    def __init__(self):
        self.stepped = multiprocessing.get_context("fork").Event()

    def on_step_begin(self, trainer, batches):
        if trainer.ranks.rank and trainer.policy.name != "sync":
            self.stepped.wait()

    def on_step_end(self, trainer, result):
        self.stepped.set()


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_ranks_tell_their_own_steps_and_one_epoch(policy):
    alone, _ = watched(run(make_model(), still, watch=WATCH[:1], num_epochs=1))
    fork = run(make_model(), still, watch=WATCH[:1], num_epochs=1, callbacks=[FirstRankFirst()])
    fork.devices(2, start="fork").policy(policy)
    both, _ = watched(fork)
    close(values(both, "epoch"), values(alone, "epoch"))
    assert values(both, "step")


def test_evaluation_and_prediction_tell_nothing():
    model = Told()
    seen, _ = watched(
        run(model, num_epochs=1).eval_fn(lambda m: {"score": float(m(data()["x"]).sum())}).set(eval_every=1)
    )
    plain, _ = watched(run(Told(), num_epochs=1))
    assert values(seen, "step") == values(plain, "step")
    model(data()["x"])
    assert collect.current_collector() is None


def test_a_run_that_went_on_has_the_same_epochs(tmp_path):
    whole, _ = watched(run(make_model(), watch=WATCH))
    first, _ = watched(run(make_model(), watch=WATCH, max_steps=8).checkpoints(str(tmp_path)))
    rest, _ = watched(run(make_model(), watch=WATCH).checkpoints(str(tmp_path)))
    close([*values(first, "epoch"), *values(rest, "epoch")], values(whole, "epoch"))


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ("encoder.feature", GraphPathError, "did you mean 'features'"),
        ("head:median", GraphError, "no reduction 'median'"),
        ("layers.9", GraphPathError, "has no 'layers'"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_training(wanted, error, text):
    with pytest.raises(error, match=text):
        run(make_model(), watch=[wanted]).run()


@pytest.mark.parametrize(
    ("name", "value"),
    [("", 1.0), ("a\nb", 1.0), ("a", torch.ones(2)), ("a", "b")],
)
def test_what_cannot_be_told_is_refused(name, value):
    def telling(model, batch):
        log(name, value)
        return step(model, batch)

    with pytest.raises(GraphError):
        run(make_model(), telling).run()
    log("name", torch.ones(2))  # where nobody listens nothing is looked at


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_on_a_gpu_recorded_steps_tell_the_values_of_ordinary_ones(settings):
    """Of the same steps, to the bit; what is computed beside the backward pass is read when it is there."""

    def told(capture):
        builder = run(make_model(), num_epochs=8, batch_size=2, watch=WATCH, capture=capture, **settings)
        seen, _ = watched(builder.devices("cuda"))
        assert not [event for event in seen if isinstance(event, Warned)]
        return values(seen, "step"), values(seen, "epoch")

    recorded, ordinary = told(True), told(False)
    assert recorded == ordinary
    assert len(recorded[0]) >= 40
