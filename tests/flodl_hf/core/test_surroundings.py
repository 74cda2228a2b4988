"""What a program has switched on around a call changes no prediction: autocast, a default device, a default dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import DeviceError
from flodl_hf import load

Saved = Callable[..., Path]
TEXTS = ["ada lives in paris!", "the acme corp's cat-dog ran"]
ASKED: dict[str, Callable[[Any], Any]] = {
    "sequence_classification": lambda m: [
        m.predict(TEXTS, threshold=0.3),
        m.predict(TEXTS, precision="int8"),
        m.predict(TEXTS),
        m.predict(TEXTS[0]),
        list(m.predict(iter(TEXTS))),
    ],
    "token_classification": lambda m: [m.predict(TEXTS, ignore_labels=[]), m.predict(TEXTS[0], ignore_labels=[])],
    "question_answering": lambda m: [m.answer("who?", TEXTS[0]), m.answer_batch([("who?", text) for text in TEXTS])],
    "masked_lm": lambda m: [m.fill_mask("a [MASK]"), m.fill_mask(["a [MASK]"], targets=["cat"])],
    "base": lambda m: [m.embed([]).dtype, m.embed(TEXTS).tolist(), m.encode(TEXTS).tolist()],
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


AROUND: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("head", ASKED)
def test_a_prediction_is_what_it_is_elsewhere(head: str, around: str, saved: Saved) -> None:
    folder = saved("bert", head)
    model: Any = load(folder)
    fresh: Any = load(folder)
    expected = ASKED[head](model)
    with AROUND[around]():
        assert ASKED[head](fresh) == expected  # its first call, which prepares the model
        assert ASKED[head](model) == expected
    assert ASKED[head](model) == expected


def test_a_model_is_loaded_to_the_default_device(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification")
    classifier: Any = load(folder)
    expected = classifier.predict(TEXTS)
    with torch.device("meta"):
        with pytest.raises(DeviceError, match=r"default device 'meta'.*expected a device for the weights"):
            load(folder)
        model: Any = load(folder, device="cpu")
    assert model.predict(TEXTS) == expected


@pytest.mark.gpu
def test_a_model_is_loaded_to_a_gpu_that_is_the_default_device(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification")
    classifier: Any = load(folder, device="cuda")
    expected = classifier.predict(TEXTS)
    with torch.device("cuda"):
        model: Any = load(folder)
        assert model.device.type == "cuda"
        assert model.predict(TEXTS) == expected
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model.predict(TEXTS) == expected
