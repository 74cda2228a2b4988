"""Fine-tuning on two GPUs: rows a second by the command line and by a script, and where the time of a step goes.

    python -m benchmarks.two_ranks [--batches 64 32] [--only cli script timeline] [--json FILE]
    python -m benchmarks.two_ranks --tiny          # does the script work? on processors, small

BERT-base at random, 9,600 texts of made-up words in log-normal lengths (median 22 words, at most 90), two classes,
bf16, 4 epochs. All is made here; nothing is read but this repository.

* ``cli``: ``flodl-hf finetune`` in a process of its own: one GPU, two with ``--out``, two without. *told* is the median
  of what it prints for the epochs after the first, *wall* that of the time from one such line to the next, in which
  saving counts.
* ``script``: `finetune(devices=2)` called by a script, with and without ``out``.
* ``timeline``: a run of 30 steps an epoch, after its shapes are recorded. *host* is where each rank's interpreter
  was, by phase; *device* what ran there (a profiler's record of one epoch): compute, sums over ranks, how much of
  these ran beside compute, and how long nothing ran; *calls* the calls of the driver that took longest. *link* is
  what a sum of all gradients over the ranks takes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ROWS, EPOCHS, STEPS = 9_600, 4, 30
WATCHED = EPOCHS - 2  # the epoch whose phases are timed; the one after it is recorded by the profiler

SCRIPT = """
import json, sys, time
from flodl.train import EpochMetrics
from flodl_hf import finetune

def main():
    speeds, ends = [], []
    def note(event):
        if isinstance(event, EpochMetrics):
            speeds.append(event.samples / event.epoch_ms * 1e3)
            ends.append(time.monotonic())
    finetune({model!r}, train={train!r}, out={out!r}, on_event=note, devices={devices!r}, batch_size={batch},
             epochs={epochs}, precision={precision!r})
    print(json.dumps({{"told": speeds, "ends": ends}}))

if __name__ == "__main__":
    main()
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=None)
    parser.add_argument("--only", nargs="*", default=["cli", "script", "timeline"])
    parser.add_argument("--tiny", action="store_true", help="a small model on processors")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), args.tiny)
        print(bench.about(), flush=True)
        for batch in args.batches or ([8] if args.tiny else [64, 32]):
            for part in args.only:
                getattr(bench, part)(batch)
        if args.json:
            args.json.write_text(json.dumps({"about": bench.about(), "rows": bench.rows}, indent=1) + "\n")


