"""Groups of texts that are alike, search among bits and bytes; beside sentence-transformers where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf import AutoModel
from flodl_hf.errors import PredictError
from flodl_hf.inference.communities import community_detection
from flodl_hf.inference.mining import paraphrase_mining
from flodl_hf.inference.quantize import (
    PRECISIONS,
    STORED_PRECISIONS,
    binary_search,
    byte_search,
    quantize_embeddings,
    ranges_of,
)
from flodl_hf.inference.search import semantic_search


def clustered(groups: int, each: int, spread: float = 0.35, size: int = 32) -> Tensor:
    draw = torch.Generator().manual_seed(groups)
    centres = torch.randn(groups, 1, size, generator=draw)
    return (centres + spread * torch.randn(groups, each, size, generator=draw)).flatten(0, 1)[
        torch.randperm(groups * each, generator=draw)
    ]


VECTORS = clustered(40, 12)
SIGNS = torch.where(VECTORS > 0, 1.0, -1.0)


def by_hand(vectors: Tensor, threshold: float, least: int) -> list[list[int]]:
    unit = F.normalize(vectors, dim=-1)
    table = (unit @ unit.T).tolist()
    near = [[j for j in sorted(range(len(row)), key=lambda j: -row[j]) if row[j] >= threshold] for row in table]
    used: set[int] = set()
    found = []
    for i in sorted((i for i in range(len(near)) if len(near[i]) >= least), key=lambda i: -len(near[i])):
        free = [j for j in near[i] if j not in used]
        if i not in used and len(free) >= least:
            found.append([i, *(j for j in free if j != i)])
            used.update(found[-1])
    return sorted(found, key=len, reverse=True)


@pytest.mark.parametrize(("threshold", "least"), [(0.75, 10), (0.6, 3), (0.9, 2), (0.3, 1)])
def test_groups_are_the_largest_first_and_share_nothing(threshold: float, least: int) -> None:
    found = community_detection(VECTORS, threshold, least, batch_size=100)
    assert found == by_hand(VECTORS, threshold, least)
    assert len(found) > 5
    assert found == community_detection(VECTORS.numpy(), threshold, least)


def test_groups_that_cannot_be() -> None:
    assert community_detection(VECTORS[:9]) == []
    assert community_detection(torch.zeros(0, 4), min_community_size=1) == []
    with pytest.raises(PredictError, match="min_community_size=0"):
        community_detection(VECTORS, min_community_size=0)


@pytest.mark.filterwarnings("ignore")
def test_groups_pairs_and_findings_are_those_of_sentence_transformers() -> None:
    util: Any = pytest.importorskip("sentence_transformers.util")
    for threshold, least in ((0.75, 10), (0.6, 3), (0.9, 2)):
        theirs = util.community_detection(VECTORS, threshold=threshold, min_community_size=least)
        assert community_detection(VECTORS, threshold, least) == theirs
    twice = torch.cat([VECTORS, VECTORS[:50], VECTORS[:50]])
    for top_k in (1, 2, 7):
        theirs = [(score, i, j) for score, i, j in util.paraphrase_mining_embeddings(twice, top_k=top_k)]
        ours = paraphrase_mining(twice, top_k=top_k)
        # Which of equal pairs is taken is for the order alone to say; how alike they are is not.
        assert [score for score, _, _ in ours] == pytest.approx([score for score, _, _ in theirs], abs=1e-6)
    theirs = util.semantic_search(VECTORS[:20], VECTORS, top_k=5, corpus_chunk_size=100)
    ours = semantic_search(VECTORS[:20], VECTORS, top_k=5, corpus_chunk_size=70)
    assert [[hit["corpus_id"] for hit in hits] for hits in ours] == [[hit["corpus_id"] for hit in h] for h in theirs]
    scores = torch.tensor([[hit["score"] for hit in hits] for hits in theirs])
    assert (ours.scores - scores).abs().max() < 1e-6


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_search_among_bytes_is_that_among_what_they_stand_for(precision: str) -> None:
    corpus, ranges = quantize_embeddings(VECTORS, precision), ranges_of(VECTORS)
    low, high = torch.from_numpy(ranges)
    middle = low + (torch.from_numpy(corpus.astype(np.float32)) + (128.5 if precision == "int8" else 0.5)) * (
        (high - low) / 255
    )
    found = byte_search(VECTORS[:30], corpus, ranges, top_k=9)
    wanted = semantic_search(VECTORS[:30], middle, top_k=9, measure="dot")
    assert (found.scores - wanted.scores).abs().max() < 1e-3
    again = byte_search(VECTORS[:30], corpus, ranges, top_k=9, whole=VECTORS)
    exact = semantic_search(VECTORS[:30], VECTORS, top_k=9, measure="dot")
    assert torch.equal(again.indices, exact.indices)
    torch.testing.assert_close(again.scores, exact.scores)


def test_what_bits_found_is_put_in_order_by_a_mapped_file(tmp_path: Any) -> None:
    np.save(tmp_path / "whole.npy", VECTORS.numpy())
    whole = np.load(tmp_path / "whole.npy", mmap_mode="r")
    exact = semantic_search(VECTORS[:30], VECTORS, top_k=3, measure="dot")
    for precision in ("binary", "ubinary"):
        bits = quantize_embeddings(VECTORS, precision)
        found = binary_search(VECTORS[:30], bits, top_k=3, rescore_multiplier=20, whole=whole)
        assert (found.indices == exact.indices).float().mean() > 0.9
        near = semantic_search(SIGNS[:30], SIGNS, top_k=12, measure="dot")
        plain = binary_search(VECTORS[:30], bits, top_k=12, rescore_multiplier=1)
        assert torch.equal(plain.indices.sort().values, near.indices.sort().values)
    with pytest.raises(PredictError, match="features"):
        binary_search(VECTORS[:, :8], bits)


@pytest.mark.gpu
def test_groups_and_findings_are_the_same_on_a_gpu() -> None:
    moved = VECTORS.cuda()
    assert [sorted(group) for group in community_detection(moved)] == [
        sorted(group) for group in community_detection(VECTORS)
    ]
    bits = quantize_embeddings(VECTORS, "ubinary")
    ours, theirs = (binary_search(VECTORS[:30], bits, top_k=3, device=device) for device in ("cuda", "cpu"))
    assert torch.equal(ours.indices, theirs.indices)
    ranges, counted = ranges_of(VECTORS), quantize_embeddings(VECTORS, "int8")
    found = [byte_search(VECTORS[:30], counted, ranges, top_k=3, device=device).indices for device in ("cuda", "cpu")]
    assert torch.equal(*found)


def test_encode_returns_the_bytes_that_are_asked_for(demo_model: Path) -> None:
    model = AutoModel.from_pretrained(demo_model)
    texts = ["a good film", "a bad film", "the cat sat"]
    whole = model.encode(texts)
    for store in PRECISIONS:
        found = model.encode(texts, store=store)
        expected = quantize_embeddings(whole, store)
        assert found.dtype == expected.dtype
        assert (found == expected).all()
        assert torch.equal(model.encode(texts, store=store, convert_to_tensor=True), torch.from_numpy(expected))
    ranges = ranges_of(whole)
    assert (
        model.encode(texts[0], store="int8", ranges=ranges) == quantize_embeddings(whole, "int8", ranges=ranges)[0]
    ).all()
    with pytest.raises(PredictError, match="store 'int9', did you mean 'int8'"):
        model.encode(texts, store="int9")


@pytest.mark.parametrize("precision", STORED_PRECISIONS)
def test_precision_is_that_of_sentence_transformers(demo_model: Path, precision: str) -> None:
    model: Any = AutoModel.from_pretrained(demo_model)
    texts = ["a good film", "a bad film", "the cat sat"]
    expected = quantize_embeddings(model.encode(texts), precision)
    found = model.encode(texts, precision=precision)
    assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
    # With store= it is the precision of the computation.
    assert model.encode(texts, precision="exact", store=precision).dtype == expected.dtype


def test_ranges_are_those_of_the_calibration_vectors() -> None:
    found = quantize_embeddings(VECTORS[:4], "int8", calibration_embeddings=VECTORS)
    assert (found == quantize_embeddings(VECTORS[:4], "int8", ranges_of(VECTORS))).all()
    assert quantize_embeddings([], "int8") == []


def test_encode_takes_the_arguments_of_sentence_transformers(demo_model: Path) -> None:
    model: Any = AutoModel.from_pretrained(demo_model)
    texts = ["a good film", "a bad film, and a long one"]
    expected = model.encode(["so: " + text for text in texts])
    given = {
        "show_progress_bar": False,
        "device": "cpu",
        "chunk_size": 8,
        "pool": None,
        "output_value": "sentence_embedding",
    }
    assert np.array_equal(model.encode(texts, None, "so: ", 1, **given), expected)
    assert np.array_equal(model.encode_query(texts, None, "so: ", 1), expected)
    listed = model.encode(texts, prompt="so: ", convert_to_numpy=False)
    assert [one.tolist() for one in listed] == expected.tolist()
    tokens = model.encode(texts, output_value="token_embeddings")
    for text, states in zip(texts, tokens, strict=True):
        plain = model(**model.tokenizer([text], return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(states, plain.detach(), rtol=0, atol=1e-5)
    assert torch.equal(model.encode(texts[0], output_value="token_embeddings"), tokens[0])
    with pytest.raises(PredictError) as caught:
        model.encode(texts, output_value=None)
    assert caught.value.details["output_value"] is None


@pytest.mark.filterwarnings("ignore:.*truncated")
def test_the_length_of_texts_can_be_set_and_is_saved(demo_model: Path, tmp_path: Path) -> None:
    model: Any = AutoModel.from_pretrained(demo_model)
    text = "a good film, a bad film and the cat"
    assert model.max_seq_length == model.max_tokens
    model.max_seq_length = 5
    short = model.tokenizer([text], truncation=True, max_length=5, return_tensors="pt")
    expected = model(**short).last_hidden_state[0].mean(0).detach()
    torch.testing.assert_close(torch.from_numpy(model.encode(text)), expected, rtol=0, atol=1e-5)
    again = AutoModel.from_pretrained(model.save_pretrained(tmp_path / "out"))
    assert again.max_seq_length == 5
    assert np.array_equal(again.encode(text), model.encode(text))
    for wrong in (2, 10**6, "5", None):
        with pytest.raises(PredictError):
            model.max_seq_length = wrong
