"""A published folder is the old one or the new one, whole, whatever happens in between."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.checkpoints.saving import publish as publish_module
from flodl_hf.checkpoints.saving.publish import is_model_file, publish_folder
from flodl_hf.errors import ExportError


def write_version(stage: Path, version: str, files: int = 4) -> None:
    for number in range(files):
        (stage / f"model-{number}.safetensors").write_text(version)


def versions(folder: Path) -> set[str]:
    return {file.read_text() for file in folder.iterdir()}


def good(folder: Path, version: str = "old") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_version(folder, version)
    return folder


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(publish_module.system, "exchange", lambda source, target: False)
    return request.param


def test_a_new_folder_with_its_parents(tmp_path: Path) -> None:
    target = publish_folder(tmp_path / "a" / "b", lambda stage: write_version(stage, "new"))
    assert target == tmp_path / "a" / "b"
    assert versions(target) == {"new"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b"}


@pytest.mark.usefixtures("swap")
def test_an_old_folder_is_replaced_whole_and_never_merged(tmp_path: Path) -> None:
    target = good(tmp_path / "out")
    (target / "model.safetensors.index.json").write_text("stale")
    publish_folder(target, lambda stage: write_version(stage, "new", 2), overwrite=True)
    assert sorted(file.name for file in target.iterdir()) == ["model-0.safetensors", "model-1.safetensors"]
    assert versions(target) == {"new"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_an_empty_folder_needs_no_permission(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    publish_folder(tmp_path / "out", lambda stage: write_version(stage, "new"))
    assert versions(tmp_path / "out") == {"new"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.usefixtures("swap")
def test_a_writer_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(stage: Path) -> None:
        write_version(stage, "new", 2)
        (stage / "1_Pooling").mkdir()
        raise error("on purpose")

    good(tmp_path / "out")
    for target in (tmp_path / "out", tmp_path / "fresh" / "deep"):
        with pytest.raises(error, match="on purpose"):
            publish_folder(target, fail, overwrite=True)
    assert versions(tmp_path / "out") == {"old"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def a_file(place: Path) -> None:
    place.write_text("mine")


def a_link_to_a_file(place: Path) -> None:
    (place.parent / "other").write_text("mine")
    place.symlink_to("other")


def a_link_to_a_folder(place: Path) -> None:
    good(place.parent / "other", "mine")
    place.symlink_to("other")


def a_dangling_link(place: Path) -> None:
    place.symlink_to("nowhere")


def a_source_tree(place: Path) -> None:
    good(place, "mine")
    (place / ".git").mkdir()
    (place / ".git" / "HEAD").write_text("mine")


def a_home(place: Path) -> None:
    good(place, "mine")
    (place / "thesis.odt").write_text("mine")


def an_empty_stranger(place: Path) -> None:
    good(place, "mine")
    (place / "photos").mkdir()


def a_hidden_link(place: Path) -> None:
    good(place, "mine")
    (place.parent / "other").mkdir()
    (place / "1_Pooling").symlink_to("../other")


def below_a_file(place: Path) -> None:
    place.parent.rmdir()
    place.parent.write_text("mine")


TARGETS = [
    a_file,
    a_link_to_a_file,
    a_link_to_a_folder,
    a_dangling_link,
    a_source_tree,
    a_home,
    an_empty_stranger,
    a_hidden_link,
    below_a_file,
]


def listing(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_text()
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_what_is_not_a_model_folder_is_never_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "in").mkdir()
    make(tmp_path / "in" / "out")
    before = listing(tmp_path)
    with pytest.raises(ExportError) as caught:
        publish_folder(tmp_path / "in" / "out", lambda stage: write_version(stage, "new"), overwrite=True)
    assert caught.value.path == str(tmp_path / "in" / "out")
    assert listing(tmp_path) == before


def test_a_full_folder_needs_overwrite(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="4 files"):
        publish_folder(good(tmp_path / "out"), lambda stage: write_version(stage, "new"))
    assert versions(tmp_path / "out") == {"old"}


def test_the_current_folder_and_those_above_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "1_Pooling").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "1_Pooling")
    for target in (".", "..", tmp_path / "a"):
        with pytest.raises(ExportError, match="current folder"):
            publish_folder(target, lambda stage: None, overwrite=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ExportError) as caught:
            publish_folder(tmp_path / "out", lambda stage: write_version(stage, "new"))
    finally:
        tmp_path.chmod(0o700)
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask_and_the_folder_that_was_there(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        target = publish_folder(tmp_path / "out", lambda stage: write_version(stage, "new"))
        modes = {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()}
        assert (stat.S_IMODE(target.stat().st_mode), modes) == (0o777 & ~umask, {0o666 & ~umask})
        target.chmod(0o750)
        publish_folder(target, lambda stage: write_version(stage, "newer"), overwrite=True)
        assert stat.S_IMODE(target.stat().st_mode) == 0o750
    finally:
        os.umask(old)


class TestSweep:
    def test_what_dead_writers_left_is_removed(self, tmp_path: Path) -> None:
        good(tmp_path / "out")
        good(tmp_path / ".out.stage-0123456789abcdef", "half")
        good(tmp_path / ".out.old-0123456789abcdef", "older")
        good(tmp_path / ".other.stage-0123456789abcdef", "not ours")
        publish_folder(tmp_path / "out", lambda stage: write_version(stage, "new"), overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"out", ".other.stage-0123456789abcdef"}

    def test_what_a_living_writer_holds_is_left_alone(self, tmp_path: Path) -> None:
        def slow(stage: Path) -> None:
            write_version(stage, "slow")
            publish_folder(tmp_path / "out", lambda inner: write_version(inner, "quick"), overwrite=True)
            assert versions(stage) == {"slow"}
            assert versions(tmp_path / "out") == {"quick"}

        publish_folder(tmp_path / "out", slow, overwrite=True)
        assert versions(tmp_path / "out") == {"slow"}
        assert {path.name for path in tmp_path.iterdir()} == {"out"}

    def test_an_orphaned_old_folder_comes_back_before_anything_else(self, tmp_path: Path) -> None:
        """Killed between the two renames, the old folder is at its other name; a failing publish restores it."""
        good(tmp_path / ".out.old-0123456789abcdef", "old")

        def fail(stage: Path) -> None:
            raise ValueError("on purpose")

        with pytest.raises(ValueError, match="on purpose"):
            publish_folder(tmp_path / "out", fail, overwrite=True)
        assert versions(tmp_path / "out") == {"old"}


def test_who_comes_second_without_permission_does_not_replace(tmp_path: Path) -> None:
    def slow(stage: Path) -> None:
        write_version(stage, "slow")
        publish_folder(tmp_path / "out", lambda inner: write_version(inner, "quick"))

    with pytest.raises(ExportError, match="4 files"):
        publish_folder(tmp_path / "out", slow)
    assert versions(tmp_path / "out") == {"quick"}


def test_the_second_rename_failing_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_module.system, "exchange", lambda source, target: False)
    good(tmp_path / "out")
    real, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, "on purpose")
        real(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(ExportError, match="on purpose"):
        publish_folder(tmp_path / "out", lambda stage: write_version(stage, "new"), overwrite=True)
    assert versions(tmp_path / "out") == {"old"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_the_size_is_no_reason_if_the_folder_above_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ExportError) as caught:
        publish_folder(tmp_path / "above" / "out", lambda stage: None, needed_bytes=200)
    assert (caught.value.errno, caught.value.needed_bytes) == (errno.EROFS, 0)


@pytest.mark.parametrize("fault", [errno.EINVAL, errno.EPERM])
def test_a_file_that_the_disk_refuses_to_sync_is_not_published(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "fsync", fsync)
    if fault == errno.EINVAL:  # a file system that cannot
        publish_folder(tmp_path / "out", lambda stage: (stage / "config.json").write_text("{}"))
    else:
        with pytest.raises(ExportError) as caught:
            publish_folder(tmp_path / "out", lambda stage: (stage / "config.json").write_text("{}"))
        assert caught.value.errno == fault
    assert (tmp_path / "out").exists() == (fault == errno.EINVAL)


def test_names_of_model_files() -> None:
    yes = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "vocab.txt",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "spm.model",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "README.md",
        "verification.json",
        "generation_config.json",
    ]
    no = [
        ".git/config",
        ".bashrc",
        "train.py",
        "notes.txt",
        "data/config.json",
        "1_Pooling/x.py",
        "a/b/config.json",
        "results.csv",
    ]
    assert [name for name in yes if not is_model_file(name)] == []
    assert [name for name in no if is_model_file(name)] == []


def test_names_of_model_files_have_one_spelling_on_all_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "normcase", str.lower)  # as on Windows
    assert is_model_file("README.md")
    assert not is_model_file("Config.json")
    assert not is_model_file("readme.md")


def fork() -> int:
    with warnings.catch_warnings():
        # The children only touch files, so threads that they do not inherit cannot block them.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a child process that never comes back here; return its id."""
    child = fork()
    if child == 0:  # pragma: no cover - killed, or leaves at once
        try:
            work()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    return child


