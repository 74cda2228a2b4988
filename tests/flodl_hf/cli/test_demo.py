"""The demo's folder: a demo gives way to the next one, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

typer_testing = pytest.importorskip("typer.testing")

from flodl_hf.cli.app import app  # noqa: E402
from flodl_hf.training.demo import LABELS, is_demo  # noqa: E402


def laid_out(folder: Path, labels: tuple[str, ...], *more: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"id2label": dict(enumerate(labels))}))
    for name in ("model.safetensors", "tokenizer.json", "checksums.json", *more):
        (folder / name).write_bytes(b"hours of work")
    return folder


def test_what_a_demo_wrote_is_known(tmp_path: Path) -> None:
    assert is_demo(laid_out(tmp_path / "a", LABELS, "verification.json"))
    assert not is_demo(laid_out(tmp_path / "b", LABELS, "training.json"))
    assert not is_demo(laid_out(tmp_path / "c", ("bad", "good")))


@pytest.mark.parametrize(("labels", "more"), [(LABELS, "training.json"), (("bad", "good"), "vocab.txt")])
def test_work_is_not_replaced_by_a_demo(labels: tuple[str, ...], more: str, tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "tuned", labels, more)
    done = typer_testing.CliRunner().invoke(app, ["demo", "--out", str(folder), "--steps", "1"])
    assert done.exit_code == 1
    assert f"{folder}: contains files of other origin" in done.stderr
    assert "--overwrite" in done.stderr
    assert (folder / "model.safetensors").read_bytes() == b"hours of work"
