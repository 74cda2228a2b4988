"""A job resumes if and only if nothing that changes its answers was changed: every option, every setting, every file."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flodl_hf import encode_file, load, predict_file
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.checkpoints.sentence.settings import TransformerSettings
from flodl_hf.checkpoints.sentence.steps import Dense, Step
from flodl_hf.errors import PredictError
from flodl_hf.inference import RunKeywords, RunOptions
from flodl_hf.jobs import tasks

CLASSES = "sequence_classification"


def begin(run: Callable[..., Any], source: Path, out: Path) -> None:
    """Finish two parts of a job, and stop it."""
    asked = iter([False, False, True])
    assert run(source, out, part_rows=10, should_stop=lambda: next(asked)).parts == 2


def resumes(run: Callable[..., Any], source: Path, out: Path) -> bool:
    """Return whether a job resumes; its parts are then the same as without the interruption."""
    try:
        return run(source, out).resumed == 2
    except PredictError as refused:
        problems = refused.details.get("problems", [])
        if not problems or not all(": was " in problem for problem in problems):
            raise
    return False


# Options that change no answer, with a value to try. The others change answers, and are refused if they are changed.
SAME: dict[str, Any] = {
    "device": "cpu", "devices": ["cpu"], "revision": None, "local_files_only": True, "weights": "disk",
    "on_progress": lambda progress: None, "should_stop": lambda: False, "overwrite": None, "parent": None,
    "part_rows": 7, "token_budget": 32, "window": 3, "progress": False, "untrained": True, "head": CLASSES,
    "model": None, "source": None, "target": None, "batch_size": None,
}  # fmt: skip
# Which job it is, what begins it anew, and what is not taken by `predict_file`.
NOT_TRIED = ("overwrite", "parent", "model", "source", "target", "progress")
NAMES = ("task", "route", "prompt_name")  # of parts that the folder does not have
CHANGED: dict[str, dict[str, Any]] = {
    "files": {
        "format": "jsonl", "header": False, "text_column": "other", "pair_column": "other", "keep": "none",
        "id_column": "id", "on_error": "null", "question": "who?", "question_column": "other",
        "context_column": "other", "query": "who?", "query_column": "other",
    },
    CLASSES: {
        "top_k": 2, "threshold": 0.1, "strict": True, "truncate": True, "function_to_apply": "none",
        "prompt": "a dog", "prompt_name": "unknown", "max_length": 4,
    },
    "token_classification": {
        "aggregation": "none", "strict": True, "stride": 2, "ignore_labels": ["LABEL_1"], "constrained": True,
    },
    "question_answering": {
        "top_k": 2, "strict": True, "no_answer": True, "whole_words": True, "max_answer_length": 3, "stride": 2,
        "window_tokens": 12, "distinct": True, "null_margin": 0.5,
    },
    "masked_lm": {"top_k": 2, "targets": ["cat"]},
    "base": {
        "pooling": "cls", "normalize": False, "truncate_dim": 4, "prompt": "a cat", "strict": True, "windows": True,
        "prompt_name": "unknown", "task": "unknown", "route": "unknown",
    },
    "encode": {
        "normalize_embeddings": True, "truncate_dim": 4, "prompt": "a cat", "prompt_name": "query", "store": "int8",
        "windows": True, "strict": True, "ranges": None, "task": "unknown", "route": "unknown",
    },
    "run": {"precision": "bf16", "batch_invariant": True},
}  # fmt: skip


def test_every_option_is_classified() -> None:
    """An option that was added is in neither table: add it to the one where it belongs."""
    own = {*inspect.signature(predict_file).parameters, *inspect.signature(encode_file).parameters}
    found = {"files": own - {"options", "how", "store"}, "run": {*RunKeywords.__annotations__} - {"long_texts"}}
    assert {field.name for field in fields(RunOptions)} == found["run"]
    for head in (CLASSES, "token_classification", "question_answering", "masked_lm", "base"):
        model: Any = load(Path(__file__).parents[2] / "golden" / f"bert-{head}")
        method = {"question_answering": "answer_batch", "masked_lm": "fill_mask", "base": "embed"}.get(head, "predict")
        found[head] = {*tasks._keywords(getattr(model, method), head)}
        if head == "base":
            found["encode"] = {*tasks._keywords(model.encode, head)}
    unclassified = {
        where: names - {"long_texts", *SAME, *CHANGED["run"], *CHANGED[where]} for where, names in found.items()
    }
    assert not any(unclassified.values()), unclassified
    # `encode_file` takes all options of `encode` that change vectors.
    assert {*CHANGED["encode"]} <= found["encode"]


@pytest.mark.parametrize("name", [n for n in SAME if n not in NOT_TRIED])
def test_options_that_change_no_answer(name: str, folder: Any, numbered: Any, tmp_path: Path) -> None:
    source, wanted, out = numbered(30), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    given: Any = folder(CLASSES)
    predict_file(given, source, wanted, part_rows=10)
    begin(lambda *args, **how: predict_file(given, *args, **how), source, out)
    warned = pytest.warns(UserWarning, match="part_rows") if name == "part_rows" else _none()
    with warned:
        assert resumes(lambda *args: predict_file(given, *args, **{name: SAME[name]}), source, out)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (out, wanted)]
    for one, other in zip(*rows, strict=True):
        assert one.pop("score") == pytest.approx(other.pop("score"), abs=1e-6)
        assert one == other


class _none:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...


@pytest.mark.parametrize(
    ("head", "name", "value"),
    [
        *((CLASSES, n, CHANGED["files"][n]) for n in ("keep", "id_column", "on_error", "text_column", "pair_column")),
        *((CLASSES, n, v) for part in (CLASSES, "run") for n, v in CHANGED[part].items() if n not in NAMES),
        *(("base", n, v) for n, v in CHANGED["base"].items() if n not in NAMES),
        *(("token_classification", n, v) for n, v in CHANGED["token_classification"].items()),
    ],
)
def test_options_that_change_answers(head: str, name: str, value: Any, model: Any, jsonl: Any, tmp_path: Path) -> None:
    source, out = jsonl([{"id": i, "text": "a cat", "other": "a dog"} for i in range(30)]), tmp_path / "out.jsonl"
    begin(lambda *args, **how: predict_file(model(head), *args, **how), source, out)
    assert not resumes(lambda *args: predict_file(model(head), *args, **{name: value}), source, out)
    assert resumes(lambda *args: predict_file(model(head), *args), source, out)


@pytest.mark.filterwarnings("ignore:.*truncated")
@pytest.mark.parametrize("name", [n for n in CHANGED["encode"] if n not in (*NAMES, "ranges")])
def test_options_that_change_vectors(name: str, model: Any, jsonl: Any, tmp_path: Path) -> None:
    source, out = jsonl([{"text": f"a cat and {i} dogs " * 9} for i in range(30)]), tmp_path / "out.npy"
    given = model("base")
    begin(lambda *args, **how: encode_file(given, *args, **how), source, out)
    assert not resumes(lambda *args: encode_file(given, *args, **{name: CHANGED["encode"][name]}), source, out)
    assert resumes(lambda *args: encode_file(given, *args), source, out)


def test_a_prompt_of_the_folder_by_its_name(folder: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(3), tmp_path / "out.npy"
    loaded: Any = load(folder("base"))
    loaded.sentence_recipe = SentenceTransformerConfig(prompts={"query": "a cat"})
    encode_file(loaded, source, out, prompt_name="query")
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert np.abs(np.load(out) - loaded.encode(["a cat" + text for text in texts])).max() < 1e-6


@pytest.mark.parametrize(("name", "value"), [("format", "csv"), ("header", False)])
def test_options_of_the_input(name: str, value: Any, model: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("text\n" + "a cat\n" * 29)
    first = {} if name == "format" else {"format": "csv", "header": True}
    begin(lambda *args, **how: predict_file(model(CLASSES), *args, **first, **how), source, out)
    assert not resumes(lambda *args: predict_file(model(CLASSES), *args, **{**first, name: value}), source, out)
    assert resumes(lambda *args: predict_file(model(CLASSES), *args, **first), source, out)


def test_a_default_that_is_given_changes_nothing(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(30), tmp_path / "out.jsonl"
    begin(lambda *args, **how: predict_file(model(CLASSES), *args, **how), source, out)
    run: dict[str, Any] = {"strict": False, "batch_invariant": False, "precision": None}
    assert resumes(lambda *args: predict_file(model(CLASSES), *args, **run), source, out)


def test_precision_of_the_model_is_that_of_a_call(folder: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(30), tmp_path / "out.jsonl"
    loaded = load(folder(CLASSES))
    begin(lambda *args, **how: predict_file(loaded, *args, **how), source, out)
    loaded.runtime(precision="bf16", token_budget=64)
    assert not resumes(lambda *args: predict_file(loaded, *args), source, out)
    assert resumes(lambda *args: predict_file(loaded.runtime(precision=None), *args), source, out)


# ---- the model -----------------------------------------------------------------------------------------

DENSE = Dense(torch.eye(16), torch.zeros(16))
RECIPE = SentenceTransformerConfig(max_tokens=18, dense=(DENSE,), prompts={"query": "a cat"})
WAY = SentenceTransformerConfig()
RECIPES: dict[str, Any] = {
    "pooling": ("cls",), "normalize": True, "max_tokens": 6, "lower_case": True,
    "dense": (replace(DENSE, weight=torch.eye(16) * 2),), "prompts": {"query": "a dog"}, "default_prompt": "query",
    "include_prompt": False, "splade": None, "lexical": replace(DENSE, activation="ReLU"), "late": None,
    "routes": {"query": WAY}, "usual_route": None, "kinds": {"question": "query"}, "truncate_dim": 4, "kind": "other", "activation": "Sigmoid",
    "tokens": (Step("Normalize", {}, of_tokens=True),), "layers": Step("WeightedLayerPooling", {"layer_start": 0}, {"layer_weights": torch.tensor([1.0, 3.0])}), "layer": 0,
    "most_words": 3, "transformer_settings": TransformerSettings(lower_case=True),
}  # fmt: skip


def test_every_field_of_a_recipe_is_checked() -> None:
    named = {field.name for field in fields(SentenceTransformerConfig)}
    assert named == {*RECIPES, "files", "transformer"}  # the last two repeat the others, or name folders


@pytest.mark.parametrize("name", [name for name, value in RECIPES.items() if value is not None])
def test_a_change_of_a_recipe_is_noticed(name: str, folder: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(30), tmp_path / "out.npy"
    loaded = load(folder("base"))
    loaded.sentence_recipe = RECIPE
    begin(lambda *args, **how: encode_file(loaded, *args, **how), source, out)
    more = {"usual_route": "query"} if name == "routes" else {}
    loaded.sentence_recipe = replace(RECIPE, **{name: RECIPES[name], **more})
    assert not resumes(lambda *args: encode_file(loaded, *args), source, out)
    loaded.sentence_recipe = replace(RECIPE, files={"modules.json": b"[]"}, transformer="elsewhere")
    assert resumes(lambda *args: encode_file(loaded, *args), source, out)
    assert len(np.load(out)) == 30


def edited(name: str, **values: Any) -> Callable[[Path], None]:
    """Return a change of a JSON file of a model's folder."""

    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def one_number(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.word_embeddings.weight"][77, 11] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


FOLDERS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "a copy": (lambda folder: None, True),
    "name": (edited("config.json", _name_or_path="elsewhere", transformers_version="5.0.0"), True),
    "labels": (
        edited("config.json", id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2}),
        False,
    ),
    "problem": (edited("config.json", problem_type="multi_label_classification"), False),
    "settings": (edited("config.json", layer_norm_eps=1e-5), False),
    "length": (edited("tokenizer_config.json", model_max_length=9), False),
    "special token": (edited("tokenizer_config.json", mask_token="cat"), False),
    "one number": (one_number, False),
}


