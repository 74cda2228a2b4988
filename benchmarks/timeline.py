"""Who waits for whom while texts become answers: each step of each window, by thread, beside the device's own work.

For every call of a new process it prints what each thread did and for how long, how long the device computed and how
long it had nothing to do between its first batch and its last, and what the first calls do that later ones do not:
preparing the graph, recording passes, allocating pinned memory. With `--windows` every step is listed.

    python -m benchmarks.timeline MODEL --data FOLDER [--task labels|embed] [--calls 5] [--windows] [--devices 2]
    python -m benchmarks.timeline MODEL --data FOLDER --device cpu --texts 200    # does the script work?
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.corpus import mixed_texts
from flodl_hf import AutoModel, AutoModelForSequenceClassification
from flodl_hf.runtime.cuda_graphs import Recorder
from flodl_hf.runtime.engine import Engine
from flodl_hf.runtime.prepared import Prepared
from flodl_hf.runtime.stream import Job, stream


@dataclass(frozen=True)
class Span:
    """One step: what it is, its thread, when it began and ended, and the processor's seconds of its thread."""

    what: str
    thread: str
    begin: float
    end: float
    used: float


class Watch:
    """Spans of one call, and the device's batches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[Span] = []
        self.batches: list[tuple[Any, Any]] = []
        self.origin = time.perf_counter()
        self.mark = self.event()

    def event(self) -> Any:
        """Return an event that the device reaches after what it was sent; None without one."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Note a step of this thread."""
        begin, used = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            end = time.perf_counter()
            thread = threading.current_thread().name
            self.spans.append(Span(what, thread, begin - self.origin, end - self.origin, time.thread_time() - used))

    def around(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are noted."""

        def noted(*args: Any, **words: Any) -> Any:
            with self.span(what):
                return call(*args, **words)

        return noted

    def stream(self, items: Any, job: Job[Any, Any], **words: Any) -> Any:
        """Stand in for `flodl_hf.runtime.stream.stream`."""
        steps = {step: self.around(step, getattr(job, step)) for step in ("encode", "start", "finish")}
        return stream(items, replace(job, **steps), **words)

    def send(self, engine: Engine, *args: Any, **words: Any) -> None:
        """Stand in for `Engine.send`."""
        before = self.event()
        _SEND(engine, *args, **words)
        self.batches.append((before, self.event()))


_SEND, _MAKE, _CAPTURE = Engine.send, Prepared.__init__, Recorder.capture


def pinned() -> tuple[int, float]:
    """Return how often the driver was asked for pinned memory, and for how many milliseconds."""
    try:
        told = torch.cuda.host_memory_stats()
    except (AttributeError, RuntimeError):
        return 0, 0.0
    return int(told.get("num_host_alloc", 0)), told.get("host_alloc_time.total", 0) / 1e3


def watched(call: Callable[[], Any], device: torch.device) -> tuple[float, float, Watch]:
    """Return the wall seconds of a call, the processor's seconds of all threads, and what was seen."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    watch = Watch(device)
    with ExitStack() as held:
        held.enter_context(patch("flodl_hf.runtime.session.stream", watch.stream))
        held.enter_context(patch.object(Engine, "send", lambda *args, **words: watch.send(*args, **words)))
        for kind, name, what, own in (
            (Prepared, "__init__", "prepare", _MAKE), (Recorder, "capture", "record", _CAPTURE),
        ):  # fmt: skip
            noted = watch.around(what, own)
            held.enter_context(patch.object(kind, name, lambda *args, noted=noted, **words: noted(*args, **words)))
        begin, used = time.perf_counter(), time.process_time()
        found = call()
        took, used = time.perf_counter() - begin, time.process_time() - used
    del found
    return took, used, watch


def told(number: int, took: float, used: float, watch: Watch, allocated: tuple[int, float]) -> None:
    """Print one call."""
    print(f"\ncall {number}: {took * 1e3:.0f} ms, {used * 1e3:.0f} ms of all threads' processor time")
    for what in ("encode", "prepare", "start", "record", "finish"):
        spans = [span for span in watch.spans if span.what == what]
        if spans:
            wall, cpu = (sum(values) * 1e3 for values in zip(*((s.end - s.begin, s.used) for s in spans), strict=True))
            threads = len({span.thread for span in spans})
            first, last = min(s.begin for s in spans) * 1e3, max(s.end for s in spans) * 1e3
            print(
                f"  {what:8} {len(spans):3} times, {threads} threads: {wall:7.1f} ms, {cpu:7.1f} of the processor, "
                f"from {first:6.1f} to {last:6.1f}"
            )
    own = [s for s in watch.spans if s.thread == "MainThread" and s.what in ("start", "finish")]
    waits = took - sum(s.end - s.begin for s in own)
    print(f"  the caller's thread waits for texts {waits * 1e3:.1f} ms; pinned memory {allocated[0]} times, ", end="")
    print(f"{allocated[1]:.1f} ms")
    if watch.batches and watch.device.type == "cuda":
        torch.cuda.synchronize()
        times = [(watch.mark.elapsed_time(a), watch.mark.elapsed_time(b)) for a, b in watch.batches]
        # From the end of the last batch, since a batch is waited for behind it.
        busy, end, gaps = 0.0, times[0][0], []
        for begin, done in times:
            gaps.append(max(0.0, begin - end))
            busy += max(0.0, done - max(begin, end))
            end = max(end, done)
        print(
            f"  the device: {len(times)} batches, begins at {times[0][0]:.1f} ms, ends at {end:.1f}; busy or launched "
            f"into {busy:.1f} ms, nothing to do {sum(gaps):.1f} ms (longest {max(gaps):.1f})"
        )


def listed(watch: Watch) -> None:
    """Print every step in the order of its beginning."""
    for span in sorted(watch.spans, key=lambda span: span.begin):
        print(
            f"    {span.begin * 1e3:8.1f} {span.end * 1e3:8.1f} ms  {span.what:8} {span.used * 1e3:7.1f}  {span.thread}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", choices=["labels", "embed"], default="labels")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--devices", type=int, default=1, help="so many CUDA devices; steps of their processes are theirs"
    )
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--windows", action="store_true")
    args = parser.parse_args()
    texts = mixed_texts(args.data, args.texts, seed=7)
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    kind: Any = AutoModel if args.task == "embed" else AutoModelForSequenceClassification
    model = kind.from_pretrained(args.model, device=args.device, dtype=dtype)
    run: dict[str, Any] = {} if args.devices == 1 else {"devices": [f"cuda:{i}" for i in range(args.devices)]}
    if args.task == "labels":
        run["untrained"] = True
    # Events of several devices cannot be compared.
    device = next(model.parameters()).device if args.devices == 1 else torch.device("cpu")
    ask = model.embed if args.task == "embed" else model.predict
    for number in range(1, args.calls + 1):
        before = pinned()
        took, used, watch = watched(lambda: ask(texts, **run), device)
        now = pinned()
        told(number, took, used, watch, (now[0] - before[0], now[1] - before[1]))
        if args.windows:
            listed(watch)


if __name__ == "__main__":
    main()
