"""Streams of answers: what the interpreter does beside them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from flodl_hf.runtime.stream import Job, stream


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
