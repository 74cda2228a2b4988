"""Standard streams that are closed, full, or of a small character set: every command says so, none is cut off."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from flodl_hf.checkpoints.system import own_version
from flodl_hf.cli import shared

TEXT = "café 😀 \x7f"
posix = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@posix
@pytest.mark.parametrize(
    ("streams", "code", "out", "err"),
    [
        ("<&-", 0, own_version(), ""),
        (">&-", 0, "", ""),
        ("2>&-", 0, own_version(), ""),
        ("<&- >&- 2>&-", 0, "", ""),
        (">/dev/full", 1, "", "OSError: standard output: No space left on device"),
    ],
)
def test_the_command_runs_in_any_streams(streams: str, code: int, out: str, err: str) -> None:
    line = f"'{sys.executable}' -m flodl_hf --version {streams}"
    root = str(Path(shared.__file__).parents[2])
    there = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=there, timeout=900, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (code, out, err)


class Narrow(io.TextIOWrapper):
    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_json_is_json_whatever_characters_the_stream_has(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Narrow(encoding))
    line = shared.as_json({"text": TEXT})
    assert json.loads(line.encode(encoding).decode(encoding)) == {"text": TEXT}
    assert ("😀" in line) == (encoding == "utf-8")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("json_output", [False, True])
def test_results_without_room_are_a_fault_and_progress_without_room_is_none(
    json_output: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    @shared.reporting
    def command(json_output: bool) -> None:
        shared.tell("result")

    with monkeypatch.context() as within:
        within.setattr(sys, "stdout", Full())
        with pytest.raises(typer.Exit) as left:
            command(json_output=json_output)
    assert left.value.exit_code == 1
    assert "standard output, or a file that is written: No space left" in capsys.readouterr().err
    with monkeypatch.context() as within:
        within.setattr(sys, "stderr", Full())
        shared.say("progress", always=True)
