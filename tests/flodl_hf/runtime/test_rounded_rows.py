"""On a processor, products see few counts of rows; the rows that are added change no answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import RunOptions, cpu
from flodl_hf.inference.batch import Pooled, Scores, ScoresAt, States, Work
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.prepared_graph import forget
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.backends.cpu import Int8Linear, OneDnnLinear, has_int8, has_onednn
from flodl_hf.nn.buckets import laid_out, rounded

VOCABULARY = 90
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48,
    "max_positions": 48, "type_vocab_size": 2, "embedding_size": 16,
}  # fmt: skip
CELLS = [(family.model_type, head) for family in FAMILIES for head in ("base", *family.heads)]
POOLINGS = ("mean", "max", "cls", "last_token", "weighted_mean", "mean_sqrt_len")
# Neither these tokens (33), nor those of any one text but the last, nor these texts (9) are a rounded count.
LENGTHS = (9, 7, 5, 5, 3, 1, 1, 1, 1)
BOUNDS = {"fp32": 1e-5, "bf16": 3e-2, "int8": 1e-4}


@pytest.fixture(params=list(BOUNDS))
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return each precision whose products keep kernels, as a processor with AVX-512 has them."""
    kind = request.param
    if not (has_int8() if kind == "int8" else has_onednn(torch.bfloat16 if kind == "bf16" else torch.float32)):
        pytest.skip("this build of torch has no such products")
    monkeypatch.setattr(cpu, "_reorders", lambda: has_onednn(torch.float32))
    monkeypatch.setattr("flodl_hf.inference.cpu.multiplies_bf16", lambda: True)
    return kind


def made(model_type: str, head: str, **settings: Any) -> EncoderModel:
    """Return a small model whose weights are large enough for its numbers to matter."""
    family = next(f for f in FAMILIES if f.model_type == model_type)
    keys = {row.key: (SIZES | settings)[row.field] for row in family.rows if row.field in SIZES}
    if head == "multiple_choice":
        keys |= {row.key: "first" for row in family.rows if row.field == "summary"}
    torch.manual_seed(0)
    model = head_named(head).model.from_config(ModelConfig.for_model(model_type, **keys))
    with torch.no_grad():
        for name, parameter in model.graph.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)
    return model.eval()


def table_of(lengths: tuple[int, ...]) -> TokenTable:
    counts = np.asarray(lengths, np.int64)
    total, none = int(counts.sum()), np.zeros(len(counts), np.int64)
    ids = np.random.default_rng(0).integers(5, VOCABULARY, total)
    kinds = (np.arange(total) % 3 == 0).astype(np.int64)
    owners = np.arange(len(counts))
    return TokenTable(ids, kinds, counts, owners, counts, none, none, np.zeros(total, np.int64), None, None, none)


def answered(model: EncoderModel, precision: Any, table: TokenTable, *, rounds: bool, **options: Any) -> list[Tensor]:
    """Return all that an engine can be asked of a model, one tensor a row and question."""
    engine = Engine.of(model, RunOptions(precision=precision, **options))
    assert engine.prepared.rounded
    asked: list[Work] = [Scores(True)] if model._per_text else [Scores(False), ScoresAt()]
    if model.head == "base":
        asked = [States(), Pooled(POOLINGS)]
    places = [list(range(0, length, 2)) for length in table.lengths]
    engine.prepared.rounded = rounds
    try:
        found: list[Tensor] = []
        for work in asked:
            if isinstance(work, ScoresAt):
                found += engine.start(table, work, places).placed().rows(table)
            else:
                pending = engine.start(table, work)
                found += list(pending.stacked()) if work.per_text else pending.placed().rows(table)
        return found
    finally:
        engine.prepared.rounded = True


@pytest.mark.parametrize(("model_type", "head"), CELLS)
def test_answers_are_those_without_rows_added(model_type: str, head: str, precision: str) -> None:
    if precision != "fp32" and head not in ("base", "sequence_classification"):
        return  # heads compute alike in all precisions
    model, table = made(model_type, head), table_of(LENGTHS)
    for options in ({}, {"token_budget": 11}):
        mine = answered(model, precision, table, rounds=True, **options)
        plain = answered(model, precision, table, rounds=False, **options)
        for one, other in zip(mine, plain, strict=True):
            assert one.isfinite().all()
            largest = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=BOUNDS[precision] * largest)


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])
@pytest.mark.skipif(not has_onednn(torch.float32), reason="this build of torch has no such products")
def test_what_stands_in_added_rows_reaches_no_answer(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_reorders", lambda: True)
    model, table = made(model_type, "base"), table_of(LENGTHS)
    before = answered(model, "fp32", table, rounds=True)
    with torch.no_grad():
        words: Any = model.graph.get_submodule("encoder.embeddings.word")
        words.weight[0] = 7.0  # the token that fills up
    forget(model)
    assert all(map(torch.equal, before, answered(model, "fp32", table, rounds=True)))


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set that takes the rows of every product from now on."""
    rows: set[int] = set()
    ready, quantised = OneDnnLinear._ready, Int8Linear.quantised
    monkeypatch.setattr(OneDnnLinear, "_ready", lambda self, x: (rows.add(x.shape[0]), ready(self, x))[1])
    monkeypatch.setattr(Int8Linear, "quantised", lambda self, x: (rows.add(x.shape[0]), quantised(self, x))[1])
    return rows


@pytest.mark.parametrize("head", ["base", "sequence_classification", "token_classification"])
def test_texts_of_all_lengths_meet_few_kernels(head: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("bert", head, max_positions=512)
    engine = Engine.of(model, RunOptions(precision=precision))  # type: ignore[arg-type]
    rows = seen_rows(monkeypatch)
    work: Work = Pooled(("mean",)) if head == "base" else Scores(model._per_text)
    for length in (*range(1, 65), *range(65, 513, 7), 512):
        list(engine.start(table_of((length,)), work).parts())
    for texts in range(1, 257, 15):
        list(engine.start(table_of((2,) * texts), work).parts())
    assert {512, 1} <= rows
    assert len(rows) <= 80
    assert rows <= {rounded(n) for n in range(1, 513)}


def test_few_counts_and_little_added() -> None:
    counts = [rounded(n) for n in range(1, 100_000)]
    assert len(set(counts[:1024])) <= 96
    assert counts == sorted(counts)
    assert all(rounded(n) == n for n in set(counts[:2048]))
    for n, up in enumerate(counts, 1):
        assert n <= up <= n + max(4 if n <= 128 else n // 16, 0)
        assert up == n or n > 8


def test_virtual_tokens_count_among_the_rows() -> None:
    lengths = np.asarray(LENGTHS)
    for lead in (0, 1, 5):
        ids, kinds, layout = laid_out(np.arange(1, 34), None, lengths, lead=lead)
        assert kinds is None
        assert layout.unpack(ids)[0].tolist() == list(range(1, 10))
        led = layout.led(lead) if lead else layout
        before = led.num_tokens
        assert before == rounded(33 + lead * layout.num_texts)
        assert len(ids) + lead * layout.num_texts == before


def test_products_that_keep_no_kernels_get_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("bert", "base")
    monkeypatch.setattr(cpu, "_reorders", lambda: False)
    assert not Engine.of(model, RunOptions(precision="fp32")).prepared.rounded
    assert not Engine.of(model, RunOptions(precision="exact")).prepared.rounded
