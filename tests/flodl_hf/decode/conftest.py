"""Tiny tokenizers trained on a few sentences, and the rows they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Ada Lovelace lives in Paris and works for the United Nations.",
    "Jean-Pierre O'Brien moved from New York to Zürich in 1994, with 3.14 % interest.",
    "Microsoft and Google met in London, (not in Paris) on Monday!",
    "The [MASK] of France is Paris. My credit card number is 1234 5678.",
]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass(frozen=True)
class ToyRow:
    """A row as the decoders read it."""

    ids: list[int]
    type_ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]
    sequence_ids: list[int | None]
    special: list[bool]
    first_token: int = 0


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=140, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer)


@pytest.fixture(scope="session")
def byte_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer)


def _row(encoding: Any, first_token: int) -> ToyRow:
    return ToyRow(
        ids=encoding.ids,
        type_ids=encoding.type_ids,
        offsets=encoding.offsets,
        word_ids=encoding.word_ids,
        sequence_ids=encoding.sequence_ids,
        special=[bool(flag) for flag in encoding.special_tokens_mask],
        first_token=first_token,
    )


@pytest.fixture(scope="session")
def encode() -> Callable[..., list[ToyRow]]:
    """Rows of one text, pair or list of words; with ``size`` in windows of that many tokens."""

    def rows(
        tokenizer: Tokenizer, text: Any, pair: str | None = None, *, size: int | None = None, stride: int = 0
    ) -> list[ToyRow]:
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
