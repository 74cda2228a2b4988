"""Masks are filled with probabilities over the whole vocabulary, targets of any length included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flodl_hf.errors import PredictError
from flodl_hf.heads.masked_lm import decode_targets, masks_of
from flodl_hf.inference.token_table import TokenTable

LOGITS = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
PROBABILITIES = LOGITS.softmax(1)


def test_targets_keep_their_probability_over_the_vocabulary() -> None:
    places = [[mask] for mask in range(3) for _ in range(3)]
    found = decode_targets(LOGITS, [[3], [7], [3]], places)
    for mask, fills in enumerate(found):
        expected = {target: PROBABILITIES[mask, token].item() for target, token in enumerate((3, 7, 3))}
        assert dict(fills) == pytest.approx(expected)
        assert [score for _, score in fills] == sorted((score for _, score in fills), reverse=True)
        order = [target for target, _ in fills]
        assert order.index(0) < order.index(2)
    assert [len(fills) for fills in decode_targets(LOGITS, [[3], [7], [3]], places, top_k=1)] == [1, 1, 1]


def test_targets_of_several_tokens_are_products_at_their_own_masks() -> None:
    # One mask of a text; target 0 has one token at row 0, target 1 two tokens at rows 1 and 2.
    (fills,) = decode_targets(LOGITS, [[4], [5, 6]], [[0], [1, 2]])
    product = (PROBABILITIES[1, 5] * PROBABILITIES[2, 6]).item()
    assert dict(fills) == pytest.approx({0: PROBABILITIES[0, 4].item(), 1: product})


def test_several_masks_share_the_targets() -> None:
    places = [[0], [1, 2], [2], [0, 1]]
    first, second = map(dict, decode_targets(LOGITS, [[4], [5, 6]], places))
    assert second[1] == pytest.approx((PROBABILITIES[0, 5] * PROBABILITIES[1, 6]).item())
    assert first[1] == pytest.approx((PROBABILITIES[1, 5] * PROBABILITIES[2, 6]).item())


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(PredictError):
        decode_targets(torch.full((1, 4), torch.nan), [[1]], [[0]])


@pytest.mark.parametrize("seed", range(6))
def test_of_several_windows_the_one_counts_in_which_a_mask_has_most_context(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, list[int]]] = []  # text, window, first token, ids without specials
    for text in range(3):
        ids = draw.integers(0, 4, int(draw.integers(3, 30))).tolist()
        size, step = int(draw.integers(4, 9)), int(draw.integers(2, 4))
        starts = range(0, max(1, len(ids) - size + step), step)
        rows += [(text, n, start, ids[start : start + size]) for n, start in enumerate(starts)]
    lengths = np.array([len(ids) + 2 for *_, ids in rows])
    none = np.zeros(len(rows), np.int64)
    table = TokenTable(
        np.array([token for *_, ids in rows for token in [9, *ids, 9]], np.int32), None, lengths,
        np.array([row[0] for row in rows]), lengths - 2, np.array([row[2] for row in rows]),
        np.array([row[1] for row in rows]),
        np.array([side for *_, ids in rows for side in [-1, *[0] * len(ids), -1]], np.int8), None, None, none,
    )  # fmt: skip
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for row, (text, _, first, ids) in enumerate(rows):
        for place, token in enumerate(ids):
            context = min(place + 1, len(ids) - place)
            whole = (text, first + place)
            if token == 3 and (whole not in best or context > best[whole][0]):
                best[whole] = (context, row, place + 1)
    found = masks_of(table, 3)
    expected = [(text, *best[text, whole][1:]) for text, whole in sorted(best)]
    kept = sorted({row for _, row, _ in expected})
    assert np.array_equal(found.table.owners, table.owners[kept])
    assert np.array_equal(found.table.window, table.window[kept])
    flat = [(row, column) for row, own in zip(kept, found.columns, strict=True) for column in own]
    assert [(text, *flat[at]) for text, at in zip(found.text.tolist(), found.order.tolist(), strict=True)] == expected
