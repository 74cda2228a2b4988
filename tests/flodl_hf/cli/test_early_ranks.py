"""The processes of ranks start with the command, before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import flodl.fork_server as server
import flodl_hf.cli
import flodl_hf.workers.process as process
started = []
server.prepare_ranks = lambda *modules: started.append("torch" in sys.modules)
process.start_early = lambda target, devices: started.append([*devices, "torch" in sys.modules])
exists = os.path.exists
os.path.exists = lambda path: path in ("/dev/nvidia0", "/dev/nvidia1") or exists(path)
sys.argv = ["flodl-hf", *{words!r}, "--help"]
try:
    flodl_hf.cli.main()
except SystemExit:
    print("started", started)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["finetune", "m", "--devices", "2"], [False]),
        (["finetune", "m", "--device=cuda:0,cuda:1"], [False]),
        (["finetune", "m", "--devices", "1"], []),
        (["finetune", "m", "--epochs", "2"], []),
        (["predict", "m", "--devices", "2"], []),
        (["predict", "m", "--in", "a", "--devices", "2"], [["cuda:0", "cuda:1", False]]),
        (["encode", "m", "-i", "a", "--devices=cuda:1,cuda:0"], [["cuda:1", "cuda:0", False]]),
        (["predict", "m", "--in", "a", "--devices", "3"], []),
        (["predict", "m", "--in", "a", "--devices", "cpu,cpu"], []),
        (["predict", "m", "--in", "a", "--devices", "auto"], []),
    ],
)
def test_ranks_are_prepared_for_several_devices_only(words: list[str], expected: list[object]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=words)], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == f"started {expected}"
