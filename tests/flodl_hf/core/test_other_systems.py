"""The main ways on a system that has none of Linux's own calls: one process, from which they were taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Taken away: what Windows lacks, and macOS in part. Libraries come first, because they may use what their system has.
PROGRAM = r"""
import builtins, ctypes, errno, io, json, os, runpy, signal, sys, warnings
import torch, torch._dynamo, numpy, safetensors.torch, tokenizers, typer, rich.console, rich.progress
import huggingface_hub.repocard
import subprocess, socket, tempfile, multiprocessing, asyncio, shutil, pathlib
from fcntl import F_GETFL as get_flags, fcntl as flags_of

gone = ["pread", "preadv", "pwrite", "fork", "register_at_fork", "sched_getaffinity", "fchmod", "O_NONBLOCK", "O_NOFOLLOW",
        "O_DIRECTORY", "O_CLOEXEC", "posix_fadvise", "killpg", "getuid", "mkfifo", "link", "fdatasync"]
for name in gone:
    if hasattr(os, name):
        delattr(os, name)
os.supports_dir_fd.clear()
shutil._use_fd_functions = False
del signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP
for name in ("fcntl", "resource", "pwd", "grp", "termios", "psutil"):
    sys.modules[name] = None

def library(name, *rest, **more):
    if name is None:
        raise TypeError("no such library")
    return given(name, *rest, **more)
given, ctypes.CDLL = ctypes.CDLL, library

opened, synced, renamed = os.open, os.fsync, os.rename
def open_(path, flags, *rest, **more):
    assert "dir_fd" not in more
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "folders are not opened here", path)
    return opened(path, flags, *rest, **more)
def fsync(descriptor):
    if flags_of(descriptor, get_flags) & 3 == os.O_RDONLY:
        raise OSError(errno.EBADF, "not open for writing")
    synced(descriptor)
def rename(one, other):
    if os.path.lexists(other):
        raise FileExistsError(errno.EEXIST, "is there", other)
    renamed(one, other)
os.open, os.fsync, os.rename = open_, fsync, rename

plain = builtins.open
def no_proc(path, *rest, **more):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(errno.ENOENT, "there is no /proc", path)
    return plain(path, *rest, **more)
builtins.open = io.open = no_proc
sys.platform = "win32"

from pathlib import Path
import flodl, flodl_hf, flodl_hf.export, flodl.distributed.launch, flodl.train.saving.keeper
from flodl_hf import finetune, load
from flodl_hf.jobs import predict_file

folder, work = Path(sys.argv[1]), Path(sys.argv[2])
done = {}
model = load(folder)
texts = ["the cat sat", "a dog"]
done["scores"] = [row[0].score for row in model.predict(texts, precision="exact")]
(work / "empty").mkdir()
for target, over in (("new", False), ("new", True), ("empty", False)):
    done["written"] = sorted(p.name for p in model.save_pretrained(work / target, overwrite=over).iterdir())
done["again"] = [row[0].score for row in load(work / "new").predict(texts, precision="exact")]
torch.save({n: t for n, t in safetensors.torch.load_file(folder / "model.safetensors").items()}, work / "pytorch_model.bin")
(work / "bin").mkdir()
for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
    shutil.copy(folder / name, work / "bin" / name)
shutil.copy(work / "pytorch_model.bin", work / "bin")
done["bin"] = [row[0].score for row in load(work / "bin").predict(texts, precision="exact")]
(work / "in.txt").write_text("the cat sat\na dog\n" * 20)
done["rows"] = predict_file(str(folder), work / "in.txt", work / "out.jsonl", part_rows=16).written
rows = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 8
given = dict(train=rows, eval=rows[:4], batch_size=4, epochs=2, seed=1)
def noted(event):
    if type(event).__name__ in ("SaveFailed", "Warned"):
        done.setdefault("events", []).append(str(event))
given["on_event"] = noted
kept = dict(checkpoints=str(work / "kept"), keep_checkpoints=True)
part = finetune(str(folder), out=work / "tuned", **given, **kept)
done["kept"] = len(list((work / "kept").rglob("step-*")))
done["steps"] = finetune(str(folder), out=work / "tuned", overwrite=True, **given, **kept, resume=True).steps
sys.argv = ["flodl-hf", "predict", str(folder), "the cat sat", "--json"]
try:
    runpy.run_module("flodl_hf", run_name="__main__")
except SystemExit as leaving:
    done["status"] = leaving.code
print(json.dumps(done))
"""


def test_the_main_ways_without_the_calls_of_linux(saved: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("typer")
    folder = saved("bert", "sequence_classification", labels=["bad", "good"])
    (tmp_path / "work").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "work")],
        capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    *answers, last = run.stdout.strip().splitlines()
    done = json.loads(last)
    assert done["scores"] == done["again"] == done["bin"]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(done["written"])
    assert (done["rows"], done["steps"], done["status"]) == (40, 8, 0)
    assert done.get("events") is None
    assert done["kept"] >= 1
    assert json.loads(answers[0])["text"] == "the cat sat"
    assert "on cpu (1 thread)" in run.stderr
    assert not [p.name for p in (tmp_path / "work").iterdir() if p.name.startswith(".")], "stages are left"


def test_files_are_read_at_their_places_by_threads_without_pread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from flodl import system

    data = os.urandom(1 << 16)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.delattr(os, "pread", raising=False)
    monkeypatch.delattr(os, "preadv", raising=False)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda place: system.read_at(descriptor, 512, place), range(0, len(data), 512)))
        assert b"".join(found) == data
        part = bytearray(100)
        assert system.read_vectors_at(descriptor, [memoryview(part), memoryview(bytearray(5))], 7) == 100
        assert part == data[7:107]
    finally:
        os.close(descriptor)


def test_a_lock_is_held_until_it_is_let_go(tmp_path: Path) -> None:
    from flodl import system

    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert system.lock(first)
    assert not system.lock(second)
    os.close(first)
    assert system.lock(second)
    os.close(second)
