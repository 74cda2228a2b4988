"""Ids of many texts from few objects: the same ids as one by one, whatever the tokenizer and the texts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner

from flodl_hf.errors import TokenizerError
from flodl_hf.inference.inputs import encode
from flodl_hf.inference.token_table import frame_of
from flodl_hf.tokenization import backend
from flodl_hf.tokenization.backend import mark_of
from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import AWKWARD, CORPUS

TEXTS = [*AWKWARD, *CORPUS, *(f"{a} {b}" for a in AWKWARD for b in CORPUS[:4])]


def one_by_one(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer._backend.encodings([text], special=False)[0].ids for text in texts]


def parted(flat: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat[0], np.cumsum(flat[1])[:-1])]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many inputs the library was given at a time."""
    sizes: list[int] = []
    plain = backend.over_threads

    def over_threads(run: Any, batch: list[Any], each: int = 1) -> list[Any]:
        sizes.append(len(batch))
        return plain(run, batch, each)

    monkeypatch.setattr(backend, "over_threads", over_threads)
    return sizes


def test_ids_of_blocks_are_those_of_the_texts_alone(tokenizer: Tokenizer, asked: list[int]) -> None:
    mark = mark_of(Inner.from_str(tokenizer.to_json()))
    assert mark is not None
    assert "pad" in mark[0].lower()
    assert parted(tokenizer._backend.flat(TEXTS)) == one_by_one(tokenizer, TEXTS)
    assert asked[0] <= len(TEXTS) // 4 + 1
    few = TEXTS[:5]
    assert parted(tokenizer._backend.flat(few)) == one_by_one(tokenizer, few)


@pytest.mark.parametrize("text", CORPUS[:2])
def test_equal_texts_are_tokenized_once(tokenizer: Tokenizer, asked: list[int], text: str) -> None:
    assert parted(tokenizer._backend.flat([text] * 100)) == one_by_one(tokenizer, [text]) * 100
    assert max(asked) == 1
    others = [text, *CORPUS[2:5], text]
    assert parted(tokenizer._backend.flat(others)) == one_by_one(tokenizer, others)


def test_a_text_that_holds_the_mark_is_still_parted_rightly(tokenizer: Tokenizer, asked: list[int]) -> None:
    mark = mark_of(Inner.from_str(tokenizer.to_json()))
    assert mark is not None
    texts = [*TEXTS, f"a {mark[0]} b", mark[0]]
    assert parted(tokenizer._backend.flat(texts)) == one_by_one(tokenizer, texts)

    assert asked[-1] == len(texts) > asked[-2]


def test_specials_taken_apart_part_nothing(folder: Any) -> None:
    settings = {"model_max_length": 512, "split_special_tokens": True}
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "config.json")}
    apart = Tokenizer.from_files({**files, "tokenizer_config.json": json.dumps(settings).encode()})
    assert mark_of(apart._backend.inner) is None
    assert parted(apart._backend.flat(TEXTS)) == one_by_one(apart, TEXTS)


def test_a_faulty_text_of_a_block_is_named(tokenizer: Tokenizer) -> None:
    texts = [*TEXTS[:40], "a\ud800b", *TEXTS[40:]]
    with pytest.raises(TokenizerError, match="text 40: character 1 is the lone surrogate"):
        tokenizer._backend.flat(texts)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("given", [{}, {"stride": 3}, {"snap": False, "stride": 3}, {"cut": "first"}], ids=str)
def test_rows_from_ids_are_the_rows_that_the_library_frames(
    tokenizer: Tokenizer, pairs: bool, given: dict[str, Any]
) -> None:
    assert frame_of(tokenizer, pairs=pairs) is not None
    seconds = [text[:5] for text in reversed(TEXTS)] if pairs else None
    if pairs and "cut" not in given:  # the text that is not cut has to fit
        texts, seconds = [text[:5] for text in TEXTS], TEXTS[::-1]
    else:
        texts = TEXTS
    quickly, slowly = (
        encode(tokenizer, texts, seconds, max_tokens=40, records=records, **given).table for records in (False, True)
    )
    assert int(slowly.window.max()) > 0
    order = np.lexsort((quickly.window, quickly.owners))
    for name in ("lengths", "owners", "counts", "first_token", "window", "nulls"):
        assert np.array_equal(getattr(quickly, name)[order], getattr(slowly, name)), name
    starts, lengths = quickly.starts.tolist(), quickly.lengths.tolist()
    tokens = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in order])
    for name in ("ids", "types", "sequence"):
        a, b = getattr(quickly, name), getattr(slowly, name)
        assert (a is None) == (b is None)
        assert a is None or np.array_equal(a[tokens], b), name


def test_a_text_that_leaves_no_room_is_named_by_its_number(tokenizer: Tokenizer) -> None:
    texts = ["a"] * 50
    with pytest.raises(TokenizerError, match="text 7: "):
        encode(tokenizer, [*texts[:7], "b c d " * 40, *texts[8:]], ["e " * 30] * 50, max_tokens=24, cut="second")
    with pytest.raises(TokenizerError, match="text 9: "):
        encode(tokenizer, [*texts[:9], "b c d " * 40, *texts[10:]], max_tokens=24, strict=True)
    with pytest.raises(TokenizerError, match="cut is 'second'"):
        encode(tokenizer, ["b c d " * 40] * 40, max_tokens=24, cut="second")
