"""Estimators for scikit-learn: vectors of texts, and a fine-tuned classifier."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin

from flodl_hf.compat import model_of

__all__ = ["TextClassifier", "TextVectors"]


class TextVectors(TransformerMixin, BaseEstimator):
    """Turns texts into vectors, ``(texts, size)``; nothing is fitted.

    Args:
        model: a model, a folder or a Hub repository.
        normalize: scale vectors to length 1; None for the folder's setting.
    """

    def __init__(self, model: Any, normalize: bool | None = None) -> None:
        self.model = model
        self.normalize = normalize

    def fit(self, X: Iterable[str], y: Any = None) -> TextVectors:
        """Load the model."""
        self.model_ = model_of(self.model, "base")
        return self

    def transform(self, X: Iterable[str]) -> np.ndarray:
        """Return one vector for each text."""
        model = self.model_ if hasattr(self, "model_") else self.fit(X).model_
        return model.encode(list(X), normalize_embeddings=self.normalize)


class TextClassifier(ClassifierMixin, BaseEstimator):
    """Fine-tunes a classifier of texts with `flodl_hf.finetune`.

    Args:
        model: a folder or a Hub repository to start from.
        options: keywords of `flodl_hf.finetune`, such as ``{"epochs": 3, "learning_rate": 2e-5}``.
    """

    def __init__(self, model: Any, options: dict[str, Any] | None = None) -> None:
        self.model = model
        self.options = options

    def fit(self, X: Sequence[str], y: Sequence[Any]) -> TextClassifier:
        """Train a model on texts and their labels."""
        from flodl_hf.training import finetune

        self.classes_ = np.unique(np.asarray(y))
        names = [str(name) for name in self.classes_]
        rows = [{"text": text, "label": str(label)} for text, label in zip(X, y, strict=True)]
        given: Any = {"task": "text-classification", "labels": names, **(self.options or {})}
        found = finetune(self.model, train=rows, **given)
        self.model_ = found.model
        return self

    def predict_proba(self, X: Sequence[str]) -> np.ndarray:
        """Return the probability of each class for each text, ``(texts, classes)``."""
        place = {str(name): number for number, name in enumerate(self.classes_)}
        found = np.zeros((len(X), len(place)))
        for row, labels in zip(found, self.model_.predict(list(X)), strict=True):
            for one in labels:
                row[place[one.label]] = one.score
        return found

    def predict(self, X: Sequence[str]) -> np.ndarray:
        """Return the most probable class of each text."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]
