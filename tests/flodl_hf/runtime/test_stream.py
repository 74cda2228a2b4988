"""Streams of answers: what the interpreter does beside them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from flodl_hf.inference.stream import Job, stream


@pytest.mark.parametrize("ahead", [False, True])
def test_no_garbage_is_sought_while_answers_are_made_and_again_while_the_caller_has_them(ahead: bool) -> None:
    during: list[bool] = []
    job: Job[int, int] = Job(lambda c: c, lambda e: e, lambda c, e, p: during.append(gc.isenabled()) or list(p))
    assert stream(list(range(50)), job, first=4, most=8, ahead=ahead) == list(range(50))
    assert during
    assert not any(during)
    assert gc.isenabled()
    found: Any = stream(iter(range(50)), job, first=4, most=8, ahead=ahead)
    assert [gc.isenabled() for _ in found] == [True] * 50
    assert not any(during)
    gc.disable()
    try:
        assert stream([1, 2], job, ahead=ahead) == [1, 2]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_fault_leaves_garbage_collection_as_it_was() -> None:
    job: Job[int, int] = Job(lambda c: c, lambda e: e, lambda c, e, p: [1 // i for i in p])
    with pytest.raises(ZeroDivisionError):
        stream([1, 0], job)
    assert gc.isenabled()


def test_what_is_done_meanwhile_begins_while_the_first_windows_are_tokenised() -> None:
    begun, done = threading.Event(), threading.Event()

    def encode(chunk: list[int]) -> list[int]:
        begun.set()
        assert done.wait(20)
        return chunk

    def meanwhile() -> None:
        assert begun.wait(20)
        done.set()

    job: Job[int, int] = Job(encode, lambda e: e, lambda c, e, p: list(p))
    assert stream(list(range(9)), job, first=2, most=4, ahead=True, meanwhile=meanwhile) == list(range(9))


def test_a_fault_of_what_is_done_meanwhile_ends_the_call() -> None:
    job: Job[int, int] = Job(lambda c: c, lambda e: e, lambda c, e, p: list(p))
    with pytest.raises(ZeroDivisionError):
        stream([1, 2, 3], job, first=1, most=1, ahead=True, meanwhile=lambda: 1 // 0)
    assert gc.isenabled()