def replace(target: Path, version: str) -> Path:
    return publish_folder(target, partial(write_version, version=version), overwrite=True)


def test_killed_at_any_moment_a_reader_sees_old_or_new(tmp_path: Path) -> None:
    target = good(tmp_path / "out", "old")
    moments = random.Random(5)
    outcome = {"old": 0, "new": 0}
    for round in range(30):
        replace(target, "old" * 3000)
        child = in_child(partial(replace, target, "new" * 3000))
        if round % 6:
            time.sleep(moments.uniform(0, 0.012))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(list(target.iterdir())) == 4
        [text] = versions(target)
        assert len(text) == 9000
        outcome[text[:3]] += 1
    assert outcome["old"] > 0
    assert outcome["new"] > 0
    replace(target, "last")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


class Deadly:
    """Wraps functions so that the process kills itself before the call of the given number."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def wrap(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return real(*arguments, **options)

        return call

    def run(self, target: Path) -> None:
        for name in ("mkdir", "open", "write", "fsync", "chmod", "rename", "unlink", "rmdir"):
            setattr(os, name, self.wrap(getattr(os, name)))
        publish_module.system.exchange = self.wrap(publish_module.system.exchange)  # type: ignore[assignment]
        replace(target, "new")


@pytest.mark.usefixtures("swap")
def test_killed_before_every_step_the_next_publish_starts_from_old_or_new(tmp_path: Path, swap: str) -> None:
    """Not at random: the child dies by its own hand before each call that changes the file system, in turn."""
    target = good(tmp_path / "out")
    steps = gaps = 0
    while True:
        replace(target, "old")
        child = in_child(partial(Deadly(steps).run, target))
        _, status = os.waitpid(child, 0)
        if not target.exists():
            # Only two renames have such a moment; the next publish mends it before its writer runs.
            gaps += 1
            with pytest.raises(ZeroDivisionError):
                publish_folder(target, lambda stage: 1 // 0, overwrite=True)  # type: ignore[arg-type, return-value]
        assert len(list(target.iterdir())) == 4
        assert versions(target) in ({"old"}, {"new"})
        if not os.WIFSIGNALED(status):
            assert versions(target) == {"new"}
            break
        steps += 1
    assert steps > 15
    assert gaps == (swap == "two renames")
    replace(target, "last")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def read_pinned(folder: Path) -> set[str]:
    """Return the texts in ``folder``, read through one descriptor; empty if it was replaced meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        texts = set()
        for number in range(4):
            with open(os.open(f"model-{number}.safetensors", os.O_RDONLY, dir_fd=descriptor)) as file:
                texts.add(file.read())
        return texts
    except FileNotFoundError:
        return set()
    finally:
        os.close(descriptor)


def test_a_stage_that_another_writer_took_for_a_stale_one_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, taken = publish_module._lock, []

    def swept(folder: Path, *, wait: bool) -> Any:
        if not taken and wait:
            taken.append(folder)
            folder.rmdir()  # between its making and its opening
        return plain(folder, wait=wait)

    monkeypatch.setattr(publish_module, "_lock", swept)
    assert versions(replace(tmp_path / "out", "new")) == {"new"}
    assert len(taken) == 1


def test_several_writers_and_a_reader_never_mix(tmp_path: Path) -> None:
    target = good(tmp_path / "out")

    def write_for_ever() -> None:
        while True:
            replace(target, f"{os.getpid()} {time.monotonic_ns()}")

    writers = [in_child(write_for_ever) for _ in range(2)]
    seen: set[str] = set()
    try:
        end = time.monotonic() + 600  # on a busy machine one of them may have its turn late
        while time.monotonic() < end and (len(seen) < 100 or len({text.split()[0] for text in seen - {"old"}}) < 2):
            texts = read_pinned(target)
            assert len(texts) <= 1
            seen |= texts
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    assert len({text.split()[0] for text in seen - {"old"}}) == 2
    assert len(versions(target)) == 1
    replace(target, "last")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
