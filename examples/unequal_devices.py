"""Train on two devices of unequal speed, with the policies Sync and Cadence.

    python examples/unequal_devices.py [FACTOR]

The second of two ranks (processes on the CPU, or GPUs) is slowed FACTOR times, 3 by default. With ``sync`` both ranks
process half of every batch. With ``cadence`` each processes whole batches, and parameters are averaged regularly.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.train import Loss, Synced, Trainer, adamw

WIDTH = 64


def rows(count: int, seed: int) -> TensorRows:
    """Return points of four classes: on which side of a plane, and whether two coordinates have one sign."""
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorRows({"x": x, "y": (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 8:].sum(1) > 0).long()})


def make_model(device: torch.device) -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))


def step(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Return the loss of a batch as a sum and a count."""
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def judge(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return the number of correct predictions of a batch."""
    return {"accuracy": ((model(batch["x"]).argmax(1) == batch["y"]).sum(), len(batch["y"]))}


def main(factor: float = 3.0, epochs: int = 2) -> dict[str, tuple[float, float]]:
    """Print seconds, accuracy and shares of the ranks for each policy; return them."""
    torch.set_num_threads(1)
    train, test = rows(4_096, seed=1), rows(1_024, seed=2)
    start = "spawn" if torch.cuda.device_count() > 1 else "fork"
    found = {}
    for policy in ("sync", "cadence"):
        meetings: list[Synced] = []
        run = Trainer.builder(make_model, adamw(3e-3), step).dataset(train).batch_size(64).num_epochs(epochs)
        run.evaluate(judge, test, batch_size=256).devices(2, start=start).policy(policy).progress(False)
        run.slowdown(rank=1, factor=factor).subscribe(meetings.append, Synced)
        begin = time.perf_counter()
        trained = run.run()
        seconds = time.perf_counter() - begin
        last = trained.metrics[-1]
        shares = " and ".join(f"{share:.0%}" for share in last.share)
        epoch_s = min(epoch.epoch_ms for epoch in trained.metrics) / 1e3
        print(
            f"{policy:8} {seconds:5.1f} s in all, {epoch_s:5.2f} s the quickest epoch; ranks did {shares} of the rows; "
            f"{last.eval['accuracy']:.1%} right" + (f"; met {len(meetings)} times" if meetings else "")
        )
        found[policy] = (epoch_s, last.eval["accuracy"])
    return found


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
