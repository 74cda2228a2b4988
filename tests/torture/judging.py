"""From what a call did to its grade.

Decides when a refusal is good enough: its type, what its text names, that it prints nothing that moves a terminal,
and that nothing was left behind.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TypeVar

from flodl.errors import FlodlError, printable, visible
from tests.torture.case import Case, Grade, Verdict
from tests.torture.resources import Meter
from tests.torture.watch import SECRET, Watch

__all__ = ["graded_error", "judge", "start_watch"]

R = TypeVar("R")

MAX_CHARACTERS = 4_000
# What a refusal asks for, and what it advises: the words that its sentences begin with.
_EXPECTS = re.compile(r"(?i)\b(expect(s|ed)?|must|at most|at least|above the limit|cannot be|only|instead of)\b")
_ADVISES = re.compile(
    r"(?i)\b(add|allow|ask|check|choose|clear|complete|convert|copy|correct|decode|delete|download|drop|fetch|free|give|"
    r"install|leave|load|make|move|name|pass|pick|put|raise|read|remove|rename|repair|replace|restore|run|save|say|see|"
    r"set|shorten|split|start|take|try|use|wait|write|do not|docs/)\b"
)
_watch: Watch | None = None


def start_watch(root: Path) -> Watch:
    """Begin to watch this process; what lies outside of cases is put under ``root``."""
    global _watch
    outside = root / "outside"
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "secret.txt").write_text(SECRET)
    _watch = Watch(root)
    return _watch


def judge(
    case: Case,
    act: Callable[[], R],
    check: Callable[[R], Verdict],
    *,
    writes: tuple[Path, ...] = (),
    network: bool = False,
) -> Verdict:
    """Return the grade of what the library does with a damaged input.

    Args:
        case: what was damaged.
        act: the call.
        check: of what the call returned, whether it is right.
        writes: folders in which the call may write.
        network: the call may connect to this machine.
    """
    assert _watch is not None, "the worker has not begun to watch"
    error: BaseException | None = None
    result: R | None = None
    meter = Meter()
    with _watch(writes, network=network) as effects:
        try:
            result = act()
        except BaseException as fault:
            error = fault
        seconds, memory = meter.read()
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        raise error
    try:
        verdict = graded_error(case, error) if error is not None else check(result)  # type: ignore[arg-type]
    except MemoryError:
        verdict = Verdict(Grade.MEMORY, "no memory left to compare")
    ran = [effect for effect in effects if effect.startswith(("ran", "started", "reached"))]
    if ran:
        verdict = Verdict(Grade.ESCAPED, "; ".join(ran[:4]), verdict.error)
    elif effects:
        verdict = Verdict(Grade.PARTIAL, "; ".join(effects[:4]), verdict.error)
    elif verdict.good and memory > case.memory_mb:
        verdict = Verdict(Grade.MEMORY, f"took {memory:.0f} MB, {verdict.grade.value}: {verdict.text}")
    elif verdict.good and seconds > case.cpu_s:
        verdict = Verdict(Grade.HANG, f"took {seconds:.1f} s of the processor, {verdict.grade.value}")
    return verdict.measured(seconds, memory)


def graded_error(case: Case, error: BaseException) -> Verdict:
    """Return the grade of an error."""
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    text = str(error)

    def graded(grade: Grade, why: str = "") -> Verdict:
        return Verdict(grade, (f"{why}: " if why else "") + visible(text[:1_000]), name)

    if isinstance(error, MemoryError) or "can't allocate memory" in text or "std::bad_alloc" in text:
        return graded(Grade.MEMORY)
    if not isinstance(error, Exception):
        return graded(Grade.CRASH)  # a panic of a compiled library, which `except Exception` lets through
    if SECRET in text:
        return graded(Grade.ESCAPED, "shows what lies outside")
    if not isinstance(error, FlodlError):
        return graded(Grade.BARE)
    wanted = {"file": case.fault.files, "key": case.fault.keys}
    lacking = [what for what, names in wanted.items() if names and not any(_names(text, name_) for name_ in names)]
    if lacking:
        return graded(Grade.UNNAMED, f"does not name the {' and '.join(lacking)}")
    fault = _form(error, text)
    return graded(Grade.UNNAMED, fault) if fault else graded(Grade.REFUSED)


def _names(text: str, wanted: str) -> bool:
    """Return whether a message names a file or key, as it is or written out."""
    leaf = os.path.basename(wanted)
    return any(form in text for form in (wanted, leaf, visible(leaf), printable(leaf)[1:-1], printable(leaf, 60)[1:40]))


def _form(error: FlodlError, text: str) -> str:
    """Return what is wrong with the form of one of our own messages, or nothing."""
    if text != visible(text):
        return "prints characters that move a terminal"
    if len(text) > MAX_CHARACTERS:
        return f"is {len(text):,} characters long"
    if not _EXPECTS.search(text):
        return "does not say what was expected"
    if not _ADVISES.search(text):
        return "does not say what to do"
    try:
        pickle.dumps(error)
        again = copy(error)  # made again as unpickling does
    except Exception as fault:
        return f"cannot be sent between processes ({fault!r})"
    return "" if str(again) == text else "changes when sent between processes"
