"""What transformers makes of a tokenizer's settings files and of its calls, or a warning where this package does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from flodl_hf.errors import TokenizerError
from flodl_hf.inference.inputs import encode
from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import byte_level, wordpiece

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]
TEXT, PAIR = "Ada lives in Paris and writes programs", "the dog"


def vocab_txt() -> bytes:
    vocab = wordpiece().get_vocab()
    return "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)).encode()


def bpe_files() -> dict[str, bytes]:
    model = json.loads(byte_level().to_str())["model"]
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    return {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": b"#version: 0.2\n" + merges.encode()}


# files and family of a folder
KINDS: dict[str, tuple[Callable[[], dict[str, bytes]], str]] = {
    "bert": (lambda: {"tokenizer.json": wordpiece().to_str().encode()}, "bert"),
    "bert, vocab.txt": (lambda: {"vocab.txt": vocab_txt()}, "bert"),
    "distilbert": (lambda: {"tokenizer.json": wordpiece().to_str().encode()}, "distilbert"),
    "roberta": (lambda: {"tokenizer.json": byte_level().to_str().encode()}, "roberta"),
    "roberta, merges": (bpe_files, "roberta"),
}
CLASSES = {"bert": "BertTokenizer", "distilbert": "DistilBertTokenizer", "roberta": "RobertaTokenizer"}


def both(folder: Path, kind: str, others: dict[str, Any] | None = None, **config: Any) -> tuple[Any, Tokenizer]:
    """Return transformers' tokenizer and ours of a folder with these settings; None leaves a setting out."""
    from transformers import AutoTokenizer

    make, family = KINDS[kind]
    for name, data in make().items():
        (folder / name).write_bytes(data)
    for name, value in (others or {}).items():
        (folder / name).write_text(json.dumps(value))
    stated = {"tokenizer_class": CLASSES[family], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)


