"""Models written for other engines: ONNX in ONNX Runtime and torch.export, each cell of the tables compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flodl_hf import load
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.cli.app import app
from flodl_hf.errors import ExportError
from flodl_hf.export import engine
from flodl_hf.export.engine import export_onnx, export_program
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.parity import onnx_session
from flodl_hf.parity.onnx_session import OnnxModel

HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
with_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript or onnxruntime is not installed")
Make = Callable[..., EncoderModel]
CELLS = [(f.model_type, h.name) for f in FAMILIES for h in HEADS if h.name == "base" or h.name in f.heads]
# A window shorter than the longest rows compared, where a family has one.
WINDOW = {"modernbert": {"local_attention": 8, "num_hidden_layers": 3}}
LAYERS = {f.model_type: row.key for f in FAMILIES for row in f.rows if row.field == "num_layers"}


def shape(model_type: str, head: str) -> dict[str, Any]:
    """Return settings that make the encoder alone deep and windowed; below heads a layer is enough, and traced sooner."""
    return WINDOW.get(model_type, {}) if head == "base" else {LAYERS[model_type]: 1}


def cells(*quick: tuple[str, str]) -> Any:
    """Return all cells of the tables, of which all but these few are slow."""
    marked = [pytest.param(*cell, marks=() if cell in quick else pytest.mark.slow) for cell in CELLS]
    return pytest.mark.parametrize(("model_type", "head"), marked)


@with_onnx
@cells(("bert", "sequence_classification"))
def test_onnx(make: Make, tmp_path: Path, model_type: str, head: str) -> None:
    model = make(model_type, head, **shape(model_type, head))
    found = export_onnx(model, tmp_path / "onnx")
    assert found.receipt.passed
    assert found.largest_difference <= engine.BOUND
    assert {"one row", "mixed lengths", "filled on the left", "single tokens", "longest rows"} <= {
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
    model = make(model_type, head, **shape(model_type, head))
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
    model.sentence_recipe = SentenceTransformerConfig(pooling=("cls", "mean"), normalize=True)
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
    session = OnnxModel(out)
    answers = session.answer(TEXTS, batch_size=3)
    with pytest.warns(UserWarning, match="truncated 1 of 4"):
        expected = load(source).embed(TEXTS, precision="exact")
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
    assert [problem.split(" (")[0] for problem in caught.value.problems] == [
        "mixed lengths", "filled on the left", "second texts",
    ]  # fmt: skip
    assert caught.value.largest_difference == pytest.approx(2e-4, rel=0.5)
    assert list(tmp_path.iterdir()) == []


@with_onnx
def test_a_vector_as_long_as_the_batch_is_not_cut(tmp_path: Path, saved: Callable[..., Path]) -> None:
    """A file from elsewhere may give the width of its vectors a name, as if it were any number."""
    import onnx  # pyright: ignore[reportMissingImports]
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]

    table = np.random.default_rng(0).standard_normal((80, 8)).astype(np.float32)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    out = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", "Divsentence_dim_1"])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["states"]),
        helper.make_node("ReduceMean", ["states"], ["sentence_embedding"], axes=[1], keepdims=0),
    ]
    held = helper.make_tensor("table", TensorProto.FLOAT, table.shape, table.tobytes(), raw=True)
    graph = helper.make_graph(nodes, "encoder", [ids], [out], [held])
    folder = saved("bert")
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    texts = ["a dog", "the cat sat on the mat"]  # the second is of eight tokens, as many as features
    assert [row.shape for row in OnnxModel(folder).answer(texts)["sentence_embedding"]] == [(8,), (8,)]
    # What the folder says of vectors holds here too.
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "m.Transformer"}]))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4, "do_lower_case": true}')
    session = OnnxModel(folder)
    assert session.max_tokens == 4
    (cut,) = session.answer(["THE CAT sat on the mat"])["sentence_embedding"]
    ids = load(folder).tokenizer("the cat")["input_ids"]  # pyright: ignore[reportOptionalCall]
    np.testing.assert_allclose(cut, table[ids].mean(0), rtol=1e-6)


def test_numbers_that_are_none_are_the_models_own(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("bert", "sequence_classification")
    with torch.no_grad():
        model.graph.get_parameter("head.classifier.bias")[0] = float("inf")
    monkeypatch.setattr(torch.export, "save", lambda *args: None)
    monkeypatch.setattr(engine.Traced, "program", lambda self: None)
    monkeypatch.setattr(torch.export, "load", lambda path: SimpleNamespace(module=lambda: lambda **given: {}))
    with pytest.raises(ExportError, match="the model's own logits of one row"):
        export_program(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@with_onnx
def test_an_opset_that_cannot_be_is_told(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("bert", "sequence_classification")
    source = model.save_pretrained(tmp_path / "source")
    for opset, code, said in ((0, 2, "'--opset'"), (99, 1, "opset 99; expected 1 to ")):
        args = ["export", str(source), "--format", "onnx", "--opset", str(opset), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, args)
        assert done.exit_code == code
        assert said in " ".join(done.output.split())
    # One that torch writes and ONNX Runtime fails to compute.
    monkeypatch.setattr(engine.Traced, "program", lambda self: None)
    monkeypatch.setattr(engine, "_write_onnx", lambda *args: None)
    monkeypatch.setattr(OnnxModel, "__init__", lambda self, path: vars(self).update(
        path=path, inputs=("input_ids",), _dtypes={"input_ids": np.int64}, outputs={}, _session=SimpleNamespace()
    ))  # fmt: skip
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot run the exported .*; opset=18 works everywhere"):
        export_onnx(model, tmp_path / "out", opset=24)
    assert not (tmp_path / "out").exists()


def test_weights_and_receipts_are_not_written_over(make: Make, tmp_path: Path) -> None:
    source = make("bert").save_pretrained(tmp_path / "source")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ExportError, match=r"found model\.safetensors: an export .* with a model's weights"):
        export_program(load(source), source, overwrite=True)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (tmp_path / "out" / "onnx").mkdir(parents=True)
    (tmp_path / "out" / "onnx" / "model.onnx").touch()
    (tmp_path / "out" / "verification.json").write_text("{}")
    done = CliRunner().invoke(app, ["verify-export", str(tmp_path / "out"), "--no-source"])
    assert done.exit_code == 1
    assert "written for another engine, without weights" in " ".join(done.output.split())
    assert (tmp_path / "out" / "verification.json").read_text() == "{}"


def test_what_torch_cannot_trace_is_told(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **how: Any) -> None:
        raise RuntimeError("no operator for this\nand a long trace")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(ExportError, match=r"torch .* cannot write it \(RuntimeError: no operator for this\)"):
        export_program(make("bert"), tmp_path / "out")
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
