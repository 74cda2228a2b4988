"""Measure how scores depend on the batch: each text alone compared with all in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flodl_hf.inference.batch import Scores, States
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.inputs import encode, split_pairs
from flodl_hf.inference.options import RunKeywords, RunOptions

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model import GraphModel


@dataclass(frozen=True, slots=True)
class Spread:
    """How far scores moved.

    Attributes:
        largest: largest difference of a score.
        mean: mean difference.
        texts: how many texts were compared.
        worst: the text with the largest difference, by its place; -1 without texts.
    """

    largest: float
    mean: float
    texts: int
    worst: int


def spread(model: GraphModel, texts: Sequence[Any], **run: Any) -> Spread:
    """Return the difference between the scores of texts in one batch and of each text alone.

    With ``batch_invariant=True`` among the keywords the answer is 0, on any device.

    Args:
        model: the model; of an encoder without a head the token states are compared.
        texts: texts or pairs.
        **run: how to run, see `RunKeywords`.

    Raises:
        PredictError: the model has no tokenizer.
    """
    given: RunKeywords = run  # type: ignore[assignment]
    options = (model._run_options or RunOptions()).changed(dict(given))
    tokenizer = model._ready("spread", untrained=True)
    firsts, seconds = split_pairs(list(texts), "spread")
    table = encode(tokenizer, firsts, seconds, max_tokens=model.max_tokens).table
    work = States() if model.head == "base" else Scores(model._per_text)

    sizes = np.ones(len(table), np.int64) if work.per_text else table.lengths
    together, alone = (
        Engine.of(model, options.changed({"batch_invariant": invariant})).start(table, work).placed()
        for invariant in (options.batch_invariant, True)
    )
    largest, total, count, worst = 0.0, 0.0, 0, -1
    for row, size in enumerate(sizes.tolist()):
        a, b = (placed.values[placed.starts[row] : placed.starts[row] + size] for placed in (together, alone))
        gap = (a - b).abs()
        if worst < 0 or float(gap.max()) > largest:
            largest, worst = float(gap.max()), int(table.owners[row])
        total += float(gap.sum())
        count += gap.numel()
    return Spread(largest, total / max(1, count), len(texts), worst)
