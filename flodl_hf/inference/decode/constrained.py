"""The best label sequence that a tagging scheme allows.

This file contains the search (Viterbi) over a whole batch. The rules are in ``labels.py``; the
units with one label each are built in ``entities.py``.
"""

from __future__ import annotations

import numpy as np

from flodl_hf.inference.decode.labels import TagScheme

__all__ = ["best_paths"]


def best_paths(probabilities: np.ndarray, lengths: np.ndarray, scheme: TagScheme) -> np.ndarray:
    """Return for each unit the label that the most probable allowed sequence of its text gives it.

    Args:
        probabilities: label distribution of each unit, texts one after another, ``(units, labels)``.
        lengths: number of units of each text, ``(texts,)``, summing to the units.
        scheme: which label may follow which, come first and come last.

    Returns:
        Label ids, ``(units,)``. Of equally probable sequences the one with the lowest ids from the end
        backwards.
    """
    total, labels = probabilities.shape
    lengths = lengths[lengths > 0]
    if total == 0:
        return np.zeros(0, np.int64)
    batch, longest = len(lengths), int(lengths.max())
    tiny = np.finfo(np.float64).tiny
    padded = np.zeros((batch, longest, labels))
    real = np.arange(longest) < lengths[:, None]
    padded[real] = np.log(np.maximum(probabilities.astype(np.float64), tiny))
    barred = np.where(scheme.allowed, 0.0, -np.inf)
    score = padded[:, 0] + np.where(scheme.may_start, 0.0, -np.inf)
    back = np.zeros((batch, longest, labels), np.int64)
    for step in range(1, longest):
        reach = score[:, :, None] + barred
        back[:, step] = reach.argmax(1)
        ahead = np.take_along_axis(reach, back[:, step][:, None, :], 1)[:, 0] + padded[:, step]
        # Finished texts keep their score, and the identity as their way back.
        live = real[:, step][:, None]
        score = np.where(live, ahead, score)
        back[:, step] = np.where(live, back[:, step], np.arange(labels))
    label = (score + np.where(scheme.may_end, 0.0, -np.inf)).argmax(1)
    path = np.zeros((batch, longest), np.int64)
    for step in range(longest - 1, -1, -1):
        path[:, step] = label
        label = np.take_along_axis(back[:, step], label[:, None], 1)[:, 0]
    return path[real]
