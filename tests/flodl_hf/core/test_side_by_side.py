"""``benchmarks/side_by_side.py`` on tiny models whose right answer is known."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "side_by_side.py"
if not SCRIPT.is_file():
    pytest.skip("benchmarks are not part of an installed package", allow_module_level=True)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("side_by_side", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["side_by_side"] = module
    spec.loader.exec_module(module)
    return module


def asked(script: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    script.main([str(a) for a in (*arguments, "--json")])
    return json.loads(capsys.readouterr().out)


Crafted = Callable[..., Any]


def test_classes(script: ModuleType, crafted: Crafted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"0": "bad", "1": "good"}
    folder = crafted("sequence_classification", {"good": 1, "bad": 0}, mix=2.0, id2label=labels).save_pretrained(
        tmp_path / "m"
    )
    data = tmp_path / "rows.tsv"
    # The last text is bad after its beginning, which is all that a truncating pipeline sees.
    texts = [("good film", 1), ("bad bad film", 0), ("the dog was good", 0), ("good " * 36 + "bad " * 300, 0)]
    data.write_text("".join(f"{text}\t{label}\n" for text, label in texts))
    found = asked(script, capsys, folder, data)
    assert found["texts"] == 4
    assert found["equal answers"] == 0.75
    assert found["largest score difference"] < 1e-5
    assert (found["ours as the data"], found["theirs as the data"]) == (0.75, 0.5)
    assert (found["only ours right"], found["only theirs right"]) == (1, 0)
    (case,) = found["differing"]
    assert (case["ours"], case["theirs"], case["gold"]) == (["bad"], ["good"], ["bad"])


def test_entities(script: ModuleType, crafted: Crafted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"0": "O", "1": "credit-card", "2": "LOC"}
    model = crafted("token_classification", {"corp": 1, "paris": 2}, other=0, id2label=labels)
    data = tmp_path / "rows.conll"
    data.write_text("ada\tO\nin\tO\nparis\tB-LOC\n\nacme\tO\ncorp\tB-credit-card\n\nthe\tO\ncat\tO\n")
    found = asked(script, capsys, model.save_pretrained(tmp_path / "m"), data)
    assert found["texts"] == 3
    assert found["equal answers"] == pytest.approx(2 / 3)
    (case,) = found["differing"]
    assert case["ours"] == [["credit-card", 5, 9]]
    assert case["theirs"] == [["card", 5, 9]]
    assert (found["ours as the data"], found["theirs as the data"]) == (1.0, 0.5)


def test_answers(script: ModuleType, crafted: Crafted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = crafted("question_answering", {"ada": 0, "corp": 1}).save_pretrained(tmp_path / "m")
    contexts = ["the cat sat. ada works for acme corp.", "the dog ran " * 30 + "ada corp was good"]
    golds = ["ada works for acme corp", "ada corp"]
    questions = [
        {"context": c, "qas": [{"id": str(i), "question": "who works?", "answers": [{"text": g, "answer_start": c.index(g)}]}]}
        for i, (c, g) in enumerate(zip(contexts, golds, strict=True))
    ]  # fmt: skip
    data = tmp_path / "rows.json"
    data.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": questions}]}))
    found = asked(script, capsys, folder, data)
    assert found["texts"] == 2
    assert found["equal answers"] == 1.0
    assert found["ours as the data"] == found["theirs as the data"] == 1.0
    assert found["differing"] == []


def test_the_table_names_every_figure_and_shows_differences(
    script: ModuleType, crafted: Crafted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"0": "bad", "1": "good"}
    folder = crafted("sequence_classification", {"good": 1, "bad": 0}, mix=2.0, id2label=labels).save_pretrained(
        tmp_path / "m"
    )
    data = tmp_path / "rows.tsv"
    data.write_text("good film\t1\n" + "good " * 36 + "bad " * 300 + "\t0\n")
    script.main([str(folder), str(data), "--limit", "2"])
    shown = capsys.readouterr().out
    assert "equal answers             0.5" in shown
    assert "ours    ['bad']\n  theirs  ['good']\n  data    ['bad']" in shown


def test_a_model_of_another_task_is_refused(script: ModuleType, crafted: Crafted, tmp_path: Path) -> None:
    folder = crafted("masked_lm", {}).save_pretrained(tmp_path / "m")
    with pytest.raises(SystemExit, match="masked_lm model; expected one of"):
        script.main([str(folder), "x.tsv"])
