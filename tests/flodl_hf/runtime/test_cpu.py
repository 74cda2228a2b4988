"""A graph prepared for a processor answers as the model does, in every family and head, with every product."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import cpu
from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.backends.cpu import (
    Int8Linear,
    OneDnnLinear,
    Scratch,
    TorchLinear,
    activate_,
    has_int8,
    has_onednn,
    sums_in_32_bits,
)
from flodl_hf.nn.layers import ACTIVATIONS, EncoderLayer
from flodl_hf.nn.layout import Layout, Packed, Padded

WIDTH, VOCABULARY = 32, 90
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 3, "num_heads": 4, "intermediate_size": 48,
    "max_positions": 40, "type_vocab_size": 2, "embedding_size": 16, "summary": "first",
}  # fmt: skip
CELLS = [(family.model_type, head) for family in FAMILIES for head in ("base", *family.heads)]
LENGTHS = (9, 9, 5, 5, 5, 1)
CLOSE = 1e-5


def made(model_type: str, head: str, **settings: Any) -> EncoderModel:
    """Return a small model whose weights are large enough for its numbers to matter."""
    family = next(f for f in FAMILIES if f.model_type == model_type)
    keys = {row.key: SIZES[row.field] for row in family.rows if row.field in SIZES}
    model = head_named(head).model.from_config(ModelConfig.for_model(model_type, **(keys | settings)))
    with torch.no_grad():
        for name, parameter in model.graph.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)
    return model.eval()


def batches() -> Iterator[tuple[Tensor, Layout]]:
    """Yield ids and layouts: texts end to end, and rows filled up, in two orders."""
    ids = torch.randint(5, VOCABULARY, (sum(LENGTHS),))
    yield ids, Packed.of(LENGTHS)
    yield ids[:9], Packed.of([9])
    mask = torch.tensor([[1] * 6 + [0] * 3, [1] * 9])
    yield torch.randint(5, VOCABULARY, (2, 9)), Padded.of(mask)
    yield torch.randint(5, VOCABULARY, (2, 9)), Padded(None)


def run(graph: Any, ids: Tensor, layout: Layout) -> Tensor:
    with torch.inference_mode():
        return graph(ids, token_type_ids=torch.zeros_like(ids), layout=layout).clone()


@pytest.fixture(params=["plain", "reordered"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Prepare as a processor without, and one with, fast reordered products would."""
    if request.param == "reordered" and not has_onednn(torch.float32):
        pytest.skip("this build of torch has no reordered products")
    monkeypatch.setattr(cpu, "_reorders", lambda: request.param == "reordered")
    return request.param


@pytest.mark.parametrize(("model_type", "head"), CELLS)
def test_fp32_answers_are_the_models_to_five_digits(model_type: str, head: str, product: str) -> None:
    model = made(model_type, head)
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, "fp32")
    assert {m.table.name for m in graph.modules() if isinstance(m, EncoderLayer)} == {"processor"}
    for ids, layout in batches():
        wanted = run(model.graph, ids, layout)
        if isinstance(layout, Padded) and layout.mask is not None and wanted.shape[:2] == ids.shape:
            kept = layout.mask
        else:
            kept = torch.ones(wanted.shape[:1], dtype=torch.bool)
        for _ in range(3):  # the second use reorders
            assert run(graph, ids, layout)[kept] == pytest.approx(wanted[kept], abs=CLOSE)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_a_classifiers_last_layer_computes_first_tokens_alone(model_type: str) -> None:
    graph = shadow(made(model_type, "sequence_classification").graph)
    cpu.prepare_cpu(graph, "fp32")
    blocks = [m for m in graph.modules() if isinstance(m, EncoderLayer)]
    assert [block.first_only for block in blocks] == [False, False, True]
    seen: list[torch.Size] = []
    blocks[-1].register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    for ids, layout in batches():
        run(graph, ids, layout)
    assert [tuple(shape) for shape in seen] == [(len(LENGTHS), WIDTH), (1, WIDTH), (2, WIDTH), (2, WIDTH)]


def test_token_heads_and_shared_blocks_keep_every_token() -> None:
    for model_type, head in (("bert", "token_classification"), ("bert", "base"), ("albert", "sequence_classification")):
        graph = shadow(made(model_type, head).graph)
        cpu.prepare_cpu(graph, "fp32")
        assert not any(m.first_only for m in graph.modules() if isinstance(m, EncoderLayer))


