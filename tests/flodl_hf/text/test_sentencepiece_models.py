"""Tokenizers from sentencepiece files give its ids, by each family's own numbering and cleaning."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from flodl_hf.errors import TokenizerError
from flodl_hf.parity.tokenizers import PROBES
from flodl_hf.tokenization.charsmap import CharsMap
from flodl_hf.tokenization.pipeline import lowercase
from flodl_hf.tokenization.sentencepiece import BPE, UNIGRAM, read_model
from flodl_hf.tokenizer import Tokenizer

from .conftest import AWKWARD, CORPUS

spm = pytest.importorskip("sentencepiece")

BASE = [
    *AWKWARD,
    *CORPUS[:13],
    *PROBES,
    "ｶﾞｷﾞｸﾞ ﾊﾟﾋﾟ ガギグ",
    "ㄱㅏㄴㅏ 하나",
    "Tiếng Việt ệ ử ặ",
    "ไทยภาษาไทย ทำน้ำ",
    "বাংলা ভাষা",
    "தமிழ் மொழி",
    "ქართული Հայերեն አማርኛ",
    "ភាសាខ្មែរ မြန်မာ ලංකා",
    "①②③ ㈱ ㍿ ㎡ ™ ® ©️ #️⃣ 👍🏽 ❤️",
    "½ ¼ Ⅳ ⁵ ₂ ﬃ ſt ĳ Ǆ ﷺ",
    "soft\u00adhyphen x\u2028y\u2029z\x85w",
    "\ufeffBOM \u202eabc\u202c",
    "▁literal ▁ lower block▁",
    "unk☃☃ ☃known☃",
]


def _corpus() -> list[str]:
    """Return texts in every normal form, both cases and full width, without markers."""
    out = set()
    for text in BASE:
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
        out.update((text, text.upper(), text.lower(), wide))
        out.update(unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD"))
    return sorted(text for text in out if not set("<[＜［") & set(text))


TEXTS = _corpus()
ROBERTA_LAYOUT: dict[str, Any] = {}
BERT_LAYOUT: dict[str, Any] = {
    "pad_id": 0,
    "unk_id": 3,
    "bos_id": 1,
    "eos_id": 2,
    "pad_piece": "[PAD]",
    "unk_piece": "[UNK]",
    "bos_piece": "[CLS]",
    "eos_piece": "[SEP]",
}
ALBERT_LAYOUT: dict[str, Any] = {
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "pad_piece": "<pad>",
    "control_symbols": "[CLS],[SEP],[MASK]",
}


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[bytes, Any]]:
    """Return a function that trains a tiny model and returns its file and its processor."""
    folder = tmp_path_factory.mktemp("spm")
    (folder / "corpus.txt").write_text("\n".join([*CORPUS, *BASE]).replace("\x00", ""), "utf-8")
    made: dict[str, tuple[bytes, Any]] = {}

    def make(**options: Any) -> tuple[bytes, Any]:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            prefix = folder / str(len(made))
            spm.SentencePieceTrainer.train(
                input=str(folder / "corpus.txt"),
                model_prefix=str(prefix),
                hard_vocab_limit=False,
                minloglevel=2,
                num_threads=1,  # sums of several threads, and so the model, differ from run to run
                **{"vocab_size": 500, "character_coverage": 0.995, **options},
            )
            data = prefix.with_suffix(".model").read_bytes()
            made[key] = data, spm.SentencePieceProcessor(model_proto=data)
        return made[key]

    return make


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [list(row.ids) for (row,) in tokenizer.encode_rows(texts, add_special_tokens=False, offsets=False)]


def _assert_same(texts: list[str], found: list[list[int]], expected: list[list[int]]) -> None:
    # The same pieces in another order have the same score: sentencepiece's choice is then one of rounding.
    parted = [(ascii(t), f, e) for t, f, e in zip(texts, found, expected, strict=True) if sorted(f) != sorted(e)]
    tied = sum(f != e for f, e in zip(found, expected, strict=True))
    assert tied <= max(3, len(texts) // 25)
    assert not parted, f"{len(parted)} of {len(texts)}: {parted[:3]}"


# Against the library itself


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity", "nfkc", "nmt_nfkc_cf"])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("fallback", [False, True])
def test_ids_are_those_of_sentencepiece(train: Any, rule: str, kind: str, fallback: bool) -> None:
    data, processor = train(
        normalization_rule_name=rule, model_type=kind, byte_fallback=fallback, vocab_size=900, **BERT_LAYOUT
    )
    tokenizer = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2", byte_fallback=True)
    _assert_same(TEXTS, _ids(tokenizer, TEXTS), processor.encode(TEXTS))


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_unknown_characters_are_unknown_as_in_transformers_and_bytes_by_name(train: Any, tmp_path: Path) -> None:
    """DeBERTa v3 from ``spm.model`` alone."""
    from transformers import DebertaV2Tokenizer

    data, processor = train(byte_fallback=True, vocab_size=900, **BERT_LAYOUT)
    (tmp_path / "spm.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DebertaV2Tokenizer"}))
    theirs = DebertaV2Tokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path, model_type="deberta-v2")
    by_bytes = Tokenizer.from_folder(tmp_path, model_type="deberta-v2", byte_fallback=True)
    texts = ["Ada lives in Paris", "a 𓀀 melts", "ꙮ"]
    assert [ours(text).input_ids for text in texts] == [theirs(text)["input_ids"] for text in texts]
    assert ours.unk_token_id in ours(texts[1]).input_ids
    assert [by_bytes(text, add_special_tokens=False).input_ids for text in texts] == processor.encode(texts)


@pytest.mark.parametrize(
    "options",
    [
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False},
        {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
        {"split_by_whitespace": False},
        {"user_defined_symbols": "(,),-,€,:"},
        {"split_digits": True, "split_by_unicode_script": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_every_setting_of_the_file_is_honoured(train: Any, kind: str, options: dict[str, Any]) -> None:
    data, processor = train(model_type=kind, **BERT_LAYOUT, **options)
    tokenizer = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2")
    texts = [*TEXTS, "a(b) - (c)-:€5", "see  two   spaces ", ":)"]
    _assert_same(texts, _ids(tokenizer, texts), processor.encode(texts))


def test_long_symbols_are_never_taken_apart(train: Any) -> None:
    data, processor = train(user_defined_symbols="Ada,Paris,:)", **BERT_LAYOUT)
    tokenizer = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2")
    texts = ["Ada:)Paris Ada Ada", "Adamant:)) comParison", *CORPUS[:13]]
    _assert_same(texts, _ids(tokenizer, texts), processor.encode(texts))
    data, _ = train(user_defined_symbols="Ada,Paris,:)", model_type="bpe", **BERT_LAYOUT)
    tokenizer = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2")
    assert "Paris" in tokenizer.tokenize("comParison")


def test_every_character_alone_and_in_a_word_is_treated_as_sentencepiece_does(train: Any) -> None:
    # With bytes for unknown characters, the ids show every character of the normalized text.
    data, processor = train(byte_fallback=True, vocab_size=900, **BERT_LAYOUT)
    tokenizer = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2", byte_fallback=True)
    # U+0344 stands for two marks, the first of which composes with a base only in canonical composition.
    skipped = {0x344}
    texts = [
        f"a{chr(code)}b {chr(code)}"
        for code in (*range(1, 0xD800), *range(0xE000, 0x20000))
        if unicodedata.category(chr(code)) != "Cn" and code not in skipped
    ]
    texts = texts[:: 1 + len(texts) // 8000] + [t for t in texts if not unicodedata.is_normalized("NFKC", t)]
    _assert_same(texts, _ids(tokenizer, texts), processor.encode(texts))


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["M", "Cs", "Cn", "Co"]), max_size=30))
def test_any_text_without_marks_is_treated_as_sentencepiece_does(train: Any, text: str) -> None:
    data, processor = train(byte_fallback=True, vocab_size=900, **BERT_LAYOUT)
    tokenizer = _loaded(data)
    composes = not unicodedata.is_normalized("NFC", unicodedata.normalize("NFKD", text))
    if set("<[＜［") & set(text) or (composes and any(0x1100 <= ord(c) < 0x1200 for c in text)):
        return
    _assert_same([text], _ids(tokenizer, [text]), [processor.encode(text)])


_cache: dict[bytes, Tokenizer] = {}


def _loaded(data: bytes) -> Tokenizer:
    if data not in _cache:
        _cache[data] = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2", byte_fallback=True)
    return _cache[data]


# Against each family's rules, written down here a second time, in plain Python


def test_xlm_roberta_numbers_pieces_as_fairseq_does(train: Any) -> None:
    data, processor = train(**ROBERTA_LAYOUT)
    tokenizer = Tokenizer.from_files({"sentencepiece.bpe.model": data}, model_type="xlm-roberta")
    expected = [[i + 1 if i else 3 for i in ids] for ids in processor.encode(TEXTS)]
    _assert_same(TEXTS, _ids(tokenizer, TEXTS), expected)
    assert tokenizer.vocab_size == processor.vocab_size() + 2
    assert tokenizer.mask_token_id == processor.vocab_size() + 1
    assert [tokenizer.token_to_id(t) for t in ("<s>", "<pad>", "</s>", "<unk>")] == [0, 1, 2, 3]
    one = tokenizer("Ada", "Paris")
    a, b = _ids(tokenizer, ["Ada", "Paris"])
    assert one.input_ids == [0, *a, 2, 2, *b, 2]
    assert "token_type_ids" not in one


def test_camembert_numbers_pieces_as_fairseq_does(train: Any) -> None:
    data, processor = train(**ROBERTA_LAYOUT)
    tokenizer = Tokenizer.from_files({"sentencepiece.bpe.model": data}, model_type="camembert")
    expected = [[i + 4 if i else 3 for i in ids] for ids in processor.encode(TEXTS)]
    _assert_same(TEXTS, _ids(tokenizer, TEXTS), expected)
    assert tokenizer.mask_token_id == processor.vocab_size() + 4
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<unk>", "<s>", "</s>")] == [1, 3, 5, 6]
    assert tokenizer("Ada").input_ids[0] == 5


def _albert(processor: Any, text: str, lower: bool, accents: bool) -> list[int]:
    text = " ".join(text.strip().split()).replace("``", '"').replace("''", '"')
    if not accents:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    if lower:
        text = text.lower()
    pieces = []
    for piece in processor.encode(text, out_type=str):
        if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
            parts = processor.encode(piece[:-1].replace("▁", ""), out_type=str)
            if piece[0] != "▁" and parts[0][0] == "▁":
                parts = parts[1:] if len(parts[0]) == 1 else [parts[0][1:], *parts[1:]]
            pieces += [*parts, ","]
        else:
            pieces.append(piece)
    return [processor.piece_to_id(piece) for piece in pieces]


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("accents", [True, False])
def test_albert_cleans_before_it_segments(train: Any, lower: bool, accents: bool) -> None:
    data, processor = train(**ALBERT_LAYOUT)
    config = json.dumps({"do_lower_case": lower, "keep_accents": accents}).encode()
    tokenizer = Tokenizer.from_files({"spiece.model": data, "tokenizer_config.json": config}, model_type="albert")
    texts = [*TEXTS, "in 1997, 12,345, 9,", "ΟΔΟΣ ΣΑΣ. Σ Σ'Α"]
    _assert_same(texts, _ids(tokenizer, texts), [_albert(processor, t, lower, accents) for t in texts])
    assert tokenizer("Ada", "x", return_token_type_ids=True).token_type_ids[-1] == 1
    # Its class gives none by default since transformers 5.
    assert "token_type_ids" not in tokenizer("Ada", "x")
    assert tokenizer.pad_token_id == 0
    assert tokenizer.vocab_size == processor.vocab_size()


def _is_punctuation(char: str) -> bool:
    code = ord(char)
    ascii_marks = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return ascii_marks or unicodedata.category(char).startswith("P")


def _deberta(processor: Any, text: str, lower: bool, split: bool) -> list[int]:
    text = text.lower() if lower else text
    parts, fresh = [], True
    for char in text:
        if not split or not _is_punctuation(char):
            if fresh:
                parts.append("")
            parts[-1] += char
            fresh = False
        else:
            parts.append(char)
            fresh = True
    return [i for part in parts for i in processor.encode(part)]


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_deberta_splits_and_lowers_as_its_settings_say(train: Any, lower: bool, split: bool) -> None:
    data, processor = train(**BERT_LAYOUT)
    config = json.dumps({"do_lower_case": lower, "split_by_punct": split}).encode()
    tokenizer = Tokenizer.from_files({"spm.model": data, "tokenizer_config.json": config}, model_type="deberta-v2")
    _assert_same(TEXTS, _ids(tokenizer, TEXTS), [_deberta(processor, t, lower, split) for t in TEXTS])


@pytest.mark.parametrize("text", ["ΟΔΟΣ", "ΣΑΣ. Σ", "ΟΔΟΣ, Ο'ΣΑ", "İstanbul", "STRASSE ẞ", "Ǆ ΑΣ1"])
def test_lower_case_is_that_of_python(text: str) -> None:
    assert normalizers.Sequence(lowercase()).normalize_str(text) == text.lower()


def test_deberta_numbers_the_mask_after_the_pieces(train: Any) -> None:
    data, processor = train(**BERT_LAYOUT)
    tokenizer = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2")
    assert tokenizer.mask_token_id == processor.vocab_size()
    assert tokenizer.vocab_size == processor.vocab_size() + 1
    left, right = processor.encode("Ada lives in"), processor.encode(".")
    assert tokenizer("Ada lives in [MASK].").input_ids == [1, *left, tokenizer.mask_token_id, *right, 2]


# What users build on


@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [
        ("xlm-roberta", "sentencepiece.bpe.model", ROBERTA_LAYOUT),
        ("camembert", "sentencepiece.bpe.model", ROBERTA_LAYOUT),
        ("albert", "spiece.model", ALBERT_LAYOUT),
        ("deberta-v2", "spm.model", BERT_LAYOUT),
    ],
)
def test_built_tokenizers_are_saved_locate_words_and_decode(
    train: Any, tmp_path: Path, family: str, name: str, layout: dict[str, Any]
) -> None:
    data, _ = train(**layout)
    built = Tokenizer.from_files({name: data}, model_type=family)
    built.save_pretrained(tmp_path)
    assert (tmp_path / name).read_bytes() == data
    again = Tokenizer.from_folder(tmp_path, model_type=family)
    assert _ids(again, TEXTS) == _ids(built, TEXTS)
    assert again.special_tokens == built.special_tokens
    text = "  Ada   lives in café ﬁne e\u0301tat Paris."
    [[row]] = built.encode_rows([text])
    words: dict[int, tuple[int, int]] = {}
    for word, (start, end) in zip(row.word_ids, row.offsets, strict=True):
        if word is not None:
            first, last = words.get(word, (start, end))
            words[word] = min(first, start), max(last, end)
    surfaces = [text[start:end].strip() for start, end in words.values()]
    assert surfaces == ["Ada", "lives", "in", "café", "ﬁne", "e\u0301tat", "Paris."]
    assert built.decode(row.ids, skip_special_tokens=True).lower().startswith("ada lives in caf")
    [[split]] = built.encode_rows([["Ada", "lives"]], words=True)
    assert list(split.ids) == built("Ada lives").input_ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_offsets_stay_inside_any_text_and_never_go_back(train: Any, text: str) -> None:
    tokenizer = _loaded(train(**BERT_LAYOUT)[0])
    [[row]] = tokenizer.encode_rows([text], add_special_tokens=False)
    for start, end in row.offsets:
        assert 0 <= start <= end <= len(text)


# The reader


def test_the_file_is_read_as_its_own_library_reads_it(train: Any) -> None:
    for kind, number in (("unigram", UNIGRAM), ("bpe", BPE)):
        data, processor = train(model_type=kind, byte_fallback=True, vocab_size=900, **BERT_LAYOUT)
        model = read_model(data, "m")
        assert model.algorithm == number
        assert model.byte_fallback
        assert [piece.text for piece in model.pieces] == [processor.id_to_piece(i) for i in range(len(processor))]
        assert [piece.score for piece in model.pieces] == [processor.get_score(i) for i in range(len(processor))]
        assert model.unk_id == processor.unk_id()


@pytest.mark.parametrize(
    ("text", "replacement"), [("ﬁ", "fi"), ("№", "No"), ("\u00a0", " "), ("e\u0301", "é"), ("a", None), ("\x07", "")]
)
def test_single_replacements_can_be_looked_up(train: Any, text: str, replacement: str | None) -> None:
    table = CharsMap(read_model(train(**BERT_LAYOUT)[0], "m").charsmap, "m")
    assert table.get(text) == replacement


def test_a_broken_character_map_is_refused_or_harmless(train: Any) -> None:
    model = read_model(train(**BERT_LAYOUT)[0], "m").charsmap
    for end in (1, 3, 4, 5, 8, 100, len(model) // 2, len(model) - 1):
        with pytest.raises(TokenizerError):
            CharsMap(model[:end], "m")
    for size in (0, 1, 2**31, 2**32 - 1, len(model)):
        with pytest.raises(TokenizerError):
            CharsMap(size.to_bytes(4, "little") + model[4:], "m")
    with pytest.raises(TokenizerError):
        CharsMap(model[:-1] + b"x" * 300 + b"\0", "m")


def _field(number: int, payload: bytes) -> bytes:
    def varint(value: int) -> bytes:
        out = b""
        while value >= 0x80:
            out += bytes([value & 0x7F | 0x80])
            value >>= 7
        return out + bytes([value])

    return varint(number << 3 | 2) + varint(len(payload)) + payload


def _piece(text: bytes, kind: int, score: bytes = b"\0\0\0\0") -> bytes:
    return _field(1, _field(1, text) + b"\x15" + score + b"\x18" + bytes([kind]))


_HEAD = _piece(b"<unk>", 2) + _piece(b"<s>", 3) + _piece(b"</s>", 3)


def _small() -> bytes:
    texts = ["\u2581", "a", "d", "A", "\u2581A", "da", "l", "i", "v", "e", "s", "\u2581in", "\u2581P", "ar", "is"]
    scores = [struct.pack("<f", -1.0 - 0.1 * number) for number in range(len(texts))]
    pieces = b"".join(_piece(text.encode(), 1, score) for text, score in zip(texts, scores, strict=True))
    return _HEAD + pieces + _field(2, b"\x18\x01") + _field(3, _field(1, b"identity"))


def test_a_file_cut_anywhere_is_refused() -> None:
    data = _small()
    whole = Tokenizer.from_files({"sentencepiece.bpe.model": data}, model_type="xlm-roberta")
    assert whole.decode(whole("Ada lives in Paris").input_ids, skip_special_tokens=True) == "Ada lives in Paris"
    for end in range(len(data)):
        try:
            cut = Tokenizer.from_files({"sentencepiece.bpe.model": data[:end]}, model_type="xlm-roberta")
        except TokenizerError:
            continue
        # Only settings that do not matter may be missing.
        assert cut.get_vocab() == whole.get_vocab()
        assert _ids(cut, CORPUS[:13]) == _ids(whole, CORPUS[:13])


def test_flipped_bytes_are_refused_or_load_and_never_escape() -> None:
    data = _small()
    choose = random.Random(0)
    refused = 0
    for _ in range(3000):
        broken = bytearray(data)
        for _ in range(choose.randint(1, 3)):
            broken[choose.randrange(len(broken))] = choose.randrange(256)
        try:
            Tokenizer.from_files({"sentencepiece.bpe.model": bytes(broken)}, model_type="xlm-roberta")("Ada lives")
        except TokenizerError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "no pieces"),
        (b"\xff" * 20, "longer than ten"),
        (b"\x0a\xff\xff\xff\xff\x0f", "announced"),
        (b"\x0b", "wire type"),
        (b"\x02\x00", "field number 0"),
        (_HEAD, "normalizer"),
        (_HEAD + _field(3, b"") + _piece(b"<s>", 1), "more than once"),
        (_HEAD + _field(3, b"") + _piece(b"", 1), "empty"),
        (_HEAD + _field(3, b"") + _piece(b"\xff", 1), "UTF-8"),
        (_HEAD + _field(3, b"") + _piece(b"x", 9), "type"),
        (_HEAD + _field(3, b"") + _piece(b"x", 1, b"\0\0\xc0\x7f"), "nan"),
        (_HEAD + _field(3, b"") + _piece(b"x", 1, b"\0\0\x80\x7f"), "inf"),
        (_HEAD + _field(3, b"") + _piece(b"<other>", 2), "2 unknown"),
        (_piece(b"x", 1) + _field(3, b""), "0 unknown"),
        (_HEAD + _field(3, b"\x28\x00"), "escape_whitespaces"),
        (_HEAD + _field(3, b"") + _field(2, b"\x18\x03"), "word algorithm"),
        (_HEAD + _field(3, b"") + _field(2, b"\xc0\x01\x01"), "suffix"),
        (_HEAD + _piece(b"x", 1) + _field(3, _field(2, b"\x01")), "four bytes"),
        (_piece(b"x", 1) + _HEAD + _field(3, b""), "another family"),
    ],
)
def test_impossible_models_are_refused_with_the_reason(data: bytes, word: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files({"sentencepiece.bpe.model": data}, folder="there", model_type="xlm-roberta")
    assert "there/sentencepiece.bpe.model" in str(caught.value)
    assert word in str(caught.value)


def test_two_families_share_a_file_name_and_neither_is_guessed(train: Any) -> None:
    data, _ = train(**ROBERTA_LAYOUT)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files({"sentencepiece.bpe.model": data})
    assert caught.value.found == ["xlm-roberta", "camembert"]
    stated = json.dumps({"tokenizer_class": "CamembertTokenizerFast"}).encode()
    tokenizer = Tokenizer.from_files({"sentencepiece.bpe.model": data, "tokenizer_config.json": stated})
    assert tokenizer.cls_token_id == 5
