"""The kernels of disentangled attention give the sums of the reference, and the gradients, in every setting.

They run on a CUDA device, or anywhere in Triton's interpreter (``TRITON_INTERPRET=1``), and are skipped elsewhere.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flodl_hf.nn.disentangled import attention as attention_module
from flodl_hf.nn.disentangled import operator
from flodl_hf.nn.disentangled.attention import DisentangledAttention, attend_by_kernel, furthest
from flodl_hf.nn.disentangled.parts import Relative, RelativePositions
from flodl_hf.nn.disentangled.scores import PositionTables
from flodl_hf.nn.kernels import self_test as trust
from flodl_hf.nn.layout import Layout, Packed, Padded

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs = pytest.mark.skipif(
    not (INTERPRETED or (HAS_TRITON and DEVICE == "cuda")), reason="needs Triton and a CUDA device or its interpreter"
)
on_device = pytest.mark.skipif(DEVICE != "cuda" or not HAS_TRITON, reason="needs a CUDA device and Triton")
HEADS = 2
LENGTHS = (37, 19, 5, 1)
LONG = (150, 137, 1)
BOTH = ("c2p", "p2c")
# kinds, buckets, max_distance, width of a head, lengths
SETTINGS: dict[str, tuple[tuple[str, ...], int, int, int, tuple[int, ...]]] = {
    "log buckets": (BOTH, 8, 40, 32, LENGTHS),
    "every distance its own": (BOTH, 64, 64, 32, LENGTHS),
    "no buckets": (BOTH, -1, 64, 16, LENGTHS),
    "clamped": (BOTH, -1, 6, 16, LENGTHS),
    "odd buckets": (BOTH, 7, 40, 24, LENGTHS),
    "two buckets": (BOTH, 2, 40, 16, LENGTHS),
    "c2p": (("c2p",), 8, 40, 32, LENGTHS),
    "p2c": (("p2c",), 8, 40, 32, LENGTHS),
    "content alone": ((), 8, 40, 32, LENGTHS),
    "several tiles": (BOTH, 32, 512, 32, LONG),
    "several tiles, clamped": (BOTH, -1, 48, 16, LONG),
    "wide heads": (BOTH, 16, 64, 80, LENGTHS),
}
NEAREST = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layout_of(kind: str, lengths: tuple[int, ...]) -> Layout:
    if kind == "packed":
        return Packed.of(lengths, DEVICE)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    if kind == "holes":
        mask &= torch.rand(mask.shape) > 0.3
        mask[:, 0] = True
    return Padded(None if kind == "full" else mask.to(DEVICE))


def distances(layout: Layout, hidden: Tensor, buckets: int, max_distance: int) -> Relative:
    span = buckets if buckets > 0 else max_distance
    relative = RelativePositions(hidden.shape[-1], span, buckets, max_distance, None).to(DEVICE)(hidden, layout)
    assert relative is not None
    return relative


def reference(inputs: list[Tensor | None], relative: Relative, layout: Layout, scale: float) -> Tensor:
    """Return attention in float64, pair by pair, from the definition."""
    q, k, v, pk, pq = (None if x is None else x.double() for x in inputs)
    assert q is not None
    assert k is not None
    assert v is not None

    def one(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        qs, ks, vs = (x.view(len(x), HEADS, -1).transpose(0, 1) for x in (q, k, v))
        index = relative.index_for(len(q)).to(q.device)
        scores = qs @ ks.transpose(1, 2)
        if pk is not None:
            scores = scores + torch.einsum("nih,nijh->nij", qs, pk[:, index])
        if pq is not None:
            scores = scores + torch.einsum("njh,nijh->nij", ks, pq[:, index])
        scores = scores / scale
        if keep is not None:
            scores = scores.masked_fill(~keep[None, None, :], -math.inf)
        return (scores.softmax(-1) @ vs).transpose(0, 1).reshape(q.shape)

    if isinstance(layout, Packed):
        parts = zip(*(x.split(list(layout.lengths)) for x in (q, k, v)), strict=True)
        return torch.cat([one(*part, None) for part in parts])
    keep = [None] * len(q) if layout.mask is None else list(layout.mask)
    return torch.stack([one(*rows, mask) for *rows, mask in zip(q, k, v, keep, strict=True)])


def distance(found: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(found).all()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-9)).item()


def drawn(name: str, kind: str, dtype: torch.dtype, size: float = 1.0) -> tuple[Any, ...]:
    kinds, buckets, max_distance, width, lengths = SETTINGS[name]
    layout = layout_of(kind, lengths)
    shape = (sum(lengths),) if kind == "packed" else (len(lengths), max(lengths))
    rows = 2 * (buckets if buckets > 0 else max_distance)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape) * size).to(dtype).to(DEVICE)

    states = [normal(*shape, HEADS * width) for _ in range(3)]
    tables = [normal(HEADS, rows, width) if kind in kinds else None for kind in BOTH]
    relative = distances(layout, states[0], buckets, max_distance)
    return [*states, *tables], relative, layout, math.sqrt(width * (1 + len(kinds)))


def attended(inputs: list[Any], relative: Relative, layout: Layout, scale: float, **more: Any) -> Tensor:
    tables = PositionTables(*(None if x is None else x[:, relative.window] / scale for x in inputs[3:]))
    states = (torch.cat(inputs[:3], -1),) if more.pop("joined", False) else tuple(inputs[:3])
    return attend_by_kernel(states, layout, tables, relative, num_heads=HEADS, scale=scale, **more)


def compare(name: str, kind: str, dtype: torch.dtype, *, joined: bool = False) -> None:
    inputs, relative, layout, scale = drawn(name, kind, dtype)
    real = torch.ones(()) if isinstance(layout, Packed) or layout.mask is None else layout.mask[..., None]
    weight = torch.randn(inputs[0].shape).to(dtype).to(DEVICE) * real.to(DEVICE)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    expected = reference(exact, relative, layout, scale)
    (expected * weight.double()).sum().backward()
    given = [None if x is None else x.requires_grad_() for x in inputs]
    found = attended(given, relative, layout, scale, joined=joined)
    (found.float() * weight.float()).sum().backward()
    real = real.to(DEVICE)
    assert distance(found.detach() * real, expected.detach() * real) < NEAREST[dtype]
    for mine, theirs in zip(given, exact, strict=True):
        if mine is not None and theirs is not None:
            assert mine.grad is not None
            assert distance(mine.grad, theirs.grad) < NEAREST[dtype]


@runs
@pytest.mark.parametrize("kind", ["packed", "padded", "holes"])
@pytest.mark.parametrize("name", SETTINGS)
def test_sums_and_gradients_are_the_references(name: str, kind: str) -> None:
    if (kind, name) in {("holes", "wide heads"), ("holes", "several tiles, clamped"), ("holes", "two buckets")}:
        kind = "full"
    compare(name, kind, torch.float32)


@runs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["log buckets", "several tiles", "every distance its own"])
def test_half_precision_is_near_the_reference(name: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    compare(name, "packed", dtype)
    compare(name, "padded", dtype)


@runs
@pytest.mark.parametrize("kind", ["packed", "holes"])
def test_joined_states_get_one_gradient(kind: str) -> None:
    compare("log buckets", kind, torch.float32, joined=True)
    compare("every distance its own", kind, torch.float16, joined=True)


@runs
@pytest.mark.parametrize("name", ["log buckets", "every distance its own"])
def test_one_kernel_for_short_texts_is_the_two_for_long_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for keys in (128, 0):  # of a tile that covers each text, or none
        monkeypatch.setitem(operator.TILES, "whole", (operator.TILES["whole"][0]._replace(keys=keys),) * 3)
        compare(name, "packed", torch.float16)
        compare(name, "holes", torch.float16)


@runs
def test_large_float16_states_stay_finite() -> None:
    inputs, relative, layout, scale = drawn("log buckets", "padded", torch.float16, size=150.0)
    products = inputs[0].float().amax() * inputs[3].float().amax()
    assert products > 20_000
    found = attended(inputs, relative, layout, scale)
    expected = reference(inputs, relative, layout, scale)
    mask = layout.mask[..., None]
    assert torch.isfinite(found).all()
    # One key takes nearly all of each row, and which one is told in steps of a float16 score.
    assert distance(found * mask, expected * mask) < 0.2


@runs
def test_a_row_without_real_tokens_is_finite() -> None:
    inputs, relative, _, scale = drawn("log buckets", "full", torch.float32)
    mask = torch.arange(37, device=DEVICE) < torch.tensor([37, 0, 5, 1], device=DEVICE)[:, None]
    given = [None if x is None else x.requires_grad_() for x in inputs]
    found = attended(given, relative, Padded(mask), scale)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert all(torch.isfinite(x.grad).all() for x in given)


@runs
def test_dropped_weights_are_dropped_in_the_backward_too() -> None:
    inputs, relative, layout, scale = drawn("log buckets", "packed", torch.float32)
    torch.manual_seed(5)
    given = [x.double().float().requires_grad_() for x in inputs]
    out = attended(given, relative, layout, scale, dropout=0.4)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    step = 1e-2
    for place in range(5):
        change = torch.randn_like(given[place])
        moved = []
        for sign in (-1, 1):
            torch.manual_seed(5)
            shifted = [x.detach() + sign * step * change if n == place else x.detach() for n, x in enumerate(given)]
            moved.append((attended(shifted, relative, layout, scale, dropout=0.4) * weight).double().sum())
        slope = (moved[1] - moved[0]) / (2 * step)
        assert abs(slope - (given[place].grad * change).double().sum()) < 3e-3 * max(1.0, abs(slope))


@runs
def test_dropout_keeps_its_share_and_its_mean() -> None:
    length, width, p = 128, 16, 0.3
    zeros = torch.zeros(2, length, HEADS * width, device=DEVICE)
    # Equal weights, and values that tell keys apart: what is mixed shows which keys were kept.
    value = torch.zeros(2, length, HEADS, width, device=DEVICE)
    value[:, torch.arange(length), :, torch.arange(length) % width] = length / (length // width)
    value = value.reshape(2, length, -1)
    attend = attend_by_kernel((zeros, zeros, value), Padded(None), None, None, num_heads=HEADS, scale=4.0, dropout=p)
    again = attend_by_kernel((zeros, zeros, value), Padded(None), None, None, num_heads=HEADS, scale=4.0, dropout=p)
    kept = attend.view(2, length, HEADS, width) * (1 - p)
    assert abs(kept.mean().item() - (1 - p)) < 0.01
    # Each entry counts 8 draws: a binomial's spread, over rows, columns, heads and texts alike.
    expected = math.sqrt(p * (1 - p) / 8)
    assert abs(kept.std().item() / expected - 1) < 0.05
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        means = kept.mean(axes)
        assert (means - (1 - p)).abs().max() < 6 * expected / math.sqrt(kept.numel() / means.numel())
    neighbours = ((kept[:, 1:] - 1 + p) * (kept[:, :-1] - 1 + p)).mean() / expected**2
    assert abs(neighbours) < 0.05
    others = ((kept[:, :, 0] - 1 + p) * (kept[:, :, 1] - 1 + p)).mean() / expected**2
    assert abs(others) < 0.08
    assert not torch.equal(attend, again)


@on_device
@pytest.mark.gpu
def test_a_recorded_step_draws_anew_at_each_replay() -> None:
    inputs, relative, layout, scale = drawn("every distance its own", "full", torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attended(inputs, relative, layout, scale, dropout=0.5)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attended(inputs, relative, layout, scale, dropout=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


@on_device
@pytest.mark.gpu
def test_compiled_and_recorded_passes_are_the_eager_one() -> None:
    inputs, relative, layout, scale = drawn("log buckets", "packed", torch.bfloat16)
    expected = attended(inputs, relative, layout, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = attended(inputs, relative, layout, scale)
    graph.replay()
    assert torch.equal(recorded, expected)
    compiled = torch.compile(lambda q: attended([q, *inputs[1:]], relative, layout, scale), backend="aot_eager")
    assert torch.equal(compiled(inputs[0]), expected)


@runs
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kinds", [BOTH, ("c2p",), ("p2c",), ()])
def test_the_module_with_joined_products_is_the_reference(
    kinds: tuple[str, ...], share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(attention_module, "has_kernel", lambda *_: True)
    torch.manual_seed(1)
    module = DisentangledAttention(32, 2, 0.0, 0.0, kinds=kinds, share_keys=share).to(DEVICE)
    hidden = torch.randn(sum(LENGTHS), 32, device=DEVICE)
    layout = Packed.of(LENGTHS, DEVICE)
    relative = distances(layout, hidden, 8, 40)
    results = []
    for dtype, way in ((torch.float32, "eager"), (torch.float16, "sdpa")):
        module.implementation = way
        half = module.to(dtype)
        found = half(hidden.to(dtype), layout, replace(relative, table=relative.table.to(dtype)))
        found.float().pow(2).sum().backward()
        grads = [p.grad.float() for p in half.parameters() if p.grad is not None]
        results.append([found.detach().float(), *grads])
        module.zero_grad()
    assert len(results[0]) == len(results[1])
    # The bias of keys moves all scores of a row alike, so its gradient is zero but for rounding.
    least = 0.05 * max(gradient.norm() for gradient in results[0][1:])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() < 2e-2 * max(expected.norm(), least)


@pytest.mark.parametrize("buckets", [-1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("max_distance", [6, 40, 64, 512])
def test_the_window_holds_every_row_and_near_rows_are_nobody_elses(buckets: int, max_distance: int) -> None:
    if buckets > 0 and max_distance - 1 <= buckets // 2:
        pytest.skip("distances end before they share rows")
    span = buckets if buckets > 0 else max_distance
    for length in (1, 2, 5, 9, 33, 100, 300):
        relative = RelativePositions(8, span, buckets, max_distance, None)(torch.zeros(1, length, 8), Padded(None))
        assert relative is not None
        rows = relative.rows.tolist()
        assert min(rows) >= relative.window.start
        assert max(rows) < relative.window.stop
        near = relative.reach if relative.near else relative.reach - 1
        own = [row for at, row in enumerate(rows) if abs(at - length + 1) <= near]
        assert own == [span + d for d in range(1 - length, length) if abs(d) <= near]
        assert all(rows.count(row) == 1 for row in own)


def test_without_a_kernel_packed_texts_of_unknown_lengths_go_by_rows() -> None:
    torch.manual_seed(2)
    module = DisentangledAttention(32, 2, 0.0, 0.0, kinds=BOTH, share_keys=True)
    hidden = torch.randn(sum(LENGTHS), 32)
    known = Packed.of(LENGTHS)
    places = known.positions(hidden)
    relative = RelativePositions(32, 8, 8, 40, None)
    unknown = Packed(known.offsets, (), 40, places, known.offsets[:-1].long())
    for way in ("sdpa", "fast"):
        module.implementation = way
        found = module(hidden, unknown, relative(hidden, unknown))
        torch.testing.assert_close(found, module(hidden, known, relative(hidden, known)), rtol=0, atol=2e-6)


def test_shapes_are_known_without_running() -> None:
    q = torch.empty(7, 3, 2, 16, device="meta")
    table = torch.empty(2, 8, 16, device="meta")
    more = (None, None, None, None, None, 7, 4, 1, True, 0.25, 0.0)
    out, lse = operator.disentangled(q, None, None, table, None, *more)
    assert out.shape == (7, 2, 16)
    assert lse.shape == (2, 7)
    grads = torch.ops.flodl_hf.disentangled_backward(out, out, lse, q, None, None, table, None, *more)
    assert [tuple(g.shape) for g in grads] == [(7, 3, 2, 16), (0,), (0,), (2, 8, 16), (0,)]


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED))
def test_a_device_is_asked_whether_its_kernels_agree(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device(DEVICE)
    monkeypatch.setenv("FLODL_HF_CACHE", "off")
    trust.forget()
    with torch.inference_mode():
        assert trust.trusted("disentangled", device, dtype, 32, furthest)
    trust.forget()
    kernels = operator._products
    monkeypatch.setattr(operator, "_products", lambda states, table: kernels(states, table * 1.5))
    with pytest.warns(UserWarning, match="falling back to torch's own kernels"):
        assert not trust.trusted("disentangled", device, dtype, 32, furthest)
    trust.forget()
