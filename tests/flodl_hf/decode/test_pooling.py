"""Padded and packed pooling agree, and the mean is that of sentence-transformers to the bit."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.errors import PredictError
from flodl_hf.inference.pooling import Pooling, finish_embeddings, pool_packed, pool_padded

MODES = [mode for mode in get_args(Pooling) if mode != "pooler"]


def batch(lengths, width=None, seed=0, size=6):
    hidden = torch.randn(len(lengths), width or max(lengths), size, generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(hidden.shape[1]) < torch.tensor(lengths)[:, None]
    return hidden, mask


def test_the_mean_is_bit_for_bit_that_of_sentence_transformers() -> None:
    hidden, mask = batch([1, 17, 33, 64], width=64, size=96)
    # Its arithmetic: sum of states times mask over the mask's sum, at least 1e-9.
    expanded = mask.long().unsqueeze(-1).expand(hidden.size()).to(hidden.dtype)
    total, count = torch.sum(hidden * expanded, 1), torch.clamp(expanded.sum(1), min=1e-9)
    assert torch.equal(pool_padded(hidden, mask.long()), total / count)
    assert torch.equal(pool_padded(hidden, mask, "mean_sqrt_len"), total / torch.sqrt(count))


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_is_what_it_says_row_by_row(mode) -> None:
    lengths = [3, 1, 5]
    hidden, mask = batch(lengths)
    found = pool_padded(hidden, mask, mode)
    for row, length in enumerate(lengths):
        tokens = hidden[row, :length]
        weights = torch.arange(1.0, length + 1)[:, None]
        expected = {
            "cls": tokens[0],
            "last_token": tokens[-1],
            "mean": tokens.mean(0),
            "max": tokens.amax(0),
            "mean_sqrt_len": tokens.sum(0) / length**0.5,
            "weighted_mean": (tokens * weights).sum(0) / weights.sum(),
        }[mode]
        torch.testing.assert_close(found[row], expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 99))
def test_packed_equals_padded(lengths, seed) -> None:
    hidden, mask = batch(lengths, width=8, seed=seed)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    for mode in MODES:
        torch.testing.assert_close(pool_packed(hidden[mask], cu_seqlens, mode), pool_padded(hidden, mask, mode))


def test_padding_on_the_left_is_understood() -> None:
    hidden, mask = batch([2, 4])
    for mode in MODES:
        if mode != "weighted_mean":
            torch.testing.assert_close(
                pool_padded(hidden.flip(1), mask.flip(1), "cls" if mode == "last_token" else mode),
                pool_padded(hidden, mask, "last_token" if mode in ("cls", "last_token") else mode),
            )


def test_several_poolings_are_joined() -> None:
    hidden, mask = batch([2, 4])
    pooled = torch.randn(2, 6)
    found = pool_padded(hidden, mask, ["pooler", "cls", "mean"], pooler_output=pooled)
    expected = torch.cat([pooled, hidden[:, 0], pool_padded(hidden, mask)], 1)
    assert torch.equal(found, expected)
    packed = pool_packed(hidden[mask], torch.tensor([0, 2, 6]), ["pooler", "cls", "mean"], pooler_output=pooled)
    torch.testing.assert_close(packed, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", [[0, 0, 3, 7], [0, 3, 3, 7], [0, 3, 7, 7]])
def test_a_row_without_tokens_has_a_finite_vector(mode: Any, bounds: list[int]) -> None:
    hidden = torch.randn(7, 6)
    found = pool_packed(hidden, torch.tensor(bounds), mode)
    filled = [n for n in range(3) if bounds[n] < bounds[n + 1]]
    torch.testing.assert_close(found[filled], pool_packed(hidden, torch.tensor([0, 3, 7]), mode))
    assert found.isfinite().all()


def test_half_precision_is_pooled_in_float32() -> None:
    hidden = torch.ones(1, 5000, 2, dtype=torch.float16)
    found = pool_padded(hidden, torch.ones(1, 5000))
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.ones(1, 2))


def test_gradients_flow_through_both_layouts() -> None:
    hidden, mask = batch([2, 4])
    leaf = hidden.clone().requires_grad_()
    (padded,) = torch.autograd.grad(pool_padded(leaf, mask).square().sum(), leaf)
    (packed,) = torch.autograd.grad(pool_packed(leaf[mask], torch.tensor([0, 2, 6])).square().sum(), leaf)
    torch.testing.assert_close(padded, packed)
    assert padded.abs().sum() > 0


def test_vectors_are_cut_before_they_are_normalised() -> None:
    vectors = torch.tensor([[3.0, 4.0, 12.0], [0.0, 0.0, 5.0]])
    found = finish_embeddings(vectors, truncate_dim=2, normalize=True)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert torch.equal(finish_embeddings(vectors), vectors)


@pytest.mark.parametrize(
    "call",
    [
        lambda h, m: pool_padded(h, m, "median"),
        lambda h, m: pool_padded(h, m, []),
        lambda h, m: pool_padded(h, m, "pooler"),
        lambda h, m: pool_packed(h[m], torch.tensor([0, 2]), "pooler"),
        lambda h, m: finish_embeddings(h[0], truncate_dim=0),
        lambda h, m: finish_embeddings(h[0], truncate_dim=7),
    ],
)
def test_what_cannot_be_pooled_is_refused(call) -> None:
    with pytest.raises(PredictError, match="embeddings"):
        call(*batch([2]))


@pytest.mark.parametrize("how", ["sum", "max"])
def test_devices_without_segments_pool_alike(how: str) -> None:
    from flodl_hf.inference.pooling import scattered

    lengths = torch.tensor([3, 1, 0, 4])
    values = torch.randn(8, 5)
    expected = torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)
    torch.testing.assert_close(scattered(values, how, lengths), expected, rtol=0, atol=1e-6)
