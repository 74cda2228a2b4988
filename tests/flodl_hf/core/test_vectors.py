"""Vectors of many texts: one array, each number where its text is, whatever came with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flodl_hf.model.encoder_model import EncoderModel
from flodl_hf.runtime.stream import stream

Make = Callable[..., EncoderModel]
EXACT: dict[str, Any] = {"precision": "exact", "batch_invariant": True}
LONG = "the cat sat on the mat and ran " * 12
TEXTS = ["the cat sat", LONG, "", "a dog", f"very good film {LONG}", "good", "ada lives in paris"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"truncate": True}, {"truncate_dim": 5}], ids=str)
def test_vectors_are_those_of_each_text_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ahead: bool
) -> None:
    model: Any = make("bert", "base")
    # Windows of three: some of them have a text of several rows, and the last is not full.
    monkeypatch.setattr(
        "flodl_hf.runtime.session.stream", lambda items, job, **k: stream(items, job, first=3, most=3, ahead=ahead)
    )
    expected = torch.stack([model.embed(text, **EXACT, **options) for text in TEXTS])
    found = model.embed(TEXTS, **EXACT, **options)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(list(model.embed(iter(TEXTS), **EXACT, **options))), expected)
    torch.testing.assert_close(model.embed(TEXTS, **options), expected, rtol=0, atol=1e-5)
    if options.get("normalize", True):
        raw = model.embed(TEXTS, **EXACT, **options | {"normalize": False})
        assert torch.equal(found, torch.nn.functional.normalize(raw, dim=-1))


def test_a_text_of_very_many_windows_is_told_once_with_what_else_there_is(make: Make) -> None:
    model: Any = make("bert", "base")
    huge = "the cat " * 1900  # 38 tokens in a window
    said = r"a text of 15,200 characters is read in 100 windows of 40 tokens.*truncate=True keeps the first"
    for texts in ([huge, "a mat", huge], iter([huge, "a mat", huge])):
        with pytest.warns(UserWarning, match=said) as told:
            list(model.embed(texts))
        assert len(told) == 1
    cut = torch.from_numpy(model.encode(huge, normalize_embeddings=True))
    torch.testing.assert_close(model.embed(huge, truncate=True), cut)
    model.embed(huge[:-400])  # of fewer


def test_lengths_of_windows_say_nothing_of_their_mean(make: Make) -> None:
    model: Any = make("bert", "base")
    assert model.embed(LONG).norm().item() == pytest.approx(1.0, abs=1e-6)
    assert model.embed(LONG, normalize=False).norm().item() != pytest.approx(1.0, abs=1e-3)
