"""Evaluation by several ranks: every sample once, the figures of one rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.distributed import Ranks, launch
from flodl.distributed.shares import deal
from flodl.errors import TrainError
from flodl.metrics import (
    Accuracy,
    Classification,
    MultiLabel,
    Pearson,
    Spearman,
    SquaredError,
    merged,
)
from flodl.train import EvalDone, Trainer, sgd

torch.set_num_threads(1)
ROWS = 53


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.floats(0.1, 10), max_size=60).map(lambda values: sorted(values, reverse=True)),
    speeds=st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda values: max(values) > 0.1),
)
def test_every_piece_is_dealt_once_and_ranks_end_together(costs, speeds):
    owners = deal(costs, speeds)
    assert len(owners) == len(costs)
    assert all(speeds[owner] > 0 for owner in owners)
    times = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) / speed
        for rank, speed in enumerate(speeds)
        if speed > 0
    ]
    # no rank ends later than if the last piece had waited until all others were done together
    best = sum(costs) / sum(speeds)
    assert max(times) <= best + max(costs, default=0.0) * len(speeds) / max(speeds) + 1e-6


def test_equal_pieces_and_speeds_give_turns():
    assert deal([1.0] * 5, (1.0, 1.0)) == [0, 1, 0, 1, 0]
    assert deal([1.0] * 7, (2.5, 1.0)).count(0) == 5
    with pytest.raises(TrainError):
        deal([1.0], (0.0, 0.0))


def judge(model, batch):
    scores = model(batch["x"])
    marks = batch["mark"].double()
    return {
        "loss": (cross_entropy(scores, batch["y"], reduction="sum"), len(batch["y"])),
        "right": ((scores.argmax(1) == batch["y"]).sum(), len(batch["y"])),
        "marks": (marks.sum(), 1),
        "squares": (marks.square().sum(), 1),
    }


def figures(ranks, data, *, speeds=None, **evaluation):
    """Return the figures of an untrained model that the ranks evaluate with these speeds."""
    found = []
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.9))
    shares = {} if speeds is None else {"shares": speeds}
    run = Trainer.builder(model, sgd(0.1), judge).dataset(data).set(batch_size=4, progress=False, **shares)
    if "eval_fn" in evaluation:
        run.eval_fn(evaluation["eval_fn"])
    else:
        run.evaluate(judge, data)
    trainer = run.trainer(ranks).prepare(ranks)
    trainer.events.subscribe(lambda event: found.append(dict(event.metrics)), EvalDone)
    trainer.evaluator.run()
    return found[0]


def evaluate(ranks, speeds):
    g = torch.Generator().manual_seed(3)
    data = TensorRows(
        {
            "x": torch.randn(ROWS, 6, generator=g),
            "y": torch.randint(0, 3, (ROWS,), generator=g),
            "mark": torch.randint(0, 1 << 20, (ROWS,), generator=g),
        }
    )
    torch.manual_seed(0)
    return figures(ranks, data, speeds=speeds)


@pytest.mark.parametrize("speeds", [None, (1.0, 1.0), (2.5, 1.0), (1.0, 0.0)])
def test_figures_of_two_ranks_are_those_of_one(speeds):
    alone = evaluate(Ranks(), None)
    first, second = launch(evaluate, (speeds,), ranks=2, start="fork").wait()
    assert first == second
    for name, value in alone.items():
        assert first[name] == pytest.approx(value, rel=1e-14)


class OnRanks:
    def __call__(self, model):
        raise AssertionError("called on one rank")

    def on_ranks(self, model, ranks, speeds):
        return {"ranks": float(len(ranks.gather(ranks.rank))), "first": speeds[0]}


def with_function(ranks, call):
    data = TensorRows({"x": torch.zeros(8, 6), "y": torch.zeros(8, dtype=torch.long)})
    return figures(ranks, data, speeds=(3.0, 1.0), eval_fn=call)


def test_a_function_that_can_is_called_on_all_ranks_and_others_on_the_first():
    assert launch(with_function, (OnRanks(),), ranks=2, start="fork").wait() == [{"ranks": 2.0, "first": 3.0}] * 2
    seen = launch(with_function, (lambda model: {"one": 1},), ranks=2, start="fork").wait()
    assert seen == [{"one": 1.0}] * 2


# ---- metrics in parts --------------------------------------------------------------------------------


def _tensor(*shape, kind="float"):
    g = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=g) if kind == "float" else torch.randint(0, 3, shape, generator=g)


SCORES, CLASSES, NUMBERS = _tensor(40, 3), _tensor(40, kind="whole"), _tensor(40)
FEEDS = {
    "accuracy": (Accuracy, SCORES, CLASSES),
    "classification": (lambda: Classification(3), SCORES, CLASSES),
    "multi-label": (lambda: MultiLabel(3), SCORES, (SCORES.flip(0) > 0).long()),
    "squares": (SquaredError, NUMBERS, NUMBERS.flip(0) + 3),
    "pearson": (Pearson, NUMBERS, NUMBERS.flip(0) + NUMBERS),
    "spearman": (Spearman, NUMBERS, NUMBERS.flip(0) + NUMBERS),
}


@pytest.mark.parametrize("name", FEEDS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_metric_merged_from_ranks_is_that_of_one_rank(name, world):
    make, said, true = FEEDS[name]
    whole = make()
    whole.update(said, true)
    states = []
    for rank in range(world):
        part = make()
        if rank:  # a rank may have seen nothing
            part.update(said[rank - 1 :: world - 1], true[rank - 1 :: world - 1])
        states.append(part.state_dict())
    figures = merged(make(), states).compute()
    for key, value in whole.compute().items():
        assert figures[key] == pytest.approx(value, rel=1e-12), key
