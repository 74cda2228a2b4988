"""Beside peft itself: its folders read, ours read by it, and the same logits and gradients to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import moved  # pyright: ignore[reportMissingImports]

from flodl_hf import load
from flodl_hf.heads.auto import head_named
from flodl_hf.models.adapters import Lora
from flodl_hf.parity.cell import Bench, Cell, all_cells

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
# Warnings of transformers, which peft calls by older names.
pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

TASKS = {
    "sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS", "question_answering": "QUESTION_ANS",
    "base": "FEATURE_EXTRACTION", "masked_lm": None,
}  # fmt: skip
QUICK = (("bert", "sequence_classification"), ("modernbert", "token_classification"), ("deberta-v2", "base"))
WITHOUT_CLASS = ("gte", "new", "nomic_bert", "eurobert")  # transformers has no class of theirs for questions


def cells() -> list[Any]:
    found = []
    for cell in all_cells():
        has = cell.head == "base" or cell.head in cell.record.heads
        if has and not (cell.family in WITHOUT_CLASS and cell.head == "question_answering") and cell.record.tiny:
            quick = (cell.family, cell.head) in QUICK and cell.variant == "base"
            found.append(pytest.param(cell, id=cell.name, marks=() if quick else pytest.mark.slow))
    return found


KINDS = {
    "lora": {},
    "everything": {"targets": "all-linear", "dora": True, "rslora": True},
    "all biases": {"targets": "all-linear", "bias": "all"},
    "biases of the parts": {"targets": "all-linear", "lora_bias": True, "bias": "lora_only"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", cells())
def test_peft_reads_our_folder_and_gives_the_same_bits(cell: Cell, kind: str, tmp_path: Path) -> None:
    with Bench(cell) as bench:
        model: Any = bench.load()
        moved(model.add_adapter(Lora(rank=4, alpha=8, **KINDS[kind]))).save_pretrained(tmp_path / "adapter")
        theirs = peft.PeftModel.from_pretrained(bench.load_theirs().model, tmp_path / "adapter")
        for batch in bench.batches():
            with torch.no_grad():
                ours = model.eval()(**batch.inputs)
                # PeftModel's own call leaves token types out for some tasks.
                right = theirs.eval().get_base_model()(**batch.inputs)
            for name, value in right.items():
                assert torch.equal(ours[name], value), (batch.name, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", [Cell("bert", "sequence_classification"), Cell("modernbert", "base")])
def test_a_folder_that_peft_wrote_is_read_with_the_same_bits(cell: Cell, kind: str, tmp_path: Path) -> None:
    with Bench(cell) as bench:
        every = kind == "everything"
        matrices = ["Wqkv"] if cell.family == "modernbert" else ["query", "value"]
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, use_dora=every, use_rslora=every, task_type=TASKS[cell.head],
            target_modules="all-linear" if KINDS[kind] else matrices,
            bias=KINDS[kind].get("bias", "none"), lora_bias=KINDS[kind].get("lora_bias", False),
        )  # fmt: skip
        theirs = peft.get_peft_model(bench.load_theirs().model, settings)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
        theirs.save_pretrained(tmp_path / "adapter")
        model: Any = head_named(cell.head).model.from_pretrained(bench.folder, adapter=tmp_path / "adapter")
        theirs.eval()
        for batch in bench.batches():
            with torch.no_grad():
                ours, right = model(**batch.inputs), theirs.get_base_model()(**batch.inputs)
            assert all(torch.equal(ours[name], value) for name, value in right.items()), batch.name


def test_gradients_are_pefts(tmp_path: Path) -> None:
    with Bench(Cell("bert", "sequence_classification")) as bench:
        model: Any = bench.load()
        moved(model.add_adapter(Lora(rank=4, alpha=8, targets="all-linear"))).save_pretrained(tmp_path / "adapter")
        theirs = peft.PeftModel.from_pretrained(bench.load_theirs().model, tmp_path / "adapter", is_trainable=True)
        batch = next(iter(bench.batches())).inputs
        labels = bench.labels(batch)
        model.eval()(**batch, **labels).loss.backward()
        theirs.eval().get_base_model()(**batch, **labels).loss.backward()
        right = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
        for site in model._held_adapters.known["default"].sites.values():
            lora = model.graph.get_submodule(site.paths[0]).lora
            at = f"base_model.model.{site.theirs}"
            assert torch.equal(lora.down.grad, right[f"{at}.lora_A.default.weight"])
            assert torch.equal(lora.up.grad, right[f"{at}.lora_B.default.weight"])
        head = model.graph.get_parameter("head.classifier.weight").grad
        assert torch.equal(head, right["base_model.model.classifier.modules_to_save.default.weight"])


def test_peft_refuses_nothing_that_fine_tuning_writes(tmp_path: Path) -> None:
    from flodl_hf.training import demo, finetune

    base = demo.demo_model(demo.learn_vocabulary()).save_pretrained(tmp_path / "base")
    rows = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:24]]
    finetune(base, train=rows, out=tmp_path / "out", lora=4, epochs=1, batch_size=8)
    theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[2, 5, 6, 7, 3]])
    model: Any = load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(theirs.get_base_model()(input_ids=ids).logits, model(ids).logits)
