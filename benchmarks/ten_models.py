"""An epoch of each of ten models: PyTorch as users write it, a training step recorded by hand, and ours.

    python -m benchmarks.ten_models [--rounds 8] [--models mlp,gru_seq] [--device cuda] [--json FILE]

All in float32, 50 batches made once on the device, Adam, as the published suite has it:

* users: the hand-written module; ``torch.optim.Adam`` with its defaults; the loss read after each batch;
* recorded: the hand-written module; forward, loss, backward and fused Adam in one CUDA graph, the loss summed
  on the device, read after the epoch; attention without its weights;
* ours: the FlowBuilder graph and `Trainer` with its defaults.

Rounds go through the three in turn, an epoch each, between two synchronisations of the device. The figure is
the median over rounds, beside it 1.4826 times the median absolute deviation from it. Without CUDA nothing is
recorded, and the run only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.graph_overhead import align, scaled_mad
from benchmarks.models import MODELS, Model
from flodl.memory import process_memory
from flodl.train import Trainer, Warned
from flodl.train.optim.optimizers import OptimizerFactory

BATCHES = 50
WARM_UP = 3

Batches = list[tuple[Tensor, Tensor]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches of an epoch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--kernels", action="store_true", help="list where the device's work differs")
    args = parser.parse_args(argv)
    wanted = args.models.split(",") if args.models else [model.name for model in MODELS]
    device = torch.device(args.device)
    rows = []
    for model in MODELS:
        if model.name in wanted:
            rows.append(measure(model, device, args.rounds, args.batches, kernels=args.kernels))
            print(line(rows[-1]), flush=True)
    print(f"\n{'model':<17} {'users':>14} {'recorded':>14} {'ours':>14}   ours to users, to recorded, sigma")
    for row in rows:
        print(line(row))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {args.rounds} rounds")
    if args.json:
        record = {"device": where, "torch": torch.__version__, "rounds": args.rounds, "models": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    cells = [f"{row[who]['ms']:>8.2f} ±{row[who]['sigma']:<4.2f}" for who in ("users", "recorded", "ours")]
    ours, users, recorded = (row[who]["ms"] for who in ("ours", "users", "recorded"))
    tail = f"{ours / users - 1:>+7.1%} {ours / recorded - 1:>+7.1%} {row['ours']['sigma'] / ours:>6.2%}"
    loss = f"  losses {row['users']['loss']:.5f} {row['recorded']['loss']:.5f} {row['ours']['loss']:.5f}"
    return f"{row['name']:<17} {' '.join(cells)}   {tail}{loss} {row['ours']['peak_mb']:.0f} MB {row['said']}"


def measure(model: Model, device: torch.device, rounds: int, batches: int, *, kernels: bool = False) -> dict[str, Any]:
    """Return the figures of one model."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = model.name not in ("gru_seq", "lstm_seq")
    data = model.batches(batches, device)
    hand, recorded, graph = model.hand(), model.hand(), model.flow()
    recorded.load_state_dict(hand.state_dict())
    align(hand, graph, model.inputs(2))
    if device.type == "cuda":
        for module in (hand, recorded):
            module.to(device)
    for module in hand.modules():
        if hasattr(module, "need_weights"):
            vars(module)["need_weights"] = True  # what attention does when it is called without further words
    users = users_epoch(model, hand, data)
    captured = recorded_epoch(model, recorded, data, device)
    for _ in range(WARM_UP):
        users()
        captured()
    times: dict[str, list[float]] = {"users": [], "recorded": [], "ours": []}
    losses: dict[str, float] = {}
    said: list[str] = []
    start = [0.0]
    seen: dict[str, Any] = {"recorded": None, "ours": None}

    def before(epoch: int, trainer: Trainer) -> None:
        if epoch >= WARM_UP:
            for who, call in (("users", users), ("recorded", captured)):
                times[who].append(clocked(device, lambda call=call, who=who: losses.__setitem__(who, call())))
        synchronize(device)
        if kernels and epoch == WARM_UP + rounds - 1:
            with profiled() as seen["recorded"]:
                captured()
                synchronize(device)
            seen["ours"] = profiled()
            seen["ours"].__enter__()
        start[0] = perf_counter()

    def after(metrics: Any) -> None:
        synchronize(device)
        if seen["ours"] is not None:
            seen["ours"].__exit__(None, None, None)
        if metrics.epoch >= WARM_UP:
            times["ours"].append((perf_counter() - start[0]) * 1e3)
        losses["ours"] = metrics.loss

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    (
        Trainer.builder(lambda _: graph, OptimizerFactory(torch.optim.Adam, {"lr": model.lr}), OurStep(model))
        .dataset(data)
        .num_epochs(WARM_UP + rounds)
        .devices(str(device))
        .epoch_fn(before)
        .metrics_fn(after)
        .subscribe(lambda event: said.append(event.message), Warned)
        .run()
    )
    peak, reserved = (
        (torch.cuda.max_memory_allocated(device) / 2**20, torch.cuda.max_memory_reserved(device) / 2**20)
        if device.type == "cuda"
        else (0.0, 0.0)
    )
    found: dict[str, Any] = {
        who: {
            "ms": median(ms), "mean_ms": fmean(ms), "min_ms": min(ms), "max_ms": max(ms), "sigma": scaled_mad(ms),
            "loss": losses[who], "all": ms,
        }
        for who, ms in times.items()
    }  # fmt: skip
    found["ours"] |= {"peak_mb": peak, "reserved_mb": reserved}
    if kernels:
        show_differences(seen["recorded"], seen["ours"], batches)
    about = {"name": model.name, "device": str(device), "param_count": model.parameters, "batch_size": model.batch}
    about |= {"batches_per_epoch": batches, "warmup_epochs": WARM_UP, "measured_epochs": rounds}
    return {**about, **found, "rss_mb": (process_memory() or (0, 0))[0] / 2**20, "said": "; ".join(said)}


