"""The dictionaries of transformers 5's fill-mask pipeline.

This file contains its order, its treatment of targets and its text of the filled sequence. Decoding ids to text
is a callable of the caller's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import as_tensor


def fill_mask(
    logits: Tensor | np.ndarray,
    ids: Sequence[int],
    *,
    mask_id: int,
    pad_id: int | None,
    decode: Callable[[list[int], bool], str],
    top_k: int = 5,
    targets: Sequence[int] | None = None,
) -> list[Any]:
    """Return ``{"score", "token", "token_str", "sequence"}`` per proposal; a list per mask if there are
    several.

    Args:
        logits: vocabulary logits of one text's masks in order, ``(masks, vocabulary)``.
        ids: the text's token ids, specials included.
        mask_id: id of the mask token.
        pad_id: id of the padding token, which is left out of the sequence.
        decode: token ids and "leave out special tokens" to text.
        top_k: proposals per mask.
        targets: token ids to choose from. They lose their order and repetitions, as there.

    Raises:
        PredictError: the text has no mask, or not as many as there are logits.
    """
    places = [place for place, token in enumerate(ids) if token == mask_id]
    values = as_tensor(logits)
    if not places or len(places) != len(values):
        raise PredictError(
            f"fill-mask: the text has {len(places)} masks and there are logits for {len(values)}; "
            "expected the logits of each mask, and at least one mask",
            masks=len(places),
            logits=len(values),
        )
    probabilities = values.softmax(dim=-1)
    chosen: list[int] | None = None
    if targets is not None:
        # The pipeline converts targets to a set, and the set's order decides between equal scores.
        chosen = list(set(targets))
        probabilities = probabilities[..., torch.tensor(chosen)]
        top_k = min(top_k, len(chosen))
    scores, index = probabilities.topk(top_k)
    single = len(places) == 1
    result = []
    for place, row_scores, row_index in zip(places, scores.tolist(), index.tolist(), strict=True):
        row = []
        for score, at in zip(row_scores, row_index, strict=True):
            token = at if chosen is None else chosen[at]
            filled = [token if i == place else other for i, other in enumerate(ids)]
            sequence = decode([t for t in filled if t != pad_id], single)
            row.append({"score": score, "token": token, "token_str": decode([token], False), "sequence": sequence})
        result.append(row)
    return result[0] if single else result
