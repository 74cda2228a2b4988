"""Folders as people publish them: what transformers loads with numbers loads here with the same numbers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flodl.errors import CheckpointError, ConfigError, FlodlError
from flodl_hf import load
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import task_named

Saved = Callable[..., Path]
Change = Callable[[Path], object]
GONE = object()
IDS = torch.tensor([[2, 9, 17, 3]])


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not GONE}))

    return change


def tensors(made: Callable[[dict[str, Tensor]], dict[str, Tensor]], to: str = "model.safetensors") -> Change:
    def change(folder: Path) -> None:
        held = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
        (folder / to).parent.mkdir(exist_ok=True)
        save_file(made(held), folder / to, metadata={"format": "pt"})

    return change


def file(name: str, value: Any) -> Change:
    return lambda folder: (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def begun(text: str) -> Change:
    """Put text before the first key of ``config.json``; keys that come later and are the same hold."""
    return lambda folder: file("config.json", (folder / "config.json").read_text().replace("{", "{" + text, 1))(folder)


def moved(to: str) -> list[Change]:
    return [tensors(dict, to), lambda folder: (folder / "model.safetensors").unlink(), config(transformers_weights=to)]


def sharded(folder: Path) -> None:
    names = sorted(load_file(folder / "model.safetensors"))
    shards = {name: f"part-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for shard in set(shards.values()):
        tensors(lambda held, shard=shard: {k: v for k, v in held.items() if shards[k] == shard}, shard)(folder)
    (folder / "parts.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "model.safetensors").unlink()


def named(*names: Any) -> dict[str, Any]:
    return {"id2label": dict(names), "label2id": {name: int(key) for key, name in names}}


ADDED = {"content": "[UNK]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
# What is odd -> how it is made of a plain folder, and what a warning says, if anything.
ODD: dict[str, tuple[list[Change], str | None]] = {
    "architectures absent": ([config(architectures=GONE)], None),
    "architectures null": ([config(architectures=None)], None),
    "architectures empty": ([config(architectures=[])], None),
    "architectures a text": ([config(architectures="BertModel")], None),
    "architectures odd": ([config(architectures=["FooForBar"])], None),
    "torch_dtype": ([config(dtype=GONE, torch_dtype="float16")], None),
    "dtype beside torch_dtype": ([config(dtype="float32", torch_dtype="float16")], None),
    "float16 without a word": ([tensors(lambda held: {k: v.half() for k, v in held.items()}), config(dtype=GONE)], None),
    "no decoder": ([config(is_decoder=False, add_cross_attention=False)], None),
    "no head pruned": ([config(pruned_heads={})], None),
    "a list of pruned heads": ([config(pruned_heads={"0": [1]})], None),
    "regression": ([config(problem_type="regression")], None),
    "a problem type of nobody": ([config(problem_type="ranking")], "problem_type: 'ranking', which is none of"),
    "an empty problem type": ([config(problem_type="")], None),
    "label2id alone": ([config(id2label=GONE, label2id={"x": 0, "y": 1})], None),
    "label2id of texts": ([config(label2id={"x": "0", "y": "1"})], None),
    "label2id of other names": ([config(id2label={"0": "a", "1": "b"}, label2id={"c": 0, "d": 1})], None),
    "labels null": ([config(id2label=None, label2id=None)], None),
    "labels with a gap": ([config(**named(("0", "a"), ("2", "b")))], "the names of 2 are no label's"),
    "labels from 1": ([config(**named(("1", "a"), ("2", "b")))], "the names of 2 are no label's"),
    "labels from -1": ([config(**named(("-1", "a"), ("0", "b")))], "the names of -1 are no label's"),
    "labels far apart": ([config(**named(("0", "a"), ("99999", "b")))], "the names of 99999 are no label's"),
    "labels of one name": ([config(id2label={"0": "a", "1": "a"}, label2id={"a": 0})], None),
    "numbers as labels": ([config(id2label={"0": 0, "1": 1}, label2id={"0": 0, "1": 1})], None),
    "num_labels alone": ([config(id2label=GONE, label2id=GONE, num_labels=2)], None),
    "a script's notes": ([config(foo="bar", _num_labels=5, _name_or_path="x", finetuning_task="x")], None),
    "an output setting": ([config(use_cache=True, torchscript=True, output_past=True)], None),
    "tokenizer_config.json empty": ([file("tokenizer_config.json", {})], None),
    "tokenizer_config.json odd": ([file("tokenizer_config.json", {"tokenizer_class": "FooTokenizer", "model_max_length": 10**30, "foo": 1, "unk_token": ADDED | {"__type": "AddedToken"}})], "unknown settings are ignored: foo"),
    "added_tokens.json": ([file("added_tokens.json", {"[MASK]": 4})], None),
    "added_tokens.json empty": ([file("added_tokens.json", {})], None),
    "tables in special_tokens_map.json": ([file("special_tokens_map.json", {"unk_token": ADDED, "mask_token": "[MASK]", "additional_special_tokens": []})], None),
    "files of a training": ([file(name, "x") for name in ("README.md", "training_args.bin", "optimizer.pt", "flax_model.msgpack", "tf_model.h5")], None),
    "a generation_config.json": ([file("generation_config.json", {"_from_model_config": True})], None),
    "no metadata in the file": ([lambda folder: save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt", "by": "me"})], None),
    "norms named gamma and beta": ([tensors(lambda held: {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v for k, v in held.items()})], None),
    "a counter": ([tensors(lambda held: held | {"num_batches_tracked": torch.tensor(3)})], None),
    "weights of a loss": ([tensors(lambda held: held | {"loss_fct.weight": torch.ones(2)})], None),
    "the usual file by name": ([config(transformers_weights="model.safetensors")], None),
    "another file by name": (moved("other.safetensors"), None),
    "another file, beside the usual one": ([tensors(lambda held: {k: v + 1 for k, v in held.items()}, "other.safetensors"), config(transformers_weights="other.safetensors")], None),
    "a file in a folder below": (moved("below/other.safetensors"), None),
    "keys twice": ([begun('"vocab_size": 9999, "hidden_size": 3, ')], "'vocab_size' is present twice; the last one is used"),
    "a key twice in a table": ([begun('"task_specific_params": {"a": 1, "a": 2}, ')], "'a' is present twice; the last one is used"),
    "numbers that JSON does not have": ([begun('"score": NaN, "task_specific_params": {"best": [-Infinity]}, ')], "'score': contains NaN or Infinity, and nothing reads it"),
    "shards of another name": ([sharded, config(transformers_weights="parts.safetensors.index.json")], None),
}  # fmt: skip
MODELS = [("bert", "sequence_classification"), ("roberta", "masked_lm"), ("modernbert", "sequence_classification")]

# Every folder with one model, by turns: all that is odd is read before the family has a say, or by its tables.
CASES = [(*MODELS[place % len(MODELS)], odd) for place, odd in enumerate(ODD)]


def made(folder: Path, steps: list[Change]) -> Path:
    for step in steps:
        step(folder)
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=torch.ones_like(IDS)).logits


def loaded(folder: Path, head: str, told: str | None) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load(folder, head=head)
    texts = [str(one.message) for one in said]
    assert len(texts) == (told is not None)
    assert told is None or told in texts[0]
    return model


@pytest.mark.transformers
@pytest.mark.parametrize(("model_type", "head", "odd"), CASES)
def test_an_odd_folder_has_the_numbers_of_transformers_and_is_written_again(
    model_type: str, head: str, odd: str, saved: Saved, tmp_path: Path
) -> None:
    import transformers

    steps, told = ODD[odd]
    folder = made(saved(model_type, head), steps)
    theirs = getattr(transformers, f"AutoModel{task_named(head).hf_suffix}").from_pretrained(folder).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()  # their place in a mapped file decides last bits
    ours = loaded(folder, head, told)
    assert torch.equal(logits(ours), logits(theirs))
    assert ours.config.num_labels == theirs.config.num_labels
    ours.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again", head, told)), logits(theirs))


def test_names_that_are_no_labels_are_told_and_refused_where_all_has_to_hold(saved: Saved) -> None:
    folder = made(saved("bert", "sequence_classification"), ODD["labels with a gap"][0])
    with pytest.warns(UserWarning, match=r"config.json: settings contradict.*\n.*id2label: names 2 labels"):
        assert load(folder).config.labels == ("a", "LABEL_1")
    with pytest.raises(ConfigError, match=r"config.json.*\n.*id2label: names 2 labels, and their ids are not 0 to 1"):
        load(folder, strict_config=True)


NAMED: list[tuple[Any, type[FlodlError], str]] = [
    ("../model.safetensors", ConfigError, "expected the name of a file in the folder"),
    ("/model.safetensors", ConfigError, "expected the name of a file in the folder"),
    ("below/../model.safetensors", ConfigError, "expected the name of a file in the folder"),
    ("C:\\model.safetensors", ConfigError, "expected the name of a file in the folder"),
    (3, ConfigError, "found 3; expected the name of a file in the folder"),
    ("pytorch_model.bin", ConfigError, "expected the name of a .safetensors file"),
    ("below/model.safetensors.index.json", ConfigError, "expected an index in the folder of config.json"),
    ("absent.safetensors", CheckpointError, "absent.safetensors: No such file"),
    ("below/absent.safetensors", CheckpointError, "below"),
]


@pytest.mark.parametrize(("found", "kind", "said"), NAMED)
def test_a_file_of_weights_outside_of_the_folder_is_not_opened(
    found: Any, kind: type[FlodlError], said: str, saved: Saved
) -> None:
    folder = made(saved("bert"), [config(transformers_weights=found)])
    with pytest.raises(kind, match=said) as refused:
        load(folder)
    assert kind is CheckpointError or "config.json: transformers_weights: found" in str(refused.value)


def test_a_folder_below_that_leads_elsewhere_is_not_opened(saved: Saved, tmp_path: Path) -> None:
    folder = made(saved("bert"), moved("below/other.safetensors"))
    (folder / "below").rename(tmp_path / "elsewhere")
    (folder / "below").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the folder"):
        load(folder)


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if family.tiny])
def test_files_of_a_tokenizer_that_is_not_made_are_written_again(
    model_type: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    model = make(model_type)
    model.tokenizer = None
    folder = model.save_pretrained(tmp_path / "source")
    stated = {"tokenizer_config.json": b'{"tokenizer_class": "XTokenizer"}\n', "merges.txt": b"#version: 0.2\na b\n"}
    for name, data in stated.items():  # and no vocabulary
        (folder / name).write_bytes(data)
    (folder / "added_tokens.json").mkdir()  # which nobody can read, and nobody asks for
    read: Any = load(folder)
    assert read.tokenizer is None
    for name in stated:
        (folder / name).unlink()  # they are in memory, so that a folder may be written over
    written = read.save_pretrained(tmp_path / "written")
    assert {name: (written / name).read_bytes() for name in stated} == stated
    assert not (written / "added_tokens.json").exists()
    # A tokenizer that is put in takes their place.
    read.tokenizer = make("bert").tokenizer
    assert (read.save_pretrained(tmp_path / "other") / "merges.txt").exists() is False
