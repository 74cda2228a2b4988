"""Every tokenizer class is read as transformers reads it, or refused with its name."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers, pre_tokenizers, trainers

from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.classes import CLASSES
from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import AWKWARD, CORPUS, ROBERTA_SPECIAL, byte_level, wordpiece

TEXTS = [
    *AWKWARD, *CORPUS[:13], "hello [MASK] there", "see <mask> now", "A<pad> b", "two  spaces", "Zażółć gęślą jaźń",
    "a b\nc", "extra <extra_id_1> [CLS]",
]  # fmt: skip


def word_pieces(*special: str) -> dict[str, bytes]:
    vocab = wordpiece().get_vocab()
    tokens = [*special, *sorted(vocab, key=vocab.__getitem__)[len(special) :]]
    return {"vocab.txt": "".join(f"{token}\n" for token in tokens).encode()}


def merged(model: dict[str, Any]) -> dict[str, bytes]:
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    return {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": b"#version: 0.2\n" + merges.encode()}


def byte_pieces(*special: str) -> dict[str, bytes]:
    model = json.loads(byte_level().to_str())["model"]
    for old, new in zip(ROBERTA_SPECIAL, special, strict=False):
        model["vocab"][new] = model["vocab"].pop(old)
    return merged(model)


@cache
def suffixed() -> dict[str, Any]:
    """Return BPE whose words end in ``</w>``."""
    inner = Inner(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=False)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=ROBERTA_SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    inner.train_from_iterator([*CORPUS, *map(str.lower, CORPUS)], trainer)
    return json.loads(inner.to_str())["model"]


def fairseq() -> dict[str, bytes]:
    model = suffixed()
    tokens = [t[:-4] if t.endswith("</w>") else f"{t}@@" for t in model["vocab"] if t not in ROBERTA_SPECIAL]
    codes = "".join(f"{first} {second} {number}\n" for number, (first, second) in enumerate(model["merges"]))
    return {"vocab.txt": "".join(f"{t} {9}\n" for t in tokens).encode(), "bpe.codes": codes.encode()}


@cache
def trained(options: str) -> bytes:
    spm = pytest.importorskip("sentencepiece")
    import io

    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([text.replace("\0", "") for text in (*CORPUS, *AWKWARD)]), model_writer=out,
        hard_vocab_limit=False, minloglevel=2, **{"vocab_size": 500, "character_coverage": 0.995, **json.loads(options)},
    )  # fmt: skip
    return out.getvalue()


def spm(file: str, **options: Any) -> Callable[[], dict[str, bytes]]:
    return lambda: {file: trained(json.dumps(options, sort_keys=True))}


ROBERTA = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT = {
    "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "pad_piece": "<pad>", "control_symbols": "[CLS],[SEP],[MASK]",
}  # fmt: skip
XLNET = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 5, "control_symbols": "<cls>,<sep>,<pad>,<eod>,<eop>"}
RINNA = {
    "pad_id": 3, "pad_piece": "[PAD]", "bos_id": 1, "eos_id": 2, "unk_id": 0, "user_defined_symbols": "[CLS],[SEP],[MASK]",
}  # fmt: skip
DEBERTA = {
    "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]",
    "unk_piece": "[UNK]",
}  # fmt: skip
LLAMA = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 900, **ROBERTA}
GENERATION = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "control_symbols": "<::::>"}
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Class, family of the model, vocabulary files, settings.
CASES: list[tuple[str, str, Callable[[], dict[str, bytes]], dict[str, Any]]] = [
    *((f"{name}Tokenizer", "bert", word_pieces, {}) for name in (
        "Bert", "Electra", "DistilBert", "LayoutLM", "ConvBert", "MobileBert", "SqueezeBert", "Lxmert", "Splinter",
        "DPRQuestionEncoder", "DPRContextEncoder", "DPRReader",
    )),
    ("SplinterTokenizer", "bert", word_pieces, {"padding_side": "left"}),
    ("BertTokenizerFast", "bert", word_pieces, {"do_lower_case": False, "strip_accents": True}),
    ("FunnelTokenizer", "bert", lambda: word_pieces("<pad>", "<unk>", "<cls>", "<sep>", "<mask>"), {}),
    ("MPNetTokenizer", "mpnet", lambda: word_pieces("<s>", "<pad>", "</s>", "[UNK]", "<mask>"), {}),
    ("MPNetTokenizer", "bert", lambda: word_pieces("<s>", "<pad>", "</s>", "[UNK]", "<mask>"), {}),
    *((f"{name}Tokenizer", "roberta", byte_pieces, {}) for name in (
        "Roberta", "Bart", "Longformer", "LED", "Mvp", "Blenderbot", "GPT2", "GPTNeoX", "CodeGen", "Qwen2",
    )),
    ("RobertaTokenizer", "bert", byte_pieces, {"add_prefix_space": True}),
    ("BlenderbotTokenizer", "bert", byte_pieces, {"add_prefix_space": False}),
    ("GPT2Tokenizer", "bert", byte_pieces, {"add_prefix_space": True, "add_bos_token": True}),
    ("HerbertTokenizer", "bert", lambda: merged(suffixed()), {}),
    ("HerbertTokenizerFast", "roberta", lambda: merged(suffixed()), {}),
    ("OpenAIGPTTokenizer", "roberta", lambda: merged(suffixed()), {}),
    ("PhobertTokenizer", "roberta", fairseq, {}),
    ("BertweetTokenizer", "roberta", fairseq, {}),
    ("BertweetTokenizer", "roberta", fairseq, {"normalization": True}),
    *((f"{name}Tokenizer", "roberta", spm("sentencepiece.bpe.model", **ROBERTA), {}) for name in (
        "XLMRoberta", "Camembert", "MBart", "MBart50", "Barthez",
    )),
    ("MBartTokenizer", "roberta", spm("sentencepiece.bpe.model", **ROBERTA), {"src_lang": "de_DE"}),
    ("BarthezTokenizer", "bert", spm("sentencepiece.bpe.model", **ROBERTA), {"add_prefix_space": False}),
    ("AlbertTokenizer", "bert", spm("spiece.model", **ALBERT), {}),
    ("AlbertTokenizer", "roberta", spm("spiece.model", **ALBERT), {"do_lower_case": False, "keep_accents": True}),
    ("FNetTokenizer", "bert", spm("spiece.model", **ALBERT), {}),
    ("BigBirdTokenizer", "bert", spm("spiece.model", **ROBERTA), {}),
    ("T5Tokenizer", "roberta", spm("spiece.model", **RINNA), {}),
    ("T5Tokenizer", "roberta", spm("spiece.model", **RINNA), {
        "extra_ids": 0, "unk_token": "<unk>", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]",
        "mask_token": "[MASK]", "additional_special_tokens": [],
    }),
    ("T5Tokenizer", "bert", spm("spiece.model", **T5), {"extra_ids": 10}),
    ("PegasusTokenizer", "bert", spm("spiece.model", **T5), {}),
    ("ReformerTokenizer", "bert", spm("spiece.model", model_type="bpe", **T5), {}),
    ("XLNetTokenizer", "bert", spm("spiece.model", **XLNET), {}),
    ("XLNetTokenizer", "bert", spm("spiece.model", **XLNET), {"do_lower_case": True}),
    ("RemBertTokenizer", "bert", spm("sentencepiece.model", **ALBERT), {}),
    ("RemBertTokenizer", "bert", spm("sentencepiece.model", **ALBERT), {"do_lower_case": True, "keep_accents": False}),
    ("BertGenerationTokenizer", "bert", spm("spiece.model", **GENERATION), {}),
    ("LlamaTokenizer", "roberta",
     spm("tokenizer.model", **LLAMA), {}),
    ("LlamaTokenizer", "eurobert",
     spm("tokenizer.model", **LLAMA), {"add_bos_token": True}),
]  # fmt: skip


def folder_of(folder: Path, name: str, family: str, files: dict[str, bytes], stated: dict[str, Any]) -> Path:
    for file, data in files.items():
        (folder / file).write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **stated}))
    return folder


def assert_equal(theirs: Any, ours: Tokenizer, name: str, texts: list[str]) -> None:
    for text in texts:
        expected = theirs(text)["input_ids"]
        assert ours(text).input_ids == expected, (name, text)
        assert ours.convert_ids_to_tokens(expected) == theirs.convert_ids_to_tokens(expected), (name, text)
        a, b = theirs(text, "x y"), ours(text, "x y")
        assert b.input_ids == a["input_ids"], (name, text)
        if "token_type_ids" in a and "token_type_ids" in b:
            assert b.token_type_ids == a["token_type_ids"], (name, text)
        if theirs.is_fast:
            found = ours(text, return_offsets_mapping=True).offset_mapping
            assert [tuple(span) for span in found] == theirs(text, return_offsets_mapping=True)["offset_mapping"], text
        for skip in (False, True):
            assert ours.decode(expected, skip) == theirs.decode(expected, skip_special_tokens=skip), (name, text)
    assert ours.vocab_size == len(theirs)
    assert ours.padding_side == theirs.padding_side
    stated = {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str) and k != "question_token"}
    assert ours.special_tokens == stated


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "family", "make", "stated"), CASES, ids=[f"{c[0]}-{c[1]}-{c[3]}" for c in CASES])
def test_a_class_is_read_as_transformers_reads_it(
    tmp_path: Path, name: str, family: str, make: Callable[[], dict[str, bytes]], stated: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path, name, family, make(), stated)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert_equal(theirs, ours, name, TEXTS)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "family", "make", "stated"), [CASES[0], CASES[-1], *[
    case for case in CASES if case[0] in ("HerbertTokenizer", "PhobertTokenizer", "T5Tokenizer", "GPT2Tokenizer")
]])  # fmt: skip
def test_a_saved_tokenizer_is_read_equally_by_both(
    tmp_path: Path, name: str, family: str, make: Callable[[], dict[str, bytes]], stated: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "first").mkdir()
    folder = folder_of(tmp_path / "first", name, family, make(), stated)
    ours = Tokenizer.from_folder(folder)
    ours.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_bytes((folder / "config.json").read_bytes())
    theirs, again = AutoTokenizer.from_pretrained(tmp_path / "again"), Tokenizer.from_folder(tmp_path / "again")
    first = AutoTokenizer.from_pretrained(folder)
    for text in ("Ada lives in Paris", "Zug, été [MASK] <mask> 12", ""):
        assert again(text).input_ids == ours(text).input_ids, text
        assert theirs(text)["input_ids"] == first(text)["input_ids"], text


ADDED = ["NewTok", "Élève", "New Tok"]
SPECIALS = {"MPNetTokenizer": ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")}


def entries(first: int, **flags: bool) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(first + i): {"content": text, **flags} for i, text in enumerate(ADDED)}}


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flags", [
    None, {"normalized": True}, {"normalized": False}, {"normalized": True, "special": True}, {"special": True}, {},
    {"normalized": True, "lstrip": True, "rstrip": True}, {"single_word": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", [
    "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer", "AlbertTokenizer", "RobertaTokenizer",
    "XLNetTokenizer",
])  # fmt: skip
def test_added_tokens_are_matched_as_in_transformers(tmp_path: Path, name: str, flags: dict[str, bool] | None) -> None:
    from transformers import AutoTokenizer

    models = {
        "AlbertTokenizer": ALBERT,
        "XLNetTokenizer": {**XLNET, "control_symbols": XLNET["control_symbols"] + ",<mask>"},
    }
    if name in models:
        files = spm("spiece.model", **models[name])()
    else:
        files = byte_pieces() if name == "RobertaTokenizer" else word_pieces(*SPECIALS.get(name, ()))
    lower = {} if name == "RobertaTokenizer" else {"do_lower_case": True}
    first = len(AutoTokenizer.from_pretrained(folder_of(tmp_path, name, "bert", files, lower)))
    folder = folder_of(
        tmp_path, name, "bert", files, {**lower, **(entries(first, **flags) if flags is not None else {})}
    )
    if flags is None:
        numbers = {text: first + i for i, text in enumerate(ADDED)}
        (folder / "added_tokens.json").write_text(json.dumps(numbers))
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in (
        "a NewTok b", "a newtok b", "aNEWTOKb NEWTOK", "x NewTokNewTok y", "  NewTok  ", "Ada ÉLÈVE élève eleve",
        "[MASK] ada <mask> NewTok", "New Tok new tok",
    ):  # fmt: skip
        assert ours(text).input_ids == theirs(text)["input_ids"], text


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_each_class_of_transformers_is_read_or_refused_with_its_name(tmp_path: Path) -> None:
    import transformers

    names = [name for name in dir(transformers) if name.endswith("Tokenizer") and name != "AutoTokenizer"]
    assert len(names) > 80
    for name in names:
        word = name.removesuffix("Tokenizer")
        if word in CLASSES or word in ("MT5", "Phi3", "PreTrained"):
            continue
        folder = folder_of(tmp_path, name, "bert", word_pieces(), {})
        try:
            found = Tokenizer.from_folder(folder)
        except TokenizerError as error:
            details = error.details
        else:
            expected = transformers.AutoTokenizer.from_pretrained(folder)
            assert found("Ada lives").input_ids == expected("Ada lives")["input_ids"], name
            continue
        # The name, or the reason: words or tokens that no file contains.
        assert details.get("found") == name or {"words", "missing"} & set(details), name


@pytest.mark.parametrize("stated_in", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(("name", "files"), [
    ("LukeTokenizer", byte_pieces), ("FlaubertTokenizer", word_pieces), ("NoSuchTokenizer", word_pieces),
    ("T5Tokenizer", word_pieces), ("RobertaTokenizer", word_pieces), ("ModernBertTokenizer", word_pieces),
])  # fmt: skip
def test_a_class_that_cannot_be_built_is_refused_with_its_name(
    stated_in: str, name: str, files: Callable[[], dict[str, bytes]]
) -> None:
    stated = {"tokenizer_class": name}
    made = files()
    if stated_in == "tokenizer_config.json":
        made["tokenizer_config.json"] = json.dumps(stated).encode()
    config = {"model_type": "bert", **(stated if stated_in == "config.json" else {})}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(made, config=config)
    assert caught.value.details["field"] == "tokenizer_class"
    assert caught.value.details["found"] == name


def test_the_class_of_the_configuration_is_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_files(
        merged(suffixed()), config={"model_type": "bert", "tokenizer_class": "HerbertTokenizer"}
    )
    assert tokenizer.tokenize("Paris")[-1].endswith("</w>")
    assert tokenizer.cls_token == "<s>"


def test_of_a_token_that_occurs_twice_the_last_line_counts() -> None:
    data = "\n".join([*BERT, "ada", "paris", "ada"]).encode()
    tokenizer = Tokenizer.from_files({"vocab.txt": data}, model_type="bert")
    assert tokenizer("ada", add_special_tokens=False).input_ids == [7]


def test_words_that_python_splits_have_offsets_and_survive_pickling() -> None:
    import copy
    import pickle

    files = {**fairseq(), "tokenizer_config.json": b'{"tokenizer_class": "PhobertTokenizer"}'}
    ours = Tokenizer.from_files(files)
    text = "Ada lives in Paris."
    found = ours(text, return_offsets_mapping=True, add_special_tokens=False)
    pieces = [token.removesuffix("@@") for token in found.tokens()]
    assert [text[start:stop] for start, stop in found.offset_mapping if stop] == pieces
    for again in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert again([text] * 3).input_ids == ours([text] * 3).input_ids
    assert "tokenizer.json" not in ours.files()
    assert ours.fingerprint() == Tokenizer.from_files(files).fingerprint()
    assert ours("a </s> b", split_special_tokens=True).input_ids != ours("a </s> b").input_ids
    with pytest.raises(TokenizerError):
        ours.to_json()


BOTH = (True, False)
FUNNEL = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
# Class, family, vocabulary files, settings that replace parts of tokenizer.json.
REPLACED: list[tuple[str, str, Callable[[], dict[str, bytes]], dict[str, tuple[Any, ...]]]] = [
    ("BertTokenizer", "bert", word_pieces, {"do_lower_case": BOTH, "strip_accents": (True, None)}),
    ("BertTokenizer", "bert", word_pieces, {"tokenize_chinese_chars": BOTH}),
    ("DistilBertTokenizer", "distilbert", word_pieces, {"do_lower_case": BOTH}),
    ("MPNetTokenizer", "mpnet", lambda: word_pieces(*FUNNEL), {"do_lower_case": BOTH}),
    ("RobertaTokenizer", "roberta", byte_pieces, {"add_prefix_space": BOTH}),
    ("AlbertTokenizer", "albert", spm("spiece.model", **ALBERT), {"do_lower_case": BOTH, "keep_accents": BOTH}),
    ("AlbertTokenizer", "albert", spm("spiece.model", **ALBERT), {"add_prefix_space": BOTH}),
    ("XLMRobertaTokenizer", "xlm-roberta", spm("sentencepiece.bpe.model", **ROBERTA), {"add_prefix_space": BOTH}),
    ("DebertaV2Tokenizer", "deberta-v2",
     spm("spm.model", pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]",
         unk_piece="[UNK]"), {"do_lower_case": BOTH, "split_by_punct": BOTH}),
]  # fmt: skip


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "family", "make", "keys"), REPLACED, ids=[f"{c[0]}-{'-'.join(c[3])}" for c in REPLACED]
)
def test_settings_replace_parts_of_the_definition(
    tmp_path: Path, name: str, family: str, make: Callable[[], dict[str, bytes]], keys: dict[str, tuple[Any, ...]]
) -> None:
    from transformers import AutoTokenizer

    settings = [dict(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]
    texts = ["Ada, ÉTÉ été (Café)!", "東京は 日本", "see <mask> [MASK] now", "  two  Spaces ", "don't"]
    (tmp_path / "made").mkdir()
    (tmp_path / "read").mkdir()
    for made, stated in itertools.product((settings[0], settings[-1]), settings):
        theirs = AutoTokenizer.from_pretrained(folder_of(tmp_path / "made", name, family, make(), made))
        theirs.save_pretrained(tmp_path / "saved")
        files = {"tokenizer.json": (tmp_path / "saved" / "tokenizer.json").read_bytes()}
        folder = folder_of(tmp_path / "read", name, family, files, stated)
        theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
        for text in texts:
            assert ours(text).input_ids == theirs(text)["input_ids"], (made, stated, text)
        assert ours.files()["tokenizer.json"] == files["tokenizer.json"]
        assert Inner.from_str(ours.to_json()).encode(texts[0]).ids == ours(texts[0]).input_ids
        assert (made == stated) == (not [note for note in ours.notes if note.split(":")[0] in keys])


def test_a_generic_class_leaves_the_definition_as_it_is() -> None:
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}
    files = {
        "tokenizer.json": wordpiece().to_str().encode(), "tokenizer_config.json": json.dumps(stated).encode(),
    }  # fmt: skip
    tokenizer = Tokenizer.from_files(files, config={"model_type": "bert"})
    assert tokenizer("ADA").input_ids == tokenizer("ada").input_ids


FRAMED: list[tuple[str, Callable[[], dict[str, bytes]], Callable[[], Inner]]] = [
    ("bert", word_pieces, wordpiece), ("distilbert", word_pieces, wordpiece), ("electra", word_pieces, wordpiece),
    ("ernie", word_pieces, wordpiece), ("roberta", byte_pieces, byte_level), ("data2vec-text", byte_pieces, byte_level),
    ("xlm-roberta-xl", byte_pieces, byte_level), ("modernbert", word_pieces, wordpiece),
]  # fmt: skip


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("family", "make", "inner"), FRAMED, ids=[case[0] for case in FRAMED])
def test_a_definition_without_post_processor_has_the_template_of_its_class(
    tmp_path: Path, family: str, make: Any, inner: Callable[[], Inner], named: bool
) -> None:
    from transformers import AutoTokenizer

    definition = {**json.loads(inner().to_str()), "post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    if named:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs("Ada"), theirs("Ada", "Paris")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = Tokenizer.from_folder(tmp_path)
    assert [ours("Ada").input_ids, ours("Ada", "Paris").input_ids] == [found["input_ids"] for found in expected]
    framed = expected[0]["input_ids"] != theirs("Ada", add_special_tokens=False)["input_ids"]
    assert any("post_processor" in str(warning.message) for warning in caught) == framed


@pytest.mark.parametrize(("name", "files", "key", "value"), [
    ("BertTokenizer", word_pieces, "do_lower_case", "yes"),
    ("BertTokenizer", word_pieces, "strip_accents", 1),
    ("BertTokenizer", lambda: {"tokenizer.json": wordpiece().to_str().encode()}, "do_lower_case", "false"),
    ("BertTokenizer", word_pieces, "added_tokens_decoder", []),
    ("RobertaTokenizer", byte_pieces, "add_prefix_space", "true"),
    ("FunnelTokenizer", word_pieces, "wordpieces_prefix", "@@"),
    ("PegasusTokenizer", word_pieces, "offset", 0),
    ("BertGenerationTokenizer", word_pieces, "sp_model_kwargs", {"enable_sampling": True}),
])  # fmt: skip
def test_a_setting_that_cannot_be_applied_is_refused_with_file_key_and_value(
    name: str, files: Callable[[], dict[str, bytes]], key: str, value: Any
) -> None:
    stated = {"tokenizer_class": name, key: value}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files({**files(), "tokenizer_config.json": json.dumps(stated).encode()})
    assert caught.value.details["where"].endswith("tokenizer_config.json")
    assert caught.value.details["field"] == key
    assert caught.value.details["found"] == value


def test_unknown_settings_are_ignored_with_one_warning() -> None:
    stated = {
        "tokenizer_class": "BertTokenizer",
        "wavelets": 3,
        "ripples": 4,
        "chat_template": None,
        "errors": "replace",
    }
    mapped = {"cls_token": "[CLS]", "waves": "x"}
    files = {
        **word_pieces(), "tokenizer_config.json": json.dumps(stated).encode(),
        "special_tokens_map.json": json.dumps(mapped).encode(),
    }  # fmt: skip
    with pytest.warns(UserWarning, match="wavelets.*ripples.*waves") as caught:
        Tokenizer.from_files(files)
    assert len(caught) == 1


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "make", "stated"), [
    ("RobertaTokenizer", byte_pieces, {"trim_offsets": False}),
    ("FunnelTokenizer", lambda: word_pieces("<pad>", "<unk>", "<cls>", "<sep>", "<mask>"), {"clean_text": False}),
    ("BertTokenizer", word_pieces, {"do_basic_tokenize": False, "never_split": ["Ada"]}),
])  # fmt: skip
def test_rare_settings_are_applied_as_in_transformers(
    tmp_path: Path, name: str, make: Callable[[], dict[str, bytes]], stated: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path, name, "bert", make(), stated)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert_equal(theirs, ours, name, ["Ada lives  in Paris", "a\x00b\tc\x07 d", "<s> a </s>b", "Ada ada"])


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{}, {"cls_token": "<unk>"}], ids=["", "cls_token"])
@pytest.mark.parametrize("trim", [None, True, False])
def test_offsets_with_other_settings_than_the_definition_are_those_of_transformers(
    tmp_path: Path, trim: bool | None, more: dict[str, str]
) -> None:
    from transformers import AutoTokenizer

    made = folder_of(tmp_path, "RobertaTokenizer", "roberta", byte_pieces(), {})
    AutoTokenizer.from_pretrained(made).save_pretrained(tmp_path)
    stated = more if trim is None else {**more, "trim_offsets": trim}
    folder = folder_of(tmp_path, "RobertaTokenizer", "roberta", {}, stated)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert_equal(theirs, ours, "RobertaTokenizer", ["Ada lives  in Paris", " Ada ada"])


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_have_the_offsets_of_transformers(tmp_path: Path, side: str) -> None:
    """The first token of a window includes the space before it where a prefix space is added."""
    from transformers import AutoTokenizer

    stated = {"add_prefix_space": True, "truncation_side": side}
    folder = folder_of(tmp_path, "RobertaTokenizer", "roberta", byte_pieces(), stated)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    options = {"truncation": True, "max_length": 6, "stride": 2, "return_offsets_mapping": True}
    for text in TEXTS:
        expected = theirs(text, return_overflowing_tokens=True, **options)
        assert dict(ours(text, return_overflowing_tokens=True, **options)) == dict(expected), text


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "make", "stated"), [
    ("PhobertTokenizer", fairseq, {}), ("BertweetTokenizer", fairseq, {"normalization": True}),
    ("BertGenerationTokenizer", spm("spiece.model", **GENERATION), {}),
    ("XLMRobertaTokenizer", spm("sentencepiece.bpe.model", **ROBERTA), {
        "mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"},
    }),
    ("FNetTokenizer", spm("spiece.model", **ALBERT), {}), ("T5Tokenizer", spm("spiece.model", **T5), {"extra_ids": 3}),
    ("BertTokenizer", word_pieces, {"extra_special_tokens": {"image_token": "<new>"}}),
    ("PreTrainedTokenizerFast", lambda: {"tokenizer.json": wordpiece().to_str().encode()}, {"sep_token": "[SEP]"}),
])  # fmt: skip
def test_tokens_and_special_tokens_are_those_of_transformers(
    tmp_path: Path, name: str, make: Callable[[], dict[str, bytes]], stated: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path, name, "bert", make(), stated)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.tokenize(text), text
        length = {"return_length": True}
        assert dict(ours("a", text, **length)) == dict(theirs("a", text, **length)), text
    for fact in ("all_special_tokens", "all_special_ids", "special_tokens_map", "model_input_names", "pad_token_id"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
