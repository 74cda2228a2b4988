"""Keys of ``config.json``: used, ignored, noted or refused, in every family."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError, ConfigError
from flodl_hf import AutoConfig, AutoModelForSequenceClassification, load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.shared_keys import COMMON_IGNORED_KEYS, FOREIGN
from flodl_hf.heads.base import BaseModel
from flodl_hf.parity.cell import settings_of

Saved = Callable[..., Path]
SIZES = {
    "vocab_size": 90, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24,
    "max_positions": 40, "type_vocab_size": 2, "embedding_size": 8,
}  # fmt: skip
TINY = {f.model_type: {row.key: SIZES[row.field] for row in f.rows if row.field in SIZES} for f in FAMILIES}
BY_TYPE = {family.model_type: family for family in FAMILIES}
TYPES = list(BY_TYPE)

# Found in published files; they change no number in transformers.
HARMLESS: dict[str, Any] = {
    "tie_weights_": True,
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"},
    "eos_token_ids": [0],
    "emb_size": 16,
    "padding": "max_length",
    "classifiers_size": [3, 2, 2, 2],
    "tasks": ["glue/mnli", "glue/qnli"],
    "is_gpu": True,
    "norm_mean": [0.1, 2.5],
    "norm_std": [1.0, 0.5],
    "dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "attn_implementation": "eager",
    "_attn_implementation": "flash_attention_2",
    "output_hidden_states": True,
    "return_dict": False,
    "adapters": {"adapters": {}, "config_map": {}, "fusions": {}},
    "cell": {}, "pre_trained": "", "structure": [], "training": "",
    "tie_last_hidden_states": True,
    "directionality": "uni", "tie_encoder_decoder": True, "is_encoder_decoder": True, "cross_attention_hidden_size": 8,
    "pruned_heads": {"0": []}, "training_args": {"learning_rate": 2e-5}, "embedding_dim": 128,
}  # fmt: skip


def made(model_type: str, **changes: Any) -> ModelConfig:
    options = {key: changes.pop(key) for key in ("ignore_config_keys", "strict_config") if key in changes}
    return ModelConfig.from_dict({"model_type": model_type, **TINY[model_type], **changes}, **options)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("key", HARMLESS)
def test_a_key_that_changes_no_number_stops_no_load(model_type: str, key: str) -> None:
    changed = vars(made(model_type, **{key: HARMLESS[key]}).encoder).items() - vars(made(model_type).encoder).items()
    assert all(field.endswith("dropout") for field, _ in changed)


@pytest.mark.parametrize("model_type", TYPES)
def test_an_unknown_plain_value_is_noted_and_refused_when_asked(model_type: str) -> None:
    for value in (3, 0.5, "haar", True, ["a", {"b": 1}], {"levels": 3}):
        (note,) = made(model_type, wavelets=value).notes
        assert note.startswith("wavelets: ")
        assert "changes nothing" in note
        with pytest.raises(ConfigError, match=r"(?s)1 problem.*wavelets: found .*not understood") as caught:
            made(model_type, wavelets=value, strict_config=True)
        assert len(caught.value.problems) == 1
        assert made(model_type, wavelets=value, strict_config=True, ignore_config_keys=("wavelets",)).notes == ()
    for nothing in (None, False, "", [], {}, {"a": {}}):
        assert made(model_type, wavelets=nothing, strict_config=True).notes == ()
    with pytest.raises(ConfigError, match=r"wavelets: found .*not understood"):
        made(model_type, wavelets={"levels": 3}, auto_map={"AutoModel": "modeling_wavelets.Model"})


def read_by(model_type: str) -> set[str]:
    family = next(f for f in FAMILIES if f.model_type == model_type)
    return {key for row in family.rows for key in (row.key, *row.aliases)} | {
        entry.key for entry in family.ignored_keys
    }


@pytest.mark.parametrize("model_type", TYPES)
def test_keys_of_other_architectures_are_refused_where_they_are_switched_on(model_type: str) -> None:
    for entry in FOREIGN:
        if entry.key not in read_by(model_type):
            check_foreign(model_type, entry)


def check_foreign(model_type: str, entry: Any) -> None:
    with pytest.raises(ConfigError, match=f"{entry.key}: found 512; .*transformers without"):
        made(model_type, **{entry.key: 512})
    assert made(model_type, **{entry.key: None}).notes == ()
    assert made(model_type, ignore_config_keys=(entry.key,), **{entry.key: 512}).encoder == made(model_type).encoder


def others() -> list[tuple[str, str]]:
    """Return each family with each key that only other families read."""
    found = []
    # Keys of another architecture, and those that change nothing in any family but one.
    foreign = {entry.key for entry in (*FOREIGN, *COMMON_IGNORED_KEYS)}
    for family in FAMILIES:
        shared = {"tie_word_embeddings", "embedding_size", *read_by(family.model_type), *foreign}
        keys = dict.fromkeys(row.key for other in FAMILIES for row in other.rows if row.key not in shared)
        found += [(family.model_type, key) for key in keys]
    return found


@pytest.mark.parametrize(("model_type", "key"), others())
def test_a_setting_of_another_family_repeats_or_is_passed_over(model_type: str, key: str) -> None:
    """Equal to what this family has, or off, it repeats; a dropout changes no answer; transformers reads its own key."""
    rows = {row.key: row for other in reversed(FAMILIES) for row in other.rows}
    own = {row.field for row in next(f for f in FAMILIES if f.model_type == model_type).rows}
    config = made(model_type)
    field = rows[key].field
    same = getattr(config.encoder, field) if field in own else rows[key].default
    if field.endswith("dropout"):
        assert "dropout of other families" in made(model_type, **{key: 0.25}).notes[0]
        return
    if isinstance(same, (int, float, str, bool)):
        assert made(model_type, **{key: same}).encoder == config.encoder
    passed_over(model_type, {key: 77}, rf"{key}: found 77, a setting of other families")


def passed_over(model_type: str, said: dict[str, Any], refused: str) -> None:
    """Check that contradictions are told and change nothing, and are refused where nothing says which of two holds."""
    if BY_TYPE[model_type].tiny:
        config = made(model_type, **said)
        assert config.encoder == made(model_type).encoder
        assert [line.partition(":")[0] for line in config.overruled] == list(said)
        assert all(f"{line}; it is ignored, as by transformers" in config.notes for line in config.overruled)
    else:
        with pytest.raises(ConfigError, match=refused):
            made(model_type, **said)
    for unclear in ({"strict_config": True}, {"auto_map": {"AutoModel": "modeling_own.OwnModel"}}):
        with pytest.raises(ConfigError, match=refused):
            made(model_type, **said, **unclear)


def contradictions(model_type: str) -> dict[str, Any]:
    """Return every key of other families, of sizes and of spellings, each with a value that contradicts the family."""
    rows = {row.key: row for other in FAMILIES for row in other.rows}
    found = {key: 77 for named, key in others() if named == model_type and not rows[key].field.endswith("dropout")}
    found |= dict.fromkeys(("num_key_value_heads", "head_dim", "attention_head_size"), 1)
    found = {key: value for key, value in found.items() if key not in read_by(model_type)}
    misspelt = [row.key + "s" for row in BY_TYPE[model_type].rows if row.field == "norm_eps"]
    return found | dict.fromkeys(misspelt, 0.5)


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if family.tiny])
def test_what_is_passed_over_leaves_the_numbers_of_transformers(model_type: str, tmp_path: Path) -> None:
    said = contradictions(model_type)
    assert len(said) > 10
    with pytest.warns(UserWarning, match="contradict others of the file and are ignored") as warned:
        as_transformers(model_type, said, tmp_path / "contradicting")
    assert len(warned) == 1
    rows = {row.field: row for row in BY_TYPE[model_type].rows}
    unusual = {rows["norm_eps"].key: 0.25} if "norm_eps" in rows else {}
    if "pad_token_id" in rows and "-1" in rows["pad_token_id"].check.expected:
        unusual["pad_token_id"] = -1
    as_transformers(model_type, unusual, tmp_path / "unusual")


def without(model_type: str, left_out: Iterable[str]) -> dict[str, None]:
    """Return the keys of these fields, under every name that the family has for them."""
    rows = [row for row in BY_TYPE[model_type].rows if row.field in left_out]
    return {key: None for row in rows for key in (row.key, *row.aliases)}


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if family.left_out])
def test_sizes_that_a_file_leaves_out_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    family = BY_TYPE[model_type]
    # Others would make the model large, or odd beside small sizes; the slow run has them.
    absent = {field: size for field, size in family.left_out.items() if field in ("intermediate_size", "max_positions")}
    keys = {row.key: absent[row.field] for row in family.rows if row.field in absent}
    with pytest.warns(UserWarning, match="sizes are not stated; transformers' defaults are used") as warned:
        as_transformers(model_type, without(model_type, absent), tmp_path / "short")
    assert len(warned) == 1
    assert all(f"\n  {key}: {size}\n" in str(warned[0].message) for key, size in keys.items())
    config = ModelConfig.from_pretrained(tmp_path / "short")
    assert config.left_out == keys
    assert all(f"{key}: absent, taken as {size}, as by transformers" in config.notes for key, size in keys.items())
    for strict, unclear_map in ((True, {}), (False, {"auto_map": {"AutoModel": "modeling_own.OwnModel"}})):
        short = {k: v for k, v in TINY[model_type].items() if k not in without(model_type, absent)}
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_dict({"model_type": model_type, **short, **unclear_map}, strict_config=strict)
        assert [line.partition(": missing")[0] for line in caught.value.problems] == list(keys)


@pytest.mark.slow
@pytest.mark.transformers
@pytest.mark.parametrize(
    ("model_type", "field"), [(family.model_type, field) for family in FAMILIES for field in family.left_out]
)
def test_each_size_that_a_file_leaves_out_is_that_of_transformers(model_type: str, field: str, tmp_path: Path) -> None:
    usual = BY_TYPE[model_type].left_out
    keys = {row.field: row.key for row in BY_TYPE[model_type].rows}
    fitting = {"num_heads": {keys["hidden_size"]: 8 * usual["num_heads"]}}.get(field, {})
    if "head_dim" in keys.values() and field in ("num_heads", "hidden_size"):
        fitting |= {"head_dim": None, "num_key_value_heads": None}
    with pytest.warns(UserWarning, match=f"\n  {keys[field]}: {usual[field]}\n"):
        as_transformers(model_type, {**fitting, **without(model_type, [field])}, tmp_path / "short")


def test_sizes_that_are_left_out_and_contradict_the_weights_are_refused(saved: Saved) -> None:
    folder = saved("bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    with (
        pytest.warns(UserWarning, match="hidden_size: 768"),
        pytest.raises(CheckpointError, match=r"found \[40, 16\]; expected \[40, 768\]"),
    ):
        load(folder)


def test_a_configuration_that_is_made_states_its_sizes() -> None:
    with pytest.raises(ConfigError, match="hidden_size: missing"):
        ModelConfig.for_model("bert", **{key: value for key, value in TINY["bert"].items() if key != "hidden_size"})


def as_transformers(model_type: str, said: dict[str, Any], folder: Path) -> None:
    """Check that a small model is transformers' to the bit under a configuration that says this as well.

    What is said to be None is left out.
    """
    import transformers

    stated = {"model_type": model_type, **settings_of(BY_TYPE[model_type], "tiny"), **said}
    stated = {key: value for key, value in stated.items() if value is not None}
    config = transformers.CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(stated))
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**stated, "architectures": ["TheirModel"]}))
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    for parameter in theirs.parameters():  # where they lie in the mapped file decides the last bit of a product
        parameter.data = parameter.data.clone()
    ours = load(folder)
    ids, mask = torch.tensor([[2, 9, 17, 33, 3], [2, 30, 3, 1, 1]]), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    with torch.no_grad():
        found, expected = ours(ids, mask).last_hidden_state, theirs(ids, mask).last_hidden_state
    assert torch.equal(found, expected)


@pytest.mark.parametrize("model_type", [f.model_type for f in FAMILIES if "embedding_size" not in TINY[f.model_type]])
@pytest.mark.parametrize("key", ["emb_size", "embedding_dim"])
def test_another_width_is_noted_for_tensors_show_the_width(model_type: str, key: str) -> None:
    assert made(model_type, **{key: 16}).notes == ()
    (note,) = made(model_type, **{key: 12}).notes
    assert note.startswith(f"{key}: 12 changes no number here")


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("key", "same"), [("num_key_value_heads", 2), ("head_dim", 8), ("attention_head_size", 8)])
def test_heads_that_are_stated_twice_are_those_of_the_sizes(model_type: str, key: str, same: int) -> None:
    assert made(model_type, **{key: same}).notes == ()
    if key not in read_by(model_type):
        passed_over(model_type, {key: 1}, f"{key}: found 1; expected {same} .*transformers ignores it")
    elif any(entry.key == key and entry.read for entry in BY_TYPE[model_type].ignored_keys):
        with pytest.raises(ConfigError, match=f"{key}: found 1; expected {same} .*not supported"):
            made(model_type, **{key: 1})


def test_a_misspelt_setting_is_told_where_its_own_key_is_absent() -> None:
    passed_over("bert", {"layer_norm_epss": 1e-5}, r"layer_norm_epss: found .*did you mean 'layer_norm_eps'\?")
    assert "layer_norm_eps is absent and takes its default" in made("bert", layer_norm_epss=1e-5).notes[0]
    assert made("bert", layer_norm_epss=1e-5, layer_norm_eps=1e-12).notes


def test_common_names_are_read_as_distilberts_own() -> None:
    settings = dict(TINY["distilbert"])
    for common, own in (("hidden_size", "dim"), ("num_hidden_layers", "n_layers"), ("num_attention_heads", "n_heads")):
        settings[common] = settings.pop(own)
    config = ModelConfig.from_dict({"model_type": "distilbert", **settings})
    assert config.encoder == made("distilbert").encoder
    assert (config.hidden_size, config.dim) == (16, 16)
    assert "dim" not in config.to_dict()
    assert made("distilbert", hidden_size=16).hidden_size == 16
    both = made("distilbert", hidden_size=32)
    assert both.hidden_size == both.dim == 32  # transformers writes it over the other
    assert both.overruled == ("dim: 16; hidden_size, another name of the same setting, says 32",)
    for unclear in ({"strict_config": True}, {"auto_map": {"AutoModel": "modeling_own.OwnModel"}}):
        with pytest.raises(ConfigError, match="dim: found 16 and hidden_size 32, another name"):
            made("distilbert", hidden_size=32, **unclear)


def test_labels_and_their_number_may_disagree_as_in_transformers() -> None:
    few = made("bert", num_labels=3, id2label={"0": "no"})
    assert few.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert "num_labels is 3; the number is used" in few.notes[0]
    many = made("bert", num_labels=2, id2label={"0": "a", "1": "b", "2": "c"})
    assert many.labels == ("LABEL_0", "LABEL_1")
    assert "num_labels is 2; the number is used" in many.notes[0]


@pytest.mark.transformers
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.tiny], ids=lambda family: family.model_type)
def test_transformers_takes_the_same_and_counts_the_same_labels(family: Any) -> None:
    from transformers import CONFIG_MAPPING

    for extra in (
        {"num_labels": 3, "id2label": {"0": "no"}},
        {"num_labels": 3, "id2label": {"0": "no", "1": "yes"}},
        {"num_labels": 3, "id2label": {"0": "no", "7": "yes"}},
        {"num_labels": 2, "id2label": {"0": "a", "1": "b", "2": "c"}},
    ):
        theirs = CONFIG_MAPPING[family.model_type].from_dict({**TINY[family.model_type], **HARMLESS, **extra})
        ours = made(family.model_type, **HARMLESS, **extra)
        assert dict(enumerate(ours.labels)) == theirs.id2label
        assert [ours.hidden_size, ours.encoder.num_layers] == [theirs.hidden_size, theirs.num_hidden_layers]


@pytest.mark.parametrize("key", ["output_hidden_states", "output_attentions", "return_dict"])
def test_what_a_call_returns_is_said_where_the_file_asks_for_it(key: str) -> None:
    usual = key == "return_dict"
    assert made("bert", **{key: usual}).notes == made("bert", **{key: None}).notes == ()
    (note,) = made("bert", **{key: not usual}).notes
    assert "it is an argument of the call" in note


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_may_have_no_padding_id_unless_it_counts_positions_from_it(model_type: str) -> None:
    rows = {row.key: row for row in next(f for f in FAMILIES if f.model_type == model_type).rows}
    if "pad_token_id" not in rows:  # fixed, whatever the file says
        assert made(model_type, pad_token_id=None).encoder == made(model_type).encoder
    elif "positions are counted from it" in rows["pad_token_id"].check.expected:
        with pytest.raises(ConfigError, match=r"pad_token_id: found None; .*positions are counted from it"):
            made(model_type, pad_token_id=None)
    else:
        assert made(model_type, pad_token_id=None).encoder.pad_token_id is None


@pytest.mark.parametrize("name", ["xlnet", "convbert", "t5", "longformer", "xlm", "gpt2", "unheard_of"])
def test_an_unknown_model_type_is_no_misspelling_of_ours(name: str) -> None:
    with pytest.raises(ConfigError) as no:
        ModelConfig.from_dict({"model_type": name})
    text = str(no.value)
    assert "did you mean" not in text
    assert all(family.model_type in text for family in FAMILIES)
    assert "docs/" not in text, "documents are not part of the wheel"
    assert "flodl_hf.families.register" in text
    assert ("another architecture" in text) == (name != "unheard_of")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("brt", "bert"), ("distillbert", "distilbert"), ("xlm-roberat", "xlm-roberta"), ("deberta_v2", "deberta-v2")],
)
def test_a_misspelt_model_type_is_set_right(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        ModelConfig.from_dict({"model_type": name})


# --- which class a folder is for ---------------------------------------------------------------------


def rewritten(folder: Path, *absent: str, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
    return folder


@pytest.mark.parametrize("model_type", TYPES)
def test_a_folder_without_architectures_is_a_base_model(model_type: str, saved: Saved) -> None:
    model = load(rewritten(saved(model_type), "architectures"))
    assert type(model) is BaseModel
    assert not model.untrained


@pytest.mark.parametrize("head", list(FAMILIES[0].heads))
def test_a_head_that_nobody_named_is_told(head: str, saved: Saved) -> None:
    model = load(rewritten(saved("bert", head), "architectures"))
    assert type(model) is BaseModel
    assert model.load_report is not None
    (note,) = model.load_report.notes
    assert note.startswith("architectures: absent, so this is the encoder alone; the file also contains the head of ")
    # BERT's classifiers of texts, tokens and choices have one name, and pre-training is two tasks in one.
    named = {"token_classification": "sequence_classification", "multiple_choice": "sequence_classification"}
    assert {"pretraining": "masked_lm and next_sentence"}.get(head, named.get(head, head)) in note
    assert load(model.source.folder, head=head).load_report.trained


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("name", ["HF_Siamese", "Contriever", "BertForSomethingElse"])
def test_a_folder_of_a_class_that_is_none_of_ours_is_a_base_model(model_type: str, name: str, saved: Saved) -> None:
    folder = rewritten(saved(model_type), architectures=[name])
    held = load_file(folder / "model.safetensors")
    held["projection.weight"] = torch.ones(8, 16)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    assert type(model) is BaseModel
    assert not model.untrained
    assert model.load_report is not None
    assert name in model.load_report.ignored["projection.weight"]
    assert any(name in note for note in model.load_report.notes)


def test_a_foreign_class_excuses_nothing_inside_the_encoder(saved: Saved) -> None:
    folder = rewritten(saved("bert"), architectures=["HF_Siamese"])
    held = load_file(folder / "model.safetensors")
    held["encoder.layer.0.gate.weight"] = torch.ones(8, 16)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.0\.gate\.weight"):
        load(folder)


def test_notes_stand_in_the_load_report_and_strictness_reaches_every_door(saved: Saved) -> None:
    folder = rewritten(saved("bert", "sequence_classification"), wavelets=3)
    model = load(folder)
    assert model.load_report is not None
    assert any(note.startswith("wavelets") for note in model.load_report.notes)
    assert "wavelets" in str(model.load_report)
    for door in (load, AutoConfig.from_pretrained, AutoModelForSequenceClassification.from_pretrained):
        with pytest.raises(ConfigError, match="wavelets"):
            door(folder, strict_config=True)
