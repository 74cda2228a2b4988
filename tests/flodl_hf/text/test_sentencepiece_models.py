"""Tokenizers that are built from sentencepiece files have the ids of transformers."""

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

from flodl_hf.errors import TokenizerError
from flodl_hf.parity.tokenizers import PROBES
from flodl_hf.tokenization.guard import check_table
from flodl_hf.tokenization.sentencepiece import BPE, UNIGRAM, read_model
from flodl_hf.tokenization.tokenizer import Tokenizer

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


# Against transformers, which builds a tokenizer of the tokenizers library from the file

FILES = {
    "AlbertTokenizer": ("spiece.model", ALBERT_LAYOUT), "CamembertTokenizer": ("sentencepiece.bpe.model", ROBERTA_LAYOUT),
    "DebertaV2Tokenizer": ("spm.model", BERT_LAYOUT), "XLMRobertaTokenizer": ("sentencepiece.bpe.model", ROBERTA_LAYOUT),
}  # fmt: skip
FAMILY = {"AlbertTokenizer": "albert", "CamembertTokenizer": "camembert", "DebertaV2Tokenizer": "deberta-v2"}
RULES: list[dict[str, Any]] = [
    *({"normalization_rule_name": rule} for rule in ("nmt_nfkc", "identity", "nfkc", "nmt_nfkc_cf")),
    {"byte_fallback": True, "vocab_size": 900}, {"user_defined_symbols": "☃known☃,aa"}, {"split_by_whitespace": False},
    {"add_dummy_prefix": False}, {"remove_extra_whitespaces": False},
]  # fmt: skip


def _both(
    train: Any, folder: Path, name: str, options: dict[str, Any], stated: dict[str, Any]
) -> tuple[Any, Tokenizer]:
    from transformers import AutoTokenizer

    file, layout = FILES[name]
    (folder / file).write_bytes(train(**{**layout, **options})[0])
    (folder / "config.json").write_text(json.dumps({"model_type": FAMILY.get(name, "xlm-roberta")}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **stated}))
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)


def _assert_equal(theirs: Any, ours: Tokenizer) -> None:
    for text in TEXTS:
        expected, found = (
            theirs(text, "a b", return_offsets_mapping=True),
            ours(text, "a b", return_offsets_mapping=True),
        )
        assert found.input_ids == expected["input_ids"], ascii(text)
        assert found.offset_mapping == expected["offset_mapping"], ascii(text)
        assert found.tokens() == expected.tokens(), ascii(text)
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_ids_are_those_of_transformers(train: Any, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    _assert_equal(*_both(train, tmp_path, name, options, {}))


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "stated"), [
    *(("AlbertTokenizer", {"do_lower_case": a, "keep_accents": b}) for a in (True, False) for b in (True, False)),
    *(("DebertaV2Tokenizer", {"do_lower_case": a, "split_by_punct": b}) for a in (True, False) for b in (True, False)),
    *((name, {"add_prefix_space": False}) for name in FILES), ("XLMRobertaTokenizer", {"mask_token": "<m>"}),
    ("DebertaV2Tokenizer", {"unk_token": "[unknown]"}),
], ids=str)  # fmt: skip
def test_settings_are_applied_as_in_transformers(train: Any, tmp_path: Path, name: str, stated: dict[str, Any]) -> None:
    _assert_equal(*_both(train, tmp_path, name, {}, stated))


def test_pieces_are_numbered_by_the_class(train: Any) -> None:
    data, processor = train(**ROBERTA_LAYOUT)
    size = processor.vocab_size()
    xlm = Tokenizer.from_files({"sentencepiece.bpe.model": data}, model_type="xlm-roberta")
    assert [xlm.token_to_id(t) for t in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")] == [0, 1, 2, 3, size + 1]
    one = xlm("Ada", "Paris")
    a, b = ([i + 1 for i in processor.encode(text)] for text in ("Ada", "Paris"))
    assert one.input_ids == [0, *a, 2, 2, *b, 2]
    assert "token_type_ids" not in one
    camembert = Tokenizer.from_files({"sentencepiece.bpe.model": data}, model_type="camembert")
    assert [camembert.token_to_id(t) for t in ("<pad>", "<unk>", "<s>", "</s>", "<mask>")] == [1, 3, 5, 6, size + 4]
    data, processor = train(**BERT_LAYOUT)
    deberta = Tokenizer.from_files({"spm.model": data}, model_type="deberta-v2")
    left, right = processor.encode("Ada lives in"), processor.encode(".")
    assert deberta.mask_token_id == processor.vocab_size()
    assert deberta("Ada lives in [MASK] .").input_ids == [1, *left, deberta.mask_token_id, *right, 2]


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
    tokenizer = Tokenizer.from_files({"spm.model": train(**BERT_LAYOUT)[0]}, model_type="deberta-v2")
    [[row]] = tokenizer.encode_rows([text], add_special_tokens=False)
    for start, end in row.offsets:
        assert 0 <= start <= end <= len(text)


# The reader


def test_the_file_is_read_as_its_own_library_reads_it(train: Any) -> None:
    for kind, number in (("unigram", UNIGRAM), ("bpe", BPE)):
        data, processor = train(model_type=kind, byte_fallback=True, vocab_size=900, **BERT_LAYOUT)
        model = read_model(data, "m")
        assert model.algorithm == number
        assert [piece.text for piece in model.pieces] == [processor.id_to_piece(i) for i in range(len(processor))]
        assert [piece.score for piece in model.pieces] == [processor.get_score(i) for i in range(len(processor))]
        assert model.unk_id == processor.unk_id()


def test_a_broken_character_map_is_refused_or_harmless(train: Any) -> None:
    model = read_model(train(**BERT_LAYOUT)[0], "m").charsmap
    for end in (1, 3, 4, 5, 8, 100, len(model) // 2, len(model) - 1):
        with pytest.raises(TokenizerError):
            check_table(model[:end], "m")
    for size in (0, 1, 2**31, 2**32 - 1, len(model)):
        with pytest.raises(TokenizerError):
            check_table(size.to_bytes(4, "little") + model[4:], "m")
    with pytest.raises(TokenizerError):
        check_table(model[:-1] + b"x" * 300 + b"\0", "m")


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
