"""What loading makes of stored values: one dtype, and numbers only."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError
from flodl_hf import AutoModel, AutoModelForSequenceClassification, load
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.nn.joined_tensors import as_whole, part_of

Saved = Callable[..., Path]
TYPES = [family.model_type for family in FAMILIES if "sequence_classification" in family.heads]
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **settings: Any) -> Path:
    held = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return rewrite_config(folder, **settings)


def rewrite_config(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None or k not in settings})
    )
    return folder


def stored_as(*dtypes: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    """Cast tensors in the order of their names to the dtypes by turns."""

    def change(held: dict[str, torch.Tensor]) -> None:
        for index, name in enumerate(sorted(held)):
            held[name] = held[name].to(dtypes[index % len(dtypes)])

    return change


def dtypes_of(model: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


# stored, stated in config.json, asked for -> loaded, and what the report has to say
DTYPES = [
    ((FULL,), None, None, FULL, None),
    ((HALF,), None, None, HALF, None),
    ((HALF,), "float16", None, HALF, None),
    ((HALF,), "float32", None, FULL, "stored in float16; all are cast to float32, as dtype in config.json specifies"),
    ((HALF,), "float32", "auto", FULL, "stored in float16; all are cast"),
    ((FULL,), "bfloat16", None, BRAIN, "stored in float32; all are cast"),
    ((FULL,), "int8", None, FULL, None),
    ((HALF,), "float32", BRAIN, BRAIN, None),
    ((HALF, FULL), None, None, HALF, "stored in float16 and float32; all are cast to float16, the dtype of"),
    ((FULL, HALF), None, None, FULL, "all are cast to float32"),
    ((FULL, HALF), "bfloat16", None, BRAIN, "all are cast to bfloat16, as dtype in config.json"),
    ((FULL, HALF, BRAIN), None, "float64", torch.float64, None),
]


def aligned(model: Any) -> Any:
    """Return transformers' model with copies of its weights: their place in a mapped file decides last bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize(("stored", "stated", "asked", "expected", "note"), DTYPES)
def test_a_model_has_one_dtype_and_the_report_says_which_won(
    stored: tuple[torch.dtype, ...],
    stated: str | None,
    asked: Any,
    expected: torch.dtype,
    note: str | None,
    saved: Saved,
) -> None:
    folder = rewrite(saved("bert"), stored_as(*stored), dtype=stated)
    model = AutoModel.from_pretrained(folder, dtype=asked)
    assert dtypes_of(model) == {expected}
    assert model.load_report is not None
    assert len(model.load_report.notes) == (note is not None)
    assert note is None or note in model.load_report.notes[0]
    assert model(torch.tensor([[2, 5, 3]])).last_hidden_state.dtype == expected


@pytest.mark.parametrize("model_type", TYPES)
def test_a_fresh_head_has_the_dtype_of_the_file(model_type: str, saved: Saved) -> None:
    folder = rewrite(saved(model_type), stored_as(BRAIN), dtype=None)
    model = AutoModelForSequenceClassification.from_pretrained(folder, labels=["a", "b", "c"])
    assert dtypes_of(model) == {BRAIN}
    assert model(torch.tensor([[2, 5, 3]])).logits.shape == (1, 3)


# What a configuration may state: under which keys, and which value.
STATED: list[dict[str, Any]] = [
    {},
    *({key: value} for key in ("dtype", "torch_dtype") for value in ("float32", "bfloat16", "float16")),
    {"dtype": None, "torch_dtype": "float16"},
    {"dtype": "bfloat16", "torch_dtype": "float32"},
    {"dtype": {"": "bfloat16", "text_config": "float16"}},
    {"dtype": {"text_config": "float16"}},
    {"text_config": {"dtype": "float64"}, "torch_dtype": "float32"},
]


