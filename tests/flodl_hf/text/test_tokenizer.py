"""A loaded tokenizer gives the ids of its definition, never changes, and explains every refusal."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import threading
from collections import UserList
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, normalizers

from flodl_hf.checkpoints.folders import TOKENIZER_FILES
from flodl_hf.errors import HubError, TokenizerError
from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import AWKWARD, CORPUS, KINDS, byte_level, metaspace, wordpiece

TEXTS = [*AWKWARD, *CORPUS[:13]]


# The same tokens as the definition gives


def test_uncut_rows_are_those_of_the_tokenizers_library(tokenizer: Tokenizer, plain: Inner) -> None:
    for text in TEXTS:
        [[row]] = tokenizer.encode_rows([text])
        expected = plain.encode(text)
        assert list(row.ids) == expected.ids
        assert list(row.type_ids) == expected.type_ids
        assert list(row.offsets) == expected.offsets
        assert list(row.word_ids) == expected.word_ids
        assert list(row.sequence_ids) == expected.sequence_ids
        assert list(row.special) == [flag == 1 for flag in expected.special_tokens_mask]
        assert (row.window, row.first_token, row.truncated) == (0, 0, False)
        assert row.last_token == expected.sequence_ids.count(0)


def test_uncut_pairs_are_those_of_the_tokenizers_library(tokenizer: Tokenizer, plain: Inner) -> None:
    pairs = list(reversed(TEXTS))
    rows = tokenizer.encode_rows(TEXTS, pairs)
    for (row,), text, pair in zip(rows, TEXTS, pairs, strict=True):
        expected = plain.encode(text, pair)
        assert list(row.ids) == expected.ids
        assert list(row.type_ids) == expected.type_ids
        assert list(row.offsets) == expected.offsets
        assert list(row.sequence_ids) == expected.sequence_ids


def test_rows_without_offsets_have_the_same_ids(tokenizer: Tokenizer) -> None:
    slow = tokenizer.encode_rows(TEXTS, max_tokens=16, stride=3)
    fast = tokenizer.encode_rows(TEXTS, max_tokens=16, stride=3, offsets=False)
    assert [[list(row.ids) for row in rows] for rows in fast] == [[list(row.ids) for row in rows] for rows in slow]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_offsets_are_characters_of_the_python_string(tokenizer: Tokenizer, text: str) -> None:
    [[row]] = tokenizer.encode_rows([text])
    for (start, end), sequence in zip(row.offsets, row.sequence_ids, strict=True):
        assert 0 <= start <= end <= len(text)
        if sequence is None:
            assert (start, end) == (0, 0)


@pytest.mark.parametrize(
    ("before", "word"),
    [
        ("😀👩‍👩‍👧 ", "Paris"),
        ("e\u0301\u0302 ", "Paris"),
        ("שלום ", "עולם"),
        ("𝔘𝔫𝔦 ", "Ada"),
        ("", "Ada"),
        ("\n\t ", "Ada"),
    ],
)
def test_the_offsets_of_a_word_slice_it_out(tokenizer: Tokenizer, before: str, word: str) -> None:
    text = f"{before}{word} x"
    [[row]] = tokenizer.encode_rows([text])
    inside = [
        offset
        for offset, sequence in zip(row.offsets, row.sequence_ids, strict=True)
        if sequence == 0 and offset[0] < len(before) + len(word) and offset[1] > len(before)
    ]
    assert text[inside[0][0] : inside[-1][1]].strip() == word


def test_pre_split_words_are_numbered_and_located_within_the_word(tokenizer: Tokenizer) -> None:
    words = ["Ada", "lives", "in", "Köln,", "", "123"]
    [[row]] = tokenizer.encode_rows([words], words=True)
    found = [word for word, sequence in zip(row.word_ids, row.sequence_ids, strict=True) if sequence == 0]
    assert sorted({word for word in found if word is not None}) == [0, 1, 2, 3, 5]
    assert found == sorted(found, key=lambda word: -1 if word is None else word)
    for number in (0, 1, 2, 3, 5):
        spans = [offset for offset, word in zip(row.offsets, row.word_ids, strict=True) if word == number]
        assert max(end for _, end in spans) == len(words[number])
        assert all(0 <= start <= end <= len(words[number]) for start, end in spans)


def test_pre_split_words_give_the_ids_of_the_library(folders: dict[str, Path]) -> None:
    words = ["Ada", "lives", "in", "Paris,"]
    for kind in ("wordpiece", "metaspace"):
        tokenizer = Tokenizer.from_folder(folders[kind])
        plain = Inner.from_file(str(folders[kind] / "tokenizer.json"))
        [[row]] = tokenizer.encode_rows([words], words=True)
        assert list(row.ids) == plain.encode(words, is_pretokenized=True).ids
    # Byte-level BPE marks a word by the space before it, which the library does not add between given words.
    tokenizer = Tokenizer.from_folder(folders["byte_level"])
    [[row]] = tokenizer.encode_rows([words], words=True)
    assert list(row.ids) == list(tokenizer.encode_rows([" ".join(words)])[0][0].ids)


# The call that transformers users know


def _reference(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    names = {"wordpiece": "[PAD]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)
    pad = names["wordpiece"] if tokenizer.convert_tokens_to_ids("[PAD]") is not None else "<pad>"
    tokenizer.pad_token = pad
    return tokenizer


CALLS: list[dict[str, Any]] = [
    {},
    {"padding": True},
    {"padding": "max_length", "max_length": 40, "truncation": True},
    {"truncation": True, "max_length": 8},
    {"truncation": True, "max_length": 9, "padding": True, "padding_side": "left"},
    {"truncation": "only_first", "max_length": 7},
    {"max_length": 7},
    {"padding": True, "pad_to_multiple_of": 8},
    {"add_special_tokens": False},
    {"return_offsets_mapping": True, "return_special_tokens_mask": True, "padding": True},
    {"truncation": True, "max_length": 12, "stride": 4, "return_overflowing_tokens": True},
]


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_calls_give_what_transformers_gives(folder: Path, options: dict[str, Any]) -> None:
    theirs, ours = _reference(folder), Tokenizer.from_folder(folder)
    expected = theirs(TEXTS, return_token_type_ids=True, **options)
    found = ours(TEXTS, return_token_type_ids=True, **options)
    assert set(found) == set(expected)
    for key in expected:
        assert [list(row) if isinstance(row, Sequence) else row for row in found[key]] == [
            list(row) if isinstance(row, Sequence) else row for row in expected[key]
        ], key
    for row in (0, 3, len(TEXTS) - 1):
        assert found.word_ids(row) == expected.word_ids(row)
        assert found.sequence_ids(row) == expected.sequence_ids(row)
        assert found.tokens(row) == expected.tokens(row)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncation": "only_second", "max_length": 40},
        {"truncation": True, "max_length": 21},
        {"truncation": True, "max_length": 20, "padding": True},
        {"truncation": "only_second", "max_length": 40, "stride": 3, "return_overflowing_tokens": True},
    ],
    ids=str,
)
def test_pair_calls_give_what_transformers_gives(folder: Path, options: dict[str, Any]) -> None:
    theirs, ours = _reference(folder), Tokenizer.from_folder(folder)
    first = ["Ada lives", "Where does Ada live?", "x", "The quick brown fox"]
    second = ["in Paris and writes programs for the Analytical Engine.", "Ada lives in Paris." * 6, "", "y" * 60]
    # In all windows but the first the library numbers the second text's segment 1, whatever the template
    # says.
    types = "return_overflowing_tokens" not in options or ours.token_to_id("[CLS]") == 2
    expected = theirs(first, second, return_token_type_ids=types, **options)
    found = ours(first, second, return_token_type_ids=types, **options)
    assert {
        key: [*map(list, rows)] if key != "overflow_to_sample_mapping" else rows for key, rows in found.items()
    } == {key: [*map(list, rows)] if key != "overflow_to_sample_mapping" else rows for key, rows in expected.items()}


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_decoding_gives_what_transformers_gives(folder: Path) -> None:
    theirs, ours = _reference(folder), Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = ours(text).input_ids
        for skip in (False, True):
            for clean in (False, True):
                options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": clean}
                assert ours.decode(ids, **options) == theirs.decode(ids, **options)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.tokenize(text) == theirs.tokenize(text)


def test_a_single_text_gives_flat_lists_and_a_batch_gives_rows(tokenizer: Tokenizer) -> None:
    one, many = tokenizer("Ada lives"), tokenizer(["Ada lives"])
    assert [one.input_ids] == many.input_ids
    assert one["attention_mask"] == [1] * len(one.input_ids)
    assert tokenizer.encode("Ada lives") == one.input_ids
    assert one.word_ids() == many.word_ids(0)


def test_tensors_are_rectangles_of_64_bit_integers(tokenizer: Tokenizer) -> None:
    encoded = tokenizer(["Ada", "Ada lives in Paris"], padding=True, return_tensors="pt")
    assert encoded.input_ids.dtype == torch.int64
    assert encoded.input_ids.shape == encoded.attention_mask.shape
    assert (encoded.input_ids[0][encoded.attention_mask[0] == 0] == tokenizer.pad_token_id).all()
    assert encoded.copy().to("meta").input_ids.device.type == "meta"
    assert encoded.word_ids(0)[-1] is None
    arrays = tokenizer(["Ada", "Ada lives in Paris"], padding=True, return_tensors="np")
    assert arrays.input_ids.tolist() == encoded.input_ids.tolist()
    with pytest.raises(TokenizerError):
        tokenizer(["Ada", "Ada lives in Paris"], return_tensors="pt")


def test_positions_count_leading_padding(tokenizer: Tokenizer) -> None:
    encoded = tokenizer(["Ada", "Ada lives in Paris"], padding=True, padding_side="left")
    at = encoded.char_to_token(0, 0)
    assert at is not None
    assert encoded.token_to_chars(0, at) == encoded.rows[0].offsets[1]
    assert encoded.token_to_chars(0, 0) is None
    assert encoded.word_to_tokens(0, 0)[0] == at
    assert len(encoded.word_ids(0)) == len(encoded.input_ids[0])


def test_unknown_options_are_refused_with_the_known_ones(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer("x", truncation="only_frist", max_length=4)
    assert "only_first" in str(caught.value)
    for options in ({"padding": "longst"}, {"padding": None}, {"return_tensors": "tf"}):
        with pytest.raises(TokenizerError):
            tokenizer(["x"], **options)


# Settings


@pytest.mark.parametrize(
    ("kind", "pad", "mask", "type_ids"),
    [("wordpiece", 0, "[MASK]", True), ("byte_level", 1, "<mask>", False), ("metaspace", 1, "<mask>", False)],
)
def test_special_tokens_are_found_without_any_settings(
    folders: dict[str, Path], kind: str, pad: int, mask: str, type_ids: bool
) -> None:
    tokenizer = Tokenizer.from_folder(folders[kind])
    assert tokenizer.pad_token_id == pad
    assert tokenizer.mask_token == mask
    assert tokenizer.mask_token_id == 4
    assert tokenizer.model_max_length == 512
    assert ("token_type_ids" in tokenizer("x")) is type_ids
    assert set(tokenizer.all_special_ids) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("stated", "expected"), [(512, 512), (512.0, 512), (int(1e30), None), (1e30, None), (None, None)]
)
def test_the_length_limit_is_read_from_the_settings(stated: Any, expected: int | None) -> None:
    files = _files(model_max_length=stated)
    assert Tokenizer.from_files(files).model_max_length == expected


@pytest.mark.parametrize("stated", [0, -5, 1.5, True, "512", [512]])
def test_an_impossible_length_limit_is_refused(stated: Any) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(_files(model_max_length=stated))
    assert caught.value.field == "model_max_length"


def test_an_impossible_side_is_refused_with_the_values_it_can_have() -> None:
    with pytest.raises(TokenizerError, match="did you mean 'left'") as caught:
        Tokenizer.from_files(_files(padding_side="lefft"))
    assert (caught.value.field, caught.value.found) == ("padding_side", "lefft")
    assert caught.value.details["expected"] == "'left' or 'right'"


def test_settings_that_list_tokens_win_over_the_token_map_and_both_over_custom() -> None:
    files = _files(pad_token={"content": "hello", "lstrip": False}, padding_side="left", added_tokens_decoder={})
    files["special_tokens_map.json"] = json.dumps({"pad_token": "world", "mask_token": "world"}).encode()
    tokenizer = Tokenizer.from_files(files)
    assert (tokenizer.pad_token, tokenizer.mask_token, tokenizer.cls_token) == ("hello", "world", "[CLS]")
    assert tokenizer(["hello", "hello world"], padding=True).input_ids[0][0] == tokenizer.pad_token_id
    files["tokenizer_config.json"] = json.dumps({"pad_token": "hello"}).encode()
    assert Tokenizer.from_files(files).pad_token == "world"


def test_a_special_token_that_the_vocabulary_lacks_is_none() -> None:
    tokenizer = Tokenizer.from_files(_files(pad_token="<absent>", mask_token="<absent>"))
    assert tokenizer.pad_token == "[PAD]"
    inner = Inner(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    bare = Tokenizer(inner)
    assert bare.pad_token_id is None
    assert bare.mask_token_id is None
    assert bare(["a", "a"]).input_ids == [[0], [0]]
    bare._inner.pre_tokenizer  # noqa: B018 - reading does not change it
    with pytest.raises(TokenizerError):
        bare(["a", ""], padding=True)


def test_padding_and_truncation_sections_never_act_and_are_kept(tmp_path: Path) -> None:
    inner = wordpiece()
    inner.enable_truncation(4)
    inner.enable_padding(length=32, pad_id=0, pad_token="[PAD]")
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer("Ada lives in Paris and writes").input_ids) > 4
    assert len(tokenizer("a").input_ids) < 32
    assert tokenizer.files()["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("stated", [{}, {"padding_side": "right", "truncation_side": "right"}])
def test_sections_say_which_side_where_settings_do_not(stated: dict[str, str]) -> None:
    inner = wordpiece()
    inner.enable_truncation(4, direction="left")
    inner.enable_padding(direction="left", pad_id=0, pad_token="[PAD]")
    files = {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": json.dumps(stated).encode()}
    made = Tokenizer.from_files(files)
    texts = ["Ada lives in Paris", "dog"]
    for tokenizer in (made, pickle.loads(pickle.dumps(made))):
        padded = tokenizer(texts, padding=True)
        assert 0 < padded.attention_mask[1].count(0) < len(padded.input_ids[0])
        cut = tokenizer(texts[0], max_length=5, truncation=True).input_ids
        whole = padded.input_ids[0]
        assert tokenizer.padding_side == ("right" if stated else "left")
        assert padded.attention_mask[1][0] == (1 if stated else 0)
        assert cut[1:-1] == (whole[1:4] if stated else whole[-4:-1])
        assert tokenizer(texts, padding=True, padding_side="right").attention_mask[1][0] == 1


@pytest.mark.parametrize(
    "section",
    [
        {
            "strategy": {"Fixed": 2**31},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        {
            "strategy": {"Fixed": -1},
            "direction": "Right",
            "pad_to_multiple_of": 0,
            "pad_id": -7,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        {"strategy": "nonsense"},
        {
            "strategy": "BatchLongest",
            "direction": "Left",
            "pad_to_multiple_of": 2**60,
            "pad_id": 2**31,
            "pad_type_id": 9,
            "pad_token": "x",
        },
    ],
)
def test_hostile_padding_sections_are_ignored(section: dict[str, Any]) -> None:
    definition = json.loads(wordpiece().to_str())
    definition["padding"] = section
    definition["truncation"] = {"max_length": 0, "stride": 99, "strategy": "LongestFirst", "direction": "Right"}
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(definition).encode()}, model_type="bert")
    expected = Tokenizer.from_files({"tokenizer.json": wordpiece().to_str().encode()}, model_type="bert")
    assert len(tokenizer("Ada lives").input_ids) == len(expected("Ada lives").input_ids)
    assert tokenizer.pad_token_id == 0


# What the caller is told


@pytest.mark.parametrize(
    ("texts", "where"),
    [
        ([None], "text 0"),
        (["x", 5], "text 1"),
        ([b"x"], "text 0"),
        (["x", ["a", "b"], "y"], ""),
        ([float("nan")], "text 0"),
    ],
)
def test_what_is_no_string_is_named_by_position(tokenizer: Tokenizer, texts: list[Any], where: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode_rows(texts)
    assert where in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "ok" * 50 + "\udc80"])
def test_a_lone_surrogate_is_located(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode_rows(["fine", text])
    assert caught.value.position == next(i for i, char in enumerate(text) if 0xD800 <= ord(char) < 0xE000)
    assert "text 1" in str(caught.value)
    with pytest.raises(TokenizerError):
        tokenizer(text)
    with pytest.raises(TokenizerError):
        tokenizer.token_to_id(text)


def test_a_lone_string_is_not_taken_for_a_batch(tokenizer: Tokenizer) -> None:
    for call in (
        lambda: tokenizer.encode_rows("abc"),
        lambda: tokenizer.encode_rows(["a"], "b"),
        lambda: tokenizer.encode_rows(["a", "b"], ["c"]),
        lambda: tokenizer.encode_rows(["abc"], words=True),
        lambda: tokenizer.encode_rows(["abc"], cut="second"),
        lambda: tokenizer.encode_rows(["abc"], max_tokens=0),
        lambda: tokenizer.encode_rows(["abc"], max_tokens=5, stride=-1),
    ):
        with pytest.raises(TokenizerError):
            call()


def test_nothing_gives_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_rows([]) == []
    assert tokenizer([]).input_ids == []
    assert tokenizer.batch_decode([]) == []


def test_ids_outside_the_vocabulary_are_refused_or_empty(tokenizer: Tokenizer) -> None:
    for ids in ([-1], [2**40], ["x"]):
        with pytest.raises((TokenizerError, ValueError)):
            tokenizer.decode(ids)
    assert tokenizer.convert_ids_to_tokens([10**6]) == [""]
    assert tokenizer.token_to_id("certainly absent") is None
    assert tokenizer.convert_tokens_to_ids("certainly absent") == tokenizer.unk_token_id


def test_a_tokenizer_larger_than_the_embedding_is_refused_by_name(tokenizer: Tokenizer) -> None:
    rows = tokenizer.vocab_size
    tokenizer.check_fits(rows)
    with pytest.raises(TokenizerError) as caught:
        tokenizer.check_fits(rows - 3)
    assert [i for i, _ in caught.value.worst] == [rows - 1, rows - 2, rows - 3]
    assert caught.value.expected == rows - 3


def test_the_highest_id_is_found_without_the_table_where_ids_are_places(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer._highest_id() == max(tokenizer.get_vocab().values())
    few = len(tokenizer.get_vocab()) * 2
    assert tokenizer.few_tokens(few) is not None

    def table(_: Tokenizer) -> dict[str, int]:
        raise AssertionError("the whole table was made")

    monkeypatch.setattr(Tokenizer, "get_vocab", table)
    tokenizer.check_fits(tokenizer.vocab_size)
    assert tokenizer.few_tokens(tokenizer._inner.get_vocab_size(with_added_tokens=False)) is None


def test_an_added_token_behind_the_pieces_is_the_highest() -> None:
    definition = Inner.from_str(metaspace().to_str())
    definition.add_special_tokens(["<late>"])
    tokenizer = Tokenizer.from_files({"tokenizer.json": definition.to_str().encode()}, model_type="xlm-roberta")
    assert tokenizer._highest_id() == tokenizer.token_to_id("<late>") == max(tokenizer.get_vocab().values())


def test_ids_of_the_template_must_fit_as_well() -> None:
    definition = json.loads(wordpiece().to_str())
    definition["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [100_000]
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(definition).encode()}, model_type="bert")
    with pytest.raises(TokenizerError) as caught:
        tokenizer.check_fits(300)
    assert caught.value.worst[0][0] == 100_000


# Damaged and hostile files


def _files(**config: Any) -> dict[str, bytes]:
    inner = wordpiece()
    inner.add_tokens(["hello", "world"])
    return {
        "tokenizer.json": inner.to_str().encode(),
        "tokenizer_config.json": json.dumps({**config, "tokenizer_class": "BertTokenizer"}).encode(),
    }


def test_a_truncated_definition_is_refused_wherever_it_ends() -> None:
    data = Inner(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str().encode()
    for end in range(len(data)):
        with pytest.raises(TokenizerError):
            Tokenizer.from_files({"tokenizer.json": data[:end]})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["model"]["vocab"].update(bad=-1),
        lambda d: d["model"]["vocab"].update(bad=2**32),
        lambda d: d["model"]["vocab"].update(bad="7"),
        lambda d: d["added_tokens"][0].update(id=-1),
        lambda d: d["added_tokens"].append({"id": 1}),
        lambda d: d.update(model=None),
        lambda d: d.update(model={"type": "Nonsense"}),
        lambda d: d.update(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
        lambda d: d.update(version="9.9"),
        lambda d: d.update(post_processor={"type": "TemplateProcessing"}),
    ],
)
def test_impossible_definitions_are_refused(change: Any) -> None:
    definition = json.loads(wordpiece().to_str())
    change(definition)
    with pytest.raises(TokenizerError):
        Tokenizer.from_files({"tokenizer.json": json.dumps(definition).encode()}, folder="there")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe{}", b"{" * 100_000, b'{"a": NaN}', b"\x00" * 100])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_bytes_that_are_no_settings_are_refused_with_the_file_named(name: str, data: bytes) -> None:
    if name != "tokenizer.json" and data == b'{"a": NaN}':
        pytest.skip("an unknown entry that is never read")
    files = {**_files(), name: data}
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(files, folder="there")
    assert f"there/{name}" in str(caught.value)


def test_huge_ids_are_caught_before_a_model_meets_them() -> None:
    definition = json.loads(wordpiece().to_str())
    definition["model"]["vocab"]["bad"] = 2**31
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(definition).encode()}, model_type="bert")
    with pytest.raises(TokenizerError) as caught:
        tokenizer.check_fits(300)
    assert caught.value.worst[0] == (2**31, "bad")


def test_a_normalizer_that_multiplies_text_is_refused_at_load() -> None:
    inner = wordpiece()
    inner.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 3)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(inner)
    assert caught.value.found == 1000**3


@pytest.mark.filterwarnings("ignore")
def test_a_panic_in_the_library_is_an_ordinary_error(capfd: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    inner = Inner(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(inner)
    with pytest.raises(TokenizerError):
        tokenizer.encode_rows(["a" * 60 + "b"])
    capfd.readouterr()


def test_an_empty_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer.json" in str(caught.value)
    with pytest.raises(TokenizerError):
        Tokenizer.from_folder(tmp_path / "absent")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "regular file" in str(caught.value)


# Frozen


def test_a_loaded_tokenizer_refuses_changes(tokenizer: Tokenizer) -> None:
    with pytest.raises(AttributeError):
        tokenizer.anything = 1
    for name, value in (("padding_side", "up"), ("pad_token", "not a token"), ("model_max_length", 0)):
        before = getattr(tokenizer, name)
        with pytest.raises(ValueError, match=name):
            setattr(tokenizer, name, value)
        assert getattr(tokenizer, name) == before


def test_settings_that_are_set_are_used_and_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.padding_side = changed.truncation_side = "left"
    changed.model_max_length = 6
    changed.pad_token = changed.mask_token
    assert tokenizer.padding_side == tokenizer.truncation_side == "right"
    changed.save_pretrained(tmp_path)
    for found in (changed, Tokenizer.from_folder(tmp_path), pickle.loads(pickle.dumps(changed))):
        assert found.pad_token_id == tokenizer.mask_token_id
        encoded = found(["Ada", "Ada lives in Paris and writes programs"], padding=True, truncation=True)
        assert [len(ids) for ids in encoded["input_ids"]] == [6, 6]
        assert encoded["input_ids"][0][0] == tokenizer.mask_token_id
        assert encoded["input_ids"][1][-2] == tokenizer("programs")["input_ids"][-2]


@pytest.mark.filterwarnings("ignore:is_split_into_words")
def test_a_column_of_words_is_a_batch(tokenizer: Tokenizer) -> None:
    words = [["Ada", "lives"], ["in"]]
    # As a column of `datasets`: a sequence that is no list.
    column = UserList(words)
    found = tokenizer(column, is_split_into_words=True)
    assert found.data == tokenizer(words, is_split_into_words=True).data


def test_copies_through_pickle_are_equal(tokenizer: Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again(TEXTS).data == tokenizer(TEXTS).data
    assert again.files() == tokenizer.files()
    assert again.special_tokens == tokenizer.special_tokens
    assert again.model_max_length == tokenizer.model_max_length


def test_eight_threads_get_the_same_answers(tokenizer: Tokenizer) -> None:
    calls = [
        lambda: tokenizer(TEXTS, padding=True, truncation=True, max_length=17).data,
        lambda: tokenizer(TEXTS).data,
        lambda: tokenizer.encode_rows(TEXTS, max_tokens=12, stride=4),
        lambda: tokenizer.encode_rows(TEXTS[:5], offsets=False),
        lambda: tokenizer(TEXTS[:3], padding="max_length", max_length=40, truncation=True).data,
        lambda: tokenizer.batch_decode(tokenizer(TEXTS[:6]).input_ids),
    ]
    expected = [call() for call in calls]
    faults: list[BaseException | str] = []

    def work(seed: int) -> None:
        try:
            for step in range(60):
                which = (seed + step) % len(calls)
                if calls[which]() != expected[which]:
                    faults.append(f"call {which} changed")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


# Files


def test_files_are_kept_byte_for_byte_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in _files(name_or_path="kept as it is, \u00e9").items():
        (source / name).write_bytes(b"\n" + data + b"\n\n")
    (source / "vocab.txt").write_bytes(b"any bytes \xff at all")
    (source / "model.safetensors").write_bytes(b"weights")
    tokenizer = Tokenizer.from_folder(source)
    expected = {p.name: p.read_bytes() for p in source.iterdir() if p.name in TOKENIZER_FILES}
    assert tokenizer.files() == expected
    # What happens to the folder afterwards does not matter.
    (source / "tokenizer.json").write_bytes(b"changed")
    written = tokenizer.save_pretrained(tmp_path / "out")
    assert {Path(p).name for p in written} == set(expected)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == expected


def test_saving_again_over_the_source_is_safe(tmp_path: Path) -> None:
    for name, data in _files().items():
        (tmp_path / name).write_bytes(data)
    tokenizer = Tokenizer.from_folder(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_folder(tmp_path)(TEXTS).data == tokenizer(TEXTS).data


def test_every_kind_is_loaded_from_a_local_name(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.name_or_path == str(folder)
    assert len(tokenizer) == tokenizer.vocab_size == len(tokenizer.get_vocab())
    assert "vocab_size" in repr(tokenizer)


def test_kinds_are_as_different_as_the_tests_assume() -> None:
    assert set(KINDS) == {"wordpiece", "byte_level", "metaspace"}
    assert type(byte_level().model).__name__ == "BPE"


def test_a_tokenizer_is_found_where_a_folder_keeps_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """Below a folder of modules, at an adapter's base, in a subfolder; else the message names where one is."""
    plain = folders["wordpiece"]
    place = tmp_path / "sentences with spaces é"
    shutil.copytree(plain, place / "0_Transformer")
    (place / "0_Transformer" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        TokenizerError, match="the folder '0_Transformer' in it has one: pass subfolder='0_Transformer'"
    ):
        Tokenizer.from_pretrained(place)
    (place / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]'
    )
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(place)}))
    expected = Tokenizer.from_folder(plain).encode("the dog")
    for name, how in ((place, {}), (tmp_path / "adapter", {}), (place, {"subfolder": "0_Transformer"})):
        assert Tokenizer.from_pretrained(name, **how).encode("the dog") == expected
    with pytest.raises(HubError, match="elsewhere"):
        Tokenizer.from_pretrained(place, subfolder="elsewhere")
