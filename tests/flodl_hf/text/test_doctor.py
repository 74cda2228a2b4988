"""Each place where settings contradict tokenizer.json is named, with the one that holds; a whole folder has none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import byte_level, wordpiece

WORDPIECE: Callable[[], Any] = wordpiece
TEXT = "Café ÜBER straße 東京 Ada [MASK] ☃ 12x"


def padded() -> Any:
    inner = wordpiece()
    inner.enable_padding(pad_token="[PAD]", pad_id=0)
    return inner


BERT = {
    "do_lower_case": True,
    "tokenize_chinese_chars": True,
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
}
# tokenizer.json, its family, tokenizer_config.json, config.json, what is said
CASES: list[tuple[Callable[[], Any], str, dict[str, Any], dict[str, Any], str | None]] = [
    (WORDPIECE, "bert", {}, {}, None),
    (WORDPIECE, "bert", BERT | {"strip_accents": None, "model_max_length": 512}, {"max_position_embeddings": 512}, None),
    (byte_level, "roberta", {"add_prefix_space": False, "model_max_length": 512}, {"max_position_embeddings": 514}, None),
    (WORDPIECE, "bert", {"do_lower_case": False}, {}, "do_lower_case: False in tokenizer_config.json and True in"),
    (WORDPIECE, "bert", {"strip_accents": False}, {}, "strip_accents: False .* and None in"),
    (WORDPIECE, "bert", {"tokenize_chinese_chars": False}, {}, "tokenize_chinese_chars: False .* and True in"),
    (byte_level, "roberta", {"add_prefix_space": True}, {}, "add_prefix_space: True .* and False in"),
    (WORDPIECE, "bert", {"cls_token": "[SEP]"}, {}, r"cls_token: '\[SEP\]' .* '\[CLS\]' in tokenizer.json; the former"),
    (WORDPIECE, "bert", {"sep_token": {"content": "[PAD]"}}, {}, r"sep_token: '\[PAD\]' .* '\[SEP\]' in tokenizer.json; the former"),
    (WORDPIECE, "bert", {"unk_token": "[PAD]"}, {}, r"unk_token: '\[PAD\]' .* '\[UNK\]' in"),
    (padded, "bert", {"pad_token": "[MASK]"}, {}, r"pad_token: '\[MASK\]' .* '\[PAD\]' in the padding section.*settings are used"),
    (WORDPIECE, "bert", {"max_len": 7, "model_max_length": 9}, {}, "max_len: 7 and model_max_length: 9; the latter is used"),
    (WORDPIECE, "bert", {"model_max_length": 512}, {"max_position_embeddings": 128}, "model_max_length: 512 .* 128 positions"),
    (WORDPIECE, "bert", {"tokenizer_class": "TokenizersBackend"}, {"type_vocab_size": 2}, "token types: .*because of tokenizer_class"),
    (WORDPIECE, "bert", {"model_input_names": ["input_ids"]}, {"type_vocab_size": 2}, "token types: .*because of model_input_names"),
    (WORDPIECE, "bert", {"extra_special_tokens": ["[E1]"]}, {}, r"'\[E1\]' is in the settings files alone.*added as id 300"),
]  # fmt: skip


def loaded(make: Callable[[], Any], family: str, stated: dict[str, Any], config: dict[str, Any]) -> Tokenizer:
    files = {"tokenizer.json": make().to_str().encode(), "tokenizer_config.json": json.dumps(stated).encode()}
    return Tokenizer.from_files(files, folder="there", model_type=family, config={"model_type": family, **config})


@pytest.mark.parametrize(("make", "family", "stated", "config", "says"), CASES)
def test_a_contradiction_is_named_with_what_holds(
    make: Callable[[], Any], family: str, stated: dict[str, Any], config: dict[str, Any], says: str | None
) -> None:
    notes = loaded(make, family, stated, config).notes
    assert len(notes) == (says is not None), notes
    assert says is None or re.search(says, notes[0]), notes[0]
    assert says is None or re.search("added|is used|are used|use the limit|are returned", notes[0])


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_the_ids_are_those_of_transformers_in_each_of_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for number, (make, family, stated, config, _) in enumerate(CASES):
        if any(isinstance(value, dict) for value in stated.values()):
            continue  # transformers raises TypeError
        ours = loaded(make, family, stated, config)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, data in ours.files().items():
            (folder / name).write_bytes(data)
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        for text in (TEXT, "ada"):
            assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ours(text).input_ids, stated


def test_inspect_shows_them(tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from flodl_hf import AutoConfig, AutoModel
    from flodl_hf.cli.app import app

    sizes = {
        "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 20, "type_vocab_size": 2,
    }  # fmt: skip
    model = AutoModel.from_config(AutoConfig.for_model("bert", **sizes))
    model.tokenizer = loaded(wordpiece, "bert", {"do_lower_case": False}, {})
    folder = model.save_pretrained(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"wavelets": 3}))
    asked = testing.CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    facts = json.loads(asked.stdout)
    assert [note.partition(":")[0] for note in facts["tokenizer_settings"]] == ["do_lower_case"]
    assert [note.partition(":")[0] for note in facts["notes"]] == ["wavelets"]
    told = testing.CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert re.search(r"tokenizer_settings +1\n +do_lower_case: False in", told)
    (folder / "tokenizer.json").write_text("{")
    asked = testing.CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert "tokenizer.json" in json.loads(asked.stdout)["tokenizer_settings"][0]
