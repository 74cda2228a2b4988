"""What goes wrong in a training run, tried again and again: is anything lost?

A small model with dropout, BatchNorm, clipping, a schedule and random augmentation is trained on a CPU. Each line of
the table breaks such a run in one way, at moments drawn at random, resumes it from its last checkpoint and compares
weights, optimiser and random states with a run that was left alone. "struck" counts the tries in which the fault came
before the run was over; "equal to the bit" the resumed runs whose every tensor has the same bits as the undisturbed
one.

    python benchmarks/faults.py --times 20
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.distributed import RankError, Ranks
from flodl.errors import TrainError, TrainInterrupted
from flodl.train import Loss, Saved, SaveFailed, Step, Trainer, Warned, adamw
from flodl.train.saving import keeper
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.schedule import Cosine

STEPS, SAVE_EVERY = 40, 7
PHASES = ("data", "forward", "backward", "reduce", "optimiser", "callback", "evaluation", "checkpoint", "shutdown")


class Rows:
    """Rows whose augmentation draws from torch, numpy and Python: the hardest case to resume."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 6, generator=g), torch.randint(0, 3, (64,), generator=g)

    def __len__(self) -> int:
        return 64

    def get(self, i: int) -> dict[str, Any]:
        noise = torch.randn(6) * 0.1 + float(np.random.rand()) * 0.1 + random.random() * 0.1
        return {"x": self.x[i] + noise, "y": self.y[i]}


