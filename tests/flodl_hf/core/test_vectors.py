"""Vectors of many texts: one array, each number where its text is, whatever came with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flodl_hf.errors import TextTooLongError
from flodl_hf.models.encoder_model import EncoderModel

Make = Callable[..., EncoderModel]
EXACT: dict[str, Any] = {"precision": "exact", "batch_invariant": True}
LONG = "the cat sat on the mat and ran " * 12
TEXTS = ["the cat sat", LONG, "", "a dog", f"very good film {LONG}", "good", "ada lives in paris"]


TRUNCATES = pytest.mark.filterwarnings("ignore:.*truncated")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"windows": True}, {"truncate_dim": 5}], ids=str)
@TRUNCATES
def test_vectors_are_those_of_each_text_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ahead: bool
) -> None:
    model: Any = make("bert", "base")
    # Windows of three: some of them have a text of several rows, and the last is not full.
    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: ahead)
    model.runtime(window=3)
    expected = torch.stack([model.embed(text, **EXACT, **options) for text in TEXTS])
    found = model.embed(TEXTS, **EXACT, **options)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(list(model.embed(iter(TEXTS), **EXACT, **options))), expected)
    torch.testing.assert_close(model.embed(TEXTS, **options), expected, rtol=0, atol=1e-5)
    if options.get("normalize", True):
        raw = model.embed(TEXTS, **EXACT, **options | {"normalize": False})
        assert torch.equal(found, torch.nn.functional.normalize(raw, dim=-1))


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu"]])
@pytest.mark.parametrize("method", ["embed", "encode", "encode_query", "encode_document"])
def test_one_warning_counts_the_truncated_texts(
    make: Make, monkeypatch: pytest.MonkeyPatch, method: str, devices: Any
) -> None:
    model: Any = make("bert", "base")
    call = getattr(model, method)
    model.runtime(window=2)
    for given in (TEXTS, iter(TEXTS)):
        with pytest.warns(UserWarning, match="truncated 2 of 7 texts to 40 tokens") as warned:
            list(call(given, devices=devices))
        assert len(warned) == 1
        assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="truncated 1 of 1 texts") as warned:
        call(LONG)
    assert warned[0].filename == __file__
    call([text for text in TEXTS if LONG not in text], devices=devices)
    call(TEXTS, windows=True)  # no warning


@TRUNCATES
def test_embed_and_encode_truncate_alike_and_windows_are_optional(make: Make) -> None:
    model: Any = make("bert", "base")
    kept = LONG[: model.tokenizer.encode_rows([LONG])[0][0].offsets[38][1]]
    vectors = model.embed([LONG, "a dog"], **EXACT)
    assert torch.equal(vectors[0], model.embed(kept, **EXACT))
    assert torch.equal(
        vectors, model.encode([LONG, "a dog"], normalize_embeddings=True, convert_to_tensor=True, **EXACT)
    )
    averaged = model.embed(LONG, windows=True, **EXACT)
    assert not torch.allclose(averaged, vectors[0], atol=1e-3)
    assert torch.equal(
        averaged, model.encode(LONG, windows=True, normalize_embeddings=True, convert_to_tensor=True, **EXACT)
    )
    assert torch.equal(model.embed("a dog", windows=True, **EXACT), vectors[1])
    torch.testing.assert_close(torch.as_tensor(model.similarity(LONG, kept, **EXACT)), torch.ones(1, 1))


def test_a_text_that_is_too_long_is_refused_with_strict(make: Make) -> None:
    model: Any = make("bert", "base")
    with pytest.raises(TextTooLongError) as caught:
        model.embed(["a dog", LONG], strict=True)
    assert (caught.value.where, caught.value.found, caught.value.expected) == ("text 1", 122, 40)


def test_lengths_of_windows_say_nothing_of_their_mean(make: Make) -> None:
    model: Any = make("bert", "base")
    assert model.embed(LONG, windows=True).norm().item() == pytest.approx(1.0, abs=1e-6)
    assert model.embed(LONG, windows=True, normalize=False).norm().item() != pytest.approx(1.0, abs=1e-3)
