r"""Ranks of a torchrun job that are killed, frozen, slowed and started again: who is told, when, and what is lost?

A small model is trained by ``torchrun``, on processors with gloo or on GPUs with NCCL and recorded steps. One rank gets
a signal when it enters a phase; the other ranks have to say which rank it was, its phase and its step. Then the job is
started again, and its weights, optimiser and random states are compared with those of a job that was left alone. "told"
counts the tries in which a survivor named rank, phase and step; the times are from the signal to that line.

    python benchmarks/torchrun_faults.py --ranks 2 4 --times 1
    python benchmarks/torchrun_faults.py --backend nccl --ranks 2 --at-once 8 \
        --phases "model build" forward evaluation checkpoint --kinds SIGKILL SIGSTOP
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.data import Batch, DataLoader, Where
from flodl.distributed.group import Ranks
from flodl.train import Loss, Trainer, adamw
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.schedule import Cosine

STEPS, SAVE_EVERY = 12, 3
PHASES = (
    "model build",
    "first broadcast",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimiser",
    "callback",
    "evaluation",
    "checkpoint",
)
MOST = {"model build": 1, "first broadcast": 1, "evaluation": 3, "checkpoint": 3, "callback": 3}
KINDS = ("SIGKILL", "SIGSTOP", "slow")
SLOW_S = 3.0


class Rows:
    """Rows that are made when they are asked for."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(32, 6, generator=g), torch.randint(0, 3, (32,), generator=g)

    def __len__(self) -> int:
        return 32

    def get(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


def jitter(batch: Batch, where: Where) -> Batch:
    """Change a batch by numbers drawn from its address, as augmentation should: batches are made ahead."""
    noise = torch.from_numpy(where.rng("jitter").normals(batch.num_rows * 6)).reshape(-1, 6)
    return batch.with_parts(x=batch["x"] + 0.1 * noise.to(batch["x"]))


def train_step(model: nn.Module, batch: Any) -> Loss:
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def rank_main(folder: Path) -> None:
    """Train as one rank of the job; the victim falls where the environment says."""
    torch.set_num_threads(1)
    victim, phase, number, kind = os.environ.get("FAULT", "-1|none|0|none").split("|")
    enter, count = Ranks.phase, [0]

    def watched(self: Ranks, name: str, step: int | None = None) -> None:
        enter(self, name, step)
        if name == phase and self.rank == int(victim):
            count[0] += 1
            if count[0] == int(number):
                row = self.rank % self.board.world
                (folder / "fell").write_text(f"{time.time()} {self.board.step(row)}")
                if kind == "slow":
                    time.sleep(SLOW_S)
                else:
                    os.kill(os.getpid(), getattr(signal, kind))

    Ranks.phase = watched  # type: ignore[method-assign]
    made = Trainer.builder(
        lambda device: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)), adamw(1e-2), train_step
    )
    made.dataset(DataLoader(Rows(), 8, transform=jitter, seed=11)).num_epochs(3).checkpoints(
        str(folder / "run"), every=SAVE_EVERY, resume=True
    )
    made.set(seed=11, max_grad_norm=1.0, schedule=Cosine(1e-2, 1e-4, STEPS), policy="sync")
    if os.environ["BACKEND"] == "nccl":
        made.set(capture=True)
    made.eval_fn(lambda model: {"size": float(sum(p.abs().sum() for p in model.parameters()))})
    made.run()


def job(folder: Path, ranks: int, backend: str, fault: str = "") -> tuple[int, list[tuple[float, str]]]:
    """Run torchrun; return its status and the lines that it printed, each with its time."""
    folder.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FAULT": fault or "-1|none|0|none",
        "GLOO_SOCKET_IFNAME": "lo",
        "BACKEND": backend,
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), env.get("PYTHONPATH"))))
    if backend == "gloo":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               str(Path(__file__)), "--rank-folder", str(folder)]  # fmt: skip
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    lines = [(time.time(), line.rstrip("\n")) for line in running.stdout]
    return running.wait(), lines


