"""Minimum score of each label, as stored in a model's ``config.json``.

They are chosen on held-out data when a classifier is trained (`flodl_hf.training.thresholds`), and used by
``predict(threshold="tuned")``. Other libraries ignore the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flodl.errors import printable, shown
from flodl_hf.errors import PredictError

__all__ = ["LABEL_THRESHOLDS", "thresholds_of", "tuned_thresholds"]

LABEL_THRESHOLDS = "label_thresholds"
"""The key: a table of numbers from 0 to 1 by label name."""


def thresholds_of(found: Any, labels: Sequence[str], notes: list[str]) -> dict[str, float] | None:
    """Return the thresholds in a file's key, in the order of the labels; None if absent or invalid.

    Args:
        found: the key's value.
        labels: names of the model's labels.
        notes: receives a sentence if the value is not a threshold for each label.
    """
    if found is None:
        return None
    if isinstance(found, Mapping) and set(found) == set(labels) and all(_is_share(value) for value in found.values()):
        return {name: float(found[name]) for name in labels}
    notes.append(
        f"{LABEL_THRESHOLDS}: found {shown(found, 60)}; expected a number from 0 to 1 for each of the labels; predict "
        "knows no tuned thresholds"
    )
    return None


def tuned_thresholds(
    kept: Mapping[str, float] | None, threshold: str, function_to_apply: str | None
) -> Mapping[str, float]:
    """Return the stored thresholds by label, if a call requests them.

    Args:
        kept: the thresholds of the configuration.
        threshold: the string that the call passed.
        function_to_apply: the function that the call requests; None for the configuration's.

    Raises:
        PredictError: the string is not "tuned", the model stores none, or the scores use another function than the
        one that the thresholds were chosen for.
    """
    if threshold != "tuned":
        raise PredictError(
            f"predict: threshold={printable(threshold, 40)}; expected a number, numbers by label, or 'tuned'",
            threshold=threshold,
        )
    if kept is None:
        raise PredictError(
            "predict: threshold='tuned', but this model stores none; expected label_thresholds in config.json. "
            "finetune(tune_thresholds=True) chooses them on held-out data; or give a number",
            threshold=threshold,
        )
    if function_to_apply is not None:
        raise PredictError(
            f"predict: function_to_apply={function_to_apply!r} with threshold='tuned'; the thresholds were chosen for "
            "the scores of the configured function; omit it, or give custom numbers",
            function_to_apply=function_to_apply,
        )
    return kept


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
