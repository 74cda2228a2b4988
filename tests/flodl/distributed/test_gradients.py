"""Gradients that leave during the backward pass: the same sums, whatever a rank has or has not made."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from flodl.distributed import RankError, Ranks, gradients, launch
from flodl.distributed.gradients import GradientSum
from flodl.errors import TrainError

torch.set_num_threads(1)


class Branches(nn.Module):
    """Two branches of which a call uses one, and a third that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right, self.idle = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, branch):
        return getattr(self, branch)(torch.tanh(self.stem(x))).sum()


def found_gradients(model):
    return {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in model.named_parameters()}


def one_step(ranks, plan, early):
    """Return gradients after a step in which each rank does its branches, and what had left before the end."""
    gradients.GRADIENT_BUCKET = 20  # each layer travels alone
    model = Branches()
    total = GradientSum(ranks, model)
    total.early = early
    out = []
    for step in plan:
        model.zero_grad()
        branches = step[ranks.rank]
        for number, branch in enumerate(branches, start=1):
            x = torch.full((2, 4), 1.0 + ranks.rank + number)
            last = number == len(branches)
            with total.during_backward(send=True) if last else nullcontext():
                model(x, branch).backward()
        gone = len(total._sent) if total._begun else 0
        counts = [sum(column) for column in zip(*total([float(len(branches)), 1.0]), strict=True)]
        out.append((found_gradients(model), counts, gone))
    return out


PLANS = {
    "all alike": [(["left"], ["left"])],
    "each its own branch": [(["left"], ["right"])],
    "one has nothing": [(["left", "right"], [])],
    "accumulated, the last one lacks a branch": [(["right", "left"], ["left"]), (["left"], ["right", "left"])],
}


@pytest.mark.parametrize("name", PLANS)
def test_sums_are_the_same_sent_early_or_late(name):
    early = launch(one_step, (PLANS[name], True), ranks=2, start="fork").wait()
    late = launch(one_step, (PLANS[name], False), ranks=2, start="fork").wait()
    for step, plan in enumerate(PLANS[name]):
        expected = Branches()
        for rank, branches in enumerate(plan):
            for number, branch in enumerate(branches, start=1):
                expected(torch.full((2, 4), 1.0 + rank + number), branch).backward()
        for rank in (0, 1):
            for found in (early, late):
                sums, counts, _ = found[rank][step]
                assert counts == [sum(map(len, plan)), 2.0]
                for key, value in found_gradients(expected).items():
                    assert (sums[key] is None) == (value is None), key
                    assert value is None or sums[key] == pytest.approx(value, rel=1e-6)
            for key, value in early[rank][step][0].items():
                assert value == late[rank][step][0][key]  # to the bit
            assert late[rank][step][2] == 0


def used_in_order(ranks):
    gradients.GRADIENT_BUCKET = 20
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    total = GradientSum(ranks, model)
    left = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: left.append(len(total._sent)))
    with total.during_backward(send=True):
        model(torch.ones(2, 4)).sum().backward()
    gone = len(total._sent)
    total([0.0])
    model[1].requires_grad_(False)  # hooks follow what is trained
    model.zero_grad()
    with total.during_backward(send=True):
        model(torch.ones(2, 4)).sum().backward()
    again = len(total._sent)
    total([0.0])
    return left[0], gone, len(total._buckets), again, model[1].weight.grad is None


def test_buckets_leave_before_the_pass_is_over():
    for left, gone, buckets, again, frozen in launch(used_in_order, ranks=2, start="fork").wait():
        assert left >= 2  # the last layers are gone when the first one's gradient comes
        assert gone == 3
        assert (buckets, again) == (2, 2)
        assert frozen


def backward_twice(ranks):
    model = nn.Linear(4, 1)
    total = GradientSum(ranks, model)
    with total.during_backward(send=True):
        model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    try:
        total([0.0])
    except TrainError as error:
        return error.tensors


def test_a_gradient_that_grows_after_it_was_sent_is_refused():
    assert launch(backward_twice, ranks=2, start="fork").wait() == [["weight", "bias"]] * 2


def broken_then_whole(ranks):
    model = nn.Linear(4, 1)
    total = GradientSum(ranks, model)
    try:
        with total.during_backward(send=True):
            raise ValueError("no memory")
    except ValueError:
        pass
    model(torch.full((2, 4), 1.0 + ranks.rank)).sum().backward()  # nothing leaves here
    gone = len(total._sent)
    total([0.0])
    return gone, model.weight.grad.tolist()


def test_a_pass_that_failed_leaves_nothing_behind():
    assert launch(broken_then_whole, ranks=2, start="fork").wait() == [(0, [[6.0] * 4])] * 2


def dies_in_backward(ranks):
    model = nn.Linear(4, 1)
    total = GradientSum(ranks, model)
    if ranks.rank == 1:
        raise ValueError("rank 1 is gone")
    with total.during_backward(send=True):
        model(torch.ones(2, 4)).sum().backward()
    total([0.0])


def test_a_rank_lost_meanwhile_is_named():
    with pytest.raises(RankError, match="rank 1 is gone"):
        launch(dies_in_backward, ranks=2, start="fork", timeout_s=20).wait()


class Gaps(nn.Module):
    """Two parameters that are parts of rows, with what lies between them in memory."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.arange(60.0).view(6, 10)[:, :4]) for _ in range(2))


def with_gaps(ranks):
    model = Gaps()
    total = GradientSum(ranks, model)
    (model.one.sum() + 2 * model.two.square().sum()).backward()
    total([0.0])
    return [torch.equal(model.one.grad, torch.full((6, 4), 2.0)), torch.equal(model.two.grad, 8 * model.two)]


def test_gradients_of_parameters_with_gaps_in_memory_do_not_overlap():
    assert launch(with_gaps, ranks=2, start="fork").wait() == [[True, True]] * 2


class Tall(nn.Module):
    """An embedding, whose gradient comes last, under layers, as an encoder has them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(200, 8), nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 100) for _ in range(8))


def test_captured_sums_are_few_and_what_is_full_last_is_small(monkeypatch):
    monkeypatch.setattr(gradients, "CAPTURED_BUCKET", 2000)
    monkeypatch.setattr(gradients, "GRADIENT_BUCKET", 500)
    model = Tall()
    total = GradientSum(Ranks(), model)
    total.prepare_capture()
    assert total.refresh_buckets()
    sizes = [sum(total.parameters[place].numel() for place in places) for places in total._buckets]
    assert sizes == [1900, 1800, 1800, 1700, 80, 1600]  # at last the places alone, and then the words
    assert sorted(place for places in total._buckets for place in places) == list(range(len(total.parameters)))
