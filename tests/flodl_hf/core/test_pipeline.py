"""The loop of a prediction: order, bounded memory, errors, and garbage collection."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flodl_hf.errors import PredictError
from flodl_hf.inference.pipeline import Session

from .conftest import Make

Run = Callable[..., Any]


def decoded(items: list[int], encoded: Any, pending: Any) -> list[int]:
    return list(pending)


def steps(encode: Callable[[list[int]], Any] = lambda items: items, decode: Any = decoded) -> dict[str, Any]:
    return {"encode": encode, "work": None, "decode": decode, "start_rows": lambda encoded: encoded}


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def run(request: pytest.FixtureRequest, make: Make, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs steps in windows of ``window`` items, with or without overlap."""
    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: request.param)
    model: Any = make("bert", "base")
    return lambda items, steps, window=4: Session(model, {"window": window}).answer(items, **steps)


def test_results_keep_the_order_and_a_bounded_number_is_read_ahead(run: Run) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in itertools.count():
            taken = number
            yield number

    found = run(items(), steps(lambda part: [i * 2 for i in part], lambda c, e, p: [i + 1 for i in p]), 8)
    for n in range(200):
        assert next(found) == 2 * n + 1
        assert taken - n <= 4 * 8


def test_an_error_comes_once_after_the_results_before_it(run: Run) -> None:
    def encode(part: list[int]) -> list[int]:
        if 40 in part:
            raise PredictError("the forty-first item is bad")
        return part

    found = run(iter(range(100)), steps(encode), 8)
    assert list(itertools.islice(found, 40)) == list(range(40))
    with pytest.raises(PredictError):
        next(found)
    assert list(found) == []


def test_encoding_threads_end_when_the_iterator_is_dropped(run: Run) -> None:
    found = run(itertools.count(), steps())
    assert next(found) == 0
    del found
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("flodl-hf-encode"):
            thread.join(timeout=20)
            assert not thread.is_alive()


def test_garbage_collection_pauses_only_while_results_are_made(run: Run) -> None:
    during: list[bool] = []

    def decode(items: list[int], encoded: Any, pending: Any) -> list[int]:
        during.append(gc.isenabled())
        return list(pending)

    assert run(list(range(50)), steps(decode=decode)) == list(range(50))
    assert during
    assert not any(during)
    assert gc.isenabled()
    assert [gc.isenabled() for _ in run(iter(range(50)), steps(decode=decode))] == [True] * 50
    assert not any(during)
    gc.disable()
    try:
        assert run([1, 2], steps()) == [1, 2]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_leaves_garbage_collection_enabled(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run([1, 0], steps(decode=lambda c, e, p: [1 // i for i in p]))
    assert gc.isenabled()


def test_the_graph_is_prepared_while_the_first_windows_are_tokenized(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, prepared = threading.Event(), threading.Event()

    def encode(part: list[int]) -> list[int]:
        begun.set()
        assert prepared.wait(20)
        return part

    def runner(session: Session) -> None:
        assert begun.wait(20)
        prepared.set()

    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: True)
    monkeypatch.setattr(Session, "runner", runner)
    assert Session(make("bert", "base"), {"window": 4}).answer(list(range(9)), **steps(encode)) == list(range(9))
