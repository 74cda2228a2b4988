"""After a power loss a file or folder has its old or its new contents: everything is synced in the right order."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flodl.files import make_folders, write_atomically
from flodl.train import Trainer
from flodl_hf import load, predict_file
from flodl_hf.checkpoints import system
from flodl_hf.checkpoints.saving import publish as publish_module
from tests.torture.checkpoints import checkpoint, write_files

# States of workers, which nobody needs after a power loss.
TEMPORARY = "rank-"


class Disk:
    """Records which files and names are synced, and what would be lost at each rename.

    Attributes:
        lost: what a power loss could take at some moment; empty for a careful writer.
        renames: number of renames recorded.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.lost: list[str] = []
        self.renames = 0
        before = [entry.stat() for entry in folder.rglob("*")]
        self._synced = {status.st_ino: (status.st_size, status.st_mtime_ns) for status in before}
        self._unsynced_names: dict[int, str] = {}
        real = {"fsync": os.fsync, "rename": os.rename, "replace": os.replace, "exchange": system.exchange}

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            status = os.fstat(descriptor)
            self._synced[status.st_ino] = (status.st_size, status.st_mtime_ns)
            self._unsynced_names.pop(status.st_ino, None)

        def move(name: str) -> Callable[..., Any]:
            def moved(source: Any, target: Any, **options: Any) -> Any:
                if not Path(target).name.startswith(TEMPORARY) and not Path(target).name.endswith(".gone"):
                    self._check(Path(source))
                result = real[name](source, target, **options)
                if result is not False:
                    self.renames += 1
                    self._unsynced_names[os.stat(Path(target).parent).st_ino] = f"name {Path(target).name}"
                return result

            return moved

        remove_tree = shutil.rmtree

        def rmtree(path: Any, *arguments: Any, **options: Any) -> Any:
            self.lost += [f"{name}, when {Path(path).name} is removed" for name in self._unsynced_names.values()]
            return remove_tree(path, *arguments, **options)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", move("rename"))
        patch.setattr(os, "replace", move("replace"))
        patch.setattr(system, "exchange", move("exchange"))
        patch.setattr(shutil, "rmtree", rmtree)

    def _check(self, source: Path) -> None:
        """Note the entries below a renamed path that were not synced since their last change."""
        for entry in [source, *source.rglob("*")] if source.is_dir() else [source]:
            status = entry.stat()
            if status.st_size and self._synced.get(status.st_ino) != (status.st_size, status.st_mtime_ns):
                self.lost.append(f"contents of {entry.name}")

    def after(self) -> list[str]:
        """Return what a power loss after the call could take."""
        return self.lost + list(self._unsynced_names.values())


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        yield Disk(patch, folder)


def model_folder(folder: Path) -> Path:
    write_files(folder, checkpoint())
    return folder


def save_new(folder: Path) -> Callable[[], object]:
    model = load(model_folder(folder / "source"))
    return lambda: model.save_pretrained(folder / "target")


def save_over(folder: Path) -> Callable[[], object]:
    model = load(model_folder(folder / "source"))
    model.save_pretrained(folder / "target")
    return lambda: model.save_pretrained(folder / "target", overwrite=True)


def train(folder: Path) -> Callable[[], object]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    def fit() -> None:
        trainer = Trainer.builder(
            lambda device: nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), step
        ).dataset({"x": torch.ones(4, 2)}).batch_size(2).num_epochs(3).checkpoints(str(folder / "run"), keep_last=1)  # fmt: skip
        trainer.run()

    return fit


def answer_file(folder: Path) -> Callable[[], object]:
    model = load(model_folder(folder / "source"))
    texts = folder / "in.jsonl"
    texts.write_text('{"text": "the cat sat"}\n' * 4)
    return lambda: predict_file(model, texts, folder / "out.jsonl", part_rows=2)


def publish(folder: Path) -> Callable[[], object]:
    def write(stage: Path) -> None:
        (stage / "1_Pooling").mkdir()
        (stage / "1_Pooling" / "config.json").write_text("{}")
        (stage / "config.json").write_text("{}")

    return lambda: publish_module.publish_folder(folder / "target", write)


WRITERS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "one file": lambda folder: lambda: write_atomically(folder / "file", [b"new"]),
    "a new model folder": save_new,
    "over a model folder": save_over,
    "a folder with a subfolder": publish,
    "checkpoints of a run": train,
    "a file of answers": answer_file,
}


@pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folders")
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("writer", WRITERS)
def test_everything_is_synced_before_it_is_needed(
    writer: str, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WRITERS[writer](tmp_path)
    if not exchange:
        monkeypatch.setattr(publish_module.system, "exchange", lambda source, target: False)
    with disk(tmp_path) as found:
        write()
    assert found.after() == []
    assert found.renames > 0


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_step_that_fails_leaves_the_old_file(
    step: str, fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "file", [b"new"])
    assert caught.value.errno == fault
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_file_that_a_kill_left_is_used_no_more_than_once(tmp_path: Path) -> None:
    left = tmp_path / ".report.tmp"
    left.write_bytes(b"half of")
    write_atomically(tmp_path / "report", [b"whole"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report": b"whole"}

    def meanwhile() -> Iterator[bytes]:
        yield b"fir"
        assert left.exists()
        write_atomically(tmp_path / "report", [b"second"])  # another writer does not use the first one's file
        assert left.exists()
        yield b"st"

    write_atomically(tmp_path / "report", meanwhile())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"report": b"first"}


def test_folders_that_cannot_be_made_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
        with pytest.raises(OSError):
            make_folders(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []
    assert [path.name for path in make_folders(tmp_path / "a" / "b")] == ["b", "a"]
    assert make_folders(tmp_path / "a" / "b") == []