def finished(folder: Path) -> dict[str, torch.Tensor]:
    saved = read_checkpoint(list_checkpoints(folder / "run")[-1])
    return {f"{file}/{name}": t for file, part in saved.tensors.items() for name, t in part.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str:
    """Return which tensors differ, and by how much."""
    if a.keys() != b.keys():
        return f"tensors {sorted(a.keys() ^ b.keys())} are in one alone"
    found = {name: float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel()}
    return ", ".join(f"{name} {by:.1e}" for name, by in found.items() if by)


def named(line: str, victim: int, phase: str, step: str) -> bool:
    """Return whether a survivor's line says which rank it was, in which phase and at which step."""
    return bool(re.search(rf"rank {victim}: .*phase '{phase}', step {step}\b", line))


class Try(NamedTuple):
    """What one fault came to: whether it struck, was told of, and cost nothing; and when it was told."""

    struck: bool
    told: bool
    equal: bool
    after: float | None


def tried(
    folder: Path, ranks: int, backend: str, kind: str, phase: str, victim: int, number: int,
    whole: dict[str, torch.Tensor],
) -> Try:  # fmt: skip
    """Run a job in which a rank falls, start it again, and return what became of it."""
    status, lines = job(folder, ranks, backend, f"{victim}|{phase}|{number}|{kind}")
    struck, told, after = (folder / "fell").exists(), False, None
    if struck:
        when, step = (folder / "fell").read_text().split()
        hits = [at - float(when) for at, text in lines if named(text, victim, phase, step)]
        told, after = (status == 0 if kind == "slow" else bool(hits)), next(iter(hits), None)
    again, lines = job(folder, ranks, backend)
    equal = again == 0 and same(finished(folder), whole)
    if not equal:
        place = f"{kind} of rank {victim} in {phase!r}, the {number}th time"
        why = "\n".join(text for _, text in lines[-12:]) if again else different(finished(folder), whole)
        print(f"not equal: {place}: {why}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return Try(struck, told, equal, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=1, help="tries of each phase and kind")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time, where there are cores for them")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.rank_folder is not None:
        rank_main(said.rank_folder)
        return
    chance, bad = random.Random(0), 0

    def moment(phase: str) -> tuple[int, int]:
        most = MOST.get(phase, 9)
        # the first steps on a GPU are not recorded yet
        return (most - 4 if said.backend == "nccl" and most == 9 else 1), most

    print("| ranks | fault | phase | tried | struck | told | equal to the bit | told after |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as base, ThreadPoolExecutor(said.at_once) as pool:
        for ranks in said.ranks:
            status, lines = job(Path(base) / f"whole{ranks}", ranks, said.backend)
            if status:
                raise SystemExit("\n".join(text for _, text in lines))
            whole = finished(Path(base) / f"whole{ranks}")
            tries: list[tuple[str, str, list[Future[Try]]]] = []
            for kind in said.kinds:
                for phase in said.phases:
                    begun = []
                    for number in range(said.times):
                        folder = Path(base) / f"{ranks}-{kind}-{phase.replace(' ', '-')}-{number}"
                        victim, step = chance.randrange(ranks), chance.randint(*moment(phase))
                        begun.append(pool.submit(tried, folder, ranks, said.backend, kind, phase, victim, step, whole))
                    tries.append((kind, phase, begun))
            for kind, phase, begun in tries:
                found = [future.result() for future in begun]
                struck, told, equal = (sum(counts) for counts in zip(*(one[:3] for one in found), strict=True))
                after = [one.after for one in found if one.after is not None]
                bad += 2 * said.times - equal - told - (said.times - struck)
                times = f"{statistics.median(after):.2f} s (most {max(after):.2f})" if after else "-"
                print(
                    f"| {ranks} | {kind} | {phase} | {said.times} | {struck} | {told} | {equal} | {times} |", flush=True
                )
    print(
        f"\ntorch {torch.__version__}, {said.backend}, seed 0; {bad} losses. "
        "A slow rank is told of by nobody: its job ends well."
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
