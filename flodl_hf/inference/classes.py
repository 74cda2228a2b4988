"""Classes, scores and ranks from sequence classification logits.

This file decides which function turns logits into scores, how the windows of a long text are merged, and how
zero-shot and ranking use an NLI head and a cross-encoder. Rows and hypotheses are created by
the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flodl.errors import ConfigError, printable
from flodl_hf.checkpoints.config.file import ACTIVATIONS, activate, activation_at
from flodl_hf.errors import PredictError
from flodl_hf.inference.results import Classification, Ranked, build_records, not_finite

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig

Activation: TypeAlias = str
"""``"softmax"``, ``"sigmoid"``, ``"none"``, or a name in `flodl_hf.checkpoints.config.file.ACTIVATIONS`."""

_FUNCTIONS = ("softmax", "sigmoid", "none")


def activation_for(problem_type: str | None, num_labels: int, function_to_apply: str | None = None) -> Activation:
    """Return the function that makes scores of logits, chosen as transformers chooses it.

    In this order: ``function_to_apply`` if given; none for ``"regression"``; sigmoid for
    ``"multi_label_classification"`` or a single label; otherwise softmax.

    Raises:
        PredictError: ``function_to_apply`` is neither softmax, sigmoid, none, nor the name of an activation class.
    """
    if function_to_apply is not None:
        if function_to_apply.lower() in _FUNCTIONS:
            return function_to_apply.lower()
        if function_to_apply in ACTIVATIONS:
            return "none" if function_to_apply == "Identity" else function_to_apply
        raise PredictError(
            f"classification: found function_to_apply={function_to_apply!r}, expected one of {', '.join(_FUNCTIONS)}, "
            f"or an activation of torch.nn: {', '.join(ACTIVATIONS)}.",
            function_to_apply=function_to_apply,
        )
    if problem_type == "regression":
        return "none"
    if problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def score_function(config: ModelConfig) -> Activation | None:
    """Return the function that makes scores of a cross-encoder's logits, as its folder stores it; None without one.

    Raises:
        ConfigError: the stored activation is not known, or does not give one score for each label.
    """
    path = config.score_activation
    if path is None:
        return None
    name = activation_at(path)
    if name in (None, "GLU"):
        raise ConfigError(
            f"{config.where}: found {printable(path)} as activation_fn or sbert_ce_default_activation_function, "
            "expected a class of torch.nn without settings: "
            f"{', '.join(known for known in ACTIVATIONS if known != 'GLU')}. Correct it to the activation that the "
            "model was trained with.",
            where=config.where,
            problems=["activation_fn"],
            found=path,
        )
    return activation_for(None, config.num_labels, name)


def class_scores(logits: Tensor | np.ndarray, activation: Activation) -> Tensor:
    """Return the scores of ``logits`` ``(rows, labels)`` in float32, on the device of the logits."""
    values = torch.as_tensor(logits).detach().float()
    if activation == "softmax":
        return torch.softmax(values, -1)
    if activation in ("sigmoid", "none"):
        return torch.sigmoid(values) if activation == "sigmoid" else values
    return activate(activation, values)


def mean_over_windows(
    values: Tensor, owners: np.ndarray, texts: int, weights: Sequence[float] | np.ndarray | None = None
) -> Tensor:
    """Return for each text the weighted mean of its rows, ``(texts, labels)``; a text of one row keeps it as
    is.

    Args:
        values: ``(rows, labels)``.
        owners: index of the text of each row, ``(rows,)``.
        texts: number of texts; each needs a row.
        weights: weight of each row, usually its number of content tokens; equal without it.
    """
    if len(owners) == texts:
        return values[torch.from_numpy(np.argsort(owners, kind="stable")).to(values.device)]
    weight = torch.ones(len(owners), dtype=torch.float64) if weights is None else torch.as_tensor(weights)
    # An empty text has a row without content, which still must count as one.
    weight = weight.double().clamp(min=1e-9).to(values.device)
    index = torch.from_numpy(owners).to(values.device)
    total = torch.zeros(texts, dtype=torch.float64, device=values.device).index_add_(0, index, weight)
    share = (weight / total[index])[:, None]
    out = torch.zeros((texts, values.shape[1]), dtype=torch.float64, device=values.device)
    return out.index_add_(0, index, values.double() * share).to(values.dtype)


def decode_classes(
    logits: Tensor | np.ndarray,
    labels: Sequence[str],
    *,
    problem_type: str | None = None,
    function_to_apply: str | None = None,
    top_k: int | None = None,
    threshold: float | Sequence[float] | Mapping[str, float] | None = None,
    owners: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    texts: int | None = None,
) -> list[list[Classification]]:
    """Return for each text its labels with scores, best first; equal scores in the order of the labels.

    The score of a text in several windows is the mean of the windows' scores (probabilities, or values of a
    regression), each weighted by its number of content tokens.

    Args:
        logits: ``(rows, labels)``.
        labels: names in the order of their ids.
        problem_type: as in the model's configuration.
        function_to_apply: ``"softmax"``, ``"sigmoid"`` or ``"none"``, instead of the problem type's default.
        top_k: most labels of a text; all without it.
        threshold: minimum score of a returned label: one for all, one per label in order, or by name
            (labels that are not named are always returned). A text may then have no label.
        owners: index of the text of each row; without it row ``i`` is text ``i``.
        weights: number of content tokens of each row.
        texts: number of texts; without it each row is one.

    Raises:
        PredictError: an option makes no sense, or logits and labels do not fit each other.
    """
    values = torch.as_tensor(logits).detach()
    if values.ndim != 2 or values.shape[1] != len(labels):
        raise PredictError(
            f"classification: logits of shape {tuple(values.shape)} do not fit {len(labels)} labels; "
            f"expected (rows, {len(labels)})",
            found=tuple(values.shape),
            labels=len(labels),
        )
    if top_k is not None and (not isinstance(top_k, Integral) or top_k < 1):
        raise PredictError(f"classification: top_k={top_k!r}; expected at least 1, or None for all", top_k=top_k)
    count = len(values) if texts is None else texts
    array = values.float().cpu().numpy()
    if not np.isfinite(array).all():
        raise not_finite("classification")
    scores = scores_of(array, activation_for(problem_type, len(labels), function_to_apply))
    if owners is None or np.array_equal(owners, np.arange(count)):
        merged, windows = scores, [1] * count
    else:
        merged = mean_over_windows(torch.from_numpy(scores), owners, count, weights).numpy()
        windows = np.bincount(owners, minlength=count).tolist()
    index = np.argsort(-merged, axis=1, kind="stable")[:, :top_k]
    ordered = np.take_along_axis(merged, index, 1)
    least = -np.inf if threshold is None else np.array(_thresholds(threshold, labels), np.float32)[index]
    reached = ordered >= least
    counts = reached.sum(1)
    names = np.array([*labels], object)[index[reached]].tolist()
    found = build_records(Classification, names, ordered[reached].tolist(), np.repeat(windows, counts).tolist())
    ends = np.cumsum(counts).tolist()
    return list(map(found.__getitem__, map(slice, [0, *ends], ends)))


def decide(labels: Sequence[Classification], thresholds: Mapping[str, float]) -> list[Classification]:
    """Return the predicted one of two labels: the second if its score reaches its threshold, else the first.

    Args:
        labels: both labels of a text with their scores; nothing of a text with nothing to read.
        thresholds: by label, in the order of their ids.
    """
    first, second = thresholds
    scores = {one.label: one for one in labels}
    if second not in scores:
        return list(labels)
    return [scores[second if scores[second].score >= thresholds[second] else first]]


def scores_of(values: np.ndarray, activation: Activation) -> np.ndarray:
    """Return what `class_scores` does, from an array: a handful of rows is done before a tensor operation starts."""
    if activation == "none" or not values.size:
        return values
    if activation not in _FUNCTIONS:
        return activate(activation, torch.from_numpy(values)).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "sigmoid":
            return 1 / (1 + np.exp(-values))
        powers = np.exp(values - np.maximum.reduce(values, 1, keepdims=True))
        powers /= np.add.reduce(powers, 1, keepdims=True)
        return powers


def _thresholds(threshold: float | Sequence[float] | Mapping[str, float], labels: Sequence[str]) -> list[float]:
    if isinstance(threshold, (int, float)):
        return [float(threshold)] * len(labels)
    if isinstance(threshold, Mapping):
        unknown = [name for name in threshold if name not in labels]
        if unknown:
            raise PredictError(
                f"classification: thresholds for unknown labels {unknown}; expected names among {list(labels)}",
                unknown=unknown,
            )
        return [float(threshold.get(label, -np.inf)) for label in labels]
    if len(threshold) != len(labels):
        raise PredictError(
            f"classification: {len(threshold)} thresholds for {len(labels)} labels; expected one per label",
            found=len(threshold),
            labels=len(labels),
        )
    return [float(value) for value in threshold]


def entailment_id(labels: Sequence[str]) -> int:
    """Return the id of the entailment label: the first with a name that begins with "entail".

    Raises:
        PredictError: no label is called so, and guessing would turn scores upside down.
    """
    for index, label in enumerate(labels):
        if label.lower().startswith("entail"):
            return index
    raise PredictError(
        f"zero-shot: none of the labels {list(labels)[:20]} begins with 'entail'; expected an NLI model; "
        "name the labels in config.json (id2label) or pass entailment=<id>",
        labels=list(labels),
    )


def contradiction_id(labels: Sequence[str], entailment: int) -> int:
    """Return the id of the label that is weighed against entailment.

    That is the first with a name that begins with "contradict", then "not"; if no name matches, label 0, or the
    last one if 0 is entailment, as transformers takes it.
    """
    for beginning in ("contradict", "not"):
        for index, label in enumerate(labels):
            if index != entailment and label.lower().startswith(beginning):
                return index
    return len(labels) - 1 if entailment == 0 else 0


def decode_zero_shot(
    logits: Tensor | np.ndarray,
    candidates: Sequence[str],
    *,
    entailment: int,
    contradiction: int,
    owners: np.ndarray,
    weights: np.ndarray,
    multi_label: bool = False,
) -> list[list[Classification]]:
    """Return for each text its candidate labels with scores, best first.

    Pairs of text and hypothesis are numbered through: all candidates of the first text, then of the second. With
    one answer per text the entailment logits of its candidates go through a softmax; with ``multi_label``, or
    a single candidate, each candidate's entailment is weighed against its contradiction. Of a pair in several
    windows the logits are averaged first, weighted by content tokens, since windows of different pairs need
    not match.

    Args:
        logits: ``(rows, NLI labels)``.
        candidates: the candidate labels, the same for each text.
        entailment: id of the entailment label.
        contradiction: id of the contradiction label.
        owners: index of the pair of each row.
        weights: number of content tokens of each row.
        multi_label: whether several candidates may be true.
    """
    values = torch.as_tensor(logits).detach().float()
    if not bool(torch.isfinite(values).all()):
        raise not_finite("zero-shot")
    pairs = int(owners.max()) + 1 if len(owners) else 0
    merged = mean_over_windows(values, owners, pairs, weights)
    windows = np.bincount(owners, minlength=pairs).tolist()
    alone = torch.softmax(merged[:, [contradiction, entailment]], -1)[:, 1].cpu()
    together = merged[:, entailment].cpu()
    results = []
    for place in range(0, pairs, len(candidates)):
        part = slice(place, place + len(candidates))
        scores = alone[part] if multi_label or len(candidates) == 1 else torch.softmax(together[part], 0)
        ordered, index = torch.sort(scores, descending=True, stable=True)
        ranks = zip(map(int, index.tolist()), ordered.tolist(), strict=True)
        results.append([Classification(candidates[i], score, windows[place + i]) for i, score in ranks])
    return results


def decode_ranking(
    logits: Tensor | np.ndarray,
    *,
    activation: Activation = "sigmoid",
    top_k: int | None = None,
    owners: np.ndarray | None = None,
) -> list[Ranked]:
    """Return the documents of one query, best first; equal scores in the order of their logits, then the caller's.

    A document in several windows is as good as its best window: relevance needs one passage, not the whole.

    Args:
        logits: one number per row, ``(rows,)`` or ``(rows, 1)``.
        activation: what makes a score of a logit, see `activation_for`; not softmax, which is 1 of any number.
        top_k: most documents; all without it.
        owners: index of the document of each row, each with a row; without it row ``i`` is document ``i``.

    Raises:
        PredictError: the model gives more than one number per row.
    """
    values = torch.as_tensor(logits).detach().float()
    if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] != 1):
        raise PredictError(
            f"ranking: logits of shape {tuple(values.shape)}; expected (rows, 1); use a cross-encoder with one label",
            found=tuple(values.shape),
        )
    if activation == "softmax":
        raise PredictError("ranking: softmax of one number is always 1; expected 'sigmoid' or 'none'")
    given = values.reshape(-1).cpu().numpy()
    if not np.isfinite(given).all():
        raise not_finite("ranking")
    scores = class_scores(values.reshape(-1), activation).cpu().numpy()
    owner = np.arange(len(given)) if owners is None else owners
    windows = np.bincount(owner)
    order = np.lexsort((owner, -given, -scores))
    _, best = np.unique(owner[order], return_index=True)
    kept = order[np.sort(best)]
    found = zip(owner[kept].tolist(), scores[kept].tolist(), strict=True)
    ranked = [Ranked(document, score, int(windows[document])) for document, score in found]
    return ranked if top_k is None else ranked[:top_k]
