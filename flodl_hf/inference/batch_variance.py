"""Measure how scores depend on the batch: each text alone compared with all in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

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

    def scores(batch_invariant: bool) -> tuple[Tensor, Any]:
        engine = Engine.of(model, options.changed({"batch_invariant": batch_invariant}))
        found = engine.start(table, work)
        if work.per_text:
            return found.stacked(), None
        placed = found.placed()
        return placed.values, placed.starts

    together, at = scores(options.batch_invariant)
    alone, own = scores(True)
    largest, total, count, worst = 0.0, 0.0, 0, -1
    for row, length in enumerate(table.lengths.tolist()):
        if at is None:
            gap = (together[row] - alone[row]).abs()
        else:
            gap = (together[at[row] : at[row] + length] - alone[own[row] : own[row] + length]).abs()
        if worst < 0 or float(gap.max()) > largest:
            largest, worst = float(gap.max()), int(table.owners[row])
        total += float(gap.sum())
        count += gap.numel()
    return Spread(largest, total / max(1, count), len(texts), worst)
