"""Masks are filled with probabilities over the whole vocabulary, targets of any length included."""

from __future__ import annotations

import pytest
import torch

from flodl.errors import PredictError
from flodl_hf.decode import decode_masks, decode_targets

LOGITS = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
PROBABILITIES = LOGITS.softmax(1)


def test_each_mask_has_its_own_best_tokens() -> None:
    found = decode_masks(LOGITS, top_k=4)
    for mask, fills in enumerate(found):
        best = PROBABILITIES[mask].topk(4)
        assert [fill.tokens for fill in fills] == [(token,) for token in best.indices.tolist()]
        assert [fill.score for fill in fills] == pytest.approx(best.values.tolist())
    assert [len(fills) for fills in decode_masks(LOGITS, top_k=99)] == [11, 11, 11]
    assert sum(fill.score for fill in decode_masks(LOGITS, top_k=99)[0]) == pytest.approx(1)


def test_targets_keep_their_probability_over_the_vocabulary() -> None:
    found = decode_targets(LOGITS, [[3], [7], [3]])
    for mask, fills in enumerate(found):
        assert {fill.target: fill.score for fill in fills} == pytest.approx(
            {
                0: PROBABILITIES[mask, 3].item(),
                1: PROBABILITIES[mask, 7].item(),
                2: PROBABILITIES[mask, 3].item(),
            }
        )
        assert [fill.score for fill in fills] == sorted((fill.score for fill in fills), reverse=True)
        order = [fill.target for fill in fills]
        assert order.index(0) < order.index(2)
    assert [len(fills) for fills in decode_targets(LOGITS, [[3], [7]], top_k=1)] == [1, 1, 1]


def test_targets_of_several_tokens_are_products_at_their_own_masks() -> None:
    # One mask of a text; target 0 has one token at row 0, target 1 two tokens at rows 1 and 2.
    (fills,) = decode_targets(LOGITS, [[4], [5, 6]], places=[[0], [1, 2]])
    by_target = {fill.target: fill for fill in fills}
    product = (PROBABILITIES[1, 5] * PROBABILITIES[2, 6]).item()
    assert by_target[0].score == by_target[0].per_token == pytest.approx(PROBABILITIES[0, 4].item())
    assert by_target[1].tokens == (5, 6)
    assert by_target[1].score == pytest.approx(product)
    assert by_target[1].per_token == pytest.approx(product**0.5)


def test_several_masks_share_the_targets() -> None:
    places = [[0], [1, 2], [2], [0, 1]]
    first, second = decode_targets(LOGITS, [[4], [5, 6]], places=places)
    assert {f.target: f.score for f in second}[1] == pytest.approx((PROBABILITIES[0, 5] * PROBABILITIES[1, 6]).item())
    assert {f.target: f.score for f in first}[1] == pytest.approx((PROBABILITIES[1, 5] * PROBABILITIES[2, 6]).item())


@pytest.mark.parametrize(
    "call",
    [
        lambda: decode_masks(LOGITS, top_k=0),
        lambda: decode_masks(torch.full((1, 4), torch.nan)),
        lambda: decode_masks(torch.zeros(4)),
        lambda: decode_targets(LOGITS, []),
        lambda: decode_targets(LOGITS, [[]]),
        lambda: decode_targets(LOGITS, [[11]]),
        lambda: decode_targets(LOGITS, [[-1]]),
        lambda: decode_targets(LOGITS, [[1, 2]]),
        lambda: decode_targets(LOGITS, [[1, 2]], places=[[0]]),
    ],
)
def test_what_cannot_be_scored_is_refused(call) -> None:
    with pytest.raises(PredictError, match="fill-mask"):
        call()
