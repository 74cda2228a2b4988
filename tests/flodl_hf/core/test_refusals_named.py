"""What the torture rig found in configurations: refusals that did not name the key, or were no refusals of ours."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import CheckpointError, ConfigError
from flodl_hf import load
from flodl_hf.errors import TokenizerError
from flodl_hf.models import building

Saved = Callable[..., Path]
# Tables that nobody knows are read by that code, maybe, and refused.
CODE: dict[str, Any] = {"auto_map": {"AutoModel": "modeling_own.OwnModel"}}


@pytest.fixture
def folder(saved: Saved) -> Path:
    return saved("bert", "sequence_classification")


def write(folder: Path, **values: Any) -> None:
    """Write settings; a text that begins with @ stands there without its quotes."""
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    text = json.dumps({**settings, **values})
    for value in values.values():
        if isinstance(value, str) and value.startswith("@"):
            text = text.replace(json.dumps(value), value[1:])
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "[1, NaN]", "9" * 401, "-" + "9" * 5000])
@pytest.mark.parametrize("key", ["hidden_size", "anything"])
def test_a_value_that_is_no_number_is_named_by_its_key(folder: Path, key: str, number: str) -> None:
    write(folder, **{key: "@" + number})
    with pytest.raises(ConfigError, match=rf"(?s)config\.json: .* {key}: found .*(nan|inf)") as caught:
        load(folder, strict_config=True)
    assert "int_max_str_digits" not in str(caught.value)


@pytest.mark.parametrize("inner", ["1", "NaN"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_values_that_lie_too_deep_are_refused(folder: Path, inner: str, opening: str, closing: str) -> None:
    text = (folder / "config.json").read_text("utf-8")
    for depth in (500, 800, 980, 5000):
        deep = '{"deep": ' + opening * depth + inner + closing * depth + ", "
        (folder / "config.json").write_text(text.replace("{", deep, 1))
        with pytest.raises(ConfigError, match=r"config\.json: .*nested too deeply.*; expected a JSON object"):
            load(folder)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_values_that_lie_deep_are_written_again(folder: Path, tmp_path: Path, opening: str, closing: str) -> None:
    text = (folder / "config.json").read_text("utf-8")
    for depth in (50, 150):
        deep = '{"_deep": ' + opening * depth + "1" + closing * depth + ", "
        (folder / "config.json").write_text(text.replace("{", deep, 1))
        written = load(folder).save_pretrained(tmp_path / str(depth))
        assert json.loads((written / "config.json").read_text("utf-8")) == json.loads(text.replace("{", deep, 1))


def test_a_key_of_another_family_may_hold_anything(folder: Path) -> None:
    write(folder, pos_att_type=[1], **CODE)
    with pytest.raises(ConfigError, match=r"pos_att_type: found .* a setting of other families; expected it absent"):
        load(folder)


def test_a_long_key_does_not_fill_the_screen(folder: Path) -> None:
    write(folder, **CODE, **{"x" * 10_000: {"a": 1}})
    with pytest.raises(ConfigError, match="xxx") as caught:
        load(folder)
    assert len(str(caught.value)) < 1_000


def test_a_file_in_another_coding_says_how_to_save_it(folder: Path) -> None:
    text = (folder / "config.json").read_text("utf-8")
    (folder / "config.json").write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"expected JSON in UTF-8\. Save it so"):
        load(folder)


def test_tensors_that_do_not_fit_name_their_file(folder: Path) -> None:
    write(folder, num_hidden_layers=3)
    with pytest.raises(
        CheckpointError, match=r"tensors of 'model\.safetensors' do not fit .* expected those in config"
    ):
        load(folder)


def test_line_separators_are_written_out(folder: Path) -> None:
    write(folder, **CODE, **{"a\u2028b": {"a": 1}})
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert "a\\u2028b" in str(caught.value)
    assert "\u2028" not in str(caught.value)


def test_no_thread_goes_on_after_a_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while a thread is in torch's code is aborted, with a status that nobody expects."""
    seen: list[int] = []

    def slow(tensor: Any) -> int:
        seen.append(tensor.numel())
        time.sleep(0.05)
        return 0

    monkeypatch.setattr(building, "_largest_bits", slow)
    (folder / "tokenizer.json").write_text("{[]}")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        load(folder)
    assert 0 < len(seen) < 20  # of forty
    assert not [thread for thread in threading.enumerate() if thread.name == "flodl-hf-finite"]