@pytest.mark.parametrize("change", list(FOLDERS))
def test_the_model_in_another_folder(change: str, folder: Any, numbered: Any, tmp_path: Path) -> None:
    source, out, other = numbered(30), tmp_path / "out.jsonl", tmp_path / "elsewhere"
    shutil.copytree(folder(CLASSES), other)
    begin(lambda *args, **how: predict_file(folder(CLASSES), *args, **how), source, out)
    apply, same = FOLDERS[change]
    apply(other)
    assert resumes(lambda *args: predict_file(other, *args), source, out) == same


def test_a_scale_of_an_adapter_is_noticed(folder: Any, numbered: Any, tmp_path: Path) -> None:
    from flodl_hf.models.adapters import Lora

    source, out = numbered(30), tmp_path / "out.jsonl"

    def adapted(alpha: float) -> Any:
        torch.manual_seed(0)
        return load(folder(CLASSES)).add_adapter(Lora(rank=2, alpha=alpha))

    begin(lambda *args, **how: predict_file(adapted(4), *args, **how), source, out)
    assert not resumes(lambda *args: predict_file(adapted(8), *args), source, out)
    assert resumes(lambda *args: predict_file(adapted(4), *args), source, out)


def test_the_input_is_its_bytes(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out, other = numbered(30), tmp_path / "out.jsonl", tmp_path / "copied.jsonl"
    begin(lambda *args, **how: predict_file(model(), *args, **how), source, out)
    other.write_bytes(source.read_bytes())
    assert resumes(lambda *args: predict_file(model(), *args), other, out)
