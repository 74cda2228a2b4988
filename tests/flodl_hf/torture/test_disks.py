"""Power losses and disks at fault: a part of each act's states and faults here, all of them by ``make torture``."""

from __future__ import annotations

import errno
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from flodl.files import make_folders, write_atomically
from flodl_hf.torture import disks, powerloss
from flodl_hf.torture.acts import ACTS, Act
from flodl_hf.torture.case import Grade
from flodl_hf.torture.crash import CrashState, Replay, lay_out, tree_of
from flodl_hf.torture.disk import Disk, Step
from flodl_hf.torture.subjects import Ours

pytestmark = pytest.mark.skipif(os.name == "nt", reason="names of open files")
NAMES = [act.name for act in ACTS]
SLOW = ("checkpoints", "a file of answers", "a file of answers, restart")


def some(suite: Any, name: str, count: int, seed: int = 0) -> list[Any]:
    found = (case for case in suite.cases(seed, 200 * count) if case.kind == name)
    return list(islice(found, count))


@pytest.mark.parametrize("name", NAMES)
def test_the_power_goes_at_any_moment(name: str, tmp_path: Path) -> None:
    for case in some(powerloss, name, 6 if name in SLOW else 25):
        folder = tmp_path / str(case.number)
        folder.mkdir()
        verdict = powerloss.run(case, folder, Ours())
        assert verdict.grade is Grade.RIGHT, verdict.text


@pytest.mark.parametrize("name", NAMES)
def test_a_step_fails(name: str, tmp_path: Path) -> None:
    for case in some(disks, name, 3 if name in SLOW else 7):
        folder = tmp_path / str(case.number)
        folder.mkdir()
        verdict = disks.run(case, folder, Ours())
        assert verdict.good, (verdict.grade, verdict.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suite", [powerloss, disks], ids=["power", "faults"])
def test_all_of_it(suite: Any, name: str, tmp_path: Path) -> None:
    count = powerloss.all_states()[name] if suite is powerloss else len(disks.all_faults(name))
    for case in some(suite, name, count):
        folder = tmp_path / str(case.number)
        folder.mkdir()
        verdict = suite.run(case, folder, Ours())
        assert verdict.good, (verdict.grade, verdict.text)


@pytest.mark.parametrize("name", NAMES)
def test_without_syncs_every_act_loses_something(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The judges see it: of the same steps, the syncs left out, all may be said and nothing be there."""
    act: Act = next(act for act in ACTS if act.name == name)
    replay, marks, _ = powerloss._recording(name)
    root = tmp_path / "before"
    root.mkdir()
    act.prepare(root)
    kept = [step for step in replay.steps if step.kind != "sync"]
    loose = Replay(tree_of(root), kept)
    harmed = tuple((i, "lost") for i, step in enumerate(kept) if step.kind == "write")
    lay_out(loose.tree(CrashState(len(kept), frozenset(), harmed)), tmp_path / "after")
    assert act.judge(tmp_path / "after", frozenset(marks))


def recorded(root: Path, work: Any, **options: Any) -> Disk:
    disk = Disk(root, **options)
    with disk.watched():
        work()
    return disk


def test_what_a_disk_writes_down_makes_the_same_folder(tmp_path: Path) -> None:
    import shutil

    (tmp_path / "there").write_bytes(b"before")
    before = tree_of(tmp_path)

    def work() -> None:
        (tmp_path / "a").mkdir()
        with open(tmp_path / "a" / "text", "w") as file:
            file.write("line\n" * 3)
        with open(tmp_path / "there", "ab") as file:
            file.write(b" and after")
        with open(tmp_path / "a" / "both", "w+b") as file:
            file.write(b"0123456789")
            file.seek(3)
            file.write(b"XY")
            file.truncate(7)
        (tmp_path / "a" / "text").rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        os.replace(tmp_path / "moved", tmp_path / "there2")
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "copy" / "both").touch()
        os.truncate(tmp_path / "there", 3)

    disk = recorded(tmp_path, work)
    assert tree_of(tmp_path)["there"] == b"bef"
    assert Replay(before, disk.steps).final() == tree_of(tmp_path)
    assert {step.kind for step in disk.steps} == {"mkdir", "create", "write", "cut", "rename", "unlink", "rmdir"}


def test_doors_are_taken_back(tmp_path: Path) -> None:
    import builtins

    before = (os.open, os.write, os.replace, os.fsync, builtins.open, frozenset(os.supports_dir_fd))
    with pytest.raises(ZeroDivisionError):
        recorded(tmp_path, lambda: 1 // 0)
    assert before == (os.open, os.write, os.replace, os.fsync, builtins.open, frozenset(os.supports_dir_fd))


def test_states_of_a_rename_without_syncs(tmp_path: Path) -> None:
    """The classic fault: a file is written, renamed over the old one, and empty after a power loss."""
    before = {"file": b"old"}
    steps = [Step("create", "new"), Step("write", "new", "", 0, b"new!"), Step("rename", "new", "file")]
    replay = Replay(before, steps)
    found = [replay.tree(state) for state in replay.states() if state.after == 3]
    assert {"file": b""} in found
    assert {"file": b"ne"} in found
    assert {"file": bytes(4)} in found
    assert {"file": b"old"} in found
    synced = Replay(before, [*steps[:2], Step("sync", "new"), steps[2], Step("sync", ".")])
    assert [synced.tree(state) for state in synced.states() if state.after == 5] == [{"file": b"new!"}]
    assert {tree.get("file") for tree in map(synced.tree, synced.states())} == {b"old", b"new!"}


def test_a_file_that_a_kill_left_is_used_no_more_than_once(tmp_path: Path) -> None:
    left = tmp_path / ".report.tmp"
    left.write_bytes(b"half of")
    write_atomically(tmp_path / "report", [b"whole"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report": b"whole"}

    def meanwhile() -> Any:
        yield b"fir"
        assert left.exists()
        write_atomically(tmp_path / "report", [b"second"])  # another writer does not touch the first one's file
        assert left.exists()
        yield b"st"

    write_atomically(tmp_path / "report", meanwhile())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report": b"first"}


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
def test_no_step_of_one_file_fails_in_silence(fault: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    steps = len(recorded(tmp_path, lambda: write_atomically(tmp_path / "file", [b"new"])).counted)
    assert steps == 5  # made, written, synced, renamed, and its name synced
    for number in range(steps):
        (tmp_path / "file").write_bytes(b"old")
        with pytest.raises(OSError) as caught:
            recorded(tmp_path, lambda: write_atomically(tmp_path / "file", [b"new"]), fail_at=number, fault=fault)
        assert caught.value.errno == fault
        whole = {b"old"} if number < 4 else {b"new"}
        assert {path.read_bytes() for path in tmp_path.iterdir()} == whole


def test_folders_that_cannot_be_made_leave_none(tmp_path: Path) -> None:
    for number in range(6):
        with pytest.raises(OSError):
            recorded(tmp_path, lambda: make_folders(tmp_path / "a" / "b" / "c"), fail_at=number)
        assert list(tmp_path.iterdir()) == []
    assert [path.name for path in make_folders(tmp_path / "a" / "b")] == ["b", "a"]
    assert make_folders(tmp_path / "a" / "b") == []
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folders(tmp_path / "file")