# A method of an encoding, with its arguments.
WAYS: list[tuple[str, tuple[int, ...], dict[str, int]]] = [
    *((name, (5,), {}) for name in ("char_to_token", "char_to_word")),
    *((name, (0, 5), {}) for name in ("char_to_token", "char_to_word")),
    *((name, (0, 5, 1), {}) for name in ("char_to_token", "char_to_word")),
    *((name, (5,), {"sequence_index": 1}) for name in ("char_to_token", "char_to_word")),
    *((name, (place,), {}) for name in ("token_to_chars", "token_to_word", "token_to_sequence") for place in (2, 0)),
    *((name, (0, 2), {}) for name in ("token_to_chars", "token_to_word", "token_to_sequence")),
    *((name, given, {}) for name in ("word_to_tokens", "word_to_chars") for given in ((1,), (0, 1), (0, 1, 1))),
    ("word_to_tokens", (1,), {"sequence_index": 1}),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_from_a_token_to_its_text_takes_the_same_arguments(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, kind)
    for padding in (
        {},
        {"padding": "max_length", "max_length": 60},
        {"padding": "max_length", "max_length": 60, "padding_side": "left"},
    ):
        a, b = theirs(TEXT, PAIR, **padding), ours(TEXT, PAIR, **padding)
        for name, given, named in WAYS:
            expected = getattr(a, name)(*given, **named)
            expected = tuple(expected) if isinstance(expected, tuple) else expected
            assert getattr(b, name)(*given, **named) == expected, (name, given, named, padding)
    with pytest.raises(IndexError):
        ours(TEXT).token_to_chars(500)
    nothing = theirs("", add_special_tokens=False), ours("", add_special_tokens=False)
    for name in ("word_ids", "sequence_ids", "tokens"):
        assert [getattr(found, name)() for found in nothing] == [[], []], name


# A result of a tokenizer that both libraries have.
USES: dict[str, Callable[[Any], Any]] = {
    "encode, tensor": lambda t: t.encode(TEXT, return_tensors="pt"),
    "encode, pair": lambda t: t.encode(TEXT, PAIR, return_tensors="np", truncation=True, max_length=9),
    "encode, words only": lambda t: t.encode(TEXT, None, False),
    "decode a batch": lambda t: t.decode(t([TEXT, PAIR])["input_ids"], skip_special_tokens=True),
    "decode a tensor": lambda t: t.decode(t([TEXT, PAIR], padding=True, return_tensors="pt")["input_ids"]),
    "decode one": lambda t: t.decode(t(PAIR, return_tensors="pt")["input_ids"][0]),
    "targets": lambda t: dict(t([TEXT, PAIR], text_target=[PAIR, TEXT], padding=True)),
    "targets alone": lambda t: dict(t(text_target=TEXT)),
    "length": lambda t: [dict(t(given, return_length=True, padding=True)) for given in (TEXT, [TEXT, PAIR])],
    "mask": lambda t: t.get_special_tokens_mask(t(TEXT, PAIR)["input_ids"], already_has_special_tokens=True),
    "names": lambda t: (t.model_input_names, t.pad_token_type_id, t.truncation_side, t.padding_side),
    "special": lambda t: (t.special_tokens_map, t.get_added_vocab(), t.vocab),
    "decoder": lambda t: {number: str(token) for number, token in t.added_tokens_decoder.items()},
    "pop": lambda t: removed(t(TEXT, return_offsets_mapping=True)),
    "rows": lambda t: [(e.ids, e.tokens, e.attention_mask, e.special_tokens_mask, e.word_ids, e.offsets, e.type_ids)
                       for e in t([TEXT, PAIR], padding=True)[0:2]],
    "sequences": lambda t: (t(TEXT).n_sequences, t([TEXT], [PAIR]).n_sequences, len(t([TEXT, PAIR]).encodings)),
    "tensors": lambda t: dict(t(TEXT).convert_to_tensors("pt", prepend_batch_axis=True)),
    **{
        f"pad {number}": lambda t, given=given, options=options: dict(t.pad(given(t), **options))
        for number, (given, options) in enumerate([
            (lambda t: [t(TEXT), t(PAIR)], {}),
            (lambda t: [{**t(TEXT), "labels": 1.5}, {**t(PAIR), "labels": 2.5}], {"return_tensors": "pt"}),
            (lambda t: t([TEXT, PAIR]), {"padding_side": "left", "pad_to_multiple_of": 8}),
            (lambda t: t(PAIR, return_special_tokens_mask=True), {"padding": "max_length", "max_length": 20}),
            (lambda t: [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3])}], {}),
            (lambda t: {"input_ids": [np.array([1, 2]), np.array([3])]}, {"return_attention_mask": False}),
            (lambda t: {"input_ids": []}, {}),
            (lambda t: [t(TEXT), t(PAIR)], {"padding": False}),
        ])
    },
}  # fmt: skip


