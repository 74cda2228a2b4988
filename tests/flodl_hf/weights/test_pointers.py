"""A git-lfs pointer in place of a file is called what it is, and the way out is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flodl.errors import CheckpointError, FlodlError
from flodl_hf import load
from flodl_hf.errors import TokenizerError

GOLDEN = Path(__file__).parents[2] / "golden" / "bert-base"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 440449768\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.safetensors", CheckpointError),
        ("tokenizer.json", TokenizerError),
        ("vocab.txt", TokenizerError),
        ("spm.model", TokenizerError),
    ],
)
def test_a_pointer_says_what_it_is(name: str, kind: type[FlodlError], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    (folder / name).write_text(POINTER)
    with pytest.raises(kind, match="git-lfs pointer") as refused:
        load(folder)
    assert name in str(refused.value)
    assert "git lfs pull" in str(refused.value)


def test_a_pointer_in_place_of_pickled_weights(tmp_path: Path) -> None:
    from flodl_hf.export import convert_bin

    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text(POINTER)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        convert_bin(folder, tmp_path / "out")


def test_the_command_line_says_so_too(tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from flodl_hf.cli.app import app

    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    (folder / "model.safetensors").write_text(POINTER)
    done = testing.CliRunner().invoke(app, ["predict", str(folder), "a text"])
    assert done.exit_code == 1
    assert "git lfs pull" in done.stderr
