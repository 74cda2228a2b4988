"""``encode`` and ``similarity``: the outputs of sentence-transformers, from the arithmetic that it documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.errors import PredictError

Maker = Callable[..., Any]
TEXTS = ["the cat sat", "a dog ran on the mat", "ada lives in paris"]


def by_hand(model: Any, text: str) -> torch.Tensor:
    """The mean of the states of all tokens, specials among them."""
    with torch.no_grad():
        return model(**model.tokenizer([text], return_tensors="pt")).last_hidden_state[0].mean(0)


def test_encode_gives_an_array_of_means_that_are_not_scaled(make: Maker) -> None:
    model = make("bert", "base")
    expected = torch.stack([by_hand(model, text) for text in TEXTS])
    found = model.encode(TEXTS)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)
    assert model.encode(TEXTS[0]).shape == (16,)
    assert isinstance(model.encode(TEXTS, convert_to_tensor=True), torch.Tensor)
    listed = model.encode(TEXTS, convert_to_numpy=False)
    assert torch.equal(torch.stack(listed), model.encode(TEXTS, convert_to_tensor=True))
    unit = model.encode(TEXTS, normalize_embeddings=True, batch_size=2, show_progress_bar=False, device="cpu")
    assert np.linalg.norm(unit, axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
    assert np.allclose(model.encode(["sat"], prompt="the cat "), model.encode(["the cat sat"]), atol=1e-5)
    assert model.encode([]).shape == (0, 16)
    assert model.encode(iter(TEXTS)).shape == (3, 16)


@pytest.mark.filterwarnings("ignore:.*truncated")
def test_encode_cuts_long_texts_and_obeys_the_folder(make: Maker) -> None:
    model = make("bert", "base")
    long = "the cat sat on a mat " * 20
    cut = model.tokenizer([long], truncation=True, max_length=40, return_tensors="pt")
    with torch.no_grad():
        expected = model(**cut).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(model.encode(long), expected.numpy(), atol=1e-5)
    model.sentence_recipe = SentenceTransformerConfig(pooling=("cls",), normalize=True)
    assert np.linalg.norm(model.encode(TEXTS[0])) == pytest.approx(1, abs=1e-5)
    # As there: False does not take back what the folder does.
    assert np.linalg.norm(model.encode(TEXTS[0], normalize_embeddings=False)) == pytest.approx(1, abs=1e-5)


MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "cosine": lambda a, b: float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)),
    "dot": lambda a, b: float(a @ b),
    "euclidean": lambda a, b: -float(np.linalg.norm(a - b)),
    "manhattan": lambda a, b: -float(np.abs(a - b).sum()),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_similarities_are_those_of_each_with_each(measure: str, make: Maker) -> None:
    model = make("bert", "base")
    vectors = model.encode(TEXTS)
    expected = [[MEASURES[measure](a, b) for b in vectors[:2]] for a in vectors]
    for a in (vectors, torch.from_numpy(vectors), vectors.tolist(), list(vectors)):
        found = model.similarity(a, vectors[:2], measure=measure)
        assert found.shape == (3, 2)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert model.similarity(vectors[0], vectors[1], measure=measure).shape == (1, 1)
    pairs = model.similarity_pairwise(vectors[:2], vectors[1:3], measure=measure)
    np.testing.assert_allclose(pairs.numpy(), [expected[1][0], expected[2][1]], rtol=1e-4, atol=1e-4)
    # As the folder says.
    named = f'{{"similarity_fn_name": "{measure}"}}'.encode()
    model.sentence_recipe = SentenceTransformerConfig(files={"config_sentence_transformers.json": named})
    np.testing.assert_allclose(model.similarity(vectors, vectors[:2]).numpy(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.similarity_pairwise(vectors[:2], vectors[1:3]), pairs)


def test_texts_are_embedded_and_named(make: Maker) -> None:
    model = make("bert", "base")
    found = model.similarity(TEXTS[0], TEXTS)
    assert found.shape == (1, 3)
    assert float(found[0, 0]) == pytest.approx(1, abs=1e-5)
    page = found._repr_html_()
    assert all(text in page for text in TEXTS)
    assert "1.000" in page
    assert "<table>" in model.similarity(model.encode(TEXTS), model.encode(TEXTS))._repr_html_()


def test_what_cannot_be_compared_is_refused(make: Maker) -> None:
    model = make("bert", "base")
    with pytest.raises(PredictError, match="no measure 'cosin', did you mean 'cosine'"):
        model.similarity(TEXTS, TEXTS, measure="cosin")
    with pytest.raises(PredictError, match=r"\(2, 3\) and \(2, 4\)"):
        model.similarity(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(PredictError) as different:
        model.similarity_pairwise(TEXTS, TEXTS[:2])
    assert different.value.details["found"] == (len(TEXTS), 2)
    with pytest.raises(PredictError) as caught:
        model.encode(TEXTS, prompt_name="clustering")
    assert caught.value.details["found"] == "clustering"
    # sentence-transformers has an empty prompt of this name where the folder stores none.
    assert np.array_equal(model.encode(TEXTS, prompt_name="query"), model.encode(TEXTS))
    for word, value in (("output_value", "other"), ("pool", {})):
        with pytest.raises(PredictError, match=f"encode: .*{word}="):
            model.encode(TEXTS, **{word: value})
