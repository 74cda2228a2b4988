"""Tensors that files carry beside the weights: passed over where they change no number, as transformers does."""

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

from flodl.errors import CheckpointError
from flodl_hf import load
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.record import IGNORED_TENSORS
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.models.encoder_model import EncoderModel

Saved = Callable[..., Path]
IDS = torch.tensor([[2, 9, 17, 3]])
MASK = torch.ones_like(IDS)
MODELS = [
    (family, head)
    for family in FAMILIES
    for head in ("base", "masked_lm", "sequence_classification")
    if head == "base" or head in family.heads
]


def named(family: Any, head: str) -> str:
    return f"{family.model_type}-{head}"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    held = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(change(held), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(model: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).to_tuple()


def quietly(folder: Path, head: str) -> EncoderModel:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(folder, head=head)


def surplus(family: Any, head: str) -> dict[str, Tensor]:
    """Return every buffer that is passed over, at the places where files have had them."""
    inside = "" if head == "base" else f"{family.base_prefix}."
    places = ("embeddings.", "rotary_emb.", "encoder.layer.1.attention.self.", "rotary_emb.full_attention_", "")
    found = {f"{inside}{place}{name}": torch.full((3,), 0.5) for place in places for name, _ in IGNORED_TENSORS}
    if family.model_type == "esm":  # it computes with its own
        found = {name: value for name, value in found.items() if not name.endswith("inv_freq")}
    counters = {"num_batches_tracked": torch.tensor(3), f"{inside}encoder.step": torch.tensor(3)}
    return found | counters | {f"{inside}embeddings.position_ids": torch.arange(40)[None]}


@pytest.mark.parametrize(("family", "head"), MODELS, ids=lambda part: getattr(part, "model_type", part))
def test_buffers_that_older_files_carry_change_nothing_and_are_written_back(
    family: Any, head: str, saved: Saved, tmp_path: Path
) -> None:
    folder = saved(family.model_type, head)
    plain = answers(load(folder, head=head))
    more = surplus(family, head)
    model = quietly(rewrite(folder, lambda held: held | more), head)
    assert all(torch.equal(one, other) for one, other in zip(answers(model), plain, strict=True))
    assert model.load_report is not None
    assert more.keys() <= model.load_report.ignored.keys()
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("family", "head"),
    [pair for pair in MODELS if pair[0].tiny and pair[1] != "sequence_classification"],
    ids=lambda part: getattr(part, "model_type", part),
)
def test_a_file_with_such_buffers_has_the_numbers_of_transformers(family: Any, head: str, saved: Saved) -> None:
    import transformers

    more = surplus(family, head)
    folder = rewrite(saved(family.model_type, head), lambda held: held | more)
    kind = "AutoModel" if head == "base" else f"AutoModel{task_named(head).hf_suffix}"
    theirs = getattr(transformers, kind).from_pretrained(folder).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()  # their place in a mapped file decides last bits
    pairs = zip(answers(quietly(folder, head)), answers(theirs), strict=False)  # theirs may have no pooler
    assert all(torch.equal(one, other) for one, other in pairs)


