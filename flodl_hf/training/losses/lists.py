"""Losses of rankers that see all candidates of a question together: names and numbers of sentence-transformers.

LambdaLoss (Wang et al. 2018), ListNet (Cao et al. 2007), ListMLE (Xia et al. 2008) and its position-aware form (Lan et
al. 2014), RankNet (Burges et al. 2005), and margins of a teacher. Each returns a sum and its divisor, so that a
step is the same however its questions are cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.training.losses.pairs import CheckedSettings

ABSENT = -1e16
"""Score of a missing candidate."""
SCHEMES = ("NoWeightingScheme", "NDCGLoss1Scheme", "NDCGLoss2Scheme", "LambdaRankScheme", "NDCGLoss2PPScheme")


@dataclass(frozen=True)
class LambdaLoss(CheckedSettings):
    """Pairwise ranking loss: pairs are weighted by their effect on nDCG.

    Attributes:
        weighting_scheme: how: NDCGLoss2PPScheme, NDCGLoss2Scheme, NDCGLoss1Scheme, LambdaRankScheme, NoWeightingScheme.
        k: pairs of which neither is among the first so many do not count; None counts all.
        sigma: what differences of scores are multiplied by.
        eps: the least nDCG that gains are divided by.
        reduction_log: the base of the logarithm: "binary" or "natural".
        mu: NDCGLoss2PPScheme: weight of NDCGLoss2 relative to LambdaRank.
    """

    weighting_scheme: str = "NDCGLoss2PPScheme"
    k: int | None = None
    sigma: float = 1.0
    eps: float = 1e-10
    reduction_log: str = "binary"
    mu: float = 10.0

    choices: ClassVar[Mapping[str, Collection[Any]]] = {
        "weighting_scheme": SCHEMES, "reduction_log": ("binary", "natural"),
    }  # fmt: skip
    positive = ("k",)

    def __call__(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over pairs and their number."""
        scheme, most = self.weighting_scheme, scores.shape[1]
        ordered, order = scores.masked_fill(~present, ABSENT).sort(descending=True, dim=1)
        worth = labels.masked_fill(~present, -torch.inf)
        found = worth.gather(1, order)
        ahead = found[:, :, None] - found[:, None]
        counted = ahead.isfinite() if scheme == "NDCGLoss1Scheme" else ahead.isfinite() & (ahead > 0)
        first = torch.arange(most, device=scores.device) < (self.k or most)
        counted = counted & (first[:, None] | first[None])
        discount = torch.log2(1.0 + torch.arange(1, most + 1, device=scores.device).float())
        best = (worth.sort(descending=True, dim=1).values.clamp(min=0).exp2() - 1) / discount
        gain = (found.clamp(min=0).exp2() - 1) / best[:, : self.k or most].sum(1, keepdim=True).clamp(min=self.eps)
        apart = (ordered[:, :, None] - ordered[:, None]).clamp(-1e8, 1e8)
        losses = self._weights(scheme, gain, discount) * F.logsigmoid(self.sigma * apart)
        if self.reduction_log == "binary":
            losses = losses / math.log(2)
        return -torch.where(counted, losses, 0.0).sum(), counted.sum()

    def _weights(self, scheme: str, gain: Tensor, discount: Tensor) -> Any:
        """Return the weight of each pair, from both positions."""
        if scheme == "NoWeightingScheme":
            return 1.0
        if scheme == "NDCGLoss1Scheme":
            return (gain / discount)[:, :, None]
        between = (gain[:, :, None] - gain[:, None]).abs()
        shares = 1.0 / discount
        by_rank = (shares[:, None] - shares[None]).abs() * between
        if scheme == "LambdaRankScheme":
            return by_rank
        places = torch.arange(len(discount), device=gain.device)
        far = (places[:, None] - places[None]).abs()
        # the distance n is between the discounts of the positions n and n + 1, counted from 1
        by_distance = torch.where(far > 0, (shares[far - 1] - shares[far]).abs(), 0.0) * between
        return by_distance if scheme == "NDCGLoss2Scheme" else self.mu * by_distance + by_rank


