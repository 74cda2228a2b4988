"""``--timing`` prints the seconds of each phase of a command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flodl_hf.cli.shared import say_timing
from flodl_hf.training import demo

ROWS = "text\tlabel\n" + "".join(f"the food was {word}\t{label}\n" for word, label in (("good", 1), ("bad", 0)) * 8)
PHASES = {
    "finetune": ["import", "read", "load", "tokenise", "first step", "train", "evaluate", "save"],
    "predict": ["import", "load", "predict"],
}
COMMANDS = {
    "finetune": ["finetune", "base", "--train", "rows.tsv", "--eval", "rows.tsv", "--epochs", "1", "--out", "tuned"],
    "predict": ["predict", "base", "good"],
    "a file": ["predict", "base", "--in", "rows.tsv", "--out", "answers.jsonl"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_phase_has_its_seconds(name: str, tmp_path: Path) -> None:
    model = demo.demo_model(demo.learn_vocabulary())
    model._mark_untrained(())
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "rows.tsv").write_text(ROWS)
    words = [*COMMANDS[name], "--timing", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "flodl_hf", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("seconds: "))
    found = dict(re.findall(r"([a-z ]+) ([0-9.]+)(?:, |$)", line.removeprefix("seconds: ")))
    assert sorted(found) == sorted(PHASES[COMMANDS[name][0]])
    assert float(found["import"]) > 0
    assert re.fullmatch(r"exit: [0-9.]+ seconds", done.stderr.splitlines()[-1])


def test_other_ranks_print_no_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        say_timing({"import": 1.0})
        assert ("seconds: " in capsys.readouterr().err) == (rank == "0")
