"""Tokenizers from vocab.txt, or vocab.json and merges.txt, are those that transformers builds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.errors import TokenizerError
from flodl_hf.parity.tokenizers import PROBES, compare_sources
from flodl_hf.tokenization.tokenizer import Tokenizer
from flodl_hf.training.demo import train_wordpiece

from .conftest import AWKWARD, CORPUS, byte_level, wordpiece

TEXTS = [*AWKWARD, *CORPUS[:13], *PROBES]


def vocab_txt() -> bytes:
    vocab = wordpiece().get_vocab()
    return "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)).encode()


def bpe_files() -> dict[str, bytes]:
    model = json.loads(byte_level().to_str())["model"]
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    return {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": b"#version: 0.2\n" + merges.encode()}


def _write(folder: Path, files: dict[str, bytes], **config: Any) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


BERT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
]


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", BERT_OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["BertTokenizer", "DistilBertTokenizer"])
def test_bert_from_vocab_txt(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    _write(tmp_path, {"vocab.txt": vocab_txt()}, tokenizer_class=name, **options)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours(text, "x y").input_ids == theirs(text, "x y").input_ids
    assert ours.vocab_size == len(theirs)
    assert ours("a", "b", return_token_type_ids=True).token_type_ids == theirs("a", "b").token_type_ids


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefix", [False, True])
def test_roberta_from_vocab_json_and_merges(tmp_path: Path, prefix: bool) -> None:
    transformers = pytest.importorskip("transformers")
    _write(tmp_path, bpe_files(), tokenizer_class="RobertaTokenizer", add_prefix_space=prefix)
    theirs = transformers.RobertaTokenizer.from_pretrained(tmp_path, add_prefix_space=prefix)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.pad_token_id == 1
    for text in TEXTS:
        mine, other = ours(text, return_offsets_mapping=True), theirs(text, return_offsets_mapping=True)
        assert mine.input_ids == other.input_ids, text
        assert [tuple(span) for span in mine.offset_mapping] == [tuple(span) for span in other.offset_mapping]
        assert ours(text, "x y").input_ids == theirs(text, "x y").input_ids


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("takes", [True, False])
def test_the_mask_takes_the_space_before_it_where_the_files_say_so(tmp_path: Path, takes: bool) -> None:
    """As every published RoBERTa's do; where nothing is said, transformers 4 did and 5 does not."""
    transformers = pytest.importorskip("transformers")
    mask = {"content": "<mask>", "lstrip": takes, "rstrip": False, "normalized": False, "single_word": False}
    stated = {"4": {**mask, "special": True}}
    _write(tmp_path, bpe_files(), tokenizer_class="RobertaTokenizer", added_tokens_decoder=stated, mask_token="<mask>")
    theirs = transformers.RobertaTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours("of <mask>").input_ids == theirs("of <mask>").input_ids
    assert ours("of <mask>").tokens() == theirs("of <mask>").tokens()
    assert (" <mask>" in ours("of <mask>").tokens()) == takes


FOLDERS: dict[str, Callable[[], dict[str, bytes]]] = {
    "bert": lambda: {"vocab.txt": vocab_txt()},
    "roberta": bpe_files,
}


@pytest.mark.parametrize("family", FOLDERS)
def test_what_was_built_is_saved_as_tokenizer_json(tmp_path: Path, family: str) -> None:
    built = Tokenizer.from_files(FOLDERS[family](), model_type=family)
    built.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    again = Tokenizer.from_folder(tmp_path, model_type=family)
    assert again(TEXTS).data == built(TEXTS).data
    assert again.special_tokens == built.special_tokens
    assert compare_sources(tmp_path, model_type=family) == []


