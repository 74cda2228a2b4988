"""Losses of lists of candidates: the numbers of sentence-transformers, and of a loop over pairs and places."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf.training.losses import make_loss
from flodl_hf.training.losses.lists import LIST_LOSSES, SCHEMES

COUNTS = (4, 2, 5)
LABELS = [[2.0, 0.0, 1.0, 0.0], [0.0, 1.0], [0.0, 3.0, 1.0, 1.0, 0.0]]
CASES = [
    *((name, {}) for name in LIST_LOSSES),
    *(("LambdaLoss", {"weighting_scheme": scheme, "k": 2}) for scheme in SCHEMES),
    ("LambdaLoss", {"reduction_log": "natural", "sigma": 0.7}),
    ("ListMLELoss", {"respect_input_order": False}),
    ("PListMLELoss", {"respect_input_order": False}),
]


def scores() -> Tensor:
    drawn = torch.randn(sum(COUNTS), generator=torch.Generator().manual_seed(3))
    return drawn.requires_grad_()


def table(flat: Tensor, fill: float) -> Tensor:
    rows = [torch.nn.functional.pad(part, (0, 6 - len(part)), value=fill) for part in flat.split(COUNTS)]
    return torch.stack(rows)


def ours(name: str, settings: dict[str, Any], flat: Tensor) -> Tensor:
    labels = table(torch.tensor([label for row in LABELS for label in row]), 0.0)
    present = torch.arange(6) < torch.tensor(COUNTS)[:, None]
    total, count = make_loss(name, settings, LIST_LOSSES)(table(flat, 7.0), labels, present)
    return total / count


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_as_sentence_transformers(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    mine, other = scores(), scores()

    class Model(torch.nn.Module):
        """Gives the scores of pairs, which are the numbers of candidates."""

        num_labels, device = 1, torch.device("cpu")

        def preprocess(self, pairs: list[Any], **_: Any) -> dict[str, Any]:
            return {"at": torch.tensor([int(document) for _, document in pairs])}

        def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": other[given["at"]]}

    given = dict(settings)
    if "weighting_scheme" in given:
        given["weighting_scheme"] = getattr(theirs, given["weighting_scheme"])()
    numbers = iter(range(sum(COUNTS)))
    documents = [[str(next(numbers)) for _ in range(count)] for count in COUNTS]
    if name == "MarginMSELoss":
        monkeypatch.setattr("sentence_transformers.cross_encoder.losses.margin_mse.CrossEncoder", Model)
        parts = []
        for queries, labels in zip(documents, LABELS, strict=True):  # theirs takes as many of each question
            loss = theirs.MarginMSELoss(Model())([["q"], *[[q] for q in queries]], torch.tensor([labels]))
            parts.append(loss * (len(queries) - 1))
        wanted = torch.stack(parts).sum() / sum(count - 1 for count in COUNTS)
    else:
        wanted = getattr(theirs, name)(Model(), **given)([["q"] * 3, documents], [torch.tensor(row) for row in LABELS])
    found = ours(name, settings, mine)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
    (a,), (b,) = torch.autograd.grad(found, [mine]), torch.autograd.grad(wanted, [other])
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_losses_by_hand() -> None:
    parts = scores().detach().split(COUNTS)

    def mean(of: Any) -> float:
        return sum(of(s.double(), torch.tensor(y)) for s, y in zip(parts, LABELS, strict=True)) / len(COUNTS)

    def listnet(s: Tensor, y: Tensor) -> float:
        return -(y.double().softmax(0) * s.log_softmax(0)).sum().item()

    def listmle(s: Tensor, y: Tensor) -> float:
        return -sum((s[i] - s[i:].logsumexp(0)).item() for i in range(len(s)))

    pairs = [
        math.log2(1 + math.exp(float(s[j] - s[i])))
        for s, y in zip(parts, LABELS, strict=True)
        for i in range(len(s))
        for j in range(len(s))
        if y[i] > y[j]
    ]
    flat = scores()
    assert ours("ListNet", {}, flat).item() == pytest.approx(mean(listnet), rel=1e-5)
    assert ours("ListMLE", {}, flat).item() == pytest.approx(mean(listmle), rel=1e-5)
    assert ours("RankNet", {}, flat).item() == pytest.approx(sum(pairs) / len(pairs), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"weighting_scheme": "NDCG"}, "NDCGLoss2PPScheme"), ({"k": 0}, "above 0"), ({"reduction_log": "ten"}, "natural")],
    ids=str,
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_loss("Lambda", settings, LIST_LOSSES)