def profiled() -> Any:
    """Return a profiler of the device's work."""
    return torch.profiler.profile(activities=list(torch.profiler.supported_activities()))


def show_differences(recorded: Any, ours: Any, steps: int) -> None:
    """Print the kernels whose number or time a step is not the same in both."""
    totals = []
    for profile in (recorded, ours):
        found: dict[str, list[float]] = {}
        for event in profile.events():
            if str(event.device_type).endswith("CUDA"):
                kept = found.setdefault(event.name, [0.0, 0.0])
                kept[0] += 1 / steps
                kept[1] += event.time_range.elapsed_us() / steps
        totals.append(found)
    none = [0.0, 0.0]
    print(f"{'recorded':>16} {'ours':>16}   kernels and microseconds a step")
    for name in sorted(totals[0].keys() | totals[1].keys()):
        a, b = totals[0].get(name, none), totals[1].get(name, none)
        if abs(a[0] - b[0]) > 0.01 or abs(a[1] - b[1]) > 0.5:
            print(f"{a[0]:>6.2f} {a[1]:>8.1f} {b[0]:>6.2f} {b[1]:>9.1f}   {name[:110]}")
    sums = [[sum(v[i] for v in found.values()) for i in (0, 1)] for found in totals]
    print(f"{sums[0][0]:>6.1f} {sums[0][1]:>8.1f} {sums[1][0]:>6.1f} {sums[1][1]:>9.1f}   all", flush=True)


class OurStep:
    """The loss of a batch."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model.criterion(module(batch[0]), batch[1])


def users_epoch(model: Model, module: nn.Module, data: Batches) -> Callable[[], float]:
    """Return an epoch as users write it."""
    optimizer = torch.optim.Adam(module.parameters(), lr=model.lr)

    def epoch() -> float:
        total = 0.0
        for x, y in data:
            loss = model.criterion(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(data)

    return epoch


def recorded_epoch(model: Model, module: nn.Module, data: Batches, device: torch.device) -> Callable[[], float]:
    """Return an epoch of replays of one CUDA graph that holds the whole step."""
    if device.type != "cuda":
        return users_epoch(model, module, data)
    optimizer = torch.optim.Adam(module.parameters(), lr=model.lr, fused=True, capturable=True)
    x, y = (part.clone() for part in data[0])
    same = data[0][0] is data[0][1]
    total = torch.zeros((), device=device)

    def step() -> None:
        loss = model.criterion(module(x), x if same else y)
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def epoch() -> float:
        total.zero_()
        for batch in data:
            x.copy_(batch[0])
            if not same:
                y.copy_(batch[1])
            graph.replay()
        return total.item() / len(data)

    # The graph knows addresses only, so whoever holds the epoch has to hold what lies there.
    epoch.__dict__["holds"] = (module, optimizer, graph)
    return epoch


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clocked(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call, the device's work included."""
    synchronize(device)
    start = perf_counter()
    call()
    synchronize(device)
    return (perf_counter() - start) * 1e3


if __name__ == "__main__":
    sys.exit(main())
