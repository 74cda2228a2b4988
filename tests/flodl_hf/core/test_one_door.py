"""Every file of a folder goes through one door: regular, within bounds, and inside the folder or the Hub's cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import FlodlError, UnsafeFileError
from flodl_hf import load
from flodl_hf.checkpoints.hub.download import resolve
from flodl_hf.checkpoints.sentence.writing import recipe_files

Saved = Callable[..., Path]
POOLED = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt",
         "added_tokens.json", "special_tokens_map.json", "config_sentence_transformers.json", *POOLED)  # fmt: skip
SECRET = b"not for strangers"


@pytest.fixture
def folder(saved: Saved) -> Path:
    """A folder of sentence-transformers with every small file."""
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig

    place = saved("bert")
    for name, data in recipe_files(SentenceTransformerConfig(normalize=True, max_tokens=12), 16).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(data)
    for name in FILES:
        if not (place / name).exists():
            (place / name).write_bytes(b"{}" if name.endswith(".json") else b"the\n")
    return place


def outside(folder: Path, name: str) -> None:
    other = folder.parent / f"outside-{name.replace('/', '-')}"
    (folder / name).rename(other)
    other.write_bytes(other.read_bytes() + (SECRET if name.endswith(".txt") else b""))
    (folder / name).symlink_to(other)


def dangling(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "nowhere")


def loop(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)


def pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def device(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")


def directory(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def endless(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(3_000_000_000)  # holds no block of the disk


WAYS = {"outside": outside, "dangling": dangling, "loop": loop, "pipe": pipe, "device": device,
"directory": directory,
        "endless": endless}  # fmt: skip
linux = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and links")


@linux
@pytest.mark.parametrize("way", WAYS)
def test_every_file_is_refused_by_name(folder: Path, tmp_path: Path, way: str) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    whole_model: Any = load(folder)
    assert whole_model.embed("the cat").shape == (16,)
    for name in FILES:
        if way == "endless" and name == "model.safetensors":
            continue  # weights may be large
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        WAYS[way](folder, name)
        with pytest.raises(FlodlError) as caught:
            load(folder)
        fault = caught.value
        assert Path(name).name in str(fault), (name, str(fault))
        assert isinstance(fault, UnsafeFileError) or way not in ("outside", "device"), (name, fault)
        assert SECRET.decode() not in str(fault)


@linux
def test_a_pooling_folder_that_lies_elsewhere_is_refused(folder: Path) -> None:
    (folder / "1_Pooling").rename(folder.parent / "elsewhere")
    (folder / "1_Pooling").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(FlodlError, match="1_Pooling"):
        load(folder)


@linux
def test_links_of_the_hubs_cache_are_legal(folder: Path, tmp_path: Path) -> None:
    storage = tmp_path / "models--owner--name"
    snapshot = storage / "snapshots" / ("0" * 40)
    (storage / "blobs").mkdir(parents=True)
    for number, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, storage / "blobs" / str(number))
        link.symlink_to(os.path.relpath(storage / "blobs" / str(number), link.parent))
    linked: Any = load(snapshot)
    own: Any = load(folder)
    assert linked.sentence_recipe == own.sentence_recipe
    assert linked.embed("the cat", precision="exact").equal(own.embed("the cat", precision="exact"))
    assert linked.save_pretrained(tmp_path / "out").is_dir()
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_symlink()]


def test_what_is_trained_on_a_sentence_encoder_keeps_its_small_files(folder: Path, tmp_path: Path) -> None:
    from flodl_hf import finetune

    rows = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 4
    trained = finetune(str(folder), train=rows, out=tmp_path / "out", max_steps=1)
    assert trained.folder is not None
    for name in (*POOLED, "config_sentence_transformers.json"):
        assert (trained.folder / name).read_bytes() == (folder / name).read_bytes()
    classifier, encoder, source = load(trained.folder), load(trained.folder, head="base"), load(folder)
    assert classifier.head == "sequence_classification"
    assert classifier.predict("a good film")  # type: ignore[operator]
    assert encoder.sentence_recipe == source.sentence_recipe
    assert embedded(trained.folder / ".." / "out", head="base").shape == (16,)
    again = finetune(str(trained.folder), train=rows, out=tmp_path / "out", max_steps=1, overwrite=True)
    assert (again.folder / "1_Pooling" / "config.json").is_file()  # type: ignore[operator]


@linux
def test_links_inside_the_folder_are_legal(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "the-tokenizer.json")
    (folder / "tokenizer.json").symlink_to("the-tokenizer.json")
    assert load(folder).tokenizer is not None


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "sentence_bert_config.json", "modules.json"])
@pytest.mark.parametrize("text", ["[1]", "3", '"x"', "null", "[[]]", "1e400", "[" * 5000, "\ud800"])
def test_pooling_files_that_hold_something_else_are_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(FlodlError) as caught:
        load(folder)
    assert Path(name).name in str(caught.value)


def embedded(folder: Path, **options: Any) -> Any:
    model: Any = load(folder, **options)
    return model.embed("the cat")


def test_what_a_pooling_file_says_is_checked_by_its_values(folder: Path) -> None:
    for settings in ({"pooling_mode": [3]}, {"pooling_mode": "nonsense"}, {"pooling_mode": {"a": 1}}):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
        with pytest.raises(FlodlError, match="pooling"):
            embedded(folder)


def test_a_hub_name_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 5000, "a/\ud800", "owner/na\x1b[31mme", "", "a/b@\0"):
        for call in (lambda name=name: load(name), lambda name=name: resolve(name)):
            with pytest.raises(FlodlError) as caught:
                call()
            assert "\x1b" not in str(caught.value)
            str(caught.value).encode()


ESCAPES = ("\x1b[31mred", "\x9b2J", "\x07bell", "\u202egpj.exe", "over\rwritten")


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_message_moves_the_terminal(folder: Path, escape: str) -> None:
    """Keys, values and file names of strangers are quoted in errors, written out."""

    def config(change: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps({**settings, **change}))

    settings = json.loads((folder / "config.json").read_text("utf-8"))
    faults: list[Callable[[], object]] = [
        lambda: config({escape: {"a": 1}, "hidden_size": -1}),
        lambda: config({"hidden_act": escape}),
        lambda: config({"model_type": escape}),
        lambda: config({"id2label": {escape: 1, "0": escape}}),
        lambda: (config({}), (folder / "modules.json").write_text(json.dumps([{"type": escape}]))),
        lambda: (folder / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": "../" + escape}])),
        lambda: (shutil.rmtree(folder), folder.mkdir(), (folder / escape).write_text("x")),
    ]
    for damage in faults:
        damage()
        with pytest.raises(FlodlError) as caught:
            load(folder)
        text = str(caught.value) + caught.value.message
        assert not [char for char in text if char in "\x1b\x9b\x07\u202e\r"], repr(text)


def modules(*kinds: str, path: str = "") -> str:
    places = {"Transformer": path, "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return json.dumps([{"idx": i, "path": places.get(kind, ""), "type": f"a.{kind}"} for i, kind in enumerate(kinds)])


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("modules.json", modules(), "found the modules none"),
        ("modules.json", modules("Pooling", "Transformer"), "found the modules Pooling, Transformer"),
        ("modules.json", modules("Transformer", "Pooling", "Pooling"), "expected one Transformer"),
        ("modules.json", modules("Transformer", "CNN"), "found the modules Transformer, CNN"),
        (
            "modules.json",
            modules("Transformer", "Pooling").replace("1_Pooling", "nowhere"),
            "'nowhere' for the pooling",
        ),
        ("modules.json", modules("Transformer", "Pooling").replace("1_Pooling", "a\\u0000b"), "leads out"),
        ("modules.json", modules("Transformer", "Pooling", path="1_Pooling"), "contains weights too"),
        ("sentence_bert_config.json", '{"max_seq_length": true}', "max_seq_length is True"),
        ("sentence_bert_config.json", '{"max_seq_length": 1}', "integer from 3"),
        ("sentence_bert_config.json", '{"max_seq_length": "x"}', "max_seq_length is 'x'"),
        ("sentence_bert_config.json", '{"do_lower_case": 1}', "do_lower_case is 1"),
        ("1_Pooling/config.json", '{"pooling_mode": "evil"}', "the pooling is 'evil'"),
    ],
)
def test_small_files_that_would_make_other_vectors_are_refused_by_name(
    folder: Path, file: str, text: str, words: str
) -> None:
    """What was passed over, or read in another order than sentence-transformers runs it, gave other vectors."""
    (folder / file).write_text(text)
    with pytest.raises(FlodlError, match=words) as caught:
        load(folder)
    assert Path(file).name in str(caught.value)
    assert "xpected" in str(caught.value)


def test_a_normalization_of_texts_before_the_pooling_is_refused(folder: Path) -> None:
    (folder / "modules.json").write_text(modules("Transformer", "Normalize", "Pooling"))
    with pytest.raises(FlodlError) as caught:
        load(folder)
    found = caught.value.details
    assert (found["key"], found["value"]) == ("module_input_name", "sentence_embedding")
    assert str(folder / "2_Normalize" / "config.json") in str(caught.value)


@linux
def test_a_pooling_folder_that_is_a_link_to_itself_is_refused(folder: Path) -> None:
    shutil.rmtree(folder / "1_Pooling")
    (folder / "1_Pooling").symlink_to("1_Pooling")
    with pytest.raises(FlodlError, match=r"modules\.json"):
        load(folder)


def test_weights_in_the_transformers_folder_are_found(folder: Path) -> None:
    below = folder / "0_Transformer"
    below.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(below / name)
    (folder / "modules.json").write_text(modules("Transformer", "Pooling", "Normalize", path="0_Transformer"))
    assert embedded(folder).shape == (16,)
