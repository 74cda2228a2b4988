"""A process that runs a block of cases and tells each verdict as it has it; it may crash, hang or eat memory.

Forked by `tests.torture.runner`, so that libraries are imported once; what a case leaves behind in its folder is
removed before the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

from tests.torture.case import Case, Verdict
from tests.torture.judging import start_watch

__all__ = ["run_block", "run_one", "said_in"]

HEADROOM = 4 << 30
"""Address space beyond what a worker has when it starts: what a case that allocates without end dies of."""


def run_block(suite: ModuleType, cases: Sequence[Case], root: Path, out: int) -> NoReturn:
    """Run cases and write a line for each begun and each finished; never returns.

    Args:
        suite: its module.
        cases: of that suite.
        root: a folder of this worker's own.
        out: the descriptor that lines are written to.
    """
    status = 1
    try:
        os.setsid()
        _quiet(root)
        start_watch(root)
        _bound_memory()
        for case in cases:
            os.write(out, f"{case.number}\n".encode())
            verdict = run_one(suite, case, root)
            os.write(out, (json.dumps([case.number, asdict(verdict)]) + "\n").encode())
        status = 0
    except BaseException:
        # A fault of the rig itself: reported, and not counted for the library.
        os.write(out, (json.dumps(["rig", traceback.format_exc()]) + "\n").encode())
    finally:
        os._exit(status)


def run_one(suite: ModuleType, case: Case, root: Path) -> Verdict:
    """Return the verdict on one case."""
    # Workers share the machine, and a process that a case forks computes with one thread: bits depend on their number.
    torch.set_num_threads(1)
    folder = root / "case"
    folder.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return suite.run(case, folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    def again(_function: object, path: str, _fault: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.unlink(path)

    shutil.rmtree(folder, onerror=again)


def said_in(root: Path) -> Path:
    """Return the file that takes what a worker's libraries print; beside its folder, which is watched."""
    return root.with_name(f"{root.name}.said")


def _quiet(root: Path) -> None:
    """Send what libraries print to a file; a panic's story is read there."""
    faulthandler.disable()
    said = os.open(said_in(root), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(said, descriptor)
    os.close(said)
    sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False, errors="replace")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _bound_memory() -> None:
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    bound = pages * resource.getpagesize() + HEADROOM
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
