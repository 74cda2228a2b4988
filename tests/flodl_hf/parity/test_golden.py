"""Checkpoints that transformers made, and what it computed on them: repeated here without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flodl_hf import AutoTokenizer, load
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.joined_tensors import as_whole

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
PROVENANCE = json.loads((GOLDEN / "provenance.json").read_text("utf-8"))
# Every head of these families; of the others two, which between them hold what is a family's own.
WHOLE = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert", "deberta-v2")
# Proven beside transformers alone, in the matrix.
RARE = ("multiple_choice", "next_sentence", "pretraining", "replaced_tokens")
CELLS = [
    f"{family.model_type}-{head.name}"
    for family in FAMILIES
    for head in HEADS
    if head.name not in RARE
    if family.model_type in WHOLE or (family.tiny and head.name in family.heads and head.short in ("seqcls", "mlm"))
]
cells = pytest.mark.parametrize("cell", CELLS)
# Other names of RoBERTa compute what it does: quick runs repeat the numbers of one head of each.
ALIASES = ("xlm-roberta-", "camembert-")
numbers = pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[pytest.mark.slow] * (cell.startswith(ALIASES) and not cell.endswith("masked_lm")))
        for cell in CELLS
    ],
)


def expected(cell: str, kind: str) -> dict[str, Tensor]:
    held = load_file(GOLDEN / "expected" / f"{cell}.safetensors")
    return {name.removeprefix(f"{kind}."): value for name, value in held.items() if name.startswith(kind)}


def batch(cell: str, name: str) -> dict[str, Tensor]:
    return {k.removeprefix(f"{name}."): v for k, v in expected(cell, "in").items() if k.startswith(f"{name}.")}


def check(found: Tensor, recorded: Tensor, exact: Tensor, what: str) -> None:
    """Hold what was computed here to what was recorded there, both by their distance from the exact values.

    Two processors add in two orders, so neither is right to the last bit. What the recorded numbers are off from
    the same pass in float64 shows how much rounding this computation does; ours may be off by four times that and a
    few units in the last place of the largest number. Numbers far below one are sums of terms that cancel, and the
    terms are rounded at their own size, which is that of the loss.
    """
    assert found.shape == recorded.shape == exact.shape, what
    assert found.dtype == recorded.dtype, what
    largest = exact.abs().max().item()
    theirs = (recorded.double() - exact).abs().max().item()
    ulp = torch.finfo(torch.float32).eps
    bound = 4 * theirs + 16 * ulp * largest + ulp
    assert theirs <= 1e-4 * max(largest, 1.0), f"{what}: what was recorded is not this model's"
    ours = (found.double() - exact).abs().max().item()
    assert ours <= bound, f"{what}: off by {ours:.3g} from the exact values, what was recorded by {theirs:.3g}"


def test_there_is_a_checkpoint_for_every_family_and_head() -> None:
    folders = {p.name for p in GOLDEN.iterdir() if p.is_dir()} - {"expected", "__pycache__"}
    assert folders == set(CELLS) == set(PROVENANCE["ids"])
    assert {p.stem for p in (GOLDEN / "expected").iterdir()} == set(CELLS)
    files = [p for p in GOLDEN.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) < 4_000_000
    for folder in folders:
        assert sum(p.stat().st_size for p in (GOLDEN / folder).iterdir()) < 60_000


@numbers
def test_outputs_are_those_recorded(cell: str) -> None:
    model, exact = load(GOLDEN / cell), load(GOLDEN / cell).double()
    assert isinstance(model, EncoderModel)
    outputs = expected(cell, "out")
    assert {name.split(".")[1] for name in outputs} >= {"one row", "mixed lengths", "single tokens", "longest rows"}
    for name, recorded in outputs.items():
        attention, inputs, key = name.split(".")
        for side in (model, exact):
            side.set_attention(attention)
        with torch.no_grad():
            found, true = model(**batch(cell, inputs)), exact(**batch(cell, inputs))
        same_call = {other.split(".")[2] for other in outputs if other.startswith(f"{attention}.{inputs}.")}
        assert {k for k, v in found.items() if isinstance(v, Tensor)} == same_call
        check(found[key], recorded, true[key], f"{cell}, {name}")


@numbers
def test_loss_and_gradients_are_those_recorded(cell: str) -> None:
    model, exact = load(GOLDEN / cell), load(GOLDEN / cell).double()
    loss, true = (loss_of(m, cell) for m in (model, exact))
    check(loss, expected(cell, "loss")["loss"], true, f"{cell}, loss")
    family = model.config.family
    names = family.key_map(model.config.encoder, model.head)
    known = dict(model.graph.named_parameters(remove_duplicate=False))
    exactly = dict(exact.graph.named_parameters(remove_duplicate=False))
    recorded = expected(cell, "grad")
    assert len(recorded) == 3
    for name, gradient in recorded.items():
        ours = names.ours(name) or names.ours(f"{family.base_prefix}.{name}")
        alias = dict(family.heads[model.head].aliases).get(name) if ours is None else None
        ours = ours or (names.ours(alias) if alias else None)
        # Where files keep older names, transformers' modules have others.
        options = (name, f"{family.base_prefix}.{name}")
        ours = ours or next((mine for mine in known if any(option in names.also(mine) for option in options)), None)
        assert ours is not None, name
        found, true = known[ours].grad, exactly[ours].grad
        assert found is not None, name
        assert true is not None, name
        check(found, gradient, true, f"{cell}, gradient of {name}")


def loss_of(model: EncoderModel, cell: str) -> Tensor:
    out = model(**batch(cell, "mixed lengths"), **expected(cell, "label"))
    loss = out.loss if model.head != "base" else sum((v.square().sum() for v in out.to_tuple()), torch.zeros(()))
    loss.backward()
    return loss.detach()


@cells
def test_export_writes_the_bytes_back(cell: str, tmp_path: Path) -> None:
    out = load(GOLDEN / cell).save_pretrained(tmp_path / "out")
    source = {p.name: p.read_bytes() for p in (GOLDEN / cell).iterdir()}
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.name != "checksums.json"} == source


@cells
def test_every_tensor_is_used_and_none_is_new(cell: str) -> None:
    model = load(GOLDEN / cell)
    report = model.load_report
    kept = {name for entry in model.config.family.kept for name in (entry.name, *entry.also)}
    assert report is not None
    assert report.trained
    assert set(report.ignored) <= kept
    assert report.source_head == report.head == cell.removeprefix(f"{_family(cell)}-")
    stored = set(load_file(GOLDEN / cell / "model.safetensors"))
    assert set(report.renamed) == {name for name in stored if name.endswith((".gamma", ".beta"))}
    assert {as_whole(name) for name in report.matched.values()} == stored - kept


def _family(cell: str) -> str:
    return max((f.model_type for f in FAMILIES if cell.startswith(f"{f.model_type}-")), key=len)


@cells
def test_token_ids_are_those_recorded(cell: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / cell)
    assert [tokenizer.encode(text) for text in PROVENANCE["texts"]] == PROVENANCE["ids"][cell]


@cells
def test_a_golden_model_answers_from_raw_text(cell: str) -> None:
    model: Any = load(GOLDEN / cell)
    text = "Ada lives in Paris. " * 12
    if model.head == "base":
        assert model.embed(text, windows=True).norm().item() == pytest.approx(1.0, abs=1e-5)
    elif model.head == "question_answering":
        found = model.answer("who?", text)
        assert text[found.start : found.end] == found.text != ""
    elif model.head == "masked_lm":
        assert len(model.fill_mask(f"{text} [MASK]", top_k=3)[0]) == 3
    elif model.head == "token_classification":
        assert all(text[e.start : e.end] == e.word for e in model.predict(text, ignore_labels=()))
    else:
        assert sum(c.score for c in model.predict(text)) == pytest.approx(1.0, abs=1e-5)


def test_golden_cells_need_no_transformers(tmp_path: Path) -> None:
    """In a fresh interpreter that cannot import transformers."""
    script = (
        "import sys, json; sys.modules['transformers'] = None\n"
        "from flodl_hf import load\n"
        "print(json.dumps([load(p).head for p in sys.argv[1:]]))"
    )
    chosen = [cell for cell in CELLS if cell.startswith(("bert", "deberta"))]
    done = subprocess.run(
        [sys.executable, "-c", script, *(str(GOLDEN / cell) for cell in chosen)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(GOLDEN.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert json.loads(done.stdout) == [cell.removeprefix(f"{_family(cell)}-") for cell in chosen]
