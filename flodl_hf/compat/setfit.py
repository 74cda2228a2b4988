"""SetFit models whose body is computed and trained here."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from setfit import SetFitModel
from sklearn.linear_model import LogisticRegression

from flodl_hf.compat.sentence_transformers_classes import SentenceTransformer

__all__ = ["setfit_model"]


def setfit_model(model: str, head: Any = None, **options: Any) -> SetFitModel:
    """Return a SetFitModel with a body of this package.

    Args:
        model: a folder or a Hub repository.
        head: the classifier of the vectors; None for scikit-learn's LogisticRegression.
        **options: keywords of SetFitModel, such as ``labels``.
    """
    return SetFitModel(model_body=SentenceTransformer(model), model_head=head or LogisticRegression(), **options)
