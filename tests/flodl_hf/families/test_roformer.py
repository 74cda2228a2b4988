"""RoFormer: the table of its file, what it turns, and the tokenizers that say all or do not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl.errors import ConfigError
from flodl_hf import AutoModel, AutoModelForMultipleChoice, AutoTokenizer, load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import TokenizerError
from flodl_hf.nn.layout import Padded
from flodl_hf.nn.positions import PairedRotary, Rotary, StatedRotary, sinusoids

SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 12, "embedding_size": 8,
}  # fmt: skip
TABLE = "roformer.encoder.embed_positions.weight"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "天", "气", "天气", "good"]
IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
MASK = (IDS != 0).long()


def folder(place: Path, **settings: Any) -> Path:
    """Return a small encoder in a folder, spread out, with a table that is no longer sines and cosines."""
    torch.manual_seed(1)
    model: Any = AutoModel.from_config(ModelConfig.for_model("roformer", **SIZES | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(place)
    held = load_file(place / "model.safetensors")
    assert TABLE.removeprefix("roformer.") not in held
    stated = {TABLE.removeprefix("roformer."): sinusoids(12, 8) + torch.randn(12, 8) * 0.1}
    save_file(held | stated, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.transformers
@pytest.mark.parametrize("settings", [{}, {"rotary_value": True}], ids=["queries and keys", "values too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_of_the_file_turns_as_transformers_does(
    settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers import RoFormerModel

    place = folder(tmp_path, **settings)
    ours: Any = load(place, dtype=dtype, attention="eager")
    theirs: Any = RoFormerModel.from_pretrained(place, dtype=dtype).eval()
    for parameter in theirs.parameters():  # where they lie in the mapped file decides the last bit of a product
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        assert torch.equal(ours(IDS, MASK)[0], theirs(IDS, MASK)[0])
    found = load_file(ours.save_pretrained(tmp_path / "again") / "model.safetensors")
    name = TABLE.removeprefix("roformer.")
    assert torch.equal(found[name], load_file(place / "model.safetensors")[name])


@pytest.mark.transformers
@pytest.mark.parametrize(("places", "width"), [(1536, 64), (512, 32), (70, 8)])
def test_a_file_without_a_table_means_that_of_transformers(places: int, width: int) -> None:
    from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

    assert torch.equal(sinusoids(places, width), RoFormerSinusoidalPositionalEmbedding(places, width).create_weight())


def test_neighbours_turn_as_halves_do_in_another_order() -> None:
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    layout = Padded(torch.ones(1, 6, dtype=torch.long))
    order = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])
    order = torch.cat([order, order + 8])
    paired = PairedRotary(8, 6)(x, layout, 2)[..., order]
    torch.testing.assert_close(paired, Rotary(8)(x[..., order].contiguous(), layout, 2), rtol=0, atol=1e-5)


def test_a_change_of_dtype_rounds_states_alone() -> None:
    rotary = PairedRotary(8, 12, held=True).to(torch.bfloat16).float()
    assert torch.equal(rotary.table, sinusoids(12, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["neighbours", "halves"])
def test_layers_take_what_is_stated_in_whatever_dtype_they_compute(kind: str) -> None:
    held, layer = (
        (PairedRotary(8, 6, held=True), PairedRotary(8, 6)) if kind == "neighbours" else (StatedRotary(8), Rotary(8))
    )
    held.take(torch.rand(6, 8) if kind == "neighbours" else torch.rand(4))
    layout = Padded(torch.ones(1, 6, dtype=torch.long))
    # Mixed precision: float32 where they are made, and half where a table of operations computes without autocast.
    exact = held.angles(torch.zeros(1, 6, 8), layout)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(
            a is b for a, b in zip(layer.angles(torch.zeros(1, 6, 8, dtype=torch.bfloat16), layout), exact, strict=True)
        )
    found = layer.angles(torch.zeros(1, 6, 8, dtype=torch.bfloat16), layout)
    assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(found, exact, strict=True))
    assert found[0].dtype == torch.bfloat16


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    place = folder(tmp_path)
    held = load_file(place / "model.safetensors")
    held[TABLE.removeprefix("roformer.")] = sinusoids(11, 8)
    save_file(held, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"embed_positions\.weight: found shape \[11, 8\]; expected \[12, 8\]"):
        load(place)


@pytest.mark.parametrize("said", [{"use_bias": False}, {"norm_type": "rms_norm"}])
def test_the_second_roformer_is_refused_by_its_keys(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(said))}: found"):
        ModelConfig.for_model("roformer", **SIZES | said)


def test_choices_by_the_state_of_padding_are_refused() -> None:
    with pytest.raises(ConfigError, match="summary_type: found 'last'; expected 'first'"):
        AutoModelForMultipleChoice.from_config(ModelConfig.for_model("roformer", **SIZES))


def test_text_is_cut_where_files_say_all(tmp_path: Path) -> None:
    place = folder(tmp_path)
    (place / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    # The class that a folder without settings means: words of a dictionary that is not here.
    with pytest.warns(UserWarning, match="no tokenizer: .*vocab.txt: the tokenizer splits words by jieba's dictionary"):
        model: Any = load(place)
    assert model.tokenizer is None
    assert model(IDS, MASK)[0].shape == (2, 5, 16)
    # Whoever has the dictionary finds the files again.
    (place / "special_tokens_map.json").write_text('{"unk_token": "[UNK]"}', "utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = load(load(place).save_pretrained(tmp_path / "once")).save_pretrained(tmp_path / "twice")
    for name in ("vocab.txt", "special_tokens_map.json"):
        assert (saved / name).read_bytes() == (place / name).read_bytes()
    assert not (saved / "tokenizer.json").exists()
    (place / "special_tokens_map.json").unlink()
    with pytest.raises(TokenizerError, match="splits words by jieba's dictionary"):
        AutoTokenizer.from_pretrained(place)
    # Vocabularies of characters, as published.
    settings = place / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "BertTokenizer"}), "utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(place)
    assert model.tokenizer(["天气 good"])["input_ids"] == [[2, 5, 6, 8, 3]]
    # Another tokenizer's file is taken as it stands; of the class's own it is not all.
    model.tokenizer.save_pretrained(tmp_path / "saved")
    (place / "tokenizer.json").write_text(json.dumps(json.loads(model.tokenizer.to_json())), "utf-8")
    (place / "vocab.txt").unlink()
    for class_name, warned in (("PreTrainedTokenizerFast", 0), ("RoFormerTokenizer", 1)):
        settings.write_text(json.dumps({"tokenizer_class": class_name}), "utf-8")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = load(place)
        assert model.tokenizer(["天气 good"])["input_ids"] == [[2, 5, 6, 8, 3]]
        assert len(told) == warned
        assert sum("splits words by jieba" in note for note in model.load_report.notes) == warned
