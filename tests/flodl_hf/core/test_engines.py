"""Models written for other engines: ONNX in ONNX Runtime and torch.export, each cell of the tables compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flodl_hf import load
from flodl_hf.cli.app import app
from flodl_hf.errors import ExportError
from flodl_hf.export import engine, onnx_session
from flodl_hf.export.engine import export_onnx, export_program
from flodl_hf.export.onnx_session import OnnxModel
from flodl_hf.families import FAMILIES
from flodl_hf.heads import HEADS
from flodl_hf.model.encoder_model import EncoderModel
from flodl_hf.sentence.recipe import SentenceRecipe

HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
with_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript or onnxruntime is not installed")
Make = Callable[..., EncoderModel]
CELLS = [(f.model_type, h.name) for f in FAMILIES for h in HEADS if h.name == "base" or h.name in f.heads]
# A window shorter than the longest rows compared, where a family has one.
WINDOW = {"modernbert": {"local_attention": 8, "num_hidden_layers": 3}}


def cells(*quick: tuple[str, str]) -> Any:
    """Return all cells of the tables, of which all but these few are slow."""
    marked = [pytest.param(*cell, marks=() if cell in quick else pytest.mark.slow) for cell in CELLS]
    return pytest.mark.parametrize(("model_type", "head"), marked)


@with_onnx
@cells(("bert", "sequence_classification"))
def test_onnx(make: Make, tmp_path: Path, model_type: str, head: str) -> None:
    model = make(model_type, head, **WINDOW.get(model_type, {}))
    found = export_onnx(model, tmp_path / "onnx")
    assert found.receipt.passed
    assert found.largest_difference <= engine.BOUND
    assert {"one row", "mixed lengths", "single tokens", "longest rows"} <= {
        check.name.removeprefix("ONNX Runtime: ") for check in found.receipt.checks
    }
    session = OnnxModel(found.folder)
    assert session.inputs == tuple(found.inputs)
    axes = ("batch", "choices", "tokens") if head == "multiple_choice" else ("batch", "tokens")
    assert all(names == axes for names in found.inputs.values())
    for name, names in found.outputs.items():
        assert session.outputs[name][: len(names)] == names
    # What nobody compared yet: a batch of other sizes.
    ids = torch.randint(5, 40, (5, 3, 17) if head == "multiple_choice" else (5, 17))
    mask = torch.ones_like(ids)
    mask[1, ..., 4:] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask)
    answers = session.run(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids))
    assert set(expected.keys()) == set(answers)
    for name, value in expected.items():
        real = mask.bool() if "tokens" in found.outputs[name] else ...
        torch.testing.assert_close(torch.from_numpy(answers[name])[real], value[real], rtol=1e-4, atol=1e-4)


@cells(("bert", "question_answering"))
def test_torch_export(make: Make, tmp_path: Path, model_type: str, head: str) -> None:
    model = make(model_type, head, **WINDOW.get(model_type, {}))
    found = export_program(model, tmp_path / "program")
    assert found.receipt.passed
    assert found.largest_difference == 0
    module = torch.export.load(found.folder / "model.pt2").module()
    ids = torch.randint(5, 40, (1, 1, 1) if head == "multiple_choice" else (1, 1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        answers = module(**{name: given[name] for name in found.inputs})
        expected = model(input_ids=ids)
    assert type(answers) is dict
    assert set(answers) == set(expected.keys())
    for name, value in expected.items():
        assert torch.equal(answers[name], value)


TEXTS = ["the cat sat on the mat", "", "a dog", "good film " * 30]


@with_onnx
@pytest.mark.slow
def test_vectors_of_texts_by_the_command(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make("mpnet")
    model.sentence_recipe = SentenceRecipe(pooling=("cls", "mean"), normalize=True)
    source = model.save_pretrained(tmp_path / "source")
    monkeypatch.setattr(engine, "_EXTERNAL_FROM", 1)  # as for weights of more than a gigabyte
    args = ["export", str(source), "--format", "onnx", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "pass  ONNX Runtime: mixed lengths: 4 x 19 ids" in done.output
    assert "sentence_embedding (batch)" in done.output
    out = tmp_path / "out"
    assert (out / "onnx" / "model.onnx_data").stat().st_size > 10_000
    for name in ("config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    receipt = json.loads((out / "verification.json").read_text())
    assert receipt["passed"]
    assert receipt["facts"]["opset"] == engine.OPSET
    assert {"onnx/model.onnx", "onnx/model.onnx_data", "config.json"} <= set(receipt["facts"]["sha256"])
    assert 0 < receipt["facts"]["largest_difference"] <= engine.BOUND
    # Vectors of texts are those of the model, which reads first windows where it is told to cut.
    session = OnnxModel(out)
    answers = session.answer(TEXTS, batch_size=3)
    expected = load(source).embed(TEXTS, truncate=True, precision="exact")
    torch.testing.assert_close(torch.from_numpy(np.stack(answers["sentence_embedding"])), expected, rtol=0, atol=1e-5)
    assert [len(states) for states in answers["last_hidden_state"]] == [8, 2, 4, model.max_tokens]
    # The folder is checked and replaced as others are.
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0
    assert CliRunner().invoke(app, args).exit_code == 1, "the folder is in use"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"notes\.txt"):
        export_program(model, out, overwrite=True)


@with_onnx
def test_numbers_that_differ_are_never_written(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("bert", "sequence_classification")

    class Wrong:
        """What ONNX Runtime would be, a little off for filled rows."""

        def __init__(self, path: Path) -> None:
            self.traced = engine.Traced(model)

        def run(self, **inputs: torch.Tensor) -> dict[str, np.ndarray]:
            off = 0.0 if inputs["attention_mask"].all() else 2e-4
            return {name: (value + off).numpy() for name, value in self.traced(**inputs).items()}

    monkeypatch.setattr(engine, "_write_onnx", lambda *args: None)
    monkeypatch.setattr(engine.Traced, "program", lambda self: None)
    monkeypatch.setattr(engine, "OnnxModel", Wrong)
    with pytest.raises(ExportError, match="ONNX Runtime does not compute") as caught:
        export_onnx(model, tmp_path / "out")
    assert [problem.split(" (")[0] for problem in caught.value.problems] == ["mixed lengths", "second texts"]
    assert caught.value.largest_difference == pytest.approx(2e-4, rel=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_program_has_to_be_equal(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = torch.export.load

    def damaged(path: Path) -> Any:
        program = read(path)
        with torch.no_grad():
            program.state_dict["model.network.encoder.embeddings.norm.bias"][3].add_(1e-6)
        return program

    monkeypatch.setattr(torch.export, "load", damaged)
    with pytest.raises(ExportError, match=r"torch\.export does not compute"):
        export_program(make("distilbert"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_program_runs_without_this_package(make: Make, tmp_path: Path) -> None:
    found = export_program(make("bert", "token_classification"), tmp_path / "out")
    code = (
        "import sys, torch\nids = torch.tensor([[2, 7, 3]])\n"
        f"given = {{name: torch.ones_like(ids) if name == 'attention_mask' else ids for name in {list(found.inputs)}}}\n"
        "given['token_type_ids'] = torch.zeros_like(ids)\n"
        f"print(tuple(torch.export.load({str(found.folder / 'model.pt2')!r}).module()(**given)['logits'].shape))\n"
        "assert not [name for name in sys.modules if name.startswith('flodl')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "(1, 3, 2)", done.stderr


def test_what_is_refused_before_anything_is_traced(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("bert")
    source = model.save_pretrained(tmp_path / "source")
    with pytest.raises(ExportError, match="the model is in bfloat16; expected float32"):
        export_program(model.to(torch.bfloat16), tmp_path / "out")
    monkeypatch.setattr(onnx_session, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ExportError, match=r"onnxscript is not installed.*pip install 'flodl-hf\[onnx\]'"):
        export_onnx(make("bert"), tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(ExportError, match=r"found no ONNX file; .*--format onnx"):
        onnx_session.find_onnx(source)
    given = ["export", str(source), "--out", str(tmp_path / "out")]
    for more, message in (
        (["--opset", "18"], "--opset is for --format onnx"),
        (["--format", "torch-export", "--opset", "18"], "--opset is for --format onnx"),
        (["--format", "torch-export", "--dtype", "float16"], "writes float32"),
        (["--format", "onnx", "--max-shard-size", "1GB"], "--max-shard-size is for"),
    ):
        done = CliRunner().invoke(app, given + more)
        assert done.exit_code == 2
        assert message in done.output
    assert not (tmp_path / "out").exists()
