"""Garbage collection is off until the last who wants that has left, and on again only where it was on."""

import gc
import threading

import pytest

from flodl import garbage_collection
from flodl.garbage_collection import gc_frozen, gc_paused


@pytest.mark.parametrize("settled", [False, True])
def test_it_is_on_again_after_an_error(settled):
    seen = []

    @gc_paused(settled=settled)
    def breaks():
        seen.append(gc.isenabled())
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        breaks()
    assert seen == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_one_who_leaves_does_not_turn_it_on_under_another():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with gc_paused():
            inside.set()
            leave.wait(10)
            seen.append(gc.isenabled())

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert seen == [False]
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_frozen_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    with gc_frozen():
        del counted[:]
        with gc_frozen(), gc_paused(settled=True):
            assert count()
        assert count(), "a nested context leaves it frozen"
        assert not counted
    assert not count()
    with gc_paused(settled=True):
        pass
    assert counted, "a program may have frozen something itself"


def test_objects_that_the_program_froze_are_counted_once_and_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = gc.get_freeze_count
    monkeypatch.setattr(garbage_collection, "_FROZEN", False)
    gc.freeze()
    try:
        monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
        for _ in range(3):
            with gc_paused(settled=True):
                pass
        assert len(counted) == 1
        assert count()
    finally:
        gc.unfreeze()