def as_theirs(folder: Path, head: str = "base", **asked: Any) -> None:
    """Hold what is loaded of a folder to what transformers makes of it: dtype and outputs, to the bit."""
    import transformers

    kind = "AutoModel" if head == "base" else f"AutoModel{task_named(head).hf_suffix}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a table of another architecture
        ours = load(folder, head=head, **asked)
    theirs = aligned(getattr(transformers, kind).from_pretrained(folder)).eval()
    if ours.config.model_type == "deberta":
        # Theirs keeps two biases of attention in float32 whatever the dtype.
        theirs.to(next(theirs.parameters()).dtype)
    assert dtypes_of(ours) == dtypes_of(theirs)
    ids = torch.tensor([[2, 9, 17, 3]])
    mask = torch.ones_like(ids)
    if head == "multiple_choice":
        ids, mask = ids[None], mask[None]
    with torch.no_grad():
        found, expected = ours(ids, mask).to_tuple(), theirs(ids, mask).to_tuple()
    assert expected
    for one, other in zip(found, expected, strict=False):  # theirs may have no pooler
        if ours.config.model_type in ("new", "deberta", "deberta-v2") and one.dtype != FULL:
            # Equal in float32; in half precision some products are rounded at other places.
            torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
        else:
            assert torch.equal(one, other)


@pytest.mark.transformers
@pytest.mark.parametrize("stated", STATED, ids=str)
@pytest.mark.parametrize("stored", [(FULL,), (BRAIN,), (HALF,), (FULL, HALF), (HALF, FULL)], ids=str)
def test_the_dtype_of_a_folder_is_the_one_that_transformers_takes(
    stored: tuple[torch.dtype, ...], stated: dict[str, Any], saved: Saved
) -> None:
    folder = rewrite(saved("bert", "sequence_classification"), stored_as(*stored), dtype=None, torch_dtype=None)
    as_theirs(rewrite_config(folder, **stated), "sequence_classification")


@pytest.mark.transformers
@pytest.mark.parametrize(("stored", "stated"), [((HALF, FULL), None), ((HALF,), "float32"), ((FULL,), "bfloat16")])
@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if family.tiny])
def test_each_family_has_the_dtype_of_transformers(
    model_type: str, stored: tuple[torch.dtype, ...], stated: str | None, saved: Saved
) -> None:
    as_theirs(rewrite(saved(model_type), stored_as(*stored), dtype=stated, torch_dtype=None))


