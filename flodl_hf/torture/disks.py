"""Suite ``disks``: every single step of anything that is written fails once, as disks fail.

The step is enumerated, not drawn. Afterwards the old or the new is there, whole; the error is of our kind and names
what could not be written; and the same act done again on a healthy disk ends as if nothing had happened, nothing left
behind.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from flodl.errors import FlodlError
from flodl_hf.torture.acts import ACTS, Act, act_named, dealt_in_order, inert, kinds_of_acts
from flodl_hf.torture.case import Case, Grade, Verdict, refusal, right
from flodl_hf.torture.disk import Disk, Step
from flodl_hf.torture.subjects import Subject

__all__ = ["NAME", "WAYS", "all_faults", "cases", "prepare", "run"]

NAME = "disks"
# What promises no error of ours: it says so in its documentation, and whoever calls it makes one of it.
PLAIN = ("one file", "checksums", "a graph's file", "a file of vectors")


# By how many faults there are: about a hundred for each one here.
SHARES = {
    "an export": 3, "an export over an old one": 3, "an export where names cannot be exchanged": 3,
    "an export into folders to be made": 3, "an adapter over an old one": 3,
    "a conversion": 3, "checkpoints": 9, "a file of answers": 3,
    "a file of answers, restart": 3,
}  # fmt: skip


class Way(NamedTuple):
    """How a step fails.

    Args:
        name: in words.
        number: the error; 0 for a write that takes half.
        lasting: later steps that need space fail too.
        kinds: of the steps that can fail so; all where there are none.
        words: one of which a message has to hold.
    """

    name: str
    number: int
    lasting: bool = False
    kinds: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


_SPACE = ("create", "mkdir", "write", "sync", "rename")
WAYS = (
    Way("an I/O error", errno.EIO, words=("put/output", "I/O")),
    Way("a full disk", errno.ENOSPC, True, _SPACE, ("space",)),
    Way("a disk that is full for a moment", errno.ENOSPC, False, _SPACE, ("space",)),
    Way("a quota", errno.EDQUOT, True, _SPACE, ("uota", "space")),
    Way("read-only", errno.EROFS, False, (), ("ead-only",)),
    Way("another file system", errno.EXDEV, False, ("rename", "exchange"), ("ross-device", "file system")),
    Way("a write that takes half", 0, False, ("write",)),
)


KINDS = kinds_of_acts(SHARES, "place")

cases = partial(dealt_in_order, NAME, KINDS)


def prepare(subject: Subject) -> None:
    """Do every act once, to know its steps."""
    for act in ACTS:
        all_faults(act.name)


@cache
def all_faults(name: str) -> Sequence[tuple[int, Way]]:
    """Return every step that an act counts with every way in which it can fail."""
    act = act_named(name)
    with tempfile.TemporaryDirectory(prefix="flodl-torture-") as place:
        root = Path(place) / "root"
        root.mkdir()
        act.prepare(root)
        disk = Disk(root, passed_over=inert)
        with disk.watched():
            act.do(root, disk.mark)
        return [(i, way) for i, step in enumerate(disk.counted) for way in WAYS if _can_fail(step, way)]


def _can_fail(step: Step, way: Way) -> bool:
    return not way.kinds or step.kind in way.kinds


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Have one step fail; judge what is there and what is said, and do it again."""
    act = act_named(case.what["act"])
    faults = list(all_faults(act.name))
    Random(f"{act.name} {case.what['order']}").shuffle(faults)
    number, way = faults[case.what["place"] % len(faults)]
    root = folder / "root"
    root.mkdir()
    act.prepare(root)
    disk = Disk(root, fail_at=number, fault=way.number, lasting=way.lasting, passed_over=inert)
    error: BaseException | None = None
    with disk.watched():
        try:
            act.do(root, disk.mark)
        except Exception as caught:
            error = caught
    where = f"{way.name} at step {number} ({disk.refused or 'never reached'})"
    said = frozenset(disk.marks)
    fault = act.judge(root, said)
    if fault is not None:
        return Verdict(Grade.PARTIAL, f"{where}: {fault}")
    verdict = _judged(act, error, way, root)
    if verdict.good:
        fault = act.go_on(root, said)
        if fault is not None:
            verdict = Verdict(Grade.PARTIAL, fault)
    return verdict if verdict.good else Verdict(verdict.grade, f"{where}: {verdict.text}", verdict.error)


def _judged(act: Act, error: BaseException | None, way: Way, root: Path) -> Verdict:
    """Return the verdict on what was said."""
    if error is None:
        return right()
    name, text = type(error).__name__, str(error)
    if not isinstance(error, FlodlError) and not (act.name in PLAIN and isinstance(error, OSError)):
        return Verdict(Grade.BARE, text, name)
    if way.number == 0:
        return Verdict(Grade.SILENT, f"a write of half is no error: {text}", name)
    if str(root) not in text or not any(word in text for word in way.words):
        return Verdict(Grade.UNNAMED, text, name)
    return refusal(text, name)
