"""Garbage collection is as it was after importing and loading."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from flodl_hf.collecting import without_collecting


@pytest.mark.parametrize("before", [True, False])
def test_collection_is_off_meanwhile_and_as_it_was_afterwards(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled() is before
        assert not gc.get_freeze_count()
    finally:
        (gc.enable if was else gc.disable)()


def test_an_import_leaves_collection_on_and_sweeps_nothing() -> None:
    code = (
        "import gc; sweeps = []; gc.callbacks.append(lambda phase, info: sweeps.append(info['generation']));"
        "import flodl_hf; gc.callbacks.clear(); assert gc.isenabled(); print(sweeps.count(2))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