def test_the_model_keeps_its_graph_and_plain_products_share_its_weights() -> None:
    model = made("bert", "token_classification")
    before = [type(m) for m in model.graph.modules()]
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, "fp32")
    assert [type(m) for m in model.graph.modules()] == before
    own = {p.data_ptr() for p in model.graph.parameters()}
    assert {p.data_ptr() for p in graph.parameters()} == own


def test_a_part_that_someone_listens_to_stays_as_it_is() -> None:
    model = made("bert", "base")
    heard: list[Any] = []
    model.graph.get_submodule("encoder.layers.1.attention").register_forward_hook(lambda _m, _a, out: heard.append(out))
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, "fp32")
    ids, layout = next(batches())
    run(graph, ids, layout)
    assert len(heard) == 1
    tables = [m.table.name for m in graph.modules() if isinstance(m, EncoderLayer)]
    assert tables == ["processor", "torch", "processor"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_place_have_the_values_of_the_others(name: str, product: str) -> None:
    model = made("bert", "base", hidden_act=name)
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, "fp32")
    ids, layout = next(batches())
    for _ in range(2):
        assert run(graph, ids, layout) == pytest.approx(run(model.graph, ids, layout), abs=CLOSE)
    x = torch.linspace(-12, 12, 4001)
    assert activate_(x.clone(), name) == pytest.approx(ACTIVATIONS[name](x), abs=3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_computed_in_float32_where_the_processor_lacks_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: False)
    model = made("bert", "token_classification").to(dtype)
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, None)
    ids, layout = next(batches())
    assert run(graph, ids, layout) == pytest.approx(run(model.float().graph, ids, layout), abs=CLOSE)


# --- int8 ---------------------------------------------------------------------------------------------

needs_int8 = pytest.mark.skipif(not has_int8(), reason="this build of torch has no int8 products")


@needs_int8
@pytest.mark.parametrize(("model_type", "head"), CELLS)
def test_int8_answers_stay_within_a_twentieth_of_their_range(model_type: str, head: str) -> None:
    model = made(model_type, head)
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, "int8")
    ids, layout = next(batches())
    wanted, found = run(model.graph, ids, layout), run(graph, ids, layout)
    # From zero on: a head that gives one number a text gives nearly the same one to all texts of a random model.
    width = float(wanted.max().clamp(min=0) - wanted.min().clamp(max=0))
    assert float((found - wanted).abs().max()) <= 0.05 * width
    assert not torch.equal(found, wanted)


@needs_int8
def test_int8_answers_do_not_depend_on_the_batch() -> None:
    graph = shadow(made("bert", "base").graph)
    cpu.prepare_cpu(graph, "int8")
    ids = torch.randint(5, VOCABULARY, (sum(LENGTHS),))
    together = Packed.of(LENGTHS).unpack(run(graph, ids, Packed.of(LENGTHS)))
    for part, text in zip(Packed.of(LENGTHS).unpack(ids), together, strict=True):
        assert run(graph, part, Packed.of([len(part)])) == pytest.approx(text, abs=CLOSE)


@needs_int8
def test_int8_sums_do_not_saturate() -> None:
    # Two products of the largest numbers pass 16 bits; kernels without VNNI add them there.
    bits = 8 if sums_in_32_bits() else 7
    weight, x = torch.full((16, 64), 0.5), torch.full((3, 64), 2.0)
    x[:, 0] = 0.0  # a token of one number is all step and no bytes
    assert Int8Linear(weight, None, bits)(x) == pytest.approx(torch.full((3, 16), 63.0), rel=1e-4)


@needs_int8
def test_int8_tokens_have_ranges_of_their_own_to_half_a_step() -> None:
    x = torch.randn(5, 40) * torch.tensor([[1e-3], [1.0], [30.0], [0.0], [1.0]]) + torch.tensor([[0.0]] * 4 + [[9.0]])
    whole, step, low = Int8Linear(torch.randn(8, 40), None).quantised(x)
    assert whole.dtype == torch.uint8
    assert torch.equal(low, x.amin(1, keepdim=True))
    assert step == pytest.approx((x.amax(1, keepdim=True) - low) / 255, rel=1e-5)
    assert bool(((low + step * whole - x).abs() <= 0.501 * step + 1e-6).all())


@needs_int8
def test_int8_takes_tokens_of_any_range() -> None:
    x = torch.stack([torch.zeros(24), torch.full((24,), 3.0), torch.full((24,), -3.0), torch.randn(24) + 1e4])
    weight = torch.randn(16, 24)
    for row in x:
        wanted = nn.functional.linear(row[None], weight)
        bound = 0.02 * float(row.abs().max()) * float(weight.abs().sum(1).max()) + 1e-6
        assert Int8Linear(weight, None, 7)(row[None]) == pytest.approx(wanted, abs=bound)