def removed(encoded: Any) -> Any:
    """Return an encoding after the changes that users make before a call of a model."""
    offsets = encoded.pop("offset_mapping")
    encoded["labels"] = [1]
    encoded.update(more=[2])
    del encoded["attention_mask"]
    return offsets, dict(encoded), encoded.word_ids(), encoded.labels, "more" in encoded


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_used_as_in_transformers(kind: str, use: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, kind)
    found, expected = USES[use](ours), USES[use](theirs)
    assert repr(found) == repr(expected) or found == expected  # values and types; dictionaries in any order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"add_prefix_space": True}, {"add_prefix_space": False}, {"do_lower_case": True}, {"do_lower_case": False},
        {"model_max_length": 6}, {"padding_side": "left"}, {"truncation_side": "left", "model_max_length": 7},
    ],
    ids=str,
)  # fmt: skip
def test_settings_given_at_loading_replace_those_of_the_folder(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    both(tmp_path, kind)
    theirs, ours = (loader.from_pretrained(tmp_path, **settings) for loader in (AutoTokenizer, Tokenizer))
    for options in ({}, {"padding": True}, {"truncation": "model_max_length" in settings}):
        assert dict(ours([TEXT, PAIR], **options)) == dict(theirs([TEXT, PAIR], **options)), options


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_collators_of_transformers_take_the_tokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        set_seed,
    )  # fmt: skip

    theirs, ours = both(tmp_path, kind)

    def collated(tokenizer: Any, make: Callable[[Any], Any], labels: Callable[[list[int]], Any] | None) -> Any:
        rows = [dict(tokenizer(text, return_special_tokens_mask=labels is None)) for text in (TEXT, PAIR)]
        if labels is not None:
            rows = [{**row, "labels": labels(row["input_ids"])} for row in rows]
        set_seed(3)
        return dict(make(tokenizer)(rows))

    cases: list[tuple[Callable[[Any], Any], Callable[[list[int]], Any] | None]] = [
        (DataCollatorWithPadding, len),
        (DataCollatorForTokenClassification, lambda ids: [1] * len(ids)),
        (DataCollatorForLanguageModeling, None),
        (lambda tokenizer: DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8), len),
    ]
    for make, labels in cases:
        torch.testing.assert_close(collated(ours, make, labels), collated(theirs, make, labels))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_second_text_is_none(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, kind)
    for given in (("a", ""), (["a", "b"], ["", "c"]), ("", ""), ("", "b")):
        assert dict(ours(*given)) == dict(theirs(*given)), given


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_begin_at_the_side_that_is_kept(kind: str, side: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, kind, truncation_side=side)
    for length in (6, 8, 11, 40):
        for overflowing in (False, True):
            options = {"max_length": length, "truncation": True, "stride": 2, "return_overflowing_tokens": overflowing}
            assert ours(TEXT, **options).input_ids == theirs(TEXT, **options)["input_ids"], options


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_pair_is_cut_as_by_pipelines_and_cross_encoders(kind: str, side: str, tmp_path: Path) -> None:
    """The longer text gives way, whatever lengths the two have; a text alone at its end."""
    theirs, ours = both(tmp_path, kind, truncation_side=side)
    some = st.lists(st.sampled_from(["Ada", "lives", "in", "Köln", "12,345", "😀", "unbelievably"]), max_size=30)

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(st.lists(st.tuples(some, some), min_size=1, max_size=3), st.integers(4, 60), st.booleans())
    def check(pairs: list[tuple[list[str], list[str]]], most: int, alone: bool) -> None:
        firsts, seconds = ([" ".join(words) for words in texts] for texts in zip(*pairs, strict=True))
        others = None if alone else seconds
        table = encode(ours, firsts, others, max_tokens=most, truncate=True).table
        expected = theirs(firsts, others, truncation=True, max_length=most)["input_ids"]
        found = np.split(table.ids, np.cumsum(table.lengths)[:-1])
        assert {int(owner): row.tolist() for owner, row in zip(table.owners, found, strict=True)} == dict(
            enumerate(expected)
        )

    check()


@pytest.mark.parametrize("stated", [{}, {"padding_side": "right"}, {"truncation_side": "right"}])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "," not in kind])
def test_sections_of_a_definition_say_the_same_sides(kind: str, stated: Any, tmp_path: Path) -> None:
    make, _ = KINDS[kind]
    definition = json.loads(make()["tokenizer.json"])
    token = "<pad>" if kind == "roberta" else "[PAD]"
    padding = {
        "strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_type_id": 0,
        "pad_id": definition["model"]["vocab"][token], "pad_token": token,
    }  # fmt: skip
    cut = {"direction": "Left", "max_length": 6, "strategy": "LongestFirst", "stride": 0}
    theirs, ours = both(
        tmp_path, kind, {"tokenizer.json": definition | {"padding": padding, "truncation": cut}}, **stated
    )
    for options in ({}, {"max_length": 5, "truncation": True}, {"max_length": 20, "padding": "max_length"}):
        options = {"padding": True} | options
        assert ours([TEXT, "a"], **options).input_ids == theirs([TEXT, "a"], **options)["input_ids"], options
        assert (
            ours([TEXT, "a"], ["b", PAIR], **options).input_ids
            == theirs([TEXT, "a"], ["b", PAIR], **options)["input_ids"]
        )


