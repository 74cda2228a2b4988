"""Tiny tokenizers for a few sentences, and the rows they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flodl_hf.inference.batch import Placed
from flodl_hf.inference.entities import decode_entities_batch
from flodl_hf.inference.spans import decode_answers_batch
from flodl_hf.inference.token_table import table_of
from flodl_hf.tokenization.cuts import Row

CORPUS = [
    "Ada Lovelace lives in Paris and works for the United Nations.",
    "Jean-Pierre O'Brien moved from New York to Zürich in 1994, with 3.14 % interest.",
    "Microsoft and Google met in London, (not in Paris) on Monday!",
    "The [MASK] of France is Paris. My credit card number is 1234 5678.",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


# Vocabularies are written out, not trained: training breaks ties at random.
WHOLE = [
    "Paris",
    "in",
    "lives",
    "New",
    "York",
    "met",
    "the",
    "France",
    "interest",
    "The",
    "credit",
    "number",
    "Google",
    "works",
    "for",
]
PARTS = ["ce", "ard", "ion", "Bri", "en", "ton", "soft", "ing", "er", "s"]
LETTERS = sorted({letter for text in CORPUS for letter in text if letter.strip()})


def _vocabulary(pieces: list[str]) -> dict[str, int]:
    return {piece: place for place, piece in enumerate(dict.fromkeys([*SPECIALS, *pieces]))}


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Merges that build each word letter by letter from its beginning."""
    return list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS), *WHOLE, *(f"##{part}" for part in PARTS)]
    tokenizer = Tokenizer(models.WordPiece(_vocabulary(pieces), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _finished(tokenizer)


@pytest.fixture(scope="session")
def byte_bpe() -> Tokenizer:
    merges = _merges([f"Ġ{word}" for word in WHOLE] + ["Ada", "soft", "Jean"])
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(_vocabulary(pieces), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    merges = _merges([f"▁{word}" for word in WHOLE] + ["soft", "ard"])
    pieces = [*LETTERS, "▁", *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(_vocabulary(pieces), merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finished(tokenizer)


def _row(encoding: Any, first_token: int) -> Row:
    return Row(
        ids=encoding.ids,
        type_ids=encoding.type_ids,
        offsets=encoding.offsets,
        word_ids=encoding.word_ids,
        sequence_ids=encoding.sequence_ids,
        special=[bool(flag) for flag in encoding.special_tokens_mask],
        first_token=first_token,
    )


@pytest.fixture(scope="session")
def encode() -> Callable[..., list[Row]]:
    """Rows of one text, pair or list of words; with ``size`` in windows of that many tokens."""

    def rows(
        tokenizer: Tokenizer, text: Any, pair: str | None = None, *, size: int | None = None, stride: int = 0
    ) -> list[Row]:
        own = Tokenizer.from_str(tokenizer.to_str())
        if size is not None:
            own.enable_truncation(size, stride=stride, strategy="longest_first" if pair is None else "only_second")
        first = own.encode(text, pair, is_pretokenized=isinstance(text, list))
        made, place = [], 0
        for encoding in [first, *first.overflowing]:
            made.append(_row(encoding, place))
            content = sum(s == (0 if pair is None else 1) for s in encoding.sequence_ids)
            place += content - stride
        return made

    return rows


def entities_of(logits: Any, rows: Any, texts: Any, scheme: Any, owners: Any = None, **options: Any) -> Any:
    """Return the entities of several texts; row ``i`` is text ``i`` unless ``owners`` are given."""
    table = table_of(rows, range(len(rows)) if owners is None else owners)
    return decode_entities_batch(Placed.of(list(logits)), table, texts, scheme, **options)


def decode_entities(logits: Any, rows: Any, text: str, scheme: Any, **options: Any) -> Any:
    """Return the entities of one text."""
    spans = options.pop("word_spans", None)
    parts = [logits] if isinstance(logits, torch.Tensor) and logits.ndim == 2 else logits
    given = {"owners": [0] * len(rows), "word_spans": None if spans is None else [spans]}
    return entities_of(parts, rows, [text], scheme, **given, **options)[0]


def answers_of(starts: Any, ends: Any, rows: Any, contexts: Any, owners: Any, **options: Any) -> Any:
    """Return the answers in several contexts, by one tensor of starts and one of ends for each row."""
    scores = Placed.of([torch.stack(pair, -1) for pair in zip(starts, ends, strict=True)])
    return decode_answers_batch(scores, table_of(rows, owners), contexts, **options)


def decode_answers(start_logits: Any, end_logits: Any, rows: Any, context: str, **options: Any) -> Any:
    """Return the answers in one context."""
    return answers_of(start_logits, end_logits, rows, [context], [0] * len(rows), **options)[0]
