"""Fit a sine wave with a live monitor page and an HTML archive.

    python examples/sine_wave.py [FOLDER] [--serve]

The monitor shows values inside the graph, and a rule stops the run when the evaluation error no longer falls. With
--serve the program prints the address of the page and waits at the end; without it only the archive is written.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from flodl import FlowBuilder, Graph
from flodl.data import TensorRows
from flodl.monitor import Monitor
from flodl.train import Decided, Loss, Trainer, adamw


def wave(count: int, seed: int) -> TensorRows:
    """Return points of a wave with rising frequency and noise."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=draw) * 6 - 3
    return TensorRows({"x": x, "y": torch.sin(x * x) + 0.05 * torch.randn(count, 1, generator=draw)})


def make_model(device: torch.device) -> Graph:
    """Return a small network with a tag for its features."""
    return (
        FlowBuilder(nn.Linear(1, 64), entry="x")
        .through(nn.Tanh())
        .tag("features")
        .also(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), name="bend")
        .through(nn.Linear(64, 1), name="height")
        .label("wave")
        .build()
    )


def step(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Return the squared errors of a batch as a sum and a count."""
    return Loss((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))


def judge(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return the squared error of evaluation points."""
    return {"error": ((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))}


def main(folder: Path, serve: bool = False) -> float:
    """Train, print errors, write ``wave.html`` and ``wave.csv``; return the last evaluation error."""
    decided: list[Decided] = []
    monitor = Monitor(name="a rising wave", folder=folder / "record", quiet=True)
    if serve:
        print(monitor.serve())
    run = Trainer.builder(make_model, adamw(5e-3), step).dataset(wave(1_024, 1)).batch_size(64).num_epochs(40)
    run.evaluate(judge, wave(256, 2), batch_size=256).progress(False)
    run.set(monitor=monitor, watch=["features:norm"], rules=["stop when stalled(error, 6, 0.0005)"])
    trained = run.subscribe(decided.append, Decided).run()
    errors = [epoch.eval["error"] for epoch in trained.metrics]
    print(f"{len(errors)} epochs: evaluation error from {errors[0]:.3f} to {errors[-1]:.4f}")
    for decision in decided:
        print(f"after epoch {decision.epoch}: {decision.rule}, because {decision.reason}")
    monitor.save_html(folder / "wave.html")
    monitor.export_csv(folder / "wave.csv")
    print(f"wave.html has {(folder / 'wave.html').stat().st_size:,} bytes and opens offline")
    if serve:
        input("the page is up; Enter ends\n")
    return errors[-1]


if __name__ == "__main__":
    places = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(places[0] if places else temporary), "--serve" in sys.argv)