SPECIAL = {
    "content": "[E1]",
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
PLAIN = SPECIAL | {"content": "quux", "special": False, "normalized": True}
# settings that name tokens beside tokenizer.json: of tokenizer_config.json, and of other files
NAMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"additional_special_tokens": ["[E1]", "dog"]}, {}),
    ({"extra_special_tokens": ["[E1]"]}, {}),
    ({"a_token": "[E1]", "b_token": {"__type": "AddedToken"} | SPECIAL | {"lstrip": True}}, {}),
    ({"added_tokens_decoder": {"420": PLAIN, "421": SPECIAL}}, {}),
    ({"added_tokens_decoder": {"421": SPECIAL}, "additional_special_tokens": ["quux", "[E1]"]}, {}),
    ({}, {"added_tokens.json": {"[E1]": 300, "quux": 301}}),
    ({}, {"special_tokens_map.json": {"additional_special_tokens": ["[E1]"]}}),
    ({"split_special_tokens": True}, {}),
    ({"max_len": 7}, {}),
    ({"max_len": 7, "model_max_length": 9}, {}),
    ({"model_input_names": ["input_ids", "attention_mask"]}, {}),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ({"tokenizer_class": "TokenizersBackend"}, {}),
    ({"tokenizer_class": "BertTokenizerFast"}, {}),
    ({"tokenizer_class": "DistilBertTokenizer"}, {}),
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "," not in kind])
@pytest.mark.parametrize(("config", "others"), NAMED)
def test_settings_files_say_the_same(kind: str, config: Any, others: Any, tmp_path: Path) -> None:
    if kind == "roberta" and config.get("tokenizer_class", "").startswith(("Bert", "DistilBert")):
        pytest.skip("transformers fails on that class with this vocabulary")
    theirs, ours = both(tmp_path, kind, others, **config)
    family = KINDS[kind][1]
    for text in ("the [E1] dog quux doggy", "is [MASK] good", "is <mask>good", TEXT):
        a, b = theirs(text, "b [E1]"), ours(text, "b [E1]")
        assert dict(b) == dict(a), text
    assert len(ours) == len(theirs)
    if "max_len" in config:
        assert ours.model_max_length == theirs.model_max_length
    again = Tokenizer.from_files(ours.files(), model_type=family)
    assert dict(again("the [E1] dog quux", "b")) == dict(ours("the [E1] dog quux", "b"))


ONE, OTHER = "a", "e"  # in every vocabulary that is learned from English


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "roberta" not in kind])
@pytest.mark.parametrize("role", ["pad_token", "mask_token", "bos_token"])
@pytest.mark.parametrize("listed", [False, True])
def test_of_two_files_the_older_holds_unless_the_newer_lists_tokens(
    kind: str, role: str, listed: bool, tmp_path: Path
) -> None:
    stated = {role: ONE} | ({"added_tokens_decoder": {}} if listed else {})
    theirs, ours = both(tmp_path, kind, {"special_tokens_map.json": {role: OTHER}}, **stated)
    assert getattr(ours, role) == getattr(theirs, role) == (ONE if listed else OTHER)
    assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_id")
    texts = ["it is our dog", "o"]  # without either
    assert ours(texts, padding=True).input_ids == theirs(texts, padding=True)["input_ids"]
    if "," not in kind:
        which = "former" if listed else "latter"
        expected = (
            f"{role}: '{ONE}' in tokenizer_config.json and '{OTHER}' in special_tokens_map.json; the {which} is used"
        )
        assert any(note.startswith(expected) for note in ours.notes), ours.notes


