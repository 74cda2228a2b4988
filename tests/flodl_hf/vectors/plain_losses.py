"""Each loss written out in loops over float64, from its paper's formula: what the room's arithmetic is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Sequence[Tensor], Any], Tensor]


def cos(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def far(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm()


def softmax_loss(positive: Tensor, others: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(others), 0) - positive


def ranking(vectors: Sequence[Tensor], _: Any, *, both: bool = False, scale: float = 20.0) -> Tensor:
    queries, partners = vectors[:2]
    docs = [doc for column in vectors[1:] for doc in column]
    found = []
    for i, query in enumerate(queries):
        loss = softmax_loss(scale * cos(query, partners[i]), [scale * cos(query, doc) for doc in docs])
        if both:
            back = [scale * cos(other, partners[i]) for other in queries]
            loss = (loss + softmax_loss(scale * cos(query, partners[i]), back)) / 2
        found.append(loss)
    return torch.stack(found).mean()


def guided(vectors: Sequence[Tensor], guide: Tensor) -> Tensor:
    queries, partners, *negatives = vectors
    found = []
    for i in range(len(queries)):
        bound = cos(guide[i, 0], guide[i, 1])
        kept = []
        for column, mine in [(1, 0), (0, 0), (1, 1), *((k + 2, 0) for k in range(len(negatives)))]:
            for j in range(len(queries)):
                partner = (column, mine, j) == (1, 0, i)
                if partner or cos(guide[i, mine], guide[j, column]) <= bound:
                    kept.append(cos(vectors[mine][i], vectors[column][j]) / 0.01)
        found.append(softmax_loss(cos(queries[i], partners[i]) / 0.01, kept))
    return torch.stack(found).mean()


def angle(a: Tensor, b: Tensor) -> Tensor:
    half = len(a) // 2
    first = torch.complex(a[:half], a[half:]) / a.norm()
    second = torch.complex(b[:half], b[half:]) / b.norm()
    product = first * second.conj()
    return (product.real.sum() + product.imag.sum()).abs()


def ordered(vectors: Sequence[Tensor], labels: Tensor, alike: Callable[[Tensor, Tensor], Tensor] = cos) -> Tensor:
    scores = [20 * alike(a, b) for a, b in zip(*vectors, strict=True)]
    n = len(scores)
    wrong = [torch.exp(scores[i] - scores[j]) for i in range(n) for j in range(n) if labels[i] < labels[j]]
    return torch.log(1 + torch.stack(wrong).sum())


def cosine(vectors: Sequence[Tensor], labels: Tensor) -> Tensor:
    pairs = zip(*vectors, labels, strict=True)
    return torch.stack([(cos(a, b) - label) ** 2 for a, b, label in pairs]).mean()


def contrastive(vectors: Sequence[Tensor], labels: Tensor) -> Tensor:
    found = []
    for a, b, label in zip(*vectors, labels, strict=True):
        gap = 1 - cos(a, b)
        found.append(0.5 * (gap**2 if label else (0.5 - gap).clamp(min=0) ** 2))
    return torch.stack(found).mean()


def online(vectors: Sequence[Tensor], labels: Tensor) -> Tensor:
    gaps = [1 - cos(a, b) for a, b in zip(*vectors, strict=True)]
    alike = [gap for gap, label in zip(gaps, labels, strict=True) if label]
    apart = [gap for gap, label in zip(gaps, labels, strict=True) if not label]
    hard = [gap**2 for gap in alike if gap > min(apart)]
    hard += [(0.5 - gap).clamp(min=0) ** 2 for gap in apart if gap < max(alike)]
    return torch.stack(hard).sum()


def triplet(vectors: Sequence[Tensor], _: Any) -> Tensor:
    rows = zip(*vectors, strict=True)
    return torch.stack([(far(a, p) - far(a, n) + 5).clamp(min=0) for a, p, n in rows]).mean()


def of_classes(vectors: Sequence[Tensor], labels: Tensor, how: str) -> Tensor:
    texts, n = vectors[0], len(vectors[0])
    found = []
    for i in range(n):
        near = [far(texts[i], texts[j]) for j in range(n) if j != i and labels[j] == labels[i]]
        apart = [far(texts[i], texts[j]) for j in range(n) if labels[j] != labels[i]]
        if how == "all":
            found += [gap for p in near for a in apart if (gap := p - a + 5) > 0]
        elif how == "semi":
            for p in near:
                outside = [a for a in apart if a > p]
                found.append((p - (min(outside) if outside else max(apart)) + 5).clamp(min=0))
        else:
            gap = (max(near) if near else torch.zeros(())) - min(apart)
            found.append((gap + 5).clamp(min=0) if how == "hard" else torch.log(1 + gap.exp()))
    return torch.stack(found).mean()


def margins(vectors: Sequence[Tensor], labels: Tensor) -> Tensor:
    query, positive, *others = vectors
    found = []
    for i in range(len(query)):
        for k, other in enumerate(others):
            found.append((query[i] @ positive[i] - query[i] @ other[i] - labels[i, k]) ** 2)
    return torch.stack(found).mean()


def shares(vectors: Sequence[Tensor], labels: Tensor) -> Tensor:
    query, *others = vectors
    found = []
    for i in range(len(query)):
        mine = torch.stack([query[i] @ other[i] for other in others])
        theirs = labels[i].exp() / labels[i].exp().sum()
        found.append((theirs * (theirs.log() - mine + torch.logsumexp(mine, 0))).sum())
    return torch.stack(found).mean()


def nearer(vectors: Sequence[Tensor], labels: Tensor) -> Tensor:
    return torch.stack([((v - labels[:, k]) ** 2).mean() for k, v in enumerate(vectors)]).mean()


def near_teacher(vectors: Sequence[Tensor], labels: Tensor, how: str) -> Tensor:
    distance = {"cosine": lambda a, b: 1 - cos(a, b), "l2": far}[how]
    found = [distance(column[i], labels[i, k]) for k, column in enumerate(vectors) for i in range(len(column))]
    return torch.stack(found).mean()


def large_margin(vectors: Sequence[Tensor], _: Any) -> Tensor:
    queries, partners = vectors
    found = []
    for i, query in enumerate(queries):
        others = [cos(query, partners[j]) for j in range(len(partners)) if j != i]
        found.append((0.8 - cos(query, partners[i])).clamp(min=0) + (torch.stack(others).max() - 0.3).clamp(min=0))
    return torch.stack(found).mean()


def spread(vectors: Sequence[Tensor], labels: Any, beside: bool = False) -> Tensor:
    found = []
    for column in vectors:
        n, size = column.shape
        near = torch.stack([cos(column[i], column[j]) for i in range(n) for j in range(n) if i != j])
        found.append(near.mean() ** 2 + (near.square().mean() - 1 / size).clamp(min=0))
    return torch.stack(found).mean() + (ranking(vectors, labels) if beside else 0.0)


def unit(tensor: Tensor) -> Tensor:
    return tensor / tensor.norm(dim=-1, keepdim=True)


def matryoshka(vectors: Sequence[Tensor], labels: Any) -> Tensor:
    return sum(
        (ranking([unit(v[:, :d]) for v in vectors], labels) * w for d, w in ((8, 1.0), (4, 0.5))), torch.zeros(())
    )


def layerwise(layers: Sequence[Sequence[Tensor]], labels: Any) -> Tensor:
    total = ranking(layers[-1], labels)
    goal = torch.softmax(torch.cat(list(layers[-1])) / 0.3, 1).detach()
    for index, vectors in enumerate(layers[:-1]):
        total = total + ranking(vectors, labels) / (1 + math.log(1 + index)) / (len(layers) - 1)
        mine = torch.log_softmax(torch.cat(list(vectors)) / 0.3, 1)
        total = total + 0.3 * (goal * (goal.log() - mine)).sum(1).mean()
    return total
