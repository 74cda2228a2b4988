"""Garbage collection is off until the last who wants that has left, and on again only where it was on."""

import gc
import subprocess
import sys
import threading

import pytest

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


ENDING = """
import atexit, gc, os, sys
from flodl.garbage_collection import gc_spared_at_exit

class Log:
    def __init__(self, name, mode):
        self.file, self.itself = open(name, mode), self

class Last(Log):
    def __del__(self):
        self.file.write(" and this")

text, data, closed = Log(sys.argv[1] + "/text", "w"), Log(sys.argv[1] + "/data", "wb"), Log(sys.argv[1] + "/closed", "w")
text.file.write("all of it"), data.file.write(b"and this"), closed.file.close()
atexit.register(lambda: print(gc.get_freeze_count() > 0))
gc_spared_at_exit(), gc_spared_at_exit()
print(gc.isenabled(), gc.get_freeze_count())
"""
LAST = "last = Last(sys.argv[1] + '/last', 'w')"
PIPE = "pipe = os.fdopen(os.pipe()[1], 'w')"


@pytest.mark.parametrize(
    ("flags", "more", "spared"),
    [([], "", True), (["-X", "dev", "-W", "ignore"], "", False), ([], "gc.set_debug(gc.DEBUG_SAVEALL)", False),
     ([], LAST, False), ([], PIPE, False), ([], "some = (one for one in [])", False)],
)  # fmt: skip
def test_a_program_that_ends_seeks_no_garbage_and_loses_nothing(tmp_path, flags, more, spared):
    done = subprocess.run(
        [sys.executable, *flags, "-c", ENDING + more, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "0", str(spared)]
    assert not done.stderr
    assert ((tmp_path / "text").read_text(), (tmp_path / "data").read_bytes()) == ("all of it", b"and this")
    assert more != LAST or (tmp_path / "last").read_text() == " and this"


def test_what_is_frozen_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    with gc_frozen():
        del counted[:]
        with gc_frozen(), gc_paused(settled=True):
            assert count()
        assert count(), "what lies inside leaves it frozen"
        assert not counted
    assert not count()
    with gc_paused(settled=True):
        pass
    assert counted, "a program may have frozen something itself"