@pytest.mark.parametrize("kind", ["bert, vocab.txt", "roberta, merges"])
def test_further_special_tokens_join_vocabulary_files(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, kind, additional_special_tokens=["[E1]", "dog"])
    for text in ("the [E1] dog quux doggy", TEXT):
        assert dict(ours(text, "b [E1]")) == dict(theirs(text, "b [E1]"))


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_taken_apart_on_demand(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, kind)
    for text in ("a [MASK] <mask> b", "[CLS] </s>"):
        whole = ours(text).input_ids
        assert ours(text, split_special_tokens=True).input_ids == theirs(text, split_special_tokens=True)["input_ids"]
        assert ours(text).input_ids == ours(text, split_special_tokens=False).input_ids == whole


def test_a_token_beyond_the_models_rows_stays_text_and_is_told(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": wordpiece().to_str().encode(),
        "tokenizer_config.json": b'{"extra_special_tokens": ["[E1]"]}',
    }
    size = wordpiece().get_vocab_size()
    tokenizer = Tokenizer.from_files(files, model_type="bert", config={"model_type": "bert", "vocab_size": size})
    assert len(tokenizer) == size
    assert "has no row for its id" in tokenizer.notes[0]
    wider = Tokenizer.from_files(files, model_type="bert", config={"model_type": "bert", "vocab_size": size + 1})
    assert wider("[E1]", add_special_tokens=False).input_ids == [size]
    assert f"added as id {size}" in wider.notes[0]


@pytest.mark.filterwarnings("default")
def test_where_the_template_contradicts_the_settings_there_is_a_warning() -> None:
    files = {"tokenizer.json": wordpiece().to_str().encode(), "special_tokens_map.json": b'{"cls_token": "[BOS]"}'}
    with pytest.warns(UserWarning, match=r"cls_token is '\[BOS\]'.*template of tokenizer.json is used"):
        tokenizer = Tokenizer.from_files(files, folder="there", model_type="bert")
    assert tokenizer("Ada").tokens()[0] == "[CLS]"


@pytest.mark.filterwarnings("default")
def test_words_of_byte_level_bpe_are_joined_with_a_warning(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, "roberta")
    words = ["Ada", "lives", "in", "Paris"]
    with pytest.warns(UserWarning, match="transformers glues them together"):
        found = ours(words, is_split_into_words=True)
    assert found.input_ids == theirs(" ".join(words))["input_ids"]
    assert [found.word_to_chars(i) for i in range(4)] == [(0, len(word)) for word in words]


@pytest.mark.parametrize("options", [
    {"truncation": True, "padding": True, "max_length": 12}, {"truncation": True, "padding": "max_length", "max_length": 12},
    {"truncation": True, "padding": True, "max_length": 16}, {"padding": "max_length", "max_length": 12}, {"padding": True},
    {"truncation": True, "padding": True}, {"truncation": True, "max_length": 12},
], ids=str)  # fmt: skip
def test_a_limit_that_is_no_multiple_raises_as_in_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, "bert", model_max_length=20)
    try:
        expected = theirs([TEXT, "a"], pad_to_multiple_of=8, **options)["input_ids"]
    except ValueError:
        with pytest.raises(ValueError, match="pad_to_multiple_of") as caught:
            ours([TEXT, "a"], pad_to_multiple_of=8, **options)
        assert isinstance(caught.value, TokenizerError)
    else:
        assert ours([TEXT, "a"], pad_to_multiple_of=8, **options).input_ids == expected


@pytest.mark.filterwarnings("error")
def test_a_text_beyond_the_limit_is_reported_once(tmp_path: Path) -> None:
    _, ours = both(tmp_path, "bert", model_max_length=8)
    options: dict[str, Any]
    for options in ({"truncation": True}, {"max_length": 40, "truncation": False}, {"padding": "max_length"}):
        ours(TEXT, **options)
    ours("Ada")
    with pytest.warns(UserWarning, match=r"tokens, and the model's limit is 8"):
        ours(TEXT)
    ours(TEXT)
    ours.encode_rows([TEXT])