# --- what the processor and torch have ----------------------------------------------------------------


def test_precisions_are_refused_by_what_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(cpu, "has_int8", lambda: False)
    assert "bf16" in str(cpu.missing("bf16"))
    assert "onednn.qlinear_pointwise" in str(cpu.missing("int8"))
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(cpu, "has_int8", lambda: True)
    assert [cpu.missing(name) for name in ("fp32", "bf16", "int8")] == [None, None, None]


def test_what_is_faster_here_is_named_beside_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("bert", "base")
    for lacking, said in (((), "'bf16' or 'int8'"), (("bf16",), "'int8'"), (("bf16", "int8"), None)):
        monkeypatch.setattr(cpu, "missing", lambda name, lacking=lacking: "none" if name in lacking else None)
        for precision in (None, "fp32"):
            found = [line for line in model.explain("cpu", precision).kernels if "faster" in line]
            assert found == ([] if said is None else [f"faster here, and less exact: precision={said}"])
        if not lacking:
            assert "faster" not in str(model.explain("cpu", "int8"))


@pytest.fixture
def without_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take torch's private operators away, as another build of it would."""
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.setattr(torch.ops, "onednn", object())
    for cached in (has_onednn, has_int8, cpu._reorders, cpu.multiplies_bf16):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (has_onednn, has_int8, cpu._reorders, cpu.multiplies_bf16):
        cached.cache_clear()


@pytest.mark.usefixtures("without_operators")
def test_without_private_operators_torchs_own_product_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not has_onednn(torch.float32)
    assert not has_int8()
    assert cpu.missing("bf16")
    assert cpu.missing("int8")
    model = made("bert", "token_classification")
    graph = shadow(model.graph)
    cpu.prepare_cpu(graph, "fp32")
    ids, layout = next(batches())
    assert run(graph, ids, layout) == pytest.approx(run(model.graph, ids, layout), abs=CLOSE)
    tables: Any = [m.table for m in graph.modules() if isinstance(m, EncoderLayer)]
    products = list(tables[0].products.values())
    assert products
    assert all(type(p) is TorchLinear for p in products)


def test_an_operator_that_multiplies_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    has_onednn.cache_clear()
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x, buffer="": x.new_zeros(len(x), 24))
    assert not has_onednn(torch.float32)
    monkeypatch.undo()
    has_onednn.cache_clear()


# --- buffers and threads ------------------------------------------------------------------------------


def test_buffers_belong_to_a_thread_and_huge_ones_are_not_kept() -> None:
    scratch = Scratch()
    first = scratch.take("wide", 4, 8, torch.float32)
    assert scratch.take("wide", 2, 8, torch.float32).data_ptr() == first.data_ptr()
    assert scratch.take("other", 4, 8, torch.float32).data_ptr() != first.data_ptr()
    huge = scratch.take("wide", 1 << 12, 1 << 12, torch.int8)
    assert scratch.take("wide", 1 << 12, 1 << 12, torch.int8).data_ptr() != huge.data_ptr()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(scratch.take("wide", 4, 8, torch.float32).data_ptr()))
    thread.start()
    thread.join()
    assert seen != [first.data_ptr()]


def test_threads_share_a_prepared_graph(product: str) -> None:
    graph = shadow(made("bert", "sequence_classification").graph)
    cpu.prepare_cpu(graph, "fp32")
    given = [torch.randint(5, VOCABULARY, (n * 4,)) for n in range(2, 8)]
    layouts = [Packed.of([4] * (len(ids) // 4)) for ids in given]
    run(graph, given[0], layouts[0])
    wanted = [run(graph, ids, layout) for ids, layout in zip(given, layouts, strict=True)]
    found: list[list[Tensor]] = [[] for _ in given]

    def work(place: int) -> None:
        found[place] = [run(graph, given[place], layouts[place]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, answers in enumerate(found):
        assert len(answers) == 20
        assert all(torch.equal(answer, wanted[place]) for answer in answers)


def test_plain_products_without_a_bias() -> None:
    weight, x, other = torch.randn(5, 3), torch.randn(2, 3), torch.randn(2, 5)
    kinds: list[Callable[..., Any]] = [TorchLinear, Int8Linear] if has_int8() else [TorchLinear]
    for make in kinds:
        plain, close = (make(weight, None, Scratch()), 1e-5) if make is TorchLinear else (make(weight, None), 0.1)
        assert plain(x, "b") == pytest.approx(nn.functional.linear(x, weight), abs=close)
        assert plain.plus(x, other) == pytest.approx(nn.functional.linear(x, weight) + other, abs=close)