def make_model(device: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def train_step(model: nn.Module, batch: Any) -> Loss:
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def run(folder: Path, ranks: int = 1, **extra: Any) -> Any:
    """Return the builder of the run that everything here does."""
    made = Trainer.builder(make_model, adamw(1e-2), extra.pop("step", train_step)).dataset(Rows()).batch_size(8)
    made.num_epochs(5).checkpoints(str(folder), every=SAVE_EVERY, resume=True)
    made.set(seed=11, max_grad_norm=1.0, schedule=Cosine(1e-2, 1e-4, STEPS), **extra)
    made.eval_fn(lambda model: {"size": float(sum(p.abs().sum() for p in model.parameters()))})
    return made if ranks == 1 else made.devices(ranks, start="fork").policy("sync")


def finished(folder: Path) -> dict[str, Any]:
    saved = read_checkpoint(list_checkpoints(folder)[-1])
    return {f"{file}/{name}": t for file, part in saved.tensors.items() for name, t in part.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def apart(call: Callable[..., None], *args: Any) -> Any:
    """Start ``call`` in a silent process of its own."""

    def silently() -> None:
        os.setpgrp()
        out = os.open(os.devnull, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            call(*args)
        except TrainInterrupted:  # multiprocessing would exit with 1, a program ends with SIGINT
            sys.exit(128 + signal.SIGINT)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process: Any = multiprocessing.get_context("fork").Process(target=silently)
        process.start()
    return process


# ---- the faults: each breaks one run, and returns how long the others took to stop where there are others --------


def fall_in_phase(folder: Path, ranks: int, phase: str, number: int, victim: int, how: signal.Signals) -> None:
    """Train; the victim gets a signal when it enters ``phase`` for the ``number``-th time."""
    enter, take, count = Ranks.phase, Step.run, [0]

    def strike() -> None:
        count[0] += 1
        if count[0] == number:
            (folder / "fell").write_text(str(time.time()))
            os.kill(os.getpid(), how)

    def watched(self: Ranks, name: str, step: int | None = None) -> None:
        enter(self, name, step)
        if name == phase and self.rank == victim:
            strike()

    def watched_step(self: Step, *args: Any, **named: Any) -> Any:
        strike()
        return take(self, *args, **named)

    Ranks.phase = watched  # type: ignore[method-assign]
    if ranks == 1 and phase == "forward":  # one rank records no phases of its steps
        Step.run = watched_step  # type: ignore[method-assign]
    try:
        run(folder, ranks).run()
    except RankError as error:
        named = error.rank == victim
        (folder / "noticed").write_text(f"{time.time()} {named}")
        raise


def killed_in(phase: str, ranks: int, how: signal.Signals = signal.SIGKILL) -> Callable[[Path, random.Random], Outcome]:
    most = {"shutdown": 1, "evaluation": 5, "checkpoint": 6, "callback": 5}.get(phase, STEPS)

    def fault(folder: Path, chance: random.Random) -> Outcome:
        victim = chance.randrange(ranks)
        process = apart(fall_in_phase, folder, ranks, phase, chance.randint(1, most), victim, how)
        process.join()
        fell, noticed = folder / "fell", folder / "noticed"
        if not fell.exists():
            return Outcome(happened=False)
        if ranks == 1:
            return Outcome(process.exitcode == -how)
        if not noticed.exists():
            return Outcome(happened=True, right=False)
        when, named = noticed.read_text().split()
        return Outcome(True, named == "True", float(when) - float(fell.read_text()))

    return fault


def torn_write(folder: Path, chance: random.Random) -> Outcome:
    """SIGKILL inside a write, rename or fsync of a save, with half of the file written."""
    number = chance.randint(1, 40)

    def torn() -> None:
        count = [0]
        write = keeper._write

        def fatal(call: Any) -> Any:
            def once(*args: Any) -> Any:
                count[0] += 1
                if count[0] == number:
                    if call is write:
                        data = b"".join(args[1])
                        Path(args[0]).write_bytes(data[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args)

            return once

        keeper._write, os.rename = fatal(write), fatal(os.rename)  # type: ignore[assignment]
        keeper.sync_folder = fatal(keeper.sync_folder)
        run(folder).run()

    process = apart(torn)
    process.join()
    return Outcome(process.exitcode == -signal.SIGKILL)


def anywhere(ranks: int) -> Callable[[Path, random.Random], Outcome]:
    """SIGKILL of the whole process (group) after a random time."""

    def fault(folder: Path, chance: random.Random) -> Outcome:
        process = apart(lambda: run(folder, ranks).run())
        process.join(timeout=chance.uniform(0.02, 0.2 if ranks == 1 else 0.7))
        happened = process.is_alive()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return Outcome(happened)

    return fault


def signalled(number: signal.Signals, ranks: int) -> Callable[[Path, random.Random], Outcome]:
    """A polite signal: the step is finished, the state saved, the exit code 128 + the signal."""

    def slowly(folder: Path) -> None:
        def rest(event: Any) -> None:
            if type(event).__name__ == "StepDone":
                (folder / "begun").touch()
                time.sleep(0.01)

        run(folder, ranks).epoch_fn(lambda epoch, t: None if epoch else t.events.subscribe(rest)).run()

    def fault(folder: Path, chance: random.Random) -> Outcome:
        process = apart(slowly, folder)
        until = time.monotonic() + 60
        while not (folder / "begun").exists() and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        began = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        process.join()
        if process.exitcode == 0:
            return Outcome(happened=False)
        return Outcome(True, process.exitcode == 128 + number, time.time() - began)

    return fault


def full_disk(folder: Path, chance: random.Random) -> Outcome:
    """Writing fails from some save on; the run goes on, and what was saved before stays."""
    write, left = keeper._write, [chance.randint(0, 30)]

    def limited(path: Path, chunks: Iterable[bytes | memoryview]) -> Any:
        if left[0] <= 0:
            path.write_bytes(b"".join(chunks)[:10])
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(path, chunks)

    saved, failed = [], []
    keeper._write = limited  # type: ignore[assignment]
    try:
        builder = run(folder)
        builder.subscribe(saved.append, Saved).subscribe(failed.append, SaveFailed).run()
    finally:
        keeper._write = write
    kept = all((folder / f"step-{e.step:08d}").is_dir() for e in saved[-2:])
    return Outcome(bool(failed), kept)


def not_a_number(folder: Path, chance: random.Random) -> Outcome:
    """The loss turns NaN at one step: the run stops there, unapplied, and goes on once the cause is gone."""
    number, count = chance.randint(1, STEPS), [0]

    def poisoned(model: nn.Module, batch: Any) -> Loss:
        loss = train_step(model, batch)
        count[0] += 1
        return Loss(loss.sum * float("nan"), loss.count) if count[0] == number else loss

    try:
        run(folder, step=poisoned).run()
    except TrainError as error:
        return Outcome(True, f"step {number - 1}" in str(error) or f"step {number}" in str(error))
    return Outcome(True, False)


def skipped_nan(folder: Path, chance: random.Random) -> Outcome:
    """``on_nan="skip"``: told once for each step left out, and every weight stays finite."""
    number, count, told = chance.randint(1, STEPS), [0], []

    def poisoned(model: nn.Module, batch: Any) -> Loss:
        loss = train_step(model, batch)
        count[0] += 1
        return Loss(loss.sum * float("nan"), loss.count) if count[0] == number else loss

    trained = run(folder, step=poisoned, on_nan="skip").subscribe(told.append, Warned).run()
    finite = all(bool(torch.isfinite(t).all()) for t in trained.state_dict().values())
    shutil.rmtree(folder)
    folder.mkdir()
    return Outcome(len(told) == 1, finite)


def damaged(folder: Path, chance: random.Random) -> Outcome:
    """One bit of the newest checkpoint turns over: it is not used, the one before it is."""
    process = apart(fall_in_phase, folder, 1, "forward", chance.randint(2 * SAVE_EVERY + 2, STEPS), 0, signal.SIGKILL)
    process.join()
    newest = list_checkpoints(folder)[-1]
    file = chance.choice([p for p in sorted(newest.iterdir()) if p.stat().st_size])
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(bytes(data))
    return Outcome(True)


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one try showed: whether the fault struck, whether it was answered as it should be, and how fast."""

    happened: bool
    right: bool = True
    stopped_after: float | None = None


@dataclass
class Line:
    """One kind of fault, over all its tries."""

    name: str
    tried: int = 0
    struck: int = 0
    right: int = 0
    equal: int = 0
    stopped: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        stopped = f"{statistics.median(self.stopped):.2f} s (most {max(self.stopped):.2f})" if self.stopped else "-"
        return f"| {self.name} | {self.tried} | {self.struck} | {self.right} | {self.equal} | {stopped} |"


def faults() -> Iterator[tuple[str, int, Callable[[Path, random.Random], Outcome]]]:
    """Yield each fault with its name and its number of ranks."""
    for ranks in (1, 2):
        for phase in PHASES:
            if ranks > 1 or phase not in ("data", "backward", "reduce", "optimiser"):  # phases that other ranks report
                yield f"SIGKILL in {phase}, {ranks} rank{'s' * (ranks > 1)}", ranks, killed_in(phase, ranks)
        yield f"SIGKILL of everything at any moment, {ranks} rank{'s' * (ranks > 1)}", ranks, anywhere(ranks)
        for number in (signal.SIGTERM, signal.SIGINT):
            yield f"{number.name}, {ranks} rank{'s' * (ranks > 1)}", ranks, signalled(number, ranks)
    yield "SIGKILL inside a write of a save", 1, torn_write
    yield "a rank frozen (SIGSTOP), 2 ranks", 2, killed_in("forward", 2, signal.SIGSTOP)
    yield "full disk", 1, full_disk
    yield "a bit of the newest checkpoint flipped", 1, damaged
    yield "NaN loss, stop", 1, not_a_number
    yield "NaN loss, skip", 1, skipped_nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="tries of each fault")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    said = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # children that are forked do not import again
    chance = random.Random(0)
    print("| fault | tried | struck | answered as it should | equal to the bit | others stopped after |")
    print("|---|---|---|---|---|---|")
    bad = 0
    with tempfile.TemporaryDirectory() as base:
        whole = {}
        for ranks in (1, 2):
            folder = Path(base) / f"whole{ranks}"
            apart(lambda f=folder, r=ranks: run(f, r).run()).join()
            whole[ranks] = finished(folder)
        for name, ranks, fault in faults():
            if said.only not in name:
                continue
            line = Line(name)
            for _ in range(said.times):
                folder = Path(base) / "run"
                folder.mkdir()
                outcome = fault(folder, chance)
                line.tried += 1
                line.struck += outcome.happened
                line.right += outcome.right
                if outcome.stopped_after is not None:
                    line.stopped.append(outcome.stopped_after)
                resumed = apart(lambda f=folder, r=ranks: run(f, r).run())
                resumed.join()
                line.equal += resumed.exitcode == 0 and same(finished(folder), whole[ranks])
                shutil.rmtree(folder)
            bad += line.tried - line.equal + line.tried - line.right
            print(line, flush=True)
    print(f"\ntorch {torch.__version__}, seed 0, a checkpoint every {SAVE_EVERY} of {STEPS} steps; {bad} losses")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
