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
listed = os.listdir
os.listdir = lambda path=".": ["nvidia0", "nvidia1", "nvidiactl"] if path == "/dev" else listed(path)
os.environ.update({visible!r})
sys.argv = ["flodl-hf", *{words!r}, "--help"]
try:
    flodl_hf.cli.main()
except SystemExit:
    print("started", started)
"""


def started(words: list[str], **visible: str) -> str:
    code = PROGRAM.format(words=words, visible=visible)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[
        -1
    ]


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
        (["predict", "m", "--in", "a", "--devices", "0,1"], []),
        (["predict", "m", "--in", "a", "--devices", "99999999"], []),
    ],
)
def test_ranks_are_prepared_for_several_devices_only(words: list[str], expected: list[object]) -> None:
    assert started(words) == f"started {expected}"


@pytest.mark.parametrize(("visible", "expected"), [("0", []), ("3,1", [["cuda:0", "cuda:1", False]]), ("", [])])
def test_ranks_are_prepared_for_visible_devices_only(visible: str, expected: list[object]) -> None:
    words = ["predict", "m", "--in", "a", "--devices", "2"]
    assert started(words, CUDA_VISIBLE_DEVICES=visible) == f"started {expected}"
