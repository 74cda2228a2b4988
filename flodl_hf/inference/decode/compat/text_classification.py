"""The dictionaries of transformers 5's text-classification and zero-shot pipelines.

This file contains their arithmetic (numpy float32, as there) and their order of results. The function
to apply is selected by ``classes.activation_for``, which both implementations share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flodl_hf.inference.decode.classes import activation_for, scores_of
from flodl_hf.inference.decode.rows import as_tensor


def _array(logits: Tensor | np.ndarray) -> np.ndarray:
    return as_tensor(logits).float().cpu().numpy()


def text_classification(
    logits: Tensor | np.ndarray,
    labels: Sequence[str],
    *,
    problem_type: str | None = None,
    function_to_apply: str | None = None,
    top_k: int | None = 1,
) -> list[Any]:
    """Return the pipeline's result for each row: ``{"label", "score"}`` dictionaries.

    Args:
        logits: ``(rows, labels)``.
        labels: names in the order of their ids.
        problem_type: as in the model's configuration.
        function_to_apply: as given to the pipeline.
        top_k: as given to the pipeline; ``None`` for all labels.
    """
    values = scores_of(_array(logits), activation_for(problem_type, len(labels), function_to_apply))
    order = np.argsort(-values, axis=-1, kind="stable")[:, :top_k]
    return [
        [{"label": labels[int(i)], "score": float(row[i])} for i in ranks]
        for ranks, row in zip(order, values, strict=True)
    ]


def zero_shot_classification(
    logits: Tensor | np.ndarray,
    sequences: Sequence[str],
    candidates: Sequence[str],
    labels: Sequence[str],
    *,
    multi_label: bool = False,
) -> list[dict[str, Any]]:
    """Return for each text ``{"sequence", "labels", "scores"}``, best first.

    Where no label begins with "entail" the last one is taken for entailment, as the pipeline does.

    Args:
        logits: ``(texts × candidates, NLI labels)``, all candidates of a text together.
        sequences: the texts.
        candidates: the candidate labels, the same for each text.
        labels: the model's own label names in the order of their ids.
        multi_label: as given to the pipeline.
    """
    values = _array(logits).reshape(len(sequences), len(candidates), -1)
    entailment = next((i for i, name in enumerate(labels) if name.lower().startswith("entail")), -1)
    if multi_label or len(candidates) == 1:
        contradiction = -1 if entailment == 0 else 0
        powers = np.exp(values[..., [contradiction, entailment]])
        scores = (powers / powers.sum(-1, keepdims=True))[..., 1]
    else:
        powers = np.exp(values[..., entailment])
        scores = powers / powers.sum(-1, keepdims=True)
    results = []
    for sequence, row in zip(sequences, scores, strict=True):
        order = row.argsort()[::-1]
        names = [candidates[int(i)] for i in order]
        results.append({"sequence": sequence, "labels": names, "scores": row[order].tolist()})
    return results
