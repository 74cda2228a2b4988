"""The same samples give the same step, however they are cut into micro-batches, accumulation and ranks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import DataLoader, TensorRows
from flodl.distributed import Ranks, launch
from flodl.train import Loss, Precision, Step
from flodl.train.feed import RowFeed, Share

torch.set_num_threads(1)
WORDS, LENGTH, CLASSES = 11, 5, 3


class Toy(nn.Module):
    """An embedding, a mixing layer and a head, as small as a model of tokens can be."""

    def __init__(self, classes):
        super().__init__()
        self.word = nn.Embedding(WORDS, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.word(ids))))


def sequence(model, batch):
    return Loss(cross_entropy(model(batch["ids"]).mean(1), batch["label"], reduction="sum"), len(batch["label"]))


def token(model, batch):
    logits, labels = model(batch["ids"]).flatten(0, 1), batch["tokens"].flatten()
    return Loss(cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum())


def span(model, batch):
    start, end = model(batch["ids"]).unbind(-1)
    total = cross_entropy(start, batch["start"], reduction="sum") + cross_entropy(end, batch["end"], reduction="sum")
    return total / 2, len(batch["start"])


def masked(model, batch):
    logits, labels = model(batch["ids"]).flatten(0, 1), batch["masked"].flatten()
    return Loss(cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), int((labels != -100).sum()))


def plain_mean(model, batch):
    return cross_entropy(model(batch["ids"]).mean(1), batch["label"])


def output_with_loss(model, batch):
    return SimpleNamespace(loss=plain_mean(model, batch))


def mapping_with_loss(model, batch):
    return {"loss": plain_mean(model, batch), "logits": None}


HEADS = {
    "sequence": (sequence, CLASSES),
    "token": (token, CLASSES),
    "span": (span, 2),
    "masked": (masked, WORDS),
    "plain mean": (plain_mean, CLASSES),
    "output with loss": (output_with_loss, CLASSES),
    "mapping with loss": (mapping_with_loss, CLASSES),
}


def make_data(seed, rows):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=g)
    tokens = torch.randint(0, CLASSES, (rows, LENGTH), generator=g)
    ignored = torch.rand(rows, LENGTH, generator=g) < torch.rand(rows, 1, generator=g)
    hidden = torch.rand(rows, LENGTH, generator=g) < 0.15
    return {
        "ids": ids,
        "label": torch.randint(0, CLASSES, (rows,), generator=g),
        "tokens": tokens.masked_fill(ignored, -100),
        "start": torch.randint(0, LENGTH, (rows,), generator=g),
        "end": torch.randint(0, LENGTH, (rows,), generator=g),
        "masked": torch.where(hidden, ids, -100),
    }


def make_model(head, seed, dtype):
    torch.manual_seed(seed)
    return Toy(HEADS[head][1]).to(dtype)


def train(
    ranks, *, head, seed, rows, batch, accumulate, micro, ratios, dtype, clip, epochs=1, sum_of_means=False, lr=0.5
):
    """Return the parameters after one epoch, and the losses of its steps."""
    model = make_model(head, seed, dtype)
    step = Step(
        model,
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        HEADS[head][0],
        ranks=ranks,
        precision=Precision("fp32", ranks.device),
        max_grad_norm=clip,
        sum_of_means=sum_of_means,
    )
    loader = DataLoader(TensorRows(make_data(seed, rows)), batch, seed=seed)
    feed = RowFeed(loader, loader.device, accumulate=accumulate, micro_batch_size=micro)
    share = Share(ranks.rank, tuple(ratios)) if ranks.world > 1 else None
    losses = [step.run(batches).loss for e in range(epochs) for _, batches in feed.work(e, range(feed.turns(e)), share)]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


def plain(*, head, seed, rows, batch, accumulate, dtype, clip, lr=0.5, **_):
    """The same by hand: one whole batch, one mean loss."""
    model = make_model(head, seed, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    data, order = make_data(seed, rows), DataLoader(TensorRows(make_data(seed, rows)), batch, seed=seed).plan(0).order
    losses = []
    for first in range(0, rows, batch * accumulate):
        chosen = torch.as_tensor(order[first : first + batch * accumulate])
        given = HEADS[head][0](model, {name: part[chosen] for name, part in data.items()})
        if isinstance(given, tuple):
            given = Loss(*given)
        given = given["loss"] if isinstance(given, dict) else given
        loss = given.as_mean() if isinstance(given, Loss) else getattr(given, "loss", given)
        if isinstance(given, Loss) and int(given.count) == 0:
            losses.append(0.0)
            continue
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


def serve(ranks):
    """Run cases until told to stop, so that many cases pay for one start."""
    while True:
        ranks.pipe.send(("next", None))
        case = ranks.pipe.recv()
        if case == "stop":
            return
        case["dtype"] = getattr(torch, case["dtype"])
        numbers, losses = train(ranks, **case)
        marks = ranks.table([float(numbers.double().sum()), float(numbers.double().square().sum())])
        ranks.pipe.send(("answer", (numbers.tolist(), losses, all(mark == marks[0] for mark in marks))))


class Pool:
    """Ranks that wait for cases."""

    def __init__(self, world):
        self.world, self.waiting, self.answers = world, set(), {}
        # A process that is forked beside threads, of which other tests leave some, may inherit a lock that one of them
        # holds and stand still where it meets the others; the ranks are started anew then.
        self.crew = launch(serve, ranks=world, start="fork", on_message=self.hear, max_restarts=2)

    def hear(self, rank, message):
        if message[0] == "next":
            self.waiting.add(rank)
        elif message[0] == "failed":
            self.waiting = set()
        else:
            self.answers[rank] = message[1]

    def look(self):
        assert not self.crew.poll(0.2), "the ranks are gone; the first failure says why"

    def run(self, **case):
        while len(self.waiting) < self.world:
            self.look()
        self.waiting, self.answers = set(), {}
        before = len(self.crew.failures)
        for rank in range(self.world):
            self.crew.send(rank, case)
        while len(self.answers) < self.world:
            self.look()
            assert len(self.crew.failures) == before, self.crew.failures[before:]
        numbers, losses, equal = self.answers[0]
        assert equal, "ranks ended with different parameters"
        return torch.tensor(numbers, dtype=torch.float64), losses

    def stop(self):
        while len(self.waiting) < self.world and self.crew.alive:
            self.crew.poll(0.2)
        for rank in range(self.world):
            self.crew.send(rank, "stop")
        self.crew.wait()


@pytest.fixture(scope="module")
def pools():
    made = {world: Pool(world) for world in (2, 3)}
    yield made
    for pool in made.values():
        pool.stop()


def run(pools, world, dtype, **case):
    if world == 1:
        numbers, losses = train(Ranks(), dtype=dtype, **case)
        return numbers.double(), losses
    return pools[world].run(dtype=str(dtype).removeprefix("torch."), **case)


def check(pools, world, dtype, rtol, **case):
    numbers, losses = run(pools, world, dtype, **case)
    expected, expected_losses = plain(dtype=dtype, **case)
    torch.testing.assert_close(numbers, expected.double(), rtol=rtol, atol=rtol)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=max(rtol, 1e-6), atol=1e-6)


cases = st.fixed_dictionaries(
    {
        "head": st.sampled_from(sorted(HEADS)),
        "seed": st.integers(0, 999),
        "rows": st.integers(2, 40),
        "batch": st.integers(2, 16),
        "accumulate": st.integers(1, 4),
        "micro": st.one_of(st.none(), st.integers(1, 5)),
        "clip": st.sampled_from([None, 0.1]),
    }
)
shares = st.lists(st.sampled_from([1.0, 2.5, 0.3]), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=st.integers(1, 3), case=cases, ratios=shares)
def test_any_split_is_the_whole_batch_in_float64(pools, world, case, ratios):
    check(pools, world, torch.float64, 1e-12, ratios=ratios[:world], **case)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=st.integers(1, 3), case=cases, ratios=shares)
def test_any_split_is_the_whole_batch_in_float32_to_rounding(pools, world, case, ratios):
    check(pools, world, torch.float32, 2e-5, ratios=ratios[:world], **case)


@pytest.mark.parametrize("head", sorted(HEADS))
def test_one_micro_batch_on_one_rank_is_a_plain_loop_to_the_bit(head):
    case = {"head": head, "seed": 5, "rows": 37, "batch": 7, "accumulate": 1, "clip": 0.1}
    numbers, losses = train(Ranks(), micro=None, ratios=(1.0,), dtype=torch.float32, **case)
    expected, expected_losses = plain(dtype=torch.float32, **case)
    assert torch.equal(numbers, expected)
    assert losses == pytest.approx(expected_losses, rel=1e-6)


@pytest.mark.parametrize(("world", "parts"), [(1, 4), (2, 1), (2, 2), (3, 2)])
def test_a_sum_of_means_inflates_by_accumulation_times_processes(pools, world, parts):
    case = {
        "head": "sequence",
        "seed": 3,
        "rows": 12,
        "batch": 12,
        "accumulate": 1,
        "clip": None,
        "ratios": [1.0] * world,
    }
    start, _ = train(Ranks(), **{**case, "ratios": [1.0]}, micro=None, dtype=torch.float64, lr=0.0)
    once, _ = train(Ranks(), **{**case, "ratios": [1.0]}, micro=None, dtype=torch.float64, lr=0.1)
    inflated, _ = run(pools, world, torch.float64, **case, micro=12 // world // parts, lr=0.1, sum_of_means=True)
    torch.testing.assert_close(inflated - start, (once - start) * world * parts, rtol=1e-9, atol=1e-12)


def test_a_step_in_which_nothing_counts_changes_nothing():
    model = make_model("token", 0, torch.float32)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    step = Step(model, optimizer, token, ranks=Ranks(), precision=Precision("fp32", torch.device("cpu")))
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    for batches in ([{"ids": ids, "tokens": torch.full((2, LENGTH), -100)}], []):
        result = step.run(batches)
        assert not result.applied
        assert "counted" in result.reason
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_sum_of_many_items_does_not_overflow_float16():
    torch.manual_seed(0)
    data = {"x": torch.randn(4096, 6), "y": torch.randn(4096, 1)}
    moved = []
    for name in ("fp32", "fp16"):
        torch.manual_seed(1)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = Step(model, optimizer, squares, precision=Precision(name, torch.device("cpu")))
        result = step(*({key: part[first : first + 2048] for key, part in data.items()} for first in (0, 2048)))
        assert result.applied
        moved.append(model.weight.detach().clone())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-2, atol=1e-3)


def squares(model, batch):
    return Loss((model(batch["x"]).float() - batch["y"]).square().sum(), len(batch["y"]))


@pytest.mark.parametrize("weight", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_sum_over_weights_below_one_is_divided_by_them(weight, kind):
    value = torch.tensor(2.0, requires_grad=True)
    assert Loss(value * weight, kind(weight)).as_mean().item() == 2.0
    assert Loss(value * 0, kind(0.0)).as_mean().item() == 0.0
