"""Pipes, files without end and nested ones among the files of a run that is gone on with: no wait, no bare error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flodl.errors import FlodlError
from flodl.files import read_regular
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl_hf import finetune
from flodl_hf.jobs import predict_file

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    os.truncate(path, 3_000_000_000)  # holds no block of the disk


def nested(path: Path) -> None:
    path.write_text("[" * 200_000)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS = [pipe, endless, nested, directory]


@pytest.mark.parametrize("damage", WAYS)
def test_a_checkpoint_with_such_a_file_is_refused(
    saved: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    rows = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 8
    given = {"train": rows, "batch_size": 4, "epochs": 2, "save_every": 2, "keep_best": False}
    kept = tmp_path / "kept"
    finetune(str(saved("bert")), **given, checkpoints=str(kept), keep_checkpoints=True)  # type: ignore[arg-type]
    newest = list_checkpoints(kept)[-1]
    shutil.copytree(newest, tmp_path / "whole")
    for file in sorted(p.name for p in newest.iterdir()):
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "whole", newest)
        damage(newest / file)
        with pytest.raises(FlodlError) as caught:
            read_checkpoint(newest)
        assert str(newest) in str(caught.value)
    with pytest.raises(FlodlError, match="none of the 1 checkpoints"):
        finetune(str(tmp_path / "bert-base"), **given, checkpoints=str(kept), resume=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", WAYS)
def test_parts_of_a_bulk_run(saved: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = saved("bert", "sequence_classification")
    (tmp_path / "in.txt").write_text("the cat sat\n" * 40)
    out, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    seen: list[int] = []

    def begun() -> bool:
        seen.append(1)
        return len(seen) > 2

    predict_file(str(folder), tmp_path / "in.txt", out, part_rows=8, should_stop=begun)
    shutil.copytree(parts, tmp_path / "whole")
    for file in sorted(p.name for p in parts.iterdir()):
        shutil.rmtree(parts, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", parts)
        damage(parts / file)
        if file == "manifest.json" or (damage is directory and file.startswith("part-")):
            with pytest.raises(FlodlError):
                predict_file(str(folder), tmp_path / "in.txt", out, part_rows=8)
        else:
            assert predict_file(str(folder), tmp_path / "in.txt", out, part_rows=8).written == 40
            assert out.read_text().count("\n") == 40
            out.unlink()


def test_finished_parts_that_a_kill_left_are_swept(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("bert", "sequence_classification")
    (tmp_path / "in.txt").write_text("the cat sat\n" * 4)
    left, other = tmp_path / ".out.jsonl.parts.4711.gone", tmp_path / ".other.jsonl.parts.4711.gone"
    for each in (left, other):
        each.mkdir()
        (each / "part-00000.jsonl").write_text("x")
    predict_file(str(folder), tmp_path / "in.txt", tmp_path / "out.jsonl")
    assert not left.exists()
    assert other.exists()


def test_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    for name, limit in (("file", 4), ("pipe", 9), ("absent", 9), (".", 9)):
        with pytest.raises(OSError):
            read_regular(tmp_path / name, limit)
