"""Focal losses: gamma 0, the formula of the paper, and gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from flodl.errors import TrainError
from flodl.losses import focal_loss


def made(shape=(7, 4), labels=4):
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(*shape, generator=g, dtype=torch.float64) * 3
    return logits, torch.randint(0, labels, (shape[0], *shape[2:]), generator=g)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_without_focus_it_is_the_cross_entropy(reduction, weighted):
    logits, labels = made()
    labels[2] = -100
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0], dtype=torch.float64) if weighted else None
    expected = cross_entropy(logits, labels, weight, reduction=reduction)
    assert torch.equal(focal_loss(logits, labels, gamma=0.0, weight=weight, reduction=reduction), expected)
    near = focal_loss(logits, labels, gamma=1e-12, weight=weight, reduction=reduction)
    torch.testing.assert_close(near, expected)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("shape", [(7, 4), (3, 4, 5)])
def test_it_follows_the_formula_of_the_paper(gamma, shape):
    logits, labels = made(shape)
    weight = torch.tensor([0.25, 1.0, 2.0, 0.5], dtype=torch.float64)
    p = logits.softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
    by_hand = -((1 - p) ** gamma) * p.log() * weight[labels]
    torch.testing.assert_close(focal_loss(logits, labels, gamma=gamma, weight=weight, reduction="none"), by_hand)
    mean = focal_loss(logits, labels, gamma=gamma, weight=weight)
    torch.testing.assert_close(mean, by_hand.sum() / weight[labels].sum())


def test_labels_that_count_nothing_count_nothing():
    logits, labels = made()
    some = labels.clone()
    some[[1, 4]] = -100
    keep = some != -100
    torch.testing.assert_close(focal_loss(logits, some), focal_loss(logits[keep], labels[keep]))
    assert focal_loss(logits, some, reduction="none")[1] == 0


def test_gradients_are_those_of_the_formula_and_finite_where_it_is_certain():
    logits, labels = made()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: focal_loss(x, labels), (logits,))
    sure = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0]], requires_grad=True)
    loss = focal_loss(sure, torch.tensor([0, 0]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(sure.grad).all()


@pytest.mark.parametrize("options", [{"reduction": "average"}, {"gamma": -1.0}, {"gamma": float("nan")}])
def test_what_cannot_be_is_refused(options):
    logits, labels = made()
    with pytest.raises(TrainError, match="focal loss: found"):
        focal_loss(logits, labels, **options)