@dataclass(frozen=True)
class RankNetLoss(LambdaLoss):
    """`LambdaLoss` with equal weights of pairs."""

    weighting_scheme: str = "NoWeightingScheme"


@dataclass(frozen=True)
class ListNetLoss(CheckedSettings):
    """Cross-entropy between the softmax of scores and the softmax of labels."""

    def __call__(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over questions and their number."""
        mine = F.log_softmax(scores.masked_fill(~present, ABSENT), 1)
        goal = F.softmax(labels.masked_fill(~present, -torch.inf), 1)
        return -torch.where(present, goal * mine, 0.0).sum(), torch.tensor(len(scores), device=scores.device)


@dataclass(frozen=True)
class ListMLELoss(CheckedSettings):
    """Likelihood of the right order: each candidate is drawn from the remaining ones.

    Attributes:
        respect_input_order: candidates are in the right order; else their labels define it.
    """

    respect_input_order: bool = True

    def __call__(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over questions and their number."""
        if not self.respect_input_order:
            order = labels.masked_fill(~present, -torch.inf).sort(descending=True, dim=1).indices
            scores, present = scores.gather(1, order), present.gather(1, order)
        filled = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
        left = filled.flip(1).logcumsumexp(1).flip(1)
        likely = torch.where(present, (filled - left) * self.weights(present), 0.0)
        return -likely.sum(), torch.tensor(len(scores), device=scores.device)

    def weights(self, present: Tensor) -> Any:
        """Return the weight of each position."""
        return 1.0


@dataclass(frozen=True)
class PListMLELoss(ListMLELoss):
    """`ListMLELoss` with larger weights of first positions."""

    def weights(self, present: Tensor) -> Tensor:
        """Return shares of 1 that fall by half from place to place."""
        count = present.sum(1, keepdim=True)
        places = torch.arange(1, present.shape[1] + 1, device=present.device)
        lowered = (count - 127).clamp(min=0)  # the largest power of two in float32
        found = (torch.exp2((count - places - lowered).float()) - torch.exp2(-lowered.float())) * present
        return found / (found.sum(1, keepdim=True) + 1e-10)


@dataclass(frozen=True)
class ADRMSELoss(CheckedSettings):
    """Squared difference between positions and right positions; first positions weigh most.

    Attributes:
        alpha: how sharply differences of scores become places.
    """

    alpha: float = 1.0

    def __call__(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over candidates and their number."""
        others = present[:, None]
        worth = labels.masked_fill(~present, 0.0)
        above = ((worth[:, None] > worth[:, :, None]) & others).sum(2).float()
        equal = ((worth[:, None] == worth[:, :, None]) & others).sum(2).float()
        right = above + (equal + 1) / 2
        filled = scores.masked_fill(~present, ABSENT)
        ahead = torch.sigmoid(self.alpha * (filled[:, None] - filled[:, :, None])) * others
        place = 1.0 + ahead.sum(2) - 0.5 * present
        errors = (right - place).square() / torch.log2(right + 1.0)
        return torch.where(present, errors, 0.0).sum(), present.sum()


@dataclass(frozen=True)
class MarginMSELoss(CheckedSettings):
    """How much better the first candidate is than each other, as a teacher's scores have it."""

    def __call__(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over other candidates and their number."""
        others = present[:, 1:]
        goal = (labels[:, :1] - labels[:, 1:]).masked_fill(~others, 0.0)
        errors = (scores[:, :1] - scores[:, 1:] - goal).square()
        return torch.where(others, errors, 0.0).sum(), others.sum()


LIST_LOSSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (LambdaLoss, RankNetLoss, ListNetLoss, ListMLELoss, PListMLELoss, ADRMSELoss, MarginMSELoss)
}
"""By name."""
