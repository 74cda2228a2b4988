"""Cases through workers: blocks are forked, watched, and begun again behind a case that took its worker along.

Decides what a worker's end means: a case that does not come back in its time hangs, one whose process dies crashes,
or ran out of memory where that is what the system said.
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.torture import library
from tests.torture.case import Case, Grade, Verdict
from tests.torture.worker import run_block, said_in

__all__ = ["RigError", "default_place", "load_suite", "run_cases"]

BLOCK = 250
"""Cases in one process; enough that starting it costs nothing beside them."""
LITTLE_ROOM = 2 << 30
"""Bytes; a folder in memory that has less free is not worked in."""


class RigError(RuntimeError):
    """The rig itself failed; the text is a worker's traceback."""


@dataclass
class _Worker:
    cases: Sequence[Case]
    process: int
    lines: int
    root: Path
    begun: float = 0.0
    done: int = 0
    current: bool = False
    rest: bytes = b""
    cpu: float = 0.0
    killed: str = ""
    fault: str = ""
    verdicts: list[tuple[Case, Verdict]] = field(default_factory=list)


def default_place() -> Path | None:
    """Return a folder that lies in memory, or None where there is none: most cases are about bytes, not about disks."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK | os.X_OK):
        return None
    return memory if shutil.disk_usage(memory).free > LITTLE_ROOM else None


def load_suite(name: str) -> ModuleType:
    """Return the module of a suite."""
    return import_module(f"tests.torture.{name}")


def run_cases(
    suite: ModuleType,
    cases: Sequence[Case],
    *,
    workers: int = 1,
    place: Path | None = None,
    told: Callable[[int], None] | None = None,
    seconds: float = math.inf,
) -> Iterator[tuple[Case, Verdict]]:
    """Yield each case with its verdict, in no fixed order.

    Args:
        suite: the module.
        cases: its cases.
        workers: processes at once.
        place: a folder to work in; memory, where the system offers it as a folder, by default.
        told: called with the number of cases as they are finished.
        seconds: what is not finished then is given up, without a verdict.

    Raises:
        RigError: a suite failed by itself.
    """
    until = time.monotonic() + seconds
    library.prepare()
    prepare = getattr(suite, "prepare", None)
    if prepare is not None:
        prepare()
    waiting = deque(_blocks(suite, cases, workers))
    running: dict[int, _Worker] = {}
    finished = 0
    with tempfile.TemporaryDirectory(prefix="flodl-torture-", dir=place or default_place()) as top:
        try:
            while (waiting or running) and time.monotonic() < until:
                while waiting and len(running) < workers:
                    worker = _start(suite, waiting.popleft(), Path(top))
                    running[worker.lines] = worker
                ready, _, _ = select.select(list(running), [], [], 0.5)
                for lines in ready:
                    _read(running[lines])
                for worker in list(running.values()):
                    _check_time(worker)
                    for pair in worker.verdicts:
                        finished += 1
                        yield pair
                    worker.verdicts.clear()
                    if told is not None:
                        told(finished)
                    if worker.process == 0:
                        del running[worker.lines]
                        left = _after(worker)
                        for pair in worker.verdicts:
                            finished += 1
                            yield pair
                        if left:
                            waiting.appendleft(left)
        finally:
            for worker in running.values():
                _kill(worker)


def _blocks(suite: ModuleType, cases: Sequence[Case], workers: int) -> Iterator[Sequence[Case]]:
    """Yield what one process does: enough blocks for all workers, and in one those that share a preparation."""
    together: Callable[[Case], str] = getattr(suite, "together", lambda _case: "")
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(together(case), []).append(case)
    rounds: int = getattr(suite, "ROUNDS", 4)
    most = BLOCK if workers == 1 else max(1, min(BLOCK, -(-len(cases) // (rounds * workers))))
    for group in groups.values():
        size = -(-len(group) // -(-len(group) // most))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _start(suite: ModuleType, cases: Sequence[Case], top: Path) -> _Worker:
    root = Path(tempfile.mkdtemp(prefix="worker-", dir=top))
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        os.close(read)
        run_block(suite, cases, root, write)
    os.close(write)
    return _Worker(cases, process, read, root, time.monotonic())


def _read(worker: _Worker) -> None:
    data = os.read(worker.lines, 1 << 16)
    if not data:
        _reap(worker)
        return
    *lines, worker.rest = (worker.rest + data).split(b"\n")
    for line in lines:
        value = json.loads(line)
        if isinstance(value, int):
            worker.current, worker.begun, worker.cpu = True, time.monotonic(), _cpu_seconds(worker.process)
        elif value[0] == "rig":
            worker.fault = value[1]
        else:
            verdict = value[1]
            verdict["grade"] = Grade(verdict["grade"])
            worker.verdicts.append((worker.cases[worker.done], Verdict(**verdict)))
            worker.done, worker.current, worker.begun = worker.done + 1, False, time.monotonic()


def _check_time(worker: _Worker) -> None:
    if worker.process == 0 or not worker.current:
        return
    case = worker.cases[worker.done]
    waited = time.monotonic() - worker.begun
    # Judged by the processor where the case uses it, because others may use it too; by the clock where it waits.
    used = _cpu_seconds(worker.process) - worker.cpu if waited > case.cpu_s else 0.0
    if waited > case.wall_s or used > case.cpu_s + 1.0:
        worker.killed = f"killed after {waited:.1f} s, {used:.1f} s of them on the processor"
        _kill(worker)


def _kill(worker: _Worker) -> None:
    if worker.process:
        for target in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                target(worker.process, signal.SIGKILL)
        _reap(worker)


def _reap(worker: _Worker) -> None:
    _, status = os.waitpid(worker.process, 0)
    if not worker.killed:
        code = os.waitstatus_to_exitcode(status)
        worker.killed = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    # What it started must not outlive it.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process, signal.SIGKILL)
    os.close(worker.lines)
    worker.process = 0


def _after(worker: _Worker) -> Sequence[Case]:
    """Give the case at which a worker ended its verdict; return the cases that it did not come to."""
    said = said_in(worker.root)
    story = said.read_text("utf-8", "replace")[-600:] if said.exists() else ""
    said.unlink(missing_ok=True)
    shutil.rmtree(worker.root, ignore_errors=True)
    if worker.fault:
        raise RigError(f"case {worker.cases[min(worker.done, len(worker.cases) - 1)].line}\n{worker.fault}")
    if worker.done == len(worker.cases):
        return ()
    case = worker.cases[worker.done]
    if worker.killed.startswith("killed"):
        grade = Grade.HANG
    elif "alloc" in story or "memory allocation" in story or "SIGKILL" in worker.killed:
        grade = Grade.MEMORY
    else:
        grade = Grade.CRASH
    worker.verdicts.append((case, Verdict(grade, f"{worker.killed}: {story}".strip(": \n"))))
    return worker.cases[worker.done + 1 :]


def _cpu_seconds(process: int) -> float:
    """Return the processor time of a process so far."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
