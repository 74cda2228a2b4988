"""What being watched costs a training run: nobody, a monitor, and a monitor with ten readers of its page.

    python -m benchmarks.monitor_cost [--rounds 7] [--steps 400] [--readers 10] [--width 512] [--json FILE]

Short runs of the three kinds are taken in turn, the order turning with each round, so that whatever else the machine
does falls on all alike. On CUDA steps are recorded, in bf16, of a model as wide as steps of some milliseconds need. Of
each run the mean time of a step counts, after the first ones, the device done at both ends, with everything that
watching does meanwhile: telling, writing the record, reading the machine, looking at layers, feeding readers. Readers
are a process of their own, connected before the first step. A figure is the median over rounds of watched by
unwatched, and its spread the median absolute deviation times 1.4826. Promised: below 1 % of a step with ten readers.

Besides, the processor time that the monitor's own threads took, by a step: it does not depend on what else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.monitor import Monitor
from flodl.train import Callback, Loss, Trainer, adamw
from flodl.train.events import Warned

KINDS = ("unwatched", "watched", "with readers")
LIMIT = 0.01
SETTLED = 20
"""Steps before the clock starts: on CUDA some are tried and recorded first."""

_READER = """
import selectors, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
selector = selectors.DefaultSelector()
for _ in range(count):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(f"GET /events HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\n\\r\\n".encode())
    selector.register(sock, selectors.EVENT_READ)
print("ready", flush=True)
taken = 0
while selector.get_map():
    for key, _ in selector.select():
        data = key.fileobj.recv(1 << 16)
        taken += len(data)
        if not data:
            selector.unregister(key.fileobj)
print(taken, flush=True)
"""


class Block(nn.Module):
    """A model of a few layers, so that layers are looked at as in real ones."""

    def __init__(self, width: int, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.first(x)))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).sum()
    return Loss(cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]), {"accuracy": (hits, len(logits))})


def processor_time() -> float:
    """Return the seconds of processor time that threads of the monitor have taken; 0 where that is not told."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("flodl-monitor") and thread.native_id is not None:
            try:
                text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            except OSError:
                return 0.0
            total += int(text.split()[0]) / 1e9
    return total


class Clock(Callback):
    """The time from the end of the settled steps to the end of the last, the device done at both."""

    def __init__(self, steps: int) -> None:
        self.steps, self.taken = steps, 0
        self.began = self.ended = self.monitor_s = 0.0

    def on_step_end(self, trainer: Any, result: Any) -> None:
        """Look at the clock after two of the steps."""
        self.taken += 1
        if self.taken not in (SETTLED, self.steps):
            return
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize(trainer.ranks.device)
        if self.taken == SETTLED:
            self.began = perf_counter()
        else:
            self.ended, self.monitor_s = perf_counter(), processor_time()


def run(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the mean time of a step in milliseconds, and what the monitor's threads took of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.batch * 50, 64, generator=generator)
    data = TensorRows({"x": x, "y": (x.sum(1) > 0).long()})
    torch.manual_seed(0)
    clock, warned = Clock(args.steps), []
    made = Trainer.builder(Block(args.width), adamw(1e-3), step).dataset(data).batch_size(args.batch)
    made.num_epochs(10_000).max_steps(args.steps).progress(False).set(callbacks=[clock])
    made.subscribe(lambda event: warned.append(event.message), Warned)
    if args.on_cuda:
        made.precision("bf16")
    if args.device is not None:
        made.devices(args.device)
    readers: Any = None
    with tempfile.TemporaryDirectory() as folder:
        monitor = None
        if kind != "unwatched":
            monitor = Monitor(name=kind, quiet=True, folder=folder)
            monitor.serve(0)
            made.set(monitor=monitor)
        if kind == "with readers" and monitor is not None and monitor.url is not None:
            port = monitor.url.rsplit(":", 1)[1].strip("/")
            command = [sys.executable, "-c", _READER, port, str(args.readers)]
            readers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert readers.stdout.readline() == "ready\n"
        made.run()
        if monitor is not None:
            monitor.close()
        if readers is not None:
            received = int(readers.communicate(timeout=30)[0])
            assert received > args.readers * 1000, "readers were sent nothing"
    if args.on_cuda and any("capture" in message or "record" in message for message in warned):
        raise SystemExit(f"steps were not recorded: {warned}")
    return {
        "step_ms": (clock.ended - clock.began) / (args.steps - SETTLED) * 1e3,
        "monitor_ms": clock.monitor_s / args.steps * 1e3,
    }


def spread(values: list[float]) -> float:
    middle = median(values)
    return 1.4826 * median([abs(value - middle) for value in values])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of each run; 400, on CUDA 300")
    parser.add_argument("--seconds", type=float, help="no round begins after so many; on CUDA 40, else no bound")
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--width", type=int, help="of the model's layers; 512, on CUDA 2,048")
    parser.add_argument("--batch", type=int, help="64, on CUDA 4,096")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", help="such as cuda:0; by default the best there is")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    args.on_cuda = torch.cuda.is_available() if args.device is None else str(args.device).startswith("cuda")
    steps, width, batch = (300, 2048, 4096) if args.on_cuda else (400, 512, 64)
    args.steps, args.width, args.batch = args.steps or steps, args.width or width, args.batch or batch
    args.seconds = args.seconds or (40.0 if args.on_cuda else float("inf"))
    torch.set_num_threads(args.threads)
    run(
        "watched", argparse.Namespace(**{**vars(args), "steps": SETTLED + 10})
    )  # whatever is imported once, is imported now

    rounds: list[dict[str, dict[str, float]]] = []
    began = perf_counter()
    for number in range(args.rounds):
        if number and perf_counter() - began > args.seconds:
            print(f"{args.seconds:.0f} s are over after {number} rounds")
            break
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        found = {kind: run(kind, args) for kind in order}
        rounds.append(found)
        print(
            f"round {number + 1}: " + ", ".join(f"{kind} {found[kind]['step_ms']:.3f} ms" for kind in KINDS), flush=True
        )
    figures: dict[str, Any] = {"unwatched_ms": median(found["unwatched"]["step_ms"] for found in rounds)}
    for kind in KINDS[1:]:
        ratios = [found[kind]["step_ms"] / found["unwatched"]["step_ms"] for found in rounds]
        own = median(found[kind]["monitor_ms"] for found in rounds)
        figures[kind] = {"ratio": median(ratios), "spread": spread(ratios), "monitor_ms": own}
        share = own / figures["unwatched_ms"]
        print(
            f"{kind:<13} {100 * (median(ratios) - 1):+6.2f} % of a step (spread {100 * spread(ratios):.2f} %); "
            f"the monitor's threads: {own * 1e3:.0f} us of processor time a step, {100 * share:.2f} % of one core"
        )
    worst = max(figures[kind]["ratio"] for kind in KINDS[1:]) - 1
    print(f"promised: below {LIMIT:.0%} of a step with readers; {'held' if worst < LIMIT else 'not held here'}")
    if args.json:
        place = torch.cuda.get_device_name() if args.on_cuda else platform.machine()
        machine = {"device": place, "machine": platform.platform(), "torch": torch.__version__, "cores": os.cpu_count()}
        args.json.write_text(
            json.dumps({**vars(args), **machine, "json": None, "figures": figures}, indent=1, default=str)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
