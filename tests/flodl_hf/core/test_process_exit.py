"""A process that exits without a last garbage collection loses nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDING = """
import atexit, gc, os, sys
from flodl_hf.checkpoints.weights.prefetch import skip_gc_at_exit

class Log:
    def __init__(self, name, mode):
        self.file, self.itself = open(name, mode), self

class Last(Log):
    def __del__(self):
        self.file.write(" and this")

text, data, closed = Log(sys.argv[1] + "/text", "w"), Log(sys.argv[1] + "/data", "wb"), Log(sys.argv[1] + "/closed", "w")
text.file.write("all of it"), data.file.write(b"and this"), closed.file.close()
atexit.register(lambda: print(gc.get_freeze_count() > 0))
skip_gc_at_exit(), skip_gc_at_exit()
print(gc.isenabled(), gc.get_freeze_count())
"""
LAST = "last = Last(sys.argv[1] + '/last', 'w')"
PIPE = "pipe = os.fdopen(os.pipe()[1], 'w')"


@pytest.mark.parametrize(
    ("flags", "more", "spared"),
    [([], "", True), (["-X", "dev", "-W", "ignore"], "", False), ([], "gc.set_debug(gc.DEBUG_SAVEALL)", False),
     ([], LAST, False), ([], PIPE, False), ([], "some = (one for one in [])", False)],
)  # fmt: skip
def test_a_process_exits_without_collection_and_loses_nothing(tmp_path, flags, more, spared):
    done = subprocess.run(
        [sys.executable, *flags, "-c", ENDING + more, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "0", str(spared)]
    assert not done.stderr
    assert ((tmp_path / "text").read_text(), (tmp_path / "data").read_bytes()) == ("all of it", b"and this")
    assert more != LAST or (tmp_path / "last").read_text() == " and this"
