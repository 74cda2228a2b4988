"""Garbage collection is as it was after importing."""

from __future__ import annotations

import subprocess
import sys


def test_an_import_leaves_collection_on_and_sweeps_nothing() -> None:
    code = (
        "import gc; sweeps = []; gc.callbacks.append(lambda phase, info: sweeps.append(info['generation']));"
        "import flodl_hf; gc.callbacks.clear(); assert gc.isenabled(); print(sweeps.count(2))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