def test_where_two_sources_part_is_shown_with_the_text(tmp_path: Path) -> None:
    definition = json.loads(wordpiece().to_str())
    definition["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    _write(tmp_path, {"tokenizer.json": json.dumps(definition).encode(), "vocab.txt": vocab_txt()})
    found = {difference.text: difference for difference in compare_sources(tmp_path, model_type="bert")}
    text = "The quick brown fox doesn't jump over 1,234.56 lazy dogs!"
    assert text in found
    assert "שלום עולם" not in found
    difference = found[text]
    assert difference.tokens_by_json != difference.tokens_by_files
    assert len(difference.ids_by_json) == len(difference.tokens_by_json)


def test_one_source_alone_has_nothing_to_disagree_with(tmp_path: Path) -> None:
    _write(tmp_path, {"vocab.txt": vocab_txt()}, tokenizer_class="BertTokenizer")
    assert compare_sources(tmp_path) == []
    _write(tmp_path, {"tokenizer.json": wordpiece().to_str().encode()})
    assert compare_sources(tmp_path) == []


def test_the_class_of_the_tokenizer_decides_before_the_family_of_the_model() -> None:
    # Chinese RoBERTa checkpoints are BERT models with RoBERTa's name or the other way round.
    files = {"vocab.txt": vocab_txt(), "tokenizer_config.json": b'{"tokenizer_class": "BertTokenizer"}'}
    assert Tokenizer.from_files(files, model_type="roberta")("hello").tokens()[0] == "[CLS]"
    assert Tokenizer.from_files({"vocab.txt": vocab_txt()}, model_type="roberta")("hello").tokens()[0] == "[CLS]"


def test_added_tokens_keep_their_stated_ids() -> None:
    size = wordpiece().get_vocab_size()
    files = {"vocab.txt": vocab_txt(), "added_tokens.json": json.dumps({"<user>": size + 1, "<url>": size}).encode()}
    tokenizer = Tokenizer.from_files(files, model_type="bert")
    assert tokenizer.convert_tokens_to_ids(["<url>", "<user>"]) == [size, size + 1]
    assert "<url>" in tokenizer("see <url>now").tokens()
    stated = {"added_tokens_decoder": {str(size): {"content": "<url>", "special": True}}}
    tokenizer = Tokenizer.from_files(
        {"vocab.txt": vocab_txt(), "tokenizer_config.json": json.dumps(stated).encode()}, model_type="bert"
    )
    assert tokenizer.added_tokens_decoder[size].special


@pytest.mark.parametrize(
    "added",
    [{"<url>": 7}, {"<url>": -1}, {"<url>": "300"}, {"<url>": 10**6}, {"the": 299}, {"<url>": True}],
)
def test_added_tokens_whose_ids_cannot_be_had_are_refused(added: dict[str, Any]) -> None:
    files = {"vocab.txt": vocab_txt(), "added_tokens.json": json.dumps(added).encode()}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(files, model_type="bert")
    assert caught.value.problems


def test_custom_special_tokens_come_from_the_settings() -> None:
    vocab = vocab_txt().replace(b"[CLS]", b"<first>").replace(b"[SEP]", b"<last>")
    settings = {"cls_token": "<first>", "sep_token": {"content": "<last>"}}
    tokenizer = Tokenizer.from_files(
        {"vocab.txt": vocab, "tokenizer_config.json": json.dumps(settings).encode()}, model_type="bert"
    )
    assert tokenizer("hello").tokens()[0] == "<first>"
    assert tokenizer("hello", "world").tokens()[-1] == "<last>"
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files({"vocab.txt": vocab}, model_type="bert")
    assert len(caught.value.missing) == 2


# Damaged files


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"a\nb\n", "[UNK]"),
        (b"[UNK]\n\xff\xfe\n", "UTF-8"),
    ],
)
def test_damaged_vocab_txt_is_refused(data: bytes, word: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files({"vocab.txt": data}, folder="there", model_type="bert")
    assert "there/vocab.txt" in str(caught.value)
    assert word in str(caught.value)


def test_lines_end_at_line_feeds_only() -> None:
    plain = Tokenizer.from_files({"vocab.txt": vocab_txt()}, model_type="bert")
    windows = Tokenizer.from_files({"vocab.txt": vocab_txt().replace(b"\n", b"\r\n")}, model_type="bert")
    assert windows.get_vocab() == plain.get_vocab()
    odd = Tokenizer.from_files({"vocab.txt": vocab_txt() + "a\u2028b\n\x0c\nlast\n".encode()}, model_type="bert")
    assert odd.token_to_id("last") == plain.vocab_size + 2


@pytest.mark.parametrize(
    "vocab",
    [
        b"",
        b"[]",
        b"{}",
        b'{"a": -1}',
        b'{"a": 4294967296}',
        b'{"a": 1.5}',
        b'{"a": true}',
        b'{"a": null}',
        b'{"a": "1"}',
        b'{"a": 1, "b": 1}',
        b'{"a": 1, "a": 2}',
        b'{"a": 1',
        b"[" * 100_000,
    ],
)
def test_damaged_vocab_json_is_refused(vocab: bytes) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files({"vocab.json": vocab, "merges.txt": b""}, folder="there", model_type="roberta")
    assert "there/vocab.json" in str(caught.value)


def test_tokens_that_share_an_id_are_refused() -> None:
    files = bpe_files()
    vocab = json.loads(files["vocab.json"])
    vocab["shared"] = vocab["a"]
    with pytest.raises(TokenizerError, match=f"2 tokens have id {vocab['a']}"):
        Tokenizer.from_files({**files, "vocab.json": json.dumps(vocab).encode()}, model_type="roberta")


def test_a_token_that_occurs_twice_is_refused() -> None:
    files = bpe_files()
    again = b'{"a": 400, ' + files["vocab.json"].strip()[1:]
    with pytest.raises(TokenizerError, match="'a' occurs twice"):
        Tokenizer.from_files({**files, "vocab.json": again}, model_type="roberta")


@pytest.mark.parametrize(
    ("line", "number"),
    [(b"onlyone", 2), (b"a b c", 2), (b"a  b", 2), (b" a", 2), (b"zz\xc4\xa0zz qq", 2), (b"\xff a", None)],
)
def test_damaged_merges_are_refused_by_line(line: bytes, number: int | None) -> None:
    files = bpe_files()
    head, rest = files["merges.txt"].split(b"\n", 1)
    files["merges.txt"] = head + b"\n" + line + b"\n" + rest
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(files, folder="there", model_type="roberta")
    assert "there/merges.txt" in str(caught.value)
    assert number is None or f"line {number}" in str(caught.value)


def test_truncated_vocabularies_never_load_with_other_ids() -> None:
    files = bpe_files()
    whole = Tokenizer.from_files(files, model_type="roberta")
    for name in files:
        for end in range(0, len(files[name]), 53):
            try:
                cut = Tokenizer.from_files({**files, name: files[name][:end]}, model_type="roberta")
            except TokenizerError:
                continue
            # A merges file that ends at a line's end is a smaller tokenizer of the same vocabulary.
            assert name == "merges.txt"
            assert cut.get_vocab() == whole.get_vocab()


def test_settings_of_the_wrong_type_are_refused() -> None:
    for config in ({"do_lower_case": "yes"}, {"tokenize_chinese_chars": 1}, {"strip_accents": "no"}):
        files = {"vocab.txt": vocab_txt(), "tokenizer_config.json": json.dumps(config).encode()}
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_files(files, model_type="bert")
        assert caught.value.field in config


# Training


def test_training_gives_the_same_vocabulary_every_time_and_covers_the_texts() -> None:
    first, second = (train_wordpiece(CORPUS, vocab_size=300) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert first.vocab_size <= 300
    assert first.get_vocab()["[PAD]"] == 0
    assert all(first.unk_token_id not in first(text).input_ids for text in CORPUS[:3])
    assert first.decode(first("Ada lives in Paris").input_ids, skip_special_tokens=True) == "ada lives in paris"
    cased = train_wordpiece(CORPUS, vocab_size=400, lowercase=False)
    assert cased.decode(cased("Ada lives").input_ids, skip_special_tokens=True) == "Ada lives"


def test_a_trained_tokenizer_has_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    trained = train_wordpiece(CORPUS, vocab_size=300, max_length=64)
    trained.save_pretrained(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.model_max_length == 64
    assert again(TEXTS).data == trained(TEXTS).data
    assert compare_sources(tmp_path) == []
