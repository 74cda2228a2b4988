"""What watching costs: steps of a graph in which nothing is watched, beside the same with ten values watched.

    python -m benchmarks.observing [--layers 12] [--width 768] [--batch 32] [--length 128] [--rounds 7] [--json FILE]
    python -m benchmarks.observing --small                     # seconds on a processor

An encoder of post-norm layers, random numbers in and out, AdamW, clipping; on CUDA in bf16, its steps recorded.
Contenders, which take turns in every round, in an order that turns round too:

* plain: nothing is watched;
* watched: means of five layers and norms of five others, told to nobody but the epoch's own figures;
* told: the same, and a subscriber takes in the event of every step.

Each turn is a run of its own: the first epoch records and warms up, the others are timed from the beginning of the
first to the end of the last, the device done, with what the host does between epochs; on a processor in its own
seconds, which other work hardly changes. The figure is the median over rounds of the ratio to plain within the round;
the spread is the median of their distances from it, times 1.4826. Promised: below 0.5 % of a recorded step.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from flodl import FlowBuilder, Graph
from flodl.train import Callback, Observed, Trainer, Warned, adamw

CUDA = torch.cuda.is_available()
CONTENDERS = ("plain", "watched", "told")
WATCHED = 10
LIMIT = 0.005


@dataclass(frozen=True)
class Size:
    """What is trained, and for how long."""

    layers: int
    width: int
    batch: int
    length: int
    steps: int
    epochs: int


def make_model(size: Size) -> Graph:
    """Return an encoder whose layers are tagged, on the device."""
    torch.manual_seed(0)

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(size.width, max(1, size.width // 64), 4 * size.width, 0.0, batch_first=True)

    flow = FlowBuilder(layer()).tag("layer_0")
    for number in range(1, size.layers):
        flow = flow.through(layer()).tag(f"layer_{number}")
    return flow.through(nn.Linear(size.width, 1)).build()


def watch(size: Size) -> list[str]:
    """Return ten values: means and norms of layers, going round where there are fewer."""
    pairs = [f"layer_{i}{how}" for how in ("", ":norm", ":max") for i in range(size.layers)]
    means, norms = [p for p in pairs if ":" not in p], [p for p in pairs if p.endswith(":norm")]
    chosen = [*means[: WATCHED // 2], *norms[-WATCHED // 2 :]]
    return [*chosen, *(p for p in pairs if p not in chosen)][:WATCHED]


@dataclass
class Clock(Callback):
    """Times epochs from the second on, the device done at both ends."""

    epochs: int
    began: float = 0.0
    seconds: float = 0.0

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        """Begin with the second epoch."""
        if epoch == 1:
            self.began = now()

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Stop with the last."""
        if epoch == self.epochs - 1:
            self.seconds = now() - self.began


def now() -> float:
    """Return the time at which the device is done; on a processor the time that it spent on this process."""
    if not CUDA:
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


def turn(contender: str, size: Size, model: Graph, data: Any) -> tuple[float, int, list[str]]:
    """Return the seconds of a step, how many values were told at once, and warnings."""
    clock, told, warned = Clock(size.epochs), [0], []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse_loss(model(batch["x"]), batch["y"])

    made = (
        Trainer.builder(deepcopy(model), adamw(1e-4), step).dataset(data).batch_size(size.batch)
        .num_epochs(size.epochs).max_grad_norm(1.0).precision("bf16" if CUDA else "fp32")
        .set(progress=False, callbacks=[clock], watch=[] if contender == "plain" else watch(size))
    )  # fmt: skip
    made.subscribe(lambda event: warned.append(event.message), Warned)
    if contender == "told":
        made.subscribe(lambda event: told.append(len(event.values)), Observed)
    made.run()
    return clock.seconds / (size.steps * (size.epochs - 1)), max(told), warned


@dataclass
class Result:
    """Seconds of a step by contender and round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CONTENDERS})

    def ratio(self, contender: str) -> tuple[float, float]:
        """Return the median of the ratios to plain less 1, and the scaled median distance from it."""
        pairs = zip(self.seconds[contender], self.seconds["plain"], strict=True)
        ratios = [one / plain - 1 for one, plain in pairs]
        middle = median(ratios)
        return middle, 1.4826 * median(abs(value - middle) for value in ratios)


def measure(size: Size, rounds: int, budget_s: float) -> Result:
    """Return the times of all contenders, in so many rounds or those that ``budget_s`` lets begin.

    Raises:
        SystemExit: what is measured is not what is meant: values are missing, or steps were not recorded.
    """
    began = perf_counter()
    with torch.device("cuda" if CUDA else "cpu"):
        model = make_model(size)
        torch.manual_seed(1)
        rows = size.steps * size.batch
        data = {"x": torch.randn(rows, size.length, size.width), "y": torch.randn(rows, size.length, 1)}
    result = Result()
    for number in range(rounds):
        if number and perf_counter() - began > budget_s:
            print(f"{budget_s:.0f} s are over after {number} rounds", flush=True)
            break
        order = [CONTENDERS[(number + place) % len(CONTENDERS)] for place in range(len(CONTENDERS))]
        for contender in order:
            seconds, told, warned = turn(contender, size, model, data)
            if contender == "told" and told != WATCHED:
                raise SystemExit(f"{told} values were told; expected {WATCHED}")
            if CUDA and any("capture" in message for message in warned):
                raise SystemExit(f"steps were not recorded: {warned}")
            result.seconds[contender].append(seconds)
        shown = ", ".join(f"{name} {result.seconds[name][-1] * 1e3:.3f} ms" for name in CONTENDERS)
        print(f"round {number + 1}: {shown} a step ({perf_counter() - began:.0f} s)", flush=True)
    return result


def main(argv: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a turn, the first of which is not timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=30.0, help="no round begins after so many")
    parser.add_argument("--small", action="store_true", help="an encoder that a processor trains in seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    size = Size(args.layers, args.width, args.batch, args.length, args.steps, args.epochs)
    if args.small:
        size = Size(4, 128, 16, 64, 8, 3)
    result = measure(size, args.rounds, args.seconds)
    place = torch.cuda.get_device_name() if CUDA else f"{platform.processor() or platform.machine()} processor"
    print(f"{place}, torch {torch.__version__}; {size}; {WATCHED} values")
    for name in CONTENDERS:
        added, spread = result.ratio(name)
        print(f"{name:<8} {median(result.seconds[name]) * 1e3:9.3f} ms a step   {added:+7.2%} (+- {spread:.2%})")
    worst = max(result.ratio(name)[0] for name in CONTENDERS)
    print(f"promised: below {LIMIT:.1%} of a recorded step; {'held' if worst < LIMIT else 'not held here'}")
    if args.json:
        args.json.write_text(json.dumps({"place": place, "size": vars(size), "seconds": result.seconds}, indent=1))
    return result


if __name__ == "__main__":
    main()
