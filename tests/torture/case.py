"""What a suite deals in: cases that a seed and a number make again, and the scale of what becomes of them.

A suite is a module of this package with ``NAME``, ``cases(seed, count) -> Iterator[Case]`` and
``run(case, folder) -> Verdict``. `dealt` makes the cases of one that states its kinds of damage in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any

__all__ = ["GOOD", "Case", "Fault", "Grade", "Kind", "Verdict", "dealt", "refusal", "right", "silent", "stated"]


class Grade(StrEnum):
    """What became of a case, the best first; the first three are as they should be."""

    RIGHT = "right"
    """Accepted, and equal to the bit to what the undamaged input gives."""
    STATED = "stated"
    """Accepted: the input says something else that is valid, and the result is what it says."""
    REFUSED = "refused"
    """An error of the library's own kind that names file, key, found, expected and what to do; nothing changed."""
    UNNAMED = "unnamed"
    """Such an error that leaves out file, key, expectation or advice, or prints what moves a terminal."""
    BARE = "bare"
    """An error of another kind: of a library below, or of Python."""
    CRASH = "crash"
    """The process died, or a panic of a compiled library went through."""
    HANG = "hang"
    """Not done within the case's time."""
    MEMORY = "memory"
    """More memory than the case has."""
    SILENT = "silent"
    """Accepted, and another result than right, without a word."""
    PARTIAL = "partial"
    """Something was left half done: files, a folder, a model, a run."""
    ESCAPED = "escaped"
    """Code of the input ran, or a file or address outside was reached."""


GOOD = frozenset((Grade.RIGHT, Grade.STATED, Grade.REFUSED))
"""The grades that are as they should be."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to an input.

    Attributes:
        what: how, in plain values; a suite's ``run`` reads them.
        files: the file at fault; a refusal has to name one of these.
        keys: the key, field or tensor at fault; a refusal has to name one of these.
    """

    what: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One input, as a suite, a seed and a number make it again.

    Attributes:
        suite: the suite's name.
        seed: of the run.
        number: of the case in the run.
        kind: what sort of damage.
        fault: the damage itself.
        cpu_s: processor time it may take.
        wall_s: time it may take on a busy machine.
        memory_mb: memory it may take beyond what the process had.
    """

    suite: str
    seed: int
    number: int
    kind: str
    fault: Fault = Fault()
    cpu_s: float = 10.0
    wall_s: float = 60.0
    memory_mb: int = 200

    @property
    def line(self) -> str:
        """The command that repeats this case alone."""
        return f"python -m tests.torture {self.suite} --seed {self.seed} --only {self.number}"

    @property
    def what(self) -> Mapping[str, Any]:
        """The damage in plain values."""
        return self.fault.what


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case.

    Attributes:
        grade: on the scale.
        text: the message of an error, or what differed.
        error: the error's type, or nothing.
        seconds: processor time taken.
        memory_mb: memory taken beyond what the process had.
    """

    grade: Grade
    text: str = ""
    error: str = ""
    seconds: float = 0.0
    memory_mb: float = 0.0

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        return self.grade in GOOD

    def measured(self, seconds: float, memory_mb: float) -> Verdict:
        """Return the verdict with what it cost."""
        return replace(self, seconds=round(seconds, 6), memory_mb=round(memory_mb, 1))


def right() -> Verdict:
    """Return: as the undamaged input."""
    return Verdict(Grade.RIGHT)


def stated(text: str = "") -> Verdict:
    """Return: another result, and the one that the input validly asks for."""
    return Verdict(Grade.STATED, text)


def silent(text: str) -> Verdict:
    """Return: another result without a word."""
    return Verdict(Grade.SILENT, text)


def refusal(text: str, error: str = "") -> Verdict:
    """Return: refused as it should be."""
    return Verdict(Grade.REFUSED, text, error)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of damage of a suite.

    Attributes:
        name: of the sort.
        share: how many of a round of cases are of it.
        make: given a generator of its own and the number of the case among its kind, the fault; what is enumerated
            rather than drawn goes by the number.
        limits: other limits than a case's own: ``cpu_s``, ``wall_s``, ``memory_mb``.
    """

    name: str
    share: int
    make: Callable[[Random, int], Fault]
    limits: Mapping[str, Any] = field(default_factory=dict)


def dealt(suite: str, kinds: Sequence[Kind], seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases, the kinds mixed evenly by their shares; each depends on seed and number alone.

    Args:
        suite: its name.
        kinds: its table.
        seed: of the run.
        count: how many.
    """
    round_ = _round(kinds)
    seen = [0] * len(kinds)
    for number in range(count):
        place = round_[number % len(round_)]
        kind = kinds[place]
        # Not the builtin hash, which differs between processes.
        fault = kind.make(Random(f"{suite} {kind.name} {seed} {seen[place]}"), seen[place])
        seen[place] += 1
        yield Case(suite, seed, number, kind.name, fault, **kind.limits)


def _round(kinds: Sequence[Kind]) -> list[int]:
    """Return the places of the kinds in one round, each as often as its share, spread evenly."""
    total = sum(kind.share for kind in kinds)
    due = sorted(
        ((turn + 0.5) * total / kind.share, place) for place, kind in enumerate(kinds) for turn in range(kind.share)
    )
    return [place for _, place in due]
