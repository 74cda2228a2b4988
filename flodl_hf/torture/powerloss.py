"""Suite ``powerloss``: the power goes at any moment of anything that is written, and what was not synced is lost.

What is done to the disk is written down once; every state that a power loss may leave is then laid out and judged: the
old or the new, and the new once it was said to be there. Every tenth is gone on with, as a user would, and has to end
as if nothing had happened.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from random import Random

from flodl_hf.torture.acts import ACTS, act_named, dealt_in_order, kinds_of_acts, recorded
from flodl_hf.torture.case import Case, Grade, Verdict, right
from flodl_hf.torture.crash import CrashState, Replay, lay_out, tree_of
from flodl_hf.torture.disk import Disk
from flodl_hf.torture.subjects import Subject

__all__ = ["NAME", "all_states", "cases", "prepare", "run"]

NAME = "powerloss"
GONE_ON_WITH = 10  # one of so many states
# By how many states there are: about two hundred for each one here.
SHARES = {
    "an export": 10, "an export over an old one": 11, "an export where names cannot be exchanged": 11,
    "an export into folders to be made": 10, "an adapter over an old one": 10,
    "a conversion": 7, "checkpoints": 20, "a file of answers": 3,
    "a file of answers, restart": 3,
}  # fmt: skip


KINDS = kinds_of_acts(SHARES, "state")

cases = partial(dealt_in_order, NAME, KINDS)


def prepare(subject: Subject) -> None:
    """Do every act once and write down what it does to the disk."""
    for act in ACTS:
        _recording(act.name)


@cache
def _recording(name: str) -> tuple[Replay, dict[str, int], list[CrashState]]:
    act = act_named(name)
    with tempfile.TemporaryDirectory(prefix="flodl-torture-") as place:
        root = Path(place) / "root"
        root.mkdir()
        act.prepare(root)
        before, disk = tree_of(root), Disk(root)
        recorded(act, root, disk)
        replay = Replay(before, disk.steps)
        if replay.final() != tree_of(root):
            raise AssertionError(f"{name}: the record of what was done to the disk is not complete")
        return replay, dict(disk.marks), list(replay.states())


def all_states() -> dict[str, int]:
    """Return how many states each act has."""
    return {act.name: len(_recording(act.name)[2]) for act in ACTS}


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Lay out what a power loss left; judge it, and go on from some."""
    act = act_named(case.what["act"])
    replay, marks, states = _recording(act.name)
    order = _order(act.name, case.what["order"], len(states))
    number = case.what["state"] % len(states)
    state = states[order[number]]
    root = folder / "root"
    lay_out(replay.tree(state), root)
    said = frozenset(name for name, when in marks.items() if when <= state.after)
    fault = act.judge(root, said)
    if fault is not None:
        return Verdict(Grade.PARTIAL, f"{replay.told(state)}: {fault}")
    if number % GONE_ON_WITH == 0:
        fault = act.go_on(root, said)
        if fault is not None:
            return Verdict(Grade.PARTIAL, f"{replay.told(state)}: {fault}")
    return right()


@cache
def _order(name: str, seed: int, count: int) -> list[int]:
    order = list(range(count))
    Random(f"{name} {seed}").shuffle(order)
    return order