INSIDE = [  # parts of a layer that would be left out of what it computes
    "bert.embeddings.my_position_ids_projection", "bert.encoder.layer.0.attention.self.query.scale",
    "encoder.layer.1.attention.self.key.lora_A.weight", "bert.encoder.layer.2.output.dense.bias", "bert.new.weight",
    "base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default.weight", "cls.predictions.scale",
    "module.bert.encoder.layer.0.output.dense.SCB", "cls.predictions.decoder.base_layer.weight",
    "base_model.model.classifier.modules_to_save.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_tensors_inside_of_the_model_are_refused_as_ever(name: str, saved: Saved) -> None:
    folder = rewrite(saved("bert", "masked_lm"), lambda held: held | {name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=rf"unexpected \(1\):\n  {name}.*\n.*merge it into the weights"):
        load(folder)


# Of another task, of a training, of a script: names that lie below no part of the model.
OUTSIDE = {
    "temperature": (), "foo.inv_freq.weight": (3,), "projection.weight": (3, 16), "projection.bias": (3,),
    "teacher.encoder.layer.0.attention.self.query.weight": (16, 16), "teacher.classifier.weight": (2, 16),
    "optimizer.state.exp_avg": (4, 4), "crf.transitions": (2, 2), "span_score.weight": (1, 16),
}  # fmt: skip


def beside(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return held | {name: torch.full(shape, 0.5) for name, shape in OUTSIDE.items()}


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("family", "head"), [pair for pair in MODELS if pair[0].tiny], ids=lambda part: getattr(part, "model_type", part)
)
def test_tensors_outside_of_the_model_are_told_and_passed_over_as_by_transformers(
    family: Any, head: str, saved: Saved, tmp_path: Path
) -> None:
    import transformers

    folder = rewrite(saved(family.model_type, head), beside)
    kind = "AutoModel" if head == "base" else f"AutoModel{task_named(head).hf_suffix}"
    theirs = getattr(transformers, kind).from_pretrained(folder).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()
    with pytest.warns(UserWarning, match=r"9 tensor\(s\) of model.safetensors belong to no module") as told:
        ours = load(folder, head=head)
    assert len(told) == 1
    said = str(told[0].message)
    assert str(folder) in said
    assert all(name in said for name in list(OUTSIDE)[:3])
    assert ours.load_report is not None
    assert set(ours.load_report.unexpected) == OUTSIDE.keys() <= ours.load_report.ignored.keys()
    pairs = zip(answers(ours), answers(theirs), strict=False)  # theirs may have no pooler
    assert all(torch.equal(one, other) for one, other in pairs)
    ours.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"unexpected \(9\)"):
        load(folder, head=head, strict_config=True)


def test_what_a_model_lacks_under_another_name_is_not_passed_over(saved: Saved) -> None:
    folder = rewrite(
        saved("bert", "sequence_classification"),
        lambda held: {name.replace("classifier", "clasifier"): value for name, value in held.items()},
    )
    with pytest.raises(CheckpointError, match=r"unexpected \(2\).*\n.*clasifier.bias.*did you mean") as refused:
        load(folder)
    assert "missing (2)" in str(refused.value)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"architectures": None}))
    with pytest.raises(CheckpointError, match=r"unexpected \(2\)"):  # and the head would be a fresh one
        load(folder, head="sequence_classification")


def test_beside_code_of_a_repository_every_tensor_may_count(saved: Saved) -> None:
    folder = rewrite(saved("bert", "masked_lm"), beside)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "m.Model"}}))
    with pytest.raises(CheckpointError, match=r"unexpected \(9\)"):
        load(folder)


def bias_of(held: dict[str, Tensor]) -> tuple[str, str]:
    """Return the bias of a head's decoder, and what it is called where it stands twice."""
    rows = max(value.shape[0] for value in held.values() if value.dim() == 2)
    name = next(name for name, value in held.items() if value.shape == (rows,) and name.endswith(".bias"))
    return name, name.removesuffix("bias") + "decoder.bias"


HEADS = [family.model_type for family in FAMILIES if family.tiny and "masked_lm" in family.heads]
# Their decoder is called so itself, or has no bias.
OWN = ("modernbert", "new", "gte", "eurobert", "nomic_bert", "jina_embeddings_v3")


@pytest.mark.transformers
@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("model_type", [name for name in HEADS if name not in OWN])
def test_a_bias_that_stands_twice_is_read_as_transformers_reads_it(
    model_type: str, differs: bool, saved: Saved, tmp_path: Path
) -> None:
    import transformers

    folder = saved(model_type, "masked_lm")
    bias, again = bias_of(load_file(folder / "model.safetensors"))
    rewrite(folder, lambda held: held | {again: held[bias] + differs})
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = load(folder)
    said = [str(one.message) for one in told if "differs from" in str(one.message)]
    assert len(said) == differs
    assert all("One of them is stale" in one and again in one for one in said)
    assert torch.equal(answers(ours)[0], answers(theirs)[0])
    ours.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("wrapped", ["module.model.", "_orig_mod.module.", "module.module."])
def test_names_below_several_wrappers_are_found(wrapped: str, saved: Saved) -> None:
    folder = saved("distilbert", "sequence_classification")
    plain = answers(load(folder))
    rewrite(folder, lambda held: {wrapped + name: value for name, value in held.items()})
    assert torch.equal(answers(load(folder))[0], plain[0])
