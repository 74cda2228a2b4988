"""The processes of ranks start with the command, before torch is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, subprocess, sys
import flodl.fork_server as server
import flodl_hf.cli
import flodl_hf.workers.process as process
started = []
server.prepare_ranks = lambda *modules: started.append("torch" in sys.modules)
if {starts!r}:
    sleeps = [sys.executable, "-c", "import time; time.sleep(100)"]
    process.rank_process = lambda *args, **kwargs: started.append(args[1]) or subprocess.Popen(sleeps)
else:
    process.start_early = lambda target, devices: started.append([*devices, "torch" in sys.modules])
listed = os.listdir
os.listdir = lambda path=".": ["nvidia0", "nvidia1", "nvidiactl"] if path == "/dev" else listed(path)
os.environ.update({visible!r})
sys.argv = ["flodl-hf", *{words!r}]
try:
    flodl_hf.cli.main()
except SystemExit:
    print("started", started)
"""


def started(words: list[str], end: str = "--nonsense", starts: bool = False, **visible: str) -> str:
    code = PROGRAM.format(words=[*words, end], visible=visible, starts=starts)
    command = [sys.executable, "-c", code]
    # Ends when no process has the standard output open.
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[-1]


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


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", []), ("3,1", [["cuda:0", "cuda:1", False]]), ("", []), ("0,-1,1", [])],
)
def test_ranks_are_prepared_for_visible_devices_only(visible: str, expected: list[object]) -> None:
    words = ["predict", "m", "--in", "a", "--devices", "2"]
    assert started(words, CUDA_VISIBLE_DEVICES=visible) == f"started {expected}"


@pytest.mark.parametrize("command", ["finetune", "predict"])
@pytest.mark.parametrize("option", ["-h", "--help", "--help-all"])
def test_help_starts_no_ranks(command: str, option: str) -> None:
    assert started([command, "m", "--in", "a", "--devices", "2"], option) == "started []"


def test_no_rank_outlives_wrong_usage() -> None:
    assert started(["predict", "m", "--in", "a", "--devices", "2"], starts=True) == "started [1]"


INTERRUPTED = """
import signal, time
from flodl.fork_server import prepare_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)
prepare_ranks("flodl_hf.training.run")
print("started", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("delay", [0.02, 0.4])
def test_an_interrupt_while_ranks_are_prepared_prints_no_traceback(delay: float) -> None:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], start_new_session=True, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(delay)  # the other process starts, or imports torch
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert out == "interrupted\n"
    assert errors == ""
