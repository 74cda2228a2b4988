"""Every family with every head: packed equals padded, export equals source, training reaches every tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flodl_hf import load
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.heads.auto import head_named
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.layout import Packed, Padded

CELLS = [(f.model_type, h.name) for f in FAMILIES for h in HEADS if h.name == "base" or h.name in f.heads]
cells = pytest.mark.parametrize(("model_type", "head"), CELLS)
LENGTHS = (9, 1, 5, 5, 12)
Make = Callable[..., EncoderModel]


def padded_batch(model: EncoderModel) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, model.config.encoder.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    pad = getattr(model.config.encoder, "pad_token_id", 0) or 0
    ids = torch.full((len(rows), max(LENGTHS)), pad)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}, rows


def scores(model: EncoderModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(**inputs)
    if model.head == "question_answering":
        return torch.stack([out.start_logits, out.end_logits], -1)
    return out[0]


@cells
def test_packed_rows_equal_padded_rows(make: Make, model_type: str, head: str) -> None:
    model = make(model_type, head)
    inputs, rows = padded_batch(model)
    layout = Packed.of(LENGTHS)
    with torch.no_grad():
        expected = scores(model, inputs)
        found = model.graph(torch.tensor([t for row in rows for t in row]), layout=layout)
    parts = found.unbind(0) if model._per_text else layout.unpack(found)
    for i, (part, n) in enumerate(zip(parts, LENGTHS, strict=True)):
        torch.testing.assert_close(part, expected[i] if model._per_text else expected[i, :n], rtol=0, atol=1e-5)


@cells
def test_filling_changes_no_real_token(make: Make, model_type: str, head: str) -> None:
    model = make(model_type, head)
    inputs, rows = padded_batch(model)
    with torch.no_grad():
        together = scores(model, inputs)
        for i, row in enumerate(rows):
            alone = scores(model, {"input_ids": torch.tensor([row])})[0]
            expected = together[i] if model._per_text else together[i, : len(row)]
            torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


@cells
def test_an_untouched_model_is_written_back_byte_for_byte(
    saved: Callable[..., Path], tmp_path: Path, model_type: str, head: str
) -> None:
    source = saved(model_type, head)
    again = load(source).save_pretrained(tmp_path / "again")
    files = sorted(p.name for p in source.iterdir())
    assert files == sorted(p.name for p in again.iterdir())
    for name in files:
        assert (source / name).read_bytes() == (again / name).read_bytes(), name


@cells
def test_training_reaches_every_tensor(make: Make, model_type: str, head: str) -> None:
    model = make(model_type, head).train()
    inputs, _ = padded_batch(model)
    out = model(**inputs)
    torch.cat([value.flatten() for value in out.values()]).square().sum().backward()
    without = [name for name, p in model.graph.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@cells
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_near(make: Make, model_type: str, head: str, dtype: torch.dtype) -> None:
    model = make(model_type, head)
    inputs, _ = padded_batch(model)
    with torch.no_grad():
        exact = scores(model, inputs)
        half = scores(model.to(dtype), inputs).float()
    real = inputs["attention_mask"].bool()
    exact, half = (exact, half) if model._per_text else (exact[real], half[real])
    assert half.isfinite().all()
    assert float((half - exact).abs().max()) < 0.15 * max(1.0, float(exact.abs().max()))


@cells
def test_a_loaded_model_is_the_saved_one(make: Make, saved: Callable[..., Path], model_type: str, head: str) -> None:
    # A class that stands for two tasks is read as the one that more people want.
    named = head if head == "pretraining" else "auto"
    model, again = make(model_type, head), load(saved(model_type, head), head=named)
    assert type(again) is head_named(head).model
    ours, theirs = model.graph.state_dict(), again.graph.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.load_report is not None
    assert again.load_report.trained


@cells
def test_names_are_one_to_one_at_the_models_own_size(make: Make, model_type: str, head: str) -> None:
    model = make(model_type, head)
    key_map = model.config.family.key_map(model.config.encoder, head)
    ours = [name for name, _ in model.graph.named_parameters(remove_duplicate=False)]
    theirs = key_map.names(ours)
    assert [key_map.ours(name) for name in theirs.values()] == ours


@cells
def test_graphs_compile_without_a_break(make: Make, model_type: str, head: str) -> None:
    model = make(model_type, head)
    inputs, _ = padded_batch(model)
    layout = Padded.of(inputs["attention_mask"])
    torch._dynamo.reset()
    compiled = torch.compile(model.graph, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(
            compiled(inputs["input_ids"], layout=layout), model.graph(inputs["input_ids"], layout=layout)
        )
