"""What being watched costs a training run: nobody, a monitor, and a monitor with ten readers of its page.

    python benchmarks/monitor_cost.py [--rounds 7] [--steps 400] [--readers 10] [--width 512] [--json FILE]

Short runs of the three kinds are taken in turn, the order turning with each round, so that whatever else the machine
does falls on all alike. Of each run the mean time of a step counts, from the fifth to the last, with everything that
watching does meanwhile: telling, writing the record, reading the machine, looking at layers, feeding readers. Readers
are a process of their own, connected before the first step. A figure is the median over rounds of watched by
unwatched, and its spread the median absolute deviation times 1.4826.

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
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import TensorRows
from flodl.monitor import Monitor
from flodl.train import Loss, Trainer, adamw
from flodl.train.events import Event, StepDone

KINDS = ("unwatched", "watched", "with readers")
SETTLED = 5

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


def run(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the mean time of a step in milliseconds, and what the monitor's threads took of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.batch * 50, 64, generator=generator)
    data = TensorRows({"x": x, "y": (x.sum(1) > 0).long()})
    torch.manual_seed(0)
    times: list[float] = []
    taken: list[float] = []

    def note(event: Event) -> None:
        times.append(event.at_s)
        if event.step == args.steps:  # pyright: ignore[reportAttributeAccessIssue]
            taken.append(processor_time())

    made = Trainer.builder(Block(args.width), adamw(1e-3), step).dataset(data).batch_size(args.batch)
    made.num_epochs(10_000).max_steps(args.steps).progress(False).subscribe(note, StepDone)
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
        made.run().join()
        if monitor is not None:
            monitor.close()
        if readers is not None:
            received = int(readers.communicate(timeout=30)[0])
            assert received > args.readers * 1000, "readers were sent nothing"
    steps = len(times) - SETTLED
    return {"step_ms": (times[-1] - times[SETTLED - 1]) / steps * 1e3, "monitor_ms": sum(taken) / len(times) * 1e3}


def spread(values: list[float]) -> float:
    middle = median(values)
    return 1.4826 * median([abs(value - middle) for value in values])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--width", type=int, default=512, help="of the model's layers")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", help="such as cuda:0; by default the best there is")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    run("watched", argparse.Namespace(**{**vars(args), "steps": 20}))  # whatever is imported once, is imported now

    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        found = {kind: run(kind, args) for kind in order}
        rounds.append(found)
        print(f"round {number + 1}: " + ", ".join(f"{kind} {found[kind]['step_ms']:.3f} ms" for kind in KINDS))
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
    if args.json:
        machine = {"machine": platform.platform(), "torch": torch.__version__, "cores": os.cpu_count()}
        args.json.write_text(
            json.dumps({**machine, **vars(args), "json": None, "figures": figures}, indent=1, default=str)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
