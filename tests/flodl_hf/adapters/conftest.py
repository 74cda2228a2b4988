"""A small classifier to adapt, and adapters that change what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf.models.adapters import Lora
from flodl_hf.training import demo

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer BERT with a head for two labels and a tokenizer."""
    return demo.demo_model(demo.learn_vocabulary()).save_pretrained(tmp_path_factory.mktemp("adapted") / "base")


@pytest.fixture
def adapted(base: Path) -> Callable[..., Any]:
    """Make a classifier with an adapter that is as if trained."""
    from adapted_models import moved  # pyright: ignore[reportMissingImports]

    from flodl_hf import AutoModelForSequenceClassification

    def make(seed: int = 1, **settings: Any) -> Any:
        torch.manual_seed(seed)
        model: Any = AutoModelForSequenceClassification.from_pretrained(base)
        return moved(model.add_adapter(Lora(**{"rank": 4, "alpha": 8, **settings})), seed=seed)

    return make
