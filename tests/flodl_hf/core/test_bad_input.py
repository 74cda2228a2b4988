"""Bad input is refused whole: the right error, naming file, key, what was found, what was expected, what to do."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError, ConfigError, FlodlError, UnsafeFileError
from flodl_hf.errors import HubError, MissingWeightsError, TokenizerError
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named

Saved = Callable[..., Path]
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@dataclass(frozen=True)
class Case:
    """One way to break a folder, and what the error has to say.

    ``says`` are regular expressions, each found in the message; by them the four beats are checked.
    """

    name: str
    damage: Callable[[Path], object]
    error: type[FlodlError]
    says: tuple[str, ...]
    head: str = "sequence_classification"
    options: dict[str, Any] = field(default_factory=dict)


# --- ways to break a folder --------------------------------------------------------------------------


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        held = {name: value.clone() for name, value in load_file(folder / WEIGHTS).items()}
        change(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def weight_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def settings(*absent: str, **changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text("utf-8")) | changes
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if k not in absent}), "utf-8")

    return damage


def config_text(change: Callable[[str], str | bytes]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        new = change((folder / CONFIG).read_text("utf-8"))
        (folder / CONFIG).write_bytes(new if isinstance(new, bytes) else new.encode())

    return damage


def sharded(change: Callable[[Path, dict[str, Any]], object]) -> Callable[[Path], object]:
    """Split the weights into two files with an index, then change the index or the files."""

    def damage(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = sorted(held)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, own in parts.items():
            save_file({name: held[name].clone() for name in own}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
        change(folder, index)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), "utf-8")

    return damage


def header_length(data: bytes) -> bytes:
    return (2**40).to_bytes(8, "little") + data[8:]


def labelled(**labels: str) -> dict[str, Any]:
    return {"id2label": {key.removeprefix("id"): name for key, name in labels.items()}}


def larger_tokenizer(folder: Path) -> None:
    described = json.loads((folder / TOKENIZER).read_text("utf-8"))
    described["model"]["vocab"]["onemoreword"] = json.loads((folder / CONFIG).read_text("utf-8"))["vocab_size"]
    (folder / TOKENIZER).write_text(json.dumps(described), "utf-8")


WHOLE = "Nothing was loaded"
WEIGHT_CASES = [
    Case("half a file", weight_bytes(lambda b: b[: len(b) // 2]), CheckpointError, (WEIGHTS, "ends at byte", "ends at byte .* of", "again")),
    Case("a file cut in its header", weight_bytes(lambda b: b[:100]), CheckpointError, (WEIGHTS, "truncated", "again")),
    Case("seven bytes", weight_bytes(lambda b: b[:7]), CheckpointError, (WEIGHTS, "7 bytes", "expected", "again")),
    Case("an empty file", weight_bytes(lambda b: b""), CheckpointError, (WEIGHTS, "0 bytes|empty", "expected")),
    Case("garbage", weight_bytes(lambda b: bytes(range(7, 256)) * 40), CheckpointError, (WEIGHTS, "expected")),
    Case("an absurd header length", weight_bytes(header_length), CheckpointError, (WEIGHTS, "expected")),
    Case("a web page", weight_bytes(lambda b: b"<!DOCTYPE html><html>404</html>"), CheckpointError, (WEIGHTS, "expected")),
    Case(
        "a pointer file",
        weight_bytes(lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        CheckpointError, (WEIGHTS, "expected", "git lfs pull"),
    ),
    Case("surplus bytes", weight_bytes(lambda b: b + b"\0" * 64), CheckpointError, (WEIGHTS, "expected")),
    Case(
        "a transposed table", tensors(lambda t: t.update({"bert.embeddings.word_embeddings.weight": torch.zeros(16, 4)})),
        CheckpointError, ("bert-sequence", "word_embeddings", r"found \[16, 4\]", r"expected \[\d+, 16\]", WHOLE, "config.json"),
    ),
    Case(
        "a missing tensor", tensors(lambda t: t.pop(QUERY)), CheckpointError,
        ("missing \\(1\\)", re.escape(QUERY), r"\[16, 16\]", WHOLE, "complete"),
    ),
    Case(
        "an extra tensor", tensors(lambda t: t.update({"bert.encoder.layer.1.attention.self.qery.weight": torch.zeros(2)})),
        CheckpointError, ("unexpected \\(1\\)", "qery", "did you mean", "query", WHOLE),
    ),
    Case(
        "many faults at once",
        tensors(lambda t: (t.pop(QUERY), t.update({"classifier.weight": torch.zeros(7, 16), "surprise": torch.zeros(1)}))),
        CheckpointError, ("missing \\(1\\)", "unexpected \\(1\\)", "wrong shape \\(1\\)", "surprise", r"found \[7, 16\]"),
    ),
    Case("half a head", tensors(lambda t: t.pop("classifier.bias")), CheckpointError, ("missing \\(1\\)", "classifier.bias", WHOLE)),
    Case("a head lost", tensors(lambda t: (t.pop("classifier.bias"), t.pop("classifier.weight"))), CheckpointError, ("missing \\(2\\)", "classifier.weight")),
    Case("half a pooler", tensors(lambda t: t.pop("bert.pooler.dense.bias")), CheckpointError, ("missing \\(1\\)", "pooler.dense.bias")),
    Case("a layer too many", tensors(lambda t: t.update({k.replace("layer.1", "layer.2"): v.clone() for k, v in list(t.items()) if "layer.1" in k})), CheckpointError, ("unexpected \\(16\\)", "layer.2")),
    Case(
        "integers for weights", tensors(lambda t: t.update({QUERY: t[QUERY].mul(10).to(torch.int64)})), CheckpointError,
        (re.escape(QUERY), "found I64", "expected one of .*F32"),
    ),
    Case("eight bits for weights", tensors(lambda t: t.update({QUERY: t[QUERY].to(torch.float8_e4m3fn)})), CheckpointError, (re.escape(QUERY), "F8_E4M3", "expected one of")),
    Case("a name in two styles", tensors(lambda t: t.update({QUERY.removeprefix("bert."): t[QUERY].clone()})), CheckpointError, ("named twice \\(1\\)", re.escape(QUERY))),
    Case("no weights", lambda f: (f / WEIGHTS).unlink(), MissingWeightsError, ("bert-sequence", "(?i)safetensors", "expected|holds")),
    Case("a missing shard", sharded(lambda f, _: (f / "model-00002-of-00002.safetensors").unlink()), CheckpointError, ("model-00002-of-00002.safetensors", "index.json|missing|does not exist")),
    Case(
        "an index that points outside",
        sharded(lambda f, i: i["weight_map"].update({QUERY: "../outside.safetensors"})), UnsafeFileError,
        ("index.json", re.escape("../outside.safetensors")),
    ),
    Case("an index with an absolute path", sharded(lambda f, i: i["weight_map"].update({QUERY: "/etc/passwd"})), UnsafeFileError, ("index.json", "/etc/passwd")),
    Case("an index that names the wrong shard", sharded(lambda f, i: i["weight_map"].update(dict.fromkeys(i["weight_map"], "model-00001-of-00002.safetensors"))), CheckpointError, ("model-0000", "index|expected")),
    Case("an index without a map", sharded(lambda f, i: i.pop("weight_map")), CheckpointError, ("index.json", "weight_map")),
    Case("an index that is no table", sharded(lambda f, i: i.update(weight_map=["x"])), CheckpointError, ("index.json", "weight_map")),
]  # fmt: skip

ONE = "1 problem"
CONFIG_CASES = [
    Case("no config", lambda f: (f / CONFIG).unlink(), ConfigError, ("config.json: does not exist", "expected", "contains: .*model.safetensors")),
    Case("a folder for a config", lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), ConfigError, ("config.json: found a folder", "expected")),
    Case("not JSON", config_text(lambda t: t[:-20]), ConfigError, (CONFIG, "not JSON", "expected a JSON object", "again or correct")),
    Case("an empty config", config_text(lambda t: ""), ConfigError, (CONFIG, "not JSON", "expected a JSON object")),
    Case("a list", config_text(lambda t: "[1, 2]"), ConfigError, (CONFIG, "a JSON list", "expected a JSON object")),
    Case("a byte order mark", config_text(lambda t: "\ufeff" + t), ConfigError, (CONFIG, "BOM", "expected a JSON object")),
    Case("not UTF-8", config_text(lambda t: t.encode("utf-16")), ConfigError, (CONFIG, "not UTF-8", "expected JSON")),
    Case("NaN", config_text(lambda t: t.replace('"hidden_size": 16', '"hidden_size": NaN')), ConfigError, (CONFIG, "nan", "expected")),
    Case("Infinity", config_text(lambda t: t.replace('"hidden_size": 16', '"hidden_size": -Infinity')), ConfigError, (CONFIG, "-inf", "expected")),
    Case("an infinite number", config_text(lambda t: t.replace('"hidden_size": 16', '"hidden_size": 1e999')), ConfigError, (CONFIG, "hidden_size", "inf", "expected")),
    Case("a number of 5,000 digits", config_text(lambda t: t.replace('"hidden_size": 16', '"hidden_size": ' + "9" * 5000)), ConfigError, (CONFIG, "expected")),
    Case("a key twice", config_text(lambda t: t.replace("{", '{"hidden_size": 8, ', 1)), ConfigError, (CONFIG, "'hidden_size' is present twice"), options={"strict_config": True}),
    Case("NaN where nothing reads it", config_text(lambda t: t.replace("{", '{"score": NaN, ', 1)), ConfigError, (CONFIG, "'score': found NaN", "expected"), options={"strict_config": True}),
    Case("NaN for a range", config_text(lambda t: t.replace("{", '{"initializer_range": NaN, "initializer_rangE": 1, ', 1).replace('"initializer_range": 0', '"was": 0')), ConfigError, (CONFIG, "'initializer_range': found NaN", "expected finite")),
    Case("nested 100,000 deep", config_text(lambda t: '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), ConfigError, (CONFIG, "nested too deeply", "expected")),
    Case("two megabytes", config_text(lambda t: t.replace("{", '{"note": "' + "x" * 2_000_000 + '", ', 1)), ConfigError, (CONFIG, "1,000,000 bytes", "expected")),
    Case("a missing size", settings("hidden_size"), ConfigError, (CONFIG, ONE, "hidden_size: missing", "expected an integer", "Correct"), options={"strict_config": True}),
    Case("a negative size", settings(hidden_size=-16), ConfigError, ("hidden_size: found -16", "expected an integer from 1")),
    Case("no layers", settings(num_hidden_layers=0), ConfigError, ("num_hidden_layers: found 0", "expected an integer from 1")),
    Case("an absurd size", settings(hidden_size=10**15), ConfigError, ("hidden_size: found 1000000000000000", "to 65536")),
    Case("absurd layers", settings(num_hidden_layers=10**6), ConfigError, ("num_hidden_layers: found", "to 1024")),
    Case("a text for a number", settings(hidden_size="16"), ConfigError, ("hidden_size: found .*16", "expected an integer")),
    Case("a fraction for a number", settings(hidden_size=16.5), ConfigError, ("hidden_size: found 16.5", "expected an integer")),
    Case("true for a number", settings(num_hidden_layers=True), ConfigError, ("num_hidden_layers: found True", "expected an integer")),
    Case("null for a number", settings(vocab_size=None), ConfigError, ("vocab_size: found None", "expected an integer")),
    Case("a list for a number", settings(vocab_size=[1]), ConfigError, ("vocab_size: found", "expected an integer")),
    Case("dropout of one", settings(hidden_dropout_prob=1.0), ConfigError, ("hidden_dropout_prob: found 1.0", r"expected a number in \[0, 1\)")),
    Case("a negative epsilon", settings(layer_norm_eps=-1e-12), ConfigError, ("layer_norm_eps: found", r"expected a number in \[0")),
    Case("an unknown activation", settings(hidden_act="gellu"), ConfigError, ("hidden_act: found", "gellu", "expected one of .*'gelu'")),
    Case("heads that do not divide", settings(num_attention_heads=3), ConfigError, ("num_attention_heads: found 3", r"divisor of the hidden size 16 \(hidden_size\)")),
    Case("padding outside the table", settings(pad_token_id=500), ConfigError, ("pad_token_id: found 500", "below vocab_size")),
    Case("several faults at once", settings("vocab_size", hidden_size=-1, hidden_act="x", rope_theta=3), ConfigError, ("4 problem", "vocab_size: missing", "hidden_size: found", "hidden_act: found", "rope_theta: found"), options={"strict_config": True}),
    Case("an unknown table beside code", settings(wavelets={"levels": 3}, auto_map={"AutoModel": "m.M"}), ConfigError, ("wavelets: found .*levels", "not understood", "ignore_config_keys")),
    Case("an unknown setting where all must be known", settings(wavelets=3), ConfigError, ("wavelets: found 3", "not understood", "ignore_config_keys"), options={"strict_config": True}),
    Case("a misspelt setting", settings("hidden_dropout_prob", hidden_dropout_probb=0.2, auto_map={"AutoModel": "m.M"}), ConfigError, ("hidden_dropout_probb", "did you mean 'hidden_dropout_prob'")),
    Case("a decoder", settings(is_decoder=True), ConfigError, ("is_decoder: found True", "not supported", "expected False", "encoders")),
    Case("relative positions", settings(position_embedding_type="relative_key"), ConfigError, ("position_embedding_type: found .*relative_key", "expected 'absolute'")),
    Case("quantised weights", settings(quantization_config={"bits": 4}), ConfigError, ("quantization_config: found", "not supported", "quantised")),
    Case("no model type", settings("model_type"), ConfigError, (CONFIG, "model_type is missing", *(re.escape(f.model_type) for f in FAMILIES))),
    Case("an unknown model type", settings(model_type="brt"), ConfigError, ("model_type is 'brt'", "did you mean 'bert'", *(re.escape(f.model_type) for f in FAMILIES))),
    Case("a decoder's model type", settings(model_type="gpt2"), ConfigError, ("model_type is 'gpt2'", "expected one of")),
    Case("a number as model type", settings(model_type=7), ConfigError, ("model_type is '7'", "expected one of")),
    Case("a nasty model type", settings(model_type="\x1b[2J" + "y" * 10_000), ConfigError, (r"model_type is '\\x1b\[2J", "expected one of")),
    Case("labels that outnumber the head", settings(**labelled(id0="a", id1="b", id2="c")), CheckpointError, ("wrong shape", r"classifier.weight: found \[2, 16\]; expected \[3, 16\]", "id2label", "labels=")),
    Case("fewer labels than the head", settings(**labelled(id0="a")), CheckpointError, ("wrong shape", r"found \[2, 16\]; expected \[1, 16\]", "id2label")),
    Case("a label beyond num_labels", settings(num_labels=2, **labelled(id0="a", id2="b")), ConfigError, ("id2label: found '2': .*b", "num_labels - 1 = 1")),
    Case("a different number of labels than rows", settings(num_labels=3, **labelled(id0="a", id1="b")), CheckpointError, ("wrong shape", "expected \\[3, 16\\]")),
    Case("a label at no number", settings(**labelled(idzero="a")), ConfigError, ("id2label: found 'zero'", "expected one name for each id")),
    Case("a label that is a list", settings(id2label={"0": ["a"], "1": "b"}), ConfigError, ("id2label: found '0'", "expected one name")),
    Case("labels as a list", settings(id2label=["a", "b"]), ConfigError, ("id2label: found", "expected a table")),
    Case("no labels at all", settings(num_labels=0), ConfigError, ("num_labels: found 0", "expected an integer from 1")),
    Case("num_labels as text", settings(num_labels="2"), ConfigError, ("num_labels: found", "expected an integer")),
]  # fmt: skip

TOKENIZER_CASES = [
    Case("a tokenizer larger than the table", larger_tokenizer, TokenizerError, ("bert-sequence", "1 of .* tokens", "onemoreword", "has no row", "belongs to this checkpoint")),
    Case("a damaged tokenizer", lambda f: (f / TOKENIZER).write_text('{"version": "1.0"', "utf-8"), TokenizerError, (TOKENIZER, "expected|JSON")),
    Case("a tokenizer of another kind", lambda f: (f / TOKENIZER).write_text("[]", "utf-8"), TokenizerError, (TOKENIZER,)),
]  # fmt: skip

ARGUMENT_CASES = [
    Case("a misspelt dtype", lambda f: None, ConfigError, ("dtype='flaot16'", "did you mean 'float16'", "expected one of"), options={"dtype": "flaot16"}),
    Case("an integer's dtype", lambda f: None, ConfigError, ("dtype=torch.int8", "expected one of"), options={"dtype": torch.int8}),
    Case("a number for a dtype", lambda f: None, ConfigError, ("dtype=16", "expected one of"), options={"dtype": 16}),
    Case("a misspelt attention", lambda f: None, ConfigError, ("attention='spda'", "did you mean 'sdpa'", "expected one of"), options={"attention": "spda"}),
    Case("an unknown problem type given", lambda f: None, ConfigError, ("problem_type='class'", "expected one of"), options={"problem_type": "class"}),
    Case("a subfolder outside", lambda f: None, HubError, ("'../..'", "leads out of it"), options={"subfolder": "../.."}),
]  # fmt: skip
CASES = [*WEIGHT_CASES, *CONFIG_CASES, *TOKENIZER_CASES, *ARGUMENT_CASES]


def held_open(folder: Path) -> list[str]:
    """Return what this process still has mapped or open below ``folder``."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return maps + [
        str(p.resolve()) for p in Path("/proc/self/fd").iterdir() if str(p.resolve()).startswith(str(folder))
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_folder_is_refused_whole(case: Case, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("bert", case.head)
    case.damage(folder)
    given: list[object] = []
    monkeypatch.setattr("flodl_hf.models.building.assign", lambda *a, **k: given.append(a))
    with pytest.raises(FlodlError) as caught:
        head_named(case.head).model.from_pretrained(folder, **case.options)
    fault, text = caught.value, str(caught.value)
    assert type(fault) is case.error, text
    for expected in case.says:
        assert re.search(expected, text, re.DOTALL), f"{expected!r} not in:\n{text}"
    assert len(text) < 4000
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) == {"\n"}
    assert given == [], "a weight was placed before the folder was known to be good"
    again = pickle.loads(pickle.dumps(fault))
    assert (type(again), str(again)) == (type(fault), text)
    del caught, fault
    if Path("/proc/self/maps").exists():
        assert held_open(folder) == []


def test_the_table_has_no_case_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
