"""The rig itself: cases come again, every end of a worker has its grade, and a library that does badly is told so."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flodl.errors import CheckpointError
from tests.torture.case import GOOD, Case, Fault, Grade, Kind, Verdict, dealt, right
from tests.torture.judging import judge
from tests.torture.runner import RigError, _blocks, load_suite, run_cases
from tests.torture.suites import SUITES

linux = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def suite_of(act: Any, kinds: dict[str, dict[str, Any]]) -> Any:
    """Return a suite whose every case calls ``act`` with its kind and folder."""
    table = [Kind(name, 1, lambda _random, number: Fault({"n": number}, ("the.file",), ("the.key",)), limits)
             for name, limits in kinds.items()]  # fmt: skip

    class Suite(ModuleType):
        def cases(self, seed: int, count: int) -> Iterator[Case]:
            return dealt("made", table, seed, count)

        def run(self, case: Case, folder: Path) -> Verdict:
            return judge(case, lambda: act(case.kind, folder), lambda found: found or right())

    return Suite("made")


def graded(act: Any, kinds: dict[str, dict[str, Any]], count: int = 0) -> dict[str, str]:
    suite = suite_of(act, kinds)
    found = list(run_cases(suite, list(suite.cases(0, count or len(kinds))), workers=2))
    return {case.kind: verdict.grade.value for case, verdict in found}


@linux
def test_every_end_of_a_call_has_its_grade() -> None:
    words = "the.file: the.key is wrong, expected better; fetch it again"

    def act(kind: str, folder: Path) -> Any:
        if kind == "refused":
            raise CheckpointError(words)
        if kind == "no-file":
            raise CheckpointError(words.replace("the.file", "a file"))
        if kind == "no-key":
            raise CheckpointError(words.replace("the.key", "a key"))
        if kind == "no-advice":
            raise CheckpointError("the.file: the.key is wrong, expected better")
        if kind == "bare":
            raise KeyError("the.key")
        if kind == "died":
            ctypes.string_at(0)
        if kind == "ended":
            os._exit(3)
        if kind == "waits":
            time.sleep(60)
        if kind == "computes":
            while True:
                pass
        if kind == "eats":
            kept = bytearray(1 << 40)
            return kept and None
        if kind == "large":
            kept = b"x" * (80 << 20)
            return kept and None
        if kind == "panic":
            raise BaseException("a panic")
        if kind == "leaves":
            (folder.parent / "left").write_text("x")
            raise CheckpointError(words)
        if kind == "changes":
            (folder / "x").write_text("x")
        if kind == "runs":
            (folder.parent / "canary-was-here").write_text("")
        if kind == "reads-outside":
            (folder.parent / "outside" / "secret.txt").read_text()
        if kind == "starts":
            os.system("true")
        return None

    kinds: dict[str, dict[str, Any]] = {
        "refused": {}, "no-file": {}, "no-key": {}, "no-advice": {}, "bare": {}, "died": {}, "ended": {},
        "waits": {"wall_s": 0.5}, "computes": {"cpu_s": 0.5}, "eats": {}, "large": {"memory_mb": 40}, "panic": {},
        "leaves": {}, "changes": {}, "runs": {}, "reads-outside": {}, "starts": {}, "right": {},
    }  # fmt: skip
    assert graded(act, kinds) == {
        "refused": "refused", "no-file": "unnamed", "no-key": "unnamed", "no-advice": "unnamed", "bare": "bare",
        "died": "crash", "ended": "crash", "waits": "hang", "computes": "hang", "eats": "memory", "large": "memory",
        "panic": "crash", "leaves": "partial", "changes": "partial", "runs": "escaped", "reads-outside": "escaped",
        "starts": "escaped", "right": "right",
    }  # fmt: skip


@linux
def test_a_suite_that_fails_by_itself_is_no_verdict() -> None:
    suite = suite_of(lambda kind, folder: None, {"a": {}})
    suite.run = lambda case, folder: {}["a fault of the rig"]
    with pytest.raises(RigError, match="a fault of the rig"):
        list(run_cases(suite, list(suite.cases(0, 2))))


@pytest.mark.parametrize("name", SUITES)
def test_cases_come_again_from_seed_and_number(name: str) -> None:
    suite = load_suite(name)
    many = list(suite.cases(3, 48))
    assert many == list(suite.cases(3, 48))
    assert many[:20] == list(suite.cases(3, 20))
    assert [case.number for case in many] == list(range(48))
    assert [case.what for case in many] != [case.what for case in suite.cases(4, 48)]
    assert many[17].line == f"python -m tests.torture {name} --seed 3 --only 17"


def test_kinds_are_mixed_by_their_shares() -> None:
    def make(_random: Any, number: int) -> Fault:
        return Fault({"n": number})

    found = list(dealt("s", [Kind("a", 3, make), Kind("b", 1, make)], 0, 400))
    assert Counter(case.kind for case in found) == {"a": 300, "b": 100}
    assert Counter(case.kind for case in found[:8]) == {"a": 6, "b": 2}
    assert [case.what["n"] for case in found if case.kind == "b"] == list(range(100))


def test_the_scale_has_three_good_grades() -> None:
    assert {grade.value for grade in GOOD} == {"right", "stated", "refused"}
    assert len(Grade) == 11


@linux
def test_what_is_not_finished_in_time_is_given_up_and_not_counted() -> None:
    suite = suite_of(lambda kind, folder: time.sleep(60) if kind == "waits" else None, {"quick": {}, "waits": {}})
    started = time.monotonic()
    found = list(run_cases(suite, list(suite.cases(0, 2)), seconds=2.0))
    assert time.monotonic() - started < 50
    assert "waits" not in {case.kind for case, _ in found}


def test_cases_that_share_a_preparation_go_to_one_process_and_all_workers_have_some() -> None:
    suite = suite_of(lambda kind, folder: None, {name: {} for name in "abcd"})
    cases = list(suite.cases(0, 800))
    assert [len(block) for block in _blocks(suite, cases, 1)] == [200, 200, 200, 200]
    assert [len(block) for block in _blocks(suite, cases, 8)] == [25] * 32
    suite.together = lambda case: case.kind
    for workers in (1, 3, 8):
        blocks = list(_blocks(suite, cases, workers))
        assert all(len({case.kind for case in block}) == 1 for block in blocks)
        assert sorted((c for block in blocks for c in block), key=lambda c: c.number) == cases


@linux
def test_bits_of_a_case_do_not_depend_on_how_many_threads_torch_has() -> None:
    before = torch.get_num_threads()
    suite = suite_of(lambda kind, folder: None, {"a": {}})
    suite.run = lambda case, folder: Verdict(Grade.RIGHT, str(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        [(_, verdict)] = run_cases(suite, list(suite.cases(0, 1)))
    finally:
        torch.set_num_threads(before)
    assert verdict.text == "1"
