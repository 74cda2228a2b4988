"""Japanese BERT: words of an analyser, then word pieces, characters or sentencepiece, with the ids of transformers."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.tokenizer import Tokenizer

TEXTS = [
    "東京タワーに行きました。", "吾輩は猫である。名前はまだ無い。", "Hello World 東京 ＡＢＣ１２３ ｶﾞｷﾞ", "",
    "  空白 と\u3000全角  ", "大きな[MASK]が好き", "１２３,４５６円 9,", "Ada Lovelaceはプログラマー\nです", "é café ÀB",
    "😀絵文字👩\u200d👩\u200d👧",
]  # fmt: skip
WORDS = [
    "東京", "タワー", "行き", "まし", "た", "吾輩", "猫", "名前", "好き", "hello", "##llo", "He", "##l", "##o", "##な",
    "プログラマー", "です",
]  # fmt: skip


def vocabulary() -> bytes:
    characters = sorted({c for text in TEXTS for c in text if not c.isspace()} | set("abcdelorwABCHW0123456789ガギ"))
    inside = [f"##{c}" for c in characters if c.isalnum()][::2]
    tokens = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *characters, *inside])
    return "".join(f"{token}\n" for token in tokens).encode()


def pieces(folder: Path) -> bytes:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_prefix=str(folder / "model"), vocab_size=150, hard_vocab_limit=False,
        minloglevel=2, pad_id=0, unk_id=1, bos_id=2, eos_id=3, control_symbols="[CLS],[SEP],[MASK]", pad_piece="[PAD]",
        unk_piece="[UNK]",
    )  # fmt: skip
    return (folder / "model.model").read_bytes()


MECAB = {"word_tokenizer_type": "mecab", "mecab_kwargs": {"mecab_dic": "ipadic"}}
SUDACHI = {"word_tokenizer_type": "sudachi"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_lower_case": True},
    {"subword_tokenizer_type": "character"},
    {"do_word_tokenize": False},
    {"do_word_tokenize": False, "subword_tokenizer_type": "character"},
    {"do_word_tokenize": False, "subword_tokenizer_type": "sentencepiece"},
    {"subword_tokenizer_type": "sentencepiece"},
    MECAB,
    {**MECAB, "do_lower_case": True},
    {**MECAB, "do_lower_case": True, "never_split": ["Ada"]},
    {**MECAB, "do_subword_tokenize": False},
    {**MECAB, "subword_tokenizer_type": "character"},
    {**MECAB, "subword_tokenizer_type": "sentencepiece"},
    {**MECAB, "mecab_kwargs": {"mecab_dic": "ipadic", "normalize_text": False}},
    {"word_tokenizer_type": "mecab"},
    SUDACHI,
    {**SUDACHI, "sudachi_kwargs": {"sudachi_split_mode": "C", "trim_whitespace": True}},
]


def folder_of(folder: Path, stated: dict[str, Any]) -> Path:
    if stated.get("subword_tokenizer_type") == "sentencepiece":
        (folder / "spiece.model").write_bytes(pieces(folder))
    else:
        (folder / "vocab.txt").write_bytes(vocabulary())
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    settings = {"tokenizer_class": "BertJapaneseTokenizer", **stated}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def needed(stated: dict[str, Any]) -> None:
    """Skip a test whose analyser is not installed."""
    kind = stated.get("word_tokenizer_type")
    if kind == "mecab":
        pytest.importorskip("fugashi")
        pytest.importorskip(stated.get("mecab_kwargs", {}).get("mecab_dic", "unidic_lite"))
    if kind == "sudachi":
        pytest.importorskip("sudachipy")
        pytest.importorskip("sudachidict_core")


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stated", SETTINGS, ids=str)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, stated: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    needed(stated)
    folder = folder_of(tmp_path, stated)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        assert ours(text).input_ids == expected, text
        assert ours(text, "猫").input_ids == theirs(text, "猫")["input_ids"], text
        assert ours.decode(expected, True) == theirs.decode(expected, skip_special_tokens=True), text
    assert list(ours("猫")) == list(theirs("猫"))
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours(TEXTS).input_ids == [ours(text).input_ids for text in TEXTS]


def test_offsets_are_places_in_the_text(tmp_path: Path) -> None:
    needed(MECAB)
    ours = Tokenizer.from_folder(folder_of(tmp_path, {**MECAB, "do_lower_case": True}))
    text = "Hello ＡＢＣ　東京タワー"
    found = ours(text, return_offsets_mapping=True, add_special_tokens=False)
    spans = [text[start:stop] for start, stop in found.offset_mapping]
    assert "".join(spans) == "HelloＡＢＣ東京タワー"
    assert spans[0] == "Hello"
    assert spans[-2:] == ["東京", "タワー"]


def test_a_saved_and_a_pickled_tokenizer_split_equally(tmp_path: Path) -> None:
    needed(MECAB)
    (tmp_path / "first").mkdir()
    ours = Tokenizer.from_folder(folder_of(tmp_path / "first", MECAB))
    ours.save_pretrained(tmp_path / "again")
    again = Tokenizer.from_folder(tmp_path / "again")
    for other in (again, pickle.loads(pickle.dumps(ours))):
        assert other(TEXTS).input_ids == ours(TEXTS).input_ids


@pytest.mark.parametrize(("stated", "package", "module"), [
    (MECAB, "fugashi", "fugashi"),
    (MECAB, "ipadic", "ipadic"),
    ({"word_tokenizer_type": "mecab"}, "unidic-lite", "unidic_lite"),
    (SUDACHI, "sudachipy", "sudachipy"),
    ({"word_tokenizer_type": "jumanpp"}, "rhoknp", "rhoknp"),
])  # fmt: skip
def test_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any], package: str, module: str
) -> None:
    if module not in ("fugashi", "sudachipy", "rhoknp"):
        pytest.importorskip("fugashi")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(folder_of(tmp_path, stated))
    assert caught.value.details["needs"] == package


@pytest.mark.parametrize(("stated", "field"), [
    ({"word_tokenizer_type": "kytea"}, "word_tokenizer_type"),
    ({"subword_tokenizer_type": "bpe"}, "subword_tokenizer_type"),
    ({"word_tokenizer_type": "mecab", "mecab_kwargs": {"mecab_dic": "jumandic"}}, "mecab_dic"),
])  # fmt: skip
def test_an_unknown_value_is_refused_with_its_key(tmp_path: Path, stated: dict[str, Any], field: str) -> None:
    if field == "mecab_dic":
        pytest.importorskip("fugashi")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(folder_of(tmp_path, stated))
    assert caught.value.details["field"] == field


def test_the_class_in_the_configuration_of_the_model_counts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_files(
        {"vocab.txt": vocabulary()}, config={"model_type": "bert", "tokenizer_class": "BertJapaneseTokenizer"}
    )
    assert tokenizer.tokenize("猫です") == ["[UNK]"]  # "basic" does not split Chinese characters, unlike BERT
