"""What the torture rig found in tokenizer files: refusals without a name, and memory taken on a file's word."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import FlodlError
from flodl_hf import load
from flodl_hf.errors import PredictError, TokenizerError
from flodl_hf.tokenization.guard import check_definition
from flodl_hf.tokenization.tokenizer import Tokenizer
from tests.torture.checkpoints import checkpoint, write_files
from tests.torture.own_ids import library_ids
from tests.torture.vocabularies import SORTS, plainly

HEAD = "sequence_classification"


def folder_of(tmp_path: Path, sort: str = "wordpiece", **files: bytes | None) -> Path:
    """Return a checkpoint with some files replaced (``tokenizer_json=...``) or left out (None)."""
    made = dict(checkpoint(SORTS[sort], HEAD, 1, sort))
    for name, data in files.items():
        stem, _, end = name.rpartition("_")
        made.pop(f"{stem}.{end}", None)
        if data is not None:
            made[f"{stem}.{end}"] = data
    write_files(tmp_path / "model", made)
    return tmp_path / "model"


def definition(change: Callable[[dict[str, Any]], object], sort: str = "wordpiece") -> bytes:
    value = json.loads(checkpoint(SORTS[sort], HEAD, 1, sort)["tokenizer.json"])
    change(value)
    return json.dumps(value).encode()


def precompiled(size: int) -> dict[str, str]:
    table = size.to_bytes(4, "little") + bytes(40)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


@pytest.mark.parametrize("table", ["AA==", "AAA=", "AAAA"])
def test_a_table_without_a_size_is_refused_before_the_library_fails_over_it(table: str) -> None:
    data = definition(lambda d: d.update(normalizer={"type": "Precompiled", "precompiled_charsmap": table}))
    with pytest.raises(TokenizerError, match=r"precompiled_charsmap .* expected a whole table"):
        check_definition(data, "tokenizer.json")


@pytest.mark.parametrize("hidden", [False, True])
def test_a_table_that_announces_more_than_it_has_is_refused_before_memory_is_taken(
    tmp_path: Path, hidden: bool
) -> None:
    """The library would take what is announced, and end the process where there is not so much."""
    data = definition(lambda d: d.update(normalizer={"type": "Sequence", "normalizers": [precompiled(2**32 - 8)]}))
    if hidden:
        data = data.replace(b'"precompiled_charsmap"', b'"precompiled_char\\u0073map"')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: precompiled_charsmap announces .* expected a whole"):
        check_definition(data, "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"announces a trie of 4,294,967,288 bytes"):
        load(folder_of(tmp_path, tokenizer_json=data))


def test_a_model_without_its_unknown_token_is_refused_at_load(tmp_path: Path) -> None:
    data = definition(lambda d: d["model"].update(unk_token="nobody"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: encoding: .*Missing .*expected"):
        load(folder_of(tmp_path, tokenizer_json=data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["model"]["vocab"].update(zz=10**6), "tokens of tokenizer.json have ids"),
        (lambda d: d["added_tokens"].pop(), ""),
        (
            lambda d: d.update(
                normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
            ),
            "can turn one character into 1000",
        ),
        (
            lambda d: d["post_processor"]["special_tokens"]["[CLS]"].update(ids=[2] * 100, tokens=["[CLS]"] * 100),
            "special tokens around two texts",
        ),
    ],
)
def test_what_a_definition_holds_is_refused_by_its_file(tmp_path: Path, change: Any, words: str) -> None:
    folder = folder_of(tmp_path, tokenizer_json=definition(change))
    if not words:
        assert load(folder).tokenizer is not None
        return
    with pytest.raises(TokenizerError, match=words) as caught:
        load(folder)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("added_tokens_json", b'{"new": 9999}'),
        ("added_tokens_json", b'{"new": "x"}'),
        ("vocab_txt", b"[PAD]\n[PAD]\n"),
        ("vocab_txt", b"[PAD]\n[UNK]\n"),
        ("vocab_txt", b"\xff"),
        ("tokenizer_config_json", b'{"model_max_length": "' + b"x" * 9_000 + b'"}'),
        ("tokenizer_config_json", b"{"),
    ],
)
def test_vocabulary_files_are_refused_by_name_with_what_is_expected(tmp_path: Path, file: str, data: bytes) -> None:
    folder = folder_of(tmp_path, "wordpiece", **{"tokenizer_json": None, file: data})
    with pytest.raises(TokenizerError, match="expect") as caught:
        load(folder)
    assert file.replace("_txt", ".txt").replace("_json", ".json") in str(caught.value)
    assert len(str(caught.value)) < 1_000


def test_a_vocabulary_that_was_cut_is_told(tmp_path: Path) -> None:
    lines = checkpoint("bert", HEAD, 1, "wordpiece")["vocab.txt"].splitlines(keepends=True)
    model = load(folder_of(tmp_path, tokenizer_json=None, vocab_txt=b"".join(lines[:30])))
    assert model.load_report is not None
    assert any("vocab.txt: has 30 tokens, and the embedding" in note for note in model.load_report.notes)
    assert not any("embedding" in note for note in load(folder_of(tmp_path / "whole")).load_report.notes)  # type: ignore[union-attr]


@pytest.mark.parametrize("sort", SORTS)
def test_the_rigs_own_reading_of_vocabulary_files_is_the_librarys(tmp_path: Path, sort: str) -> None:
    made = checkpoint(SORTS[sort], HEAD, 1, sort)
    texts = ["the cat sat", "zzz, a good film!"]
    expected = library_ids(made["tokenizer.json"].decode(), texts)
    assert library_ids(plainly(sort, made), texts) == expected
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, sort, tokenizer_json=None))
    assert [list(tokenizer(text)["input_ids"]) for text in texts] == expected


def test_indices_outside_of_the_tables_are_told_by_name(tmp_path: Path) -> None:
    model: Any = load(folder_of(tmp_path))
    ids = torch.tensor([[2, 5, 3]])
    for given, words in (
        ({"input_ids": torch.tensor([[2, 999, 3]])}, "input_ids contains 999, expected 0 to"),
        ({"input_ids": torch.tensor([[2, -1, 3]])}, "input_ids contains -1"),
        ({"input_ids": ids, "token_type_ids": torch.full_like(ids, 7)}, "token_type_ids contains 7"),
        ({"input_ids": ids, "position_ids": torch.full_like(ids, 99)}, "position_ids contains 99"),
        ({"input_ids": torch.full((1, 50), 5)}, "a row has 50 tokens, and the table of positions is for 40"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "with a token in each row"),
    ):
        with pytest.raises(PredictError, match=words) as caught:
            model(**given)
        assert isinstance(caught.value, FlodlError)
    assert model(input_ids=ids)[0].shape == (1, 3)