@pytest.mark.transformers
@pytest.mark.parametrize("stated", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("head", ["token_classification", "question_answering", "masked_lm", "multiple_choice"])
def test_each_head_has_the_dtype_of_transformers(head: str, stated: str | None, saved: Saved) -> None:
    as_theirs(rewrite(saved("bert", head), stored_as(HALF), dtype=stated, torch_dtype=None), head)


@pytest.mark.transformers
def test_files_that_nothing_is_said_of_have_the_dtype_of_the_first_tensor_used_or_not(saved: Saved) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        stored_as(FULL)(held)
        held |= {"aaa": torch.zeros(3, dtype=torch.int64), "aab.weight": torch.zeros(2, dtype=BRAIN)}

    folder = rewrite(saved("bert", "question_answering"), change, dtype=None, architectures=["OfSomebody"])
    as_theirs(folder)
    assert load(folder).dtype == BRAIN


@pytest.mark.transformers
@pytest.mark.parametrize("said", [None, "float16"])
def test_of_shards_the_index_says_the_dtype_or_the_first_tensor_of_the_first(said: str | None, saved: Saved) -> None:
    folder = saved("bert")
    held = load_file(folder / "model.safetensors")
    names = sorted(held, reverse=True)
    shards = {name: f"model-0000{1 + (at >= 5)}-of-00002.safetensors" for at, name in enumerate(names)}
    for shard in sorted(set(shards.values())):
        part = {name: held[name].to(BRAIN if "1-of" in shard else FULL) for name in names if shards[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {} if said is None else {"dtype": said}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    as_theirs(rewrite_config(folder, dtype=None))
    assert load(folder).dtype == (BRAIN if said is None else HALF)


# --- numbers only ------------------------------------------------------------------------------------


def poisoned(*values: float, name: str = "value.weight") -> Callable[[dict[str, torch.Tensor]], object]:
    def change(held: dict[str, torch.Tensor]) -> None:
        tensor = held[next(key for key in held if key.endswith(name))]
        tensor.view(-1)[-len(values) :] = torch.tensor(values)

    return change


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("values", [(float("nan"),), (float("inf"),), (-float("inf"), float("nan"))])
def test_weights_that_are_no_numbers_are_refused_by_name(values: tuple[float, ...], mapped: bool, saved: Saved) -> None:
    folder = rewrite(saved("bert", "sequence_classification"), poisoned(*values))
    with pytest.raises(
        CheckpointError, match=r"(?s)1 tensors contain.*encoder\.layer\.0\.attention\.self\.value\.weight"
    ) as no:
        load(folder, mapped=mapped)
    nans = sum(value != value for value in values)
    assert f"{nans} NaN and {len(values) - nans} infinite of 256 values" in no.value.problems[0]
    model = load(folder, mapped=mapped, allow_nonfinite=True)
    assert model.load_report is not None
    assert model.load_report.notes == [f"not finite: {no.value.problems[0]}"]


@pytest.mark.parametrize("model_type", TYPES)
def test_every_tensor_of_a_model_is_looked_at(model_type: str, saved: Saved) -> None:
    """Each in turn, wherever its value would have an effect."""
    folder = saved(model_type, "sequence_classification")
    whole = load_file(folder / "model.safetensors")
    used = load(folder).load_report
    assert used is not None
    for name in used.matched.values():
        held = {key: value.clone() for key, value in whole.items()}
        part = part_of(name)
        whole_name = name if part is None else part.whole
        first = 0 if part is None else part.index * len(held[whole_name]) // (part.count * part.groups)
        held[whole_name][first].view(-1)[0] = float("nan")
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as no:
            load(folder)
        assert [as_whole(line.partition(":")[0]) for line in no.value.problems] == [whole_name]


def test_tensors_that_are_not_used_may_hold_anything(saved: Saved) -> None:
    folder = rewrite(saved("bert", "sequence_classification"), poisoned(float("nan"), name="classifier.bias"))
    assert AutoModel.from_pretrained(folder).head == "base"


def test_a_cast_that_makes_infinities_is_refused(saved: Saved) -> None:
    folder = rewrite(saved("bert"), poisoned(7e4))
    with pytest.raises(CheckpointError, match=r"value\.weight: values to 7e\+04, beyond float16"):
        AutoModel.from_pretrained(folder, dtype="float16")
    assert AutoModel.from_pretrained(folder, dtype="bfloat16").dtype == BRAIN


@pytest.mark.parametrize("dtype", [torch.float64, HALF, BRAIN])
def test_every_stored_dtype_is_looked_at(dtype: torch.dtype, saved: Saved) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        stored_as(dtype)(held)
        poisoned(float("inf"))(held)

    with pytest.raises(CheckpointError, match="1 infinite"):
        AutoModel.from_pretrained(rewrite(saved("bert"), change))


@pytest.mark.transformers
@pytest.mark.parametrize("named", [None, "model.safetensors.index.json"])
def test_of_weights_that_lie_there_twice_those_of_transformers_are_read(named: str | None, saved: Saved) -> None:
    import transformers

    folder = rewrite(saved("bert"), lambda held: None, transformers_weights=named)
    shard = "model-00001-of-00001.safetensors"
    other = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(other, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    theirs = transformers.AutoModel.from_pretrained(folder).embeddings.word_embeddings.weight
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = AutoModel.from_pretrained(folder)
    assert torch.equal(ours.graph.get_parameter("encoder.embeddings.word.weight"), theirs)
    assert ours.load_report is not None
    said = "model.safetensors is read, as by transformers; model.safetensors.index.json, with 1 of 1 files present, "
    said += "is ignored: delete the stale files"
    assert [str(one.message) for one in told] == ([f"{folder}: {said}"] if named is None else [])
    assert ours.load_report.notes == ([said] if named is None else [])
