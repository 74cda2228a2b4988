"""Rows of tokens as arrays: made without an object a row, and equal to what is made of the objects."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers, pre_tokenizers, processors

from flodl_hf.inference.inputs import Encoded, encode
from flodl_hf.tokenization.tokenizer import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "cat", "##s", "dog", ",", "."]
LONG = "cats, a dog. b " * 9
TEXTS = ["a cat", "", "[SEP] dogs , cats.", LONG, "zebra [MASK]", "b", f"dog {LONG}", " "]
SECONDS = ["dogs", "a b", LONG, "", "[CLS] cat", LONG + LONG, "a", " "]
TEMPLATES: dict[str, dict[str, Any]] = {
    "bert": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"},
    "roberta": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] [SEP] $B [SEP]"},
    "trailing": {"single": "$A [SEP]", "pair": "$A [SEP] $B [SEP]"},
    "bare": {"single": "$A", "pair": "$A $B:1"},
    "types of the first text": {"single": "[CLS]:1 $A:1 [SEP]:1", "pair": "[CLS]:1 $A:1 [SEP]:0 $B:0 [SEP]:1"},
    "swapped": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $B [SEP] $A:1 [SEP]:1"},
}


def tokenizer_of(template: str) -> Tokenizer:
    inner = Inner(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        **TEMPLATES[template], special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(WORDS[:5])
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    files = {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    return Tokenizer.from_files(files, folder="made in a test")


def rows_of(found: Encoded) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what a table says of each window, by text and window."""
    table = found.table
    rows = {}
    for row, (start, length) in enumerate(zip(table.starts.tolist(), table.lengths.tolist(), strict=True)):
        part = slice(start, start + length)
        values: dict[str, Any] = {
            name: None if (array := getattr(table, name)) is None else array[part].tolist()
            for name in ("ids", "types", "sequence", "offsets", "word_ids")
        }
        values["types"] = values["types"] or [0] * length
        values |= {name: int(getattr(table, name)[row]) for name in ("counts", "first_token", "nulls")}
        rows[int(table.owners[row]), int(table.window[row])] = values
    return rows


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("times", [1, 6])
def test_rows_made_at_once_are_the_rows_made_one_by_one(template: str, pairs: bool, offsets: bool, times: int) -> None:
    tokenizer = tokenizer_of(template)
    # A template that swaps texts has no place where the second could be cut.
    limit = 40 if template != "swapped" or not pairs else None
    texts, seconds = (TEXTS, SECONDS) if pairs else (TEXTS, None)
    if pairs:  # a first text that leaves no room for the second is refused
        texts = [text[:20] for text in TEXTS]
    texts, seconds = texts * times, None if seconds is None else seconds * times
    given: dict[str, Any] = {"max_tokens": limit, "stride": 4, "offsets": offsets}
    quickly = encode(tokenizer, texts, seconds, **given)
    slowly = encode(tokenizer, texts, seconds, **given, records=True)
    assert slowly.rows
    assert not quickly.rows
    assert rows_of(quickly) == rows_of(slowly)
    assert np.array_equal(np.sort(quickly.table.owners), slowly.table.owners)


PIECES = st.sampled_from(["cats", "dogs", "a", "##s", "#", "[MASK]", "[SEP]", ",", "zebra", "cat##s"]) | st.text(
    max_size=6
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, min_size=8, max_size=60), st.sampled_from([" ", "", "\n"]), st.integers(9, 20))
def test_windows_by_ids_are_the_windows_by_words(pieces: list[str], between: str, limit: int) -> None:
    tokenizer = tokenizer_of("bert")
    assert tokenizer._backend.ids_show_words
    texts = [between.join(pieces[at:]) for at in range(3)]
    quickly, slowly = (
        encode(tokenizer, texts, max_tokens=limit, stride=3, records=records) for records in (False, True)
    )
    assert rows_of(quickly).keys() == rows_of(slowly).keys()
    for place, row in rows_of(slowly).items():
        assert rows_of(quickly)[place]["ids"] == row["ids"]
        assert rows_of(quickly)[place]["first_token"] == row["first_token"]


def test_lists_of_an_encoding_belong_to_the_caller() -> None:
    found = tokenizer_of("bert")(["cats a dog", "b"], padding=True)
    for method in (found.word_ids, found.sequence_ids, found.tokens):
        before = list(method(1))
        method(1).clear()
        assert method(1) == before
        assert len(before) == len(found.input_ids[1])
    assert found.word_ids(0) == [None, 0, 0, 1, 2, None]
    assert found.sequence_ids(1) == [None, 0, None, None, None, None]