class Bench:
    """The model, the data, and the figures found."""

    def __init__(self, place: Path, tiny: bool) -> None:
        self.place, self.tiny = place, tiny
        self.precision = "fp32" if tiny else "bf16"
        self.count = 64 if tiny else ROWS
        self.two: Any = ["cpu", "cpu"] if tiny else 2
        self.rows: list[dict[str, Any]] = []
        words = made_up_words(400 if tiny else 6_000)
        self.texts = made_up_texts(words, self.count)
        self.train = place / "train.tsv"
        self.train.write_text(
            "text\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(self.texts)), encoding="utf-8"
        )
        self.model = make_model(place / "model", words, TINY if tiny else BASE)

    def about(self) -> str:
        """Return the machine and the versions."""
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{names or 'processors'}, {os.cpu_count()} cores, torch {torch.__version__}"

    def note(self, part: str, what: str, batch: int, told: Sequence[float], ends: Sequence[float]) -> None:
        """Print and keep one row."""
        gaps = [after - before for before, after in pairwise(ends)]
        told_later = statistics.median(told[1:]) if len(told) > 1 else float("nan")
        wall = self.count / statistics.median(gaps) if gaps else float("nan")
        self.rows.append({"part": part, "what": what, "batch": batch, "told": list(told), "gaps_s": gaps})
        each = " ".join(f"{speed:,.0f}" for speed in told)
        print(
            f"{part:8} batch {batch:3} {what:22} {told_later:9,.0f} told {wall:9,.0f} wall rows/s   ({each})",
            flush=True,
        )

    def cli(self, batch: int) -> None:
        """Run the command line."""
        out = self.place / "tuned"
        two = ["--devices", "cpu,cpu"] if self.tiny else ["--devices", "2"]
        one = ["--devices", "cpu"] if self.tiny else []
        for what, flags in (
            ("one device, out", [*one, "--out", str(out)]), ("two devices, out", [*two, "--out", str(out)]),
            ("two devices, no out", two),
        ):  # fmt: skip
            words = ["finetune", str(self.model), "--train", str(self.train), "--epochs", str(EPOCHS)]
            words += ["--batch-size", str(batch), "--precision", self.precision, *flags]
            told, ends = [], []
            for at_s, line in lines_of([sys.executable, "-m", "flodl_hf.cli", *words], self.place):
                found = re.search(r"([\d,]+) rows/s", line)
                if found:
                    told.append(float(found[1].replace(",", "")))
                    ends.append(at_s)
                if "warning" in line.lower():
                    print("   ", line.strip()[:300], flush=True)
            self._clear(out)
            self.note("cli", what, batch, told, ends)

    def script(self, batch: int) -> None:
        """Call `finetune` from a script."""
        out, script = self.place / "scripted", self.place / "script.py"
        for what, target in (("two devices, out", str(out)), ("two devices, no out", None)):
            script.write_text(
                SCRIPT.format(
                    model=str(self.model), train=str(self.train), out=target, devices=self.two, batch=batch,
                    epochs=EPOCHS, precision=self.precision,
                )
            )  # fmt: skip
            found: dict[str, list[float]] = {"told": [], "ends": []}
            for _, line in lines_of([sys.executable, str(script)], self.place):
                if line.startswith('{"told"'):
                    found = json.loads(line)
            self._clear(out)
            self.note("script", what, batch, found["told"], found["ends"])

    def _clear(self, out: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name(out.name + ".checkpoints"), ignore_errors=True)

    def timeline(self, batch: int) -> None:
        """Look at one epoch of 30 steps in each rank."""
        rows = self.texts[: batch * (4 if self.tiny else STEPS)]
        data = [{"text": text, "label": i % 2} for i, text in enumerate(rows)]
        one = ["cpu"] if self.tiny else ["cuda:0"]
        # On one device also what each of two has to do.
        for devices, size in ((one, batch), (one, batch // 2), (self.two, batch)):
            watch = Watch(str(self.place / f"watched-{batch}-{size}-{len(devices) if devices is one else 2}"))
            part = data if size == batch else data[: len(data) // 2]
            train_watched(self.model, part, devices, size, self.precision, watch)
            for found in watch.results():
                self.rows.append({"part": "timeline", "batch": size, "devices": str(devices), **found})
                show(size, found)


def lines_of(command: Sequence[str], folder: Path) -> Iterable[tuple[float, str]]:
    """Yield the lines that a command prints in a folder, each with the time at which it came."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    assert process.stdout is not None
    last: list[str] = []
    for line in process.stdout:
        last = [*last[-20:], line]
        yield time.monotonic(), line
    if process.wait():
        print(f"FAILED: {' '.join(command)[:200]}\n{''.join(last)}", flush=True)


def made_up_words(count: int) -> list[str]:
    """Return so many words of two to four syllables."""
    draw = random.Random(3)
    syllables = [a + b for a in "bcdfghklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    return ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(count)]


def made_up_texts(words: Sequence[str], count: int) -> list[str]:
    """Return so many texts of log-normal lengths, median 22 words, at most 90."""
    draw = random.Random(7)
    lengths = [max(1, min(90, round(draw.lognormvariate(3.09, 1.0)))) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def make_model(folder: Path, words: Sequence[str], size: dict[str, int]) -> Path:
    """Return a folder with a BERT at random and a vocabulary learned from the words."""
    import torch

    from flodl_hf import AutoModelForSequenceClassification
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.training.demo import train_wordpiece

    torch.manual_seed(0)
    tokenizer = train_wordpiece(list(words), vocab_size=min(8_000, 4 * len(words)), max_length=512)
    vocabulary = 30522 if size is BASE else tokenizer.vocab_size
    config = ModelConfig.for_model(
        "bert", architectures=["BertForSequenceClassification"], vocab_size=vocabulary, max_position_embeddings=512,
        type_vocab_size=2, labels=["0", "1"], **size,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    model.tokenizer = tokenizer
    model._mark_untrained(())
    model.save_pretrained(folder)
    return folder


# ---- inside of the ranks ----------------------------------------------------------------------------------


def train_watched(model: Path, data: Any, devices: Any, batch: int, precision: str, watch: Watch) -> None:
    """Train as `finetune` does, with somebody watching each rank."""
    from contextlib import ExitStack

    from flodl.train import Trainer
    from flodl_hf.training import run
    from flodl_hf.training.job import plan_job
    from flodl_hf.training.options import make_options

    options: Any = {"devices": devices, "batch_size": batch, "precision": precision, "epochs": EPOCHS + 1}
    job = plan_job(model, data, None, make_options(options))
    builder = Trainer.builder

    def watched(*args: Any) -> Any:
        return builder(*args).epoch_fn(watch)

    with ExitStack() as stack:
        stack.callback(setattr, Trainer, "builder", staticmethod(builder))
        Trainer.builder = staticmethod(watched)  # type: ignore[method-assign]
        run.train_job(job, lambda event: None, stack)


@dataclass
class Watch:
    """Called before each epoch in each rank; times phases in one epoch, and has the profiler record the next.

    Args:
        folder: gets one file from each rank.
    """

    folder: str

    def __call__(self, epoch: int, trainer: Any) -> None:
        """Begin and end what this epoch is watched for."""
        if epoch == WATCHED:
            self.link_ms = link_ms(trainer)
            self.phases = Phases(trainer)
        elif epoch == WATCHED + 1:
            self.found = self.phases.end()
            self.profiler = start_profiler(trainer)
        elif epoch == WATCHED + 2:
            self.found |= device_times(self.profiler, self.found["steps"])
            self.found["link_ms"] = self.link_ms
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{trainer.ranks.rank}.json").write_text(json.dumps({"rank": trainer.ranks.rank, **self.found}))

    def results(self) -> list[dict[str, Any]]:
        """Return what the ranks found."""
        return [json.loads(path.read_text()) for path in sorted(Path(self.folder).glob("*.json"))]


class Phases:
    """Where a rank's interpreter is, by the phases that it names."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.ranks = trainer, trainer.ranks
        self.times: dict[str, float] = {}
        self.name, self.since = "callback", time.perf_counter()
        self.start, self.first = self.since, trainer.policy.steps
        self.phase = self.ranks.phase
        self.ranks.phase = self._enter
        self.settle = trainer.log.settle
        trainer.log.settle = self._settle

    def _enter(self, phase: str, step: int | None = None) -> None:
        now = time.perf_counter()
        self.times[self.name] = self.times.get(self.name, 0.0) + now - self.since
        self.name, self.since = phase, now
        self.phase(phase, step)

    def _settle(self, tally: Any) -> None:
        """Time separately how long the end of an epoch waits for the device."""
        now = time.perf_counter()
        self.settle(tally)
        spent = time.perf_counter() - now
        self.times["waiting for the device"] = self.times.get("waiting for the device", 0.0) + spent
        self.since += spent

    def end(self) -> dict[str, Any]:
        """Return milliseconds a step by phase, and of the whole."""
        self._enter("callback")
        self.ranks.phase, self.trainer.log.settle = self.phase, self.settle
        steps = self.trainer.policy.steps - self.first
        whole = time.perf_counter() - self.start
        ordered = sorted(self.times.items(), key=lambda entry: -entry[1])
        return {
            "steps": steps,
            "step_ms": whole / steps * 1e3,
            "host_ms": {name: spent / steps * 1e3 for name, spent in ordered},
        }


def link_ms(trainer: Any) -> float:
    """Return the milliseconds of a sum over ranks of as many float32 numbers as the model has parameters."""
    import torch

    ranks = trainer.ranks
    if ranks.solo:
        return 0.0
    flat = torch.zeros(sum(p.numel() for p in trainer.model.parameters()), device=ranks.device)
    times = []
    for _ in range(5):
        wait_for(ranks.device)
        begin = time.perf_counter()
        ranks.sum_(flat)
        wait_for(ranks.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) * 1e3


def wait_for(device: Any) -> None:
    """Wait until a CUDA device has done all that it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_profiler(trainer: Any) -> Any:
    """Return a profiler that records; None where there is no CUDA."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if trainer.ranks.device.type != "cuda":
        return None
    torch.cuda.synchronize(trainer.ranks.device)
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    profiler.__enter__()
    return profiler


def device_times(profiler: Any, steps: int) -> dict[str, Any]:
    """Return milliseconds a step of what ran on the device and of the driver's calls, from a profiler's record."""
    if profiler is None:
        return {}
    import torch

    torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    work: list[tuple[float, float]] = []
    sums: list[tuple[float, float]] = []
    calls: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for event in profiler.profiler.kineto_results.events():
        start, length, name = event.start_ns() / 1e6, event.duration_ns() / 1e6, event.name()
        if event.device_type() == torch.autograd.DeviceType.CUDA:  # pyright: ignore[reportPrivateImportUsage]
            (sums if re.search("nccl|ptop|_signal", name.lower()) else work).append((start, start + length))
            kernels.setdefault(re.split(r"[<(]", name)[0][:60], []).append(length)
        elif name.startswith(("cuda", "cu")) and "::" not in name:
            calls.setdefault(name, []).append(length)
    everything = union(work + sums)
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    busy, compute, summing = (length_of(union(part)) for part in (work + sums, work, sums))

    def most(table: dict[str, list[float]], count: int) -> dict[str, list[float]]:
        ordered = sorted(table.items(), key=lambda entry: -sum(entry[1]))[:count]
        return {name: [round(sum(each) / steps, 3), round(len(each) / steps, 1)] for name, each in ordered}

    return {
        "device_ms": {
            "span": span / steps,
            "compute": compute / steps,
            "sums": summing / steps,
            "sums beside compute": (compute + summing - busy) / steps,
            "idle": (span - busy) / steps,
        },
        "calls_ms": most(calls, 6),
        "kernels_ms": most(kernels, 8),
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time that do not overlap, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length_of(spans: list[tuple[float, float]]) -> float:
    """Return how long spans that do not overlap are together."""
    return sum(end - begin for begin, end in spans)


def show(batch: int, found: dict[str, Any]) -> None:
    """Print what one rank found."""

    def told(table: dict[str, Any]) -> str:
        return ", ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value[0]:.2f} in {value[1]:g}"
            for name, value in table.items()
        )

    print(
        f"timeline batch {batch} rank {found['rank']}: {found['step_ms']:.2f} ms a step, link {found['link_ms']:.2f} ms"
        f"\n    host   {told(found['host_ms'])}"
    )
    for name in ("device", "calls", "kernels"):
        if f"{name}_ms" in found:
            print(f"    {name:7}{told(found[f'{name}_ms'])}", flush=True)


if __name__ == "__main__":
    main()
