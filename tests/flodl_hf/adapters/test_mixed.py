"""Texts of several adapters in one batch answer as each adapter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapted_models import moved  # pyright: ignore[reportMissingImports]

from flodl.errors import ConfigError
from flodl_hf import AutoModelForTokenClassification
from flodl_hf.errors import PredictError
from flodl_hf.models.adapters import Lora

TEXTS = ["a good film", "bad", "", "neither good nor bad, and long " * 3, "the soup was cold", "x", "lovely"] * 3
NAMES = ["default", "second", "third", "second", "third", "default", "second"] * 3


def scores(found: Any) -> dict[str, float]:
    return {answer.label: answer.score for answer in found}


@pytest.fixture
def three(adapted: Any) -> Any:
    model = adapted(targets="all-linear")
    for name, seed, settings in (("second", 5, Lora(rank=2, targets=("key",))), ("third", 9, Lora(rank=3, dora=True))):
        moved(model.add_adapter(settings, name), name, seed)
    return model


def test_each_text_is_answered_by_its_own_adapter(three: Any) -> None:
    found = three.predict_mixed(TEXTS, NAMES)
    assert three.active_adapter == "third"
    alone = {name: three.set_adapter(name).predict(TEXTS, precision="exact") for name in dict.fromkeys(NAMES)}
    for place, name in enumerate(NAMES):
        assert scores(found[place]) == pytest.approx(scores(alone[name][place]), abs=1e-5)
    differing = [
        place
        for place, text in enumerate(TEXTS)
        if text and len({round(scores(alone[name][place])["praise"], 3) for name in alone}) == 3
    ]
    assert differing
    assert three.predict_mixed([], []) == []


def test_tokens_are_answered_by_the_adapter_of_their_text(base: Path) -> None:
    model: Any = AutoModelForTokenClassification.from_pretrained(base, labels=["O", "B-X"])
    for name, seed in (("default", 1), ("second", 2)):
        moved(model.add_adapter(Lora(rank=2), name), name, seed)
    texts, names = ["a good film", "bad soup"] * 3, ["default", "second", "second", "default", "second", "default"]
    found = model.predict_mixed(texts, names)
    alone = {name: model.set_adapter(name).predict(texts, precision="exact") for name in ("default", "second")}
    for place, name in enumerate(names):
        mine = [(e.label, e.start, e.end, pytest.approx(e.score, abs=1e-5)) for e in alone[name][place]]
        assert [(e.label, e.start, e.end, e.score) for e in found[place]] == mine


def test_what_cannot_share_a_batch_is_refused(three: Any) -> None:
    with pytest.raises(PredictError):
        three.predict_mixed(TEXTS, NAMES[:-1])
    with pytest.raises(PredictError):
        three.predict_mixed(["x"], "default")
    with pytest.raises(ConfigError):
        three.predict_mixed(["x"], ["fourth"])
    three._held_adapters.known["second"].labels = ("a", "b")
    with pytest.raises(PredictError) as fault:
        three.predict_mixed(TEXTS, NAMES)
    assert fault.value.details["problems"] == ["their labels differ"]
    assert three.active_adapter == "third"
