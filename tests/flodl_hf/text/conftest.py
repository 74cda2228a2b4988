"""Small tokenizers of every kind the families use, trained once on a few sentences in many scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from flodl_hf.tokenization.tokenizer import Tokenizer

CORPUS = [
    "Ada Lovelace lives in Paris and writes programs for the Analytical Engine.",
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "Unbelievable! The film wasn't good; it was great.",
    "Grüße aus Köln: 12,345 Menschen warten auf den Zug.",
    "Le café est très bon, mais l'été est fini.",
    "Москва - столица России. Это большой город.",
    "東京は日本の首都です。とても大きい。",
    "서울은 한국의 수도입니다.",
    "القاهرة عاصمة مصر",
    "שלום עולם",
    "नमस्ते दुनिया",
    "emoji 😀 👩‍👩‍👧 🇫🇷 here",
    "e\u0301 a\u0308 combining marks",
] * 4

# Texts that have broken tokenizers before: spaces of every kind, ligatures, wide letters, marks, scripts,
# controls.
AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "tea\u00a0cup",
    "the ﬁrst ﬁle",
    "ＡＢＣ　ｗｉｄｅ",
    "dots… № 5 x² ½",
    "emoji 😀 👩‍👩‍👧 🇫🇷!",
    "cafe\u0301 e\u0301\u0302\u0303",
    "שלום עולם, hello",
    "القاهرة 12,345",
    "東京は日本の首都です。",
    "नमस्ते दुनिया",
    "a\tb\nc\r\nd",
    "zero\u200bwidth\u200djoin\ufeff",
    "null\x00char \x07bell",
    "ǅ ß ẞ İ ı ſ",
    "[MASK] <mask> [CLS] </s>",
    "x" * 300,
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒻𝓊𝓃",
    "``quoted'' 'single' \"double\"",
    "ﷺ",
    "１２３,４５６ 9,",
    "Ⅷ ℃ ㎏ ﬀ",
    "1,234,567.89",
    "don't can't I'm we've they're",
]

BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def once(make: Callable[[], Inner]) -> Callable[[], Inner]:
    """Return copies of one result: trainers follow the order of a hash table, so two runs differ."""
    text = cache(lambda: make().to_str())
    return lambda: Inner.from_str(text())


@once
def wordpiece() -> Inner:
    inner = Inner(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=BERT_SPECIAL, show_progress=False)
    )
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return inner


@once
def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=ROBERTA_SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return inner


@once
def metaspace() -> Inner:
    inner = Inner(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=ROBERTA_SPECIAL, unk_token="<unk>", show_progress=False),
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return inner


KINDS = {
    "wordpiece": (wordpiece, "bert"),
    "byte_level": (byte_level, "roberta"),
    "metaspace": (metaspace, "xlm-roberta"),
}


@pytest.fixture(scope="session", params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder for each kind of tokenizer, as a checkpoint would have it."""
    out = {}
    for name, (make, model_type) in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        make().save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
        out[name] = folder
    return out


@pytest.fixture(scope="session")
def folder(folders: dict[str, Path], kind: str) -> Path:
    return folders[kind]


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def plain(folder: Path) -> Inner:
    """Return the same definition in the tokenizers library, to compare with."""
    return Inner.from_file(str(folder / "tokenizer.json"))
