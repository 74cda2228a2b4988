"""Truncation reads a prefix of a long text, and its tokens are the first tokens of the whole text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from flodl_hf.inference.inputs import encode
from flodl_hf.tokenization.backend import MARGIN, beginnings, splits_at_spaces
from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import AWKWARD, CORPUS, KINDS, wordpiece
from .test_tokenizer_classes import CASES, folder_of

# The last texts have one long word, one run of spaces before a special token, and no space.
LONG = [
    *(" ".join([text, *CORPUS[:13]] * 8) for text in AWKWARD),
    "".join(CORPUS) * 3,
    "x" * 3_000 + " a b",
    "ab" + " " * 3_000 + "<mask> [MASK] c",
    "ab " + "\n" * 3_000 + "<mask> c",
    "東京は日本の首都です。" * 100,
]
TOKENIZERS = {
    name: Tokenizer.from_files({"tokenizer.json": make().to_str().encode()}) for name, (make, _) in KINDS.items()
}
WORDS = st.text(max_size=12) | st.sampled_from(["<mask>", "[MASK]", "\u0600", "e\u0301", "\u200b", "ﷺ", "``", "Σ"])
SPACES = st.sampled_from([" ", " ", " ", "  ", "\n", "\u3000", "\u00a0", ""])


def split(flat: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat[0], np.cumsum(flat[1])[:-1])]


def assert_first_tokens(tokenizer: Tokenizer, texts: Sequence[str], wanted: int) -> int:
    """Compare with the whole texts, and return how many texts were shortened."""
    backend = tokenizer._backend
    whole = split(backend.flat(texts))
    read, flat = beginnings(texts, wanted, backend.flat)
    for text, prefix, ids, expected in zip(texts, read, split(flat), whole, strict=True):
        assert text.startswith(prefix)
        assert ids[:wanted] == expected[:wanted], (text[:80], len(prefix))
        assert len(ids) >= wanted + MARGIN or prefix == text
        assert len(backend.flat([prefix])[0]) == len(ids)
    return sum(len(prefix) < len(text) for prefix, text in zip(read, texts, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "family", "make", "stated"), CASES, ids=[f"{c[0]}-{c[1]}-{c[3]}" for c in CASES])
def test_a_prefix_has_the_first_tokens_in_every_tokenizer_class(
    tmp_path: Path, name: str, family: str, make: Callable[[], dict[str, bytes]], stated: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, name, family, make(), stated))
    if not tokenizer._backend.splits_at_spaces:
        assert tokenizer.encode_rows(LONG[:1], max_tokens=9, overflow="truncate")[0][0].truncated
        return
    for wanted in (1, 16):
        assert assert_first_tokens(tokenizer, LONG, wanted) >= len(AWKWARD)


@pytest.mark.parametrize(
    "folder", sorted((Path(__file__).parents[2] / "golden").glob("*-masked_lm")), ids=lambda p: p.name
)
def test_a_prefix_has_the_first_tokens_in_the_families(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer._backend.splits_at_spaces
    assert assert_first_tokens(tokenizer, LONG, 16)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)), parts=st.lists(st.tuples(WORDS, SPACES), min_size=10, max_size=60),
    wanted=st.integers(1, 6),
)  # fmt: skip
def test_a_prefix_of_random_unicode_has_the_first_tokens(kind: str, parts: list[tuple[str, str]], wanted: int) -> None:
    text = "".join(word + space for word, space in parts)
    assert_first_tokens(TOKENIZERS[kind], [text.encode(errors="ignore").decode(), text * 3], wanted)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("cut", ["longest", "first", "second"])
@pytest.mark.parametrize("limit", [24, 25])
def test_truncated_pairs_are_those_of_the_whole_texts(kind: str, cut: str, limit: int) -> None:
    tokenizer = TOKENIZERS[kind]
    # The library makes a row of each pair of windows, so its texts are not very long.
    texts = [text[:300] for text in [*LONG, *CORPUS]]
    firsts = [text if cut != "second" else text[:4] for text in texts]
    seconds = [text if cut != "first" else text[:4] for text in texts[::-1]]
    whole = tokenizer._backend.rows(firsts, seconds)
    if cut != "longest":  # the text that is not cut has to fit
        kept = [i for i, row in enumerate(whole) if row.sequence_ids.count(int(cut == "first")) < 12]
        firsts, seconds, whole = [firsts[i] for i in kept], [seconds[i] for i in kept], [whole[i] for i in kept]
    inner = Inner.from_str(tokenizer.to_json())
    strategy = {"longest": "longest_first", "first": "only_first", "second": "only_second"}[cut]
    inner.enable_truncation(limit, strategy=strategy)
    expected = [row.ids for row in inner.encode_batch(list(zip(firsts, seconds, strict=True)))]
    found = encode(tokenizer, firsts, seconds, max_tokens=limit, truncate=True, cut=cut)
    rows = np.split(found.table.ids, np.cumsum(found.table.lengths)[:-1])
    assert [rows[i].tolist() for i in np.argsort(found.table.owners)] == expected
    assert found.truncated == sum(len(row) > limit for row in whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_one_side(side: str) -> None:
    files = {"tokenizer.json": wordpiece().to_str().encode()}
    tokenizer = Tokenizer.from_files({**files, "tokenizer_config.json": b'{"truncation_side": "%s"}' % side.encode()})
    found = encode(tokenizer, CORPUS, max_tokens=9, truncate=True)
    rows = np.split(found.table.ids, np.cumsum(found.table.lengths)[:-1])
    for place, owner in enumerate(found.table.owners.tolist()):
        (row,) = tokenizer._backend.rows([CORPUS[owner]])
        kept = row.ids[1:-1][-7:] if side == "left" else row.ids[1:-1][:7]
        assert rows[place].tolist() == [row.ids[0], *kept, row.ids[-1]]


def test_definitions_that_do_not_split_at_spaces_read_whole_texts() -> None:
    inner = wordpiece()
    assert splits_at_spaces(inner)
    inner.add_tokens([AddedToken("New York")])
    assert not splits_at_spaces(inner)
    inner = wordpiece()
    inner.pre_tokenizer = None  # type: ignore[assignment]
    assert not splits_at_spaces(inner)
