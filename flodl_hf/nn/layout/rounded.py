"""Packed batches on a CPU, padded to recurring counts of rows.

oneDNN makes a kernel for each count of rows that a weight is multiplied by, in milliseconds and half a megabyte, and
keeps a thousand of them. Texts of all lengths would fill that up; rounded up, tokens and texts come in about ninety
counts up to 1,024. Rows are added once, after the last text, before the embeddings: they contain a token of the
vocabulary, belong to no text, attend to nothing, and are cut off with the results.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flodl_hf.nn.layout.buckets import FILLER
from flodl_hf.nn.layout.layouts import Packed


def rounded(count: int) -> int:
    """Return ``count`` rounded up to a count of rows that kernels are made for.

    Beyond 128 there are 16 steps from a power of two to the next, so at most a sixteenth is added. Below, where fewer
    kernels matter more than a row, steps are of 4, up to 32 of 2, and up to 8 nothing is added.
    """
    if count <= 8:
        return count
    step = 2 if count <= 32 else max(4, 1 << ((count - 1).bit_length() - 5))
    return -(-count // step) * step


def laid_out(
    ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray, *, lead: int = 0
) -> tuple[Tensor, Tensor | None, Packed]:
    """Return ids, token types and the layout of concatenated texts, tokens and texts rounded up.

    Args:
        ids: token ids, texts end to end, ``(tokens,)``.
        types: token types, ``(tokens,)``, or None.
        lengths: tokens of each text, ``(texts,)``, each at least 1.
        lead: virtual tokens that are put before each text later.
    """
    real, count = len(ids), len(lengths)
    texts = rounded(count)
    tokens = rounded(real + lead * texts) - lead * texts
    places = np.zeros(tokens, np.int64)
    offsets = np.full(texts + 1, real, np.int32)
    opens = np.zeros(texts, np.int64)
    offsets[0] = 0
    if count == 1:  # somebody waits for this one text
        places[:real] = np.arange(real)
    else:
        ends = np.cumsum(lengths)
        offsets[1 : count + 1] = ends
        opens[:count] = ends - lengths
        places[:real] = np.arange(real) - np.repeat(opens[:count], lengths)
    layout = Packed(
        torch.from_numpy(offsets), tuple(lengths.tolist()), 0, torch.from_numpy(places), torch.from_numpy(opens)
    )
    return _filled(ids, tokens), None if types is None else _filled(types, tokens), layout


def _filled(values: np.ndarray, tokens: int) -> Tensor:
    found = np.full(tokens, FILLER, np.int64)
    found[: len(values)] = values
    return torch.from_numpy(found)
