"""Train a sub-graph alone, then load it into a larger model by its path and structural hash.

    python examples/transfer.py

A small reader is trained to recognise a number in a noisy signal. Its weights are then loaded into a model that adds
the numbers of two signals: frozen, trainable, and, for comparison, random. With the reader's weights, 120 examples are
enough.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from flodl import FlowBuilder, Graph

LENGTH, NUMBERS = 24, 6


def signals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return waves with noise, ``(count, LENGTH)``, and the frequency of each, a number below ``NUMBERS``."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(NUMBERS, (count,), generator=draw)
    phase = torch.rand(count, 1, generator=draw) * 6.283
    time = torch.arange(LENGTH) / LENGTH * 6.283
    return torch.sin((numbers[:, None] + 1) * time + phase) + 0.2 * torch.randn(count, LENGTH, generator=draw), numbers


def make_reader() -> Graph:
    """Return the reader of one signal; its label is its name in a larger graph."""
    return (
        FlowBuilder(nn.Linear(LENGTH, 64))
        .through(nn.GELU())
        .through(nn.Linear(64, 64))
        .also(nn.Sequential(nn.GELU(), nn.Linear(64, 64)), name="refine")
        .label("reader")
        .build()
    )


class Pair(nn.Module):
    """Reads two signals with one reader and concatenates the results."""

    def __init__(self, reader: Graph) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, both: Tensor) -> Tensor:
        return torch.cat([self.reader(both[:, 0]), self.reader(both[:, 1])], dim=-1)


def learn(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Train a number of steps on all rows."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy."""
    with torch.no_grad():
        return float((model(x).argmax(-1) == y).float().mean())


def sums(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pairs of signals, ``(count, 2, LENGTH)``, and the sums of their numbers."""
    (one, a), (two, b) = signals(count, seed), signals(count, seed + 1)
    return torch.stack([one, two], dim=1), a + b


def main() -> dict[str, float]:
    """Print the accuracy of the three models and return it."""
    torch.manual_seed(0)
    reader = make_reader()
    alone = FlowBuilder(reader).through(nn.Linear(64, NUMBERS), name="classifier").label("alone").build()
    learn(alone, *signals(2_000, seed=1), steps=150)
    print(f"the reader alone: {right(alone, *signals(500, seed=50)):.0%} of new signals right")

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reader.safetensors"
        alone.subgraph("reader").save_checkpoint(file)
        for way in ("from nothing", "loaded and frozen", "loaded and trained on"):
            torch.manual_seed(1)
            adder = (
                FlowBuilder(Pair(make_reader()), name="pair")
                .through(nn.Linear(128, 64))
                .through(nn.GELU())
                .through(nn.Linear(64, 2 * NUMBERS - 1), name="classifier")
                .label("adder")
                .build()
            )
            if way != "from nothing":
                adder.load_subgraph_checkpoint("pair.reader", file)
            if way == "loaded and frozen":
                adder.freeze("pair.reader")
            learn(adder, *sums(120, seed=7), steps=120)
            found[way] = right(adder, *sums(500, seed=90))
            learnt = sum(p.numel() for p in adder.parameters() if p.requires_grad)
            print(f"{way:22} {found[way]:4.0%} of new sums right, {learnt:,} parameters trained")
    print(adder.tree_summary())
    return found


if __name__ == "__main__":
    main()
