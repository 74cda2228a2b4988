"""Tokenizer definitions from strangers: patterns that never end, templates that crowd out texts, types without a row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization import backend

SLOW = "(?:a|b)*[cd][ef]"  # tries each start of a run of a's, to its end
TEXT = "a" * 40_000 + "cge"


def definition(**parts: Any) -> bytes:
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}, **parts,
    }).encode()  # fmt: skip


def template(first: int = 0, second: int = 1, ids: int = 1) -> dict[str, Any]:
    cls = {"SpecialToken": {"id": "[CLS]", "type_id": first}}
    return {
        "type": "TemplateProcessing",
        "single": [cls, {"Sequence": {"id": "A", "type_id": first}}],
        "pair": [cls, {"Sequence": {"id": "A", "type_id": first}}, {"Sequence": {"id": "B", "type_id": second}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2] * ids, "tokens": ["[CLS]"] * ids}},
    }


def made(**parts: Any) -> Any:
    from flodl_hf.tokenization.tokenizer import Tokenizer

    return Tokenizer.from_files({"tokenizer.json": definition(**parts)}, folder="somewhere")


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    pattern = {"Regex": SLOW}
    part = (
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        if place == "pre_tokenizer"
        else {"type": "Replace", "pattern": pattern, "content": "b"}
    )
    tokenizer = made(**{place: part})
    assert tokenizer("aaa").input_ids == made()("aaa").input_ids
    with monkeypatch.context() as hurried:
        hurried.setattr(backend, "PATIENCE_S", 0.1)
        hurried.setattr(backend, "PER_CHARACTER_S", 0.0)
        for call in (lambda: tokenizer(TEXT), lambda: tokenizer([TEXT, "a"]), lambda: tokenizer.encode_rows([TEXT])):
            with pytest.raises(TokenizerError, match="took more than") as caught:
                call()
            assert caught.value.patterns == [SLOW]
    assert tokenizer("a").input_ids == [4], "the next text is answered"


def test_patterns_that_do_not_end_are_errors() -> None:
    nested = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(TokenizerError, match="retry-limit"):
        made(pre_tokenizer=nested)("a" * 60 + "b")


def test_published_patterns_run_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    monkeypatch.setattr(backend, "within_time", None)
    assert made(normalizer={"type": "Sequence", "normalizers": [spaces]})("a  a").input_ids == [4, 4]
    assert backend.foreign_patterns({"normalizers": [spaces]}) == ()
    assert backend.foreign_patterns({"x": [{"Regex": "a"}, {"y": {"Regex": "b"}}, {"Regex": "a"}]}) == (
        "a",
        "b",
    )


def test_templates_with_very_many_ids_are_refused() -> None:
    assert made(post_processor=template(ids=60))("a").input_ids == [2] * 60 + [4]
    with pytest.raises(TokenizerError, match="puts 100,000 special tokens") as caught:
        made(post_processor=template(ids=100_000))
    assert (caught.value.found, caught.value.expected) == (100_000, 64)


def test_types_without_a_row_are_refused() -> None:
    tokenizer = made(post_processor=template(first=7))
    with pytest.raises(TokenizerError, match="type 7, expected 0 to 1"):
        tokenizer.check_fits(30, 2)
    tokenizer.check_fits(30)
    pairs = made(post_processor=template(second=5))
    pairs.check_fits(30, 2)
    assert pairs("a").input_ids == [2, 4], "single texts have types that the model has"
    with pytest.raises(TokenizerError, match="second texts the token type 5"):
        pairs("a", "a")
    pairs.check_fits(30, 6)
    assert pairs("a", "a").token_type_ids == [0, 0, 5]
