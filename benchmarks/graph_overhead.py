"""What a FlowBuilder graph costs over the same model written by hand, on a CPU.

    python benchmarks/graph_overhead.py [--seconds 8] [--batch 16] [--models mlp,gru_seq] [--json FILE]

Both versions get the same weights and the same batch. Training steps (forward, loss, backward) of the two are
taken in turn, the first of each pair changing sides, so that whatever else the machine does falls on both
alike. The ratio is the median over pairs of graph time by hand-written time; sigma is 1.4826 times the median
absolute deviation from it, and the error is that of the median over so many pairs.

Two copies of one hand-written model can differ by several per cent in one process, because their weights lie
elsewhere in memory. The last two columns are free of that: forward passes over no rows, that is, what Python
and dispatch cost when nothing is computed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models import MODELS, Model

from flodl import FlowBuilder

COLUMNS = ("hand_ms", "graph_ms", "ratio", "ratio_sigma", "ratio_error", "hand_empty_us", "graph_empty_us")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each model")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch; the fewer, the more the graph's share")
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    wanted = args.models.split(",") if args.models else [model.name for model in MODELS]

    rows = [measure(model, args.batch, args.seconds) for model in MODELS if model.name in wanted]
    titles = ("pairs", "hand ms", "graph ms", "ratio", "sigma", "error", "hand0 us", "graph0 us")
    print(f"{'model':<17} {'parameters':>11} " + " ".join(f"{title:>9}" for title in titles))
    for row in rows:
        figures = [row[key] for key in COLUMNS]
        shown = " ".join(f"{figure:>9.4f}" for figure in figures)
        print(f"{row['name']:<17} {row['parameters']:>11,} {row['pairs']:>9} {shown}")
    step = step_cost()
    print(f"one step around nothing: by hand {step['hand_ns']:.0f} ns, in a graph {step['graph_ns']:.0f} ns")
    if args.json:
        record = {
            "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
            "threads": args.threads, "batch": args.batch, "models": rows, "step": step,
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(model: Model, batch: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one model.

    Raises:
        SystemExit: when a parameter count is not the listed one or the two versions differ in their result.
    """
    torch.manual_seed(0)
    hand, graph = model.hand(), model.flow()
    for kind, module in (("hand-written", hand), ("graph", graph)):
        count = sum(p.numel() for p in module.parameters())
        if count != model.parameters:
            raise SystemExit(f"{model.name}, {kind}: {count} parameters, expected {model.parameters}")
    x = model.inputs(batch)
    align(hand, graph, x)
    if not torch.equal(hand(x), graph(x)):
        raise SystemExit(f"{model.name}: the two versions do not compute the same")

    for module in (hand, graph):
        for _ in range(3):
            train_step(module, x, model)
    hand_s: list[float] = []
    graph_s: list[float] = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(hand_s) < 8:
        sides = [(hand, hand_s), (graph, graph_s)]
        for module, times in sides if len(hand_s) % 2 else reversed(sides):
            times.append(train_step(module, x, model))
    hand_us, graph_us = empty_cost(hand, graph, model.inputs(0))
    ratios = [g / h for h, g in zip(hand_s, graph_s, strict=True)]
    ratio, sigma = median(ratios), scaled_mad(ratios)
    return {
        "name": model.name, "parameters": model.parameters, "pairs": len(ratios),
        "hand_ms": median(hand_s) * 1e3, "hand_sigma_ms": scaled_mad(hand_s) * 1e3,
        "graph_ms": median(graph_s) * 1e3, "graph_sigma_ms": scaled_mad(graph_s) * 1e3,
        "ratio": ratio, "ratio_sigma": sigma,
        "hand_empty_us": hand_us, "graph_empty_us": graph_us,
        # A median scatters sqrt(pi/2) times as much as a mean would.
        "ratio_error": math.sqrt(math.pi / 2) * sigma / math.sqrt(len(ratios)),
    }  # fmt: skip


def align(hand: nn.Module, graph: nn.Module, x: Tensor) -> None:
    """Give both versions the same weights: their layers are called in the same order."""
    for source, target in zip(layers(hand, x), layers(graph, x), strict=True):
        target.load_state_dict(source.state_dict())


def layers(module: nn.Module, x: Tensor) -> list[nn.Module]:
    """Return the modules that hold parameters themselves, in the order of their first call."""
    called: dict[nn.Module, None] = {}
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    hooks = [m.register_forward_pre_hook(lambda m, _: called.setdefault(m)) for m in owners]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return list(called)


def train_step(module: nn.Module, x: Tensor, model: Model) -> float:
    """Return the seconds of forward, loss and backward: processor time on one thread, else wall time."""
    module.zero_grad()
    # On one thread the processor time of this process is the time on a quiet machine, also when it is not quiet.
    clock = process_time if torch.get_num_threads() == 1 else perf_counter
    start = clock()
    model.loss(module(x)).backward()
    return clock() - start


@torch.no_grad()
def empty_cost(hand: nn.Module, graph: nn.Module, nothing: Tensor, rounds: int = 400) -> tuple[float, float]:
    """Return the least time of a forward pass over no rows, by hand and as a graph, in microseconds.

    Nothing is computed then, so what is left is Python and dispatch, and a graph's own cost stands out.
    """
    best = [math.inf, math.inf]
    for _ in range(rounds):
        for side, module in enumerate((hand, graph)):
            start = perf_counter()
            module(nothing)
            best[side] = min(best[side], (perf_counter() - start) * 1e6)
    return best[0], best[1]


def step_cost(steps: int = 100, rounds: int = 400) -> dict[str, float]:
    """Return what one call of a module that does nothing costs in a chain of them, in nanoseconds."""
    names = [f"m{i}" for i in range(steps)]

    class Hand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Identity())

    body = "\n".join(f"    x = self.{name}(x)" for name in names)
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, x):\n{body}\n    return x\n", namespace)
    Hand.forward = namespace["forward"]
    flow = FlowBuilder()
    for name in names:
        flow.through(nn.Identity(), name=name)
    hand, graph, x = Hand(), flow.build(), torch.zeros(1)
    times: dict[str, list[float]] = {"hand_ns": [], "graph_ns": []}
    for _ in range(rounds):
        for key, module in (("hand_ns", hand), ("graph_ns", graph)):
            start = perf_counter()
            module(x)
            times[key].append((perf_counter() - start) / steps * 1e9)
    return {key: median(values) for key, values in times.items()}


def scaled_mad(values: list[float]) -> float:
    """Return 1.4826 times the median absolute deviation, a robust estimate of the standard deviation."""
    middle = median(values)
    return 1.4826 * median([abs(value - middle) for value in values])


if __name__ == "__main__":
    raise SystemExit(main())
