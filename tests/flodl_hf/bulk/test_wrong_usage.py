"""Wrong usage of ``flodl-hf predict`` is status 2, and says what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

typer_testing = pytest.importorskip("typer.testing")


def run(*arguments: str) -> Any:
    from flodl_hf.cli.app import app

    return typer_testing.CliRunner().invoke(app, ["predict", *arguments])


@pytest.mark.parametrize("to_file", [False, True])
def test_an_unknown_precision_is_wrong_usage(tmp_path: Path, to_file: bool) -> None:
    texts = tmp_path / "in.txt"
    texts.write_text("a text\n")
    rest = ["--in", str(texts), "--out", str(tmp_path / "out.jsonl")] if to_file else ["a text"]
    done = run(str(tmp_path), *rest, "--precision", "bf61")
    assert done.exit_code == 2, done.output
    assert "bf61" in done.output
    assert "bf16" in done.output
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("head", ["multiple_choice", "next_sentence"])
def test_a_head_without_a_form_in_files_is_refused(head: str, folder: Any, jsonl: Any, tmp_path: Path) -> None:
    from flodl_hf import load, predict_file
    from flodl_hf.errors import PredictError

    with pytest.raises(PredictError) as caught:
        predict_file(
            load(folder("sequence_classification"), head=head),
            jsonl([{"text": "a"}]),
            tmp_path / "out.csv",
            untrained=True,
        )
    assert caught.value.details["head"] == head
