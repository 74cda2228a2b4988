"""``pipeline`` is called and answers as transformers' pipelines are and do: every shape, default and keyword."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flodl_hf
from flodl.errors import ConfigError, FlodlError
from flodl_hf import load, pipeline
from flodl_hf.errors import PredictError
from flodl_hf.heads.truncated import too_long

Saved = Callable[..., Path]
TEXTS = ["ada lives in paris!", "the acme corp's cat-dog ran, 3.14 times", "xyz"]
LONG = "ada lives in paris! " * 12
NER = {str(i): name for i, name in enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])}
NLI = {"0": "contradiction", "1": "neutral", "2": "entailment"}
MASKED = ["the [MASK] sat", "a [MASK] of [MASK]"]
HEADS = {
    "text-classification": ("sequence_classification", {"id2label": NLI}),
    "token-classification": ("token_classification", {"id2label": NER}),
    "zero-shot-classification": ("sequence_classification", {"id2label": NLI}),
    "fill-mask": ("masked_lm", {}),
    "feature-extraction": ("base", {}),
    "question-answering": ("question_answering", {}),
}
PAIR = {"text": TEXTS[0], "text_pair": TEXTS[1]}
UNPAIRED = {"text": TEXTS[0], "text_pair": ""}
LABELS = ["cat", "film", "corp"]
CONTEXT = "ada lives in paris and the cat ran"
# A task, its inputs, and the keywords of the call.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *[
        ("text-classification", (given,), options)
        for given in (TEXTS[0], TEXTS, TEXTS[:1], PAIR, [PAIR, PAIR])
        for options in ({}, {"top_k": 1}, {"top_k": 2}, {"top_k": None}, {"function_to_apply": "none"})
    ],
    ("text-classification", (LONG,), {"truncation": True}),
    ("text-classification", ([LONG, TEXTS[0]],), {"truncation": True, "max_length": 12, "top_k": None}),
    ("text-classification", ({"text": TEXTS[0], "text_pair": LONG},), {"truncation": True}),
    ("text-classification", (TEXTS,), {"batch_size": 2, "padding": True}),
    ("text-classification", ([PAIR, TEXTS[0]],), {"top_k": 2}),
    *[("text-classification", (given,), {"max_length": 5}) for given in (LONG, [LONG, TEXTS[0]], {"text": TEXTS[0], "text_pair": LONG})],
    ("text-classification", (TEXTS[0],), {"max_length": 5, "padding": True}),
    ("text-classification", (TEXTS[0],), {"max_length": 5, "truncation": False}),
    ("text-classification", ([[[TEXTS[0], TEXTS[1]]]],), {}),
    *[("text-classification", (given,), options) for given in (UNPAIRED, [UNPAIRED, UNPAIRED]) for options in ({}, {"truncation": True})],
    *[
        ("token-classification", (given,), options)
        for given in (TEXTS[0], TEXTS, TEXTS[:1])
        for options in ({}, {"aggregation_strategy": "simple"}, {"aggregation_strategy": "max", "ignore_labels": []})
    ],
    ("token-classification", (LONG,), {"aggregation_strategy": "first"}),
    ("token-classification", (TEXTS[0],), {"aggregation_strategy": "SIMPLE", "ignore_labels": None}),
    ("token-classification", (TEXTS[0],), {"aggregation_strategy": None}),
    ("fill-mask", (MASKED[0],), {"top_k": None}),
    ("token-classification", ("the cat sat",), {"offset_mapping": [(0, 0), (0, 1), (4, 7), (8, 9), (0, 0)]}),
    ("token-classification", ([LONG, TEXTS[0]],), {}),
    ("token-classification", (LONG,), {"aggregation_strategy": "simple", "stride": 8}),
    ("token-classification", (["ada", "lives", "in", "paris"],), {"is_split_into_words": True, "aggregation_strategy": "first"}),
    *[("zero-shot-classification", (given, LABELS), {}) for given in (TEXTS[0], TEXTS, TEXTS[:1])],
    ("zero-shot-classification", (TEXTS[0],), {"candidate_labels": "cat, film", "multi_label": True}),
    ("zero-shot-classification", (TEXTS,), {"candidate_labels": LABELS, "hypothesis_template": "so {}!"}),
    ("zero-shot-classification", (TEXTS,), {"candidate_labels": LABELS, "hypothesis_template": "so {0:>5}!"}),
    ("zero-shot-classification", ([LONG, TEXTS[0]],), {"candidate_labels": LABELS}),
    *[("fill-mask", (given,), options) for given in (*MASKED, MASKED, MASKED[:1]) for options in ({}, {"top_k": 2}, {"targets": ["cat", "##s"]})],
    ("fill-mask", (MASKED[0],), {"targets": "cat"}),
    ("fill-mask", (MASKED[0] + " " + LONG,), {"tokenizer_kwargs": {"truncation": True}}),
    ("fill-mask", (MASKED,), {"tokenizer_kwargs": {"truncation": True, "max_length": 8}}),
    ("zero-shot-classification", (TEXTS[0],), {"candidate_labels": LABELS, "truncation": True}),
    ("token-classification", (["ada", "lives"],), {"is_split_into_words": True, "delimiter": " "}),
    ("feature-extraction", (LONG,), {"tokenize_kwargs": {"truncation": True, "max_length": 8}}),
    *[("feature-extraction", (given,), {}) for given in (TEXTS[0], TEXTS, TEXTS[:1])],
    ("feature-extraction", (LONG,), {"truncation": True}),
    *[("feature-extraction", (TEXTS[0],), {"tokenize_kwargs": given}) for given in ({"max_length": 5}, {"padding": True}, {"padding": "max_length", "max_length": 12}, {"add_special_tokens": False})],
    ("feature-extraction", ([["ada", "xyz"]],), {"tokenize_kwargs": {"padding": True}}),
    ("fill-mask", (MASKED[1] + " " + LONG,), {"tokenizer_kwargs": {"max_length": 8}}),
    ("feature-extraction", (TEXTS[0],), {"return_tensors": True}),
]  # fmt: skip


def same(found: Any, expected: Any) -> None:
    """Equal in every type, key, its order and its value; scores to the order of sums, which batches change."""
    assert isinstance(found, type(expected)) or hasattr(expected, "__float__"), (found, expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, str) or not hasattr(expected, "__float__"):
        assert found == expected
    else:
        assert float(found) == pytest.approx(float(expected), abs=1e-5)


def theirs(task: str, folder: Path, length: int = 40) -> Callable[..., Any]:
    transformers = pytest.importorskip("transformers")
    roles = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{"model_max_length": length, **roles},
    )
    return transformers.pipeline(task, model=str(folder), tokenizer=tokenizer, device="cpu")


@pytest.mark.transformers
@pytest.mark.parametrize(("task", "inputs", "options"), CALLS, ids=[f"{n}-{c[0]}" for n, c in enumerate(CALLS)])
def test_calls_answer_as_transformers(
    task: str, inputs: tuple[Any, ...], options: dict[str, Any], saved: Saved
) -> None:
    head, settings = HEADS[task]
    folder = saved("bert", head, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(task, folder)(*inputs, **options)
        found = pipeline(task, folder)(*inputs, **options)
        # Keywords may be given when it is made.
        if "top_k" not in options:
            same(pipeline(task, folder, device=-1, torch_dtype="float32", **options)(*inputs), expected)
    same(found, expected)


@pytest.mark.transformers
@pytest.mark.parametrize("task", ["text-classification", "token-classification", "feature-extraction"])
@pytest.mark.filterwarnings("ignore")
def test_models_without_a_table_of_positions_truncate_to_the_length_of_the_tokenizer(task: str, saved: Saved) -> None:
    head, settings = HEADS[task]
    folder = saved("modernbert", head, **settings)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((folder / "tokenizer_config.json").read_text()), "model_max_length": 50})
    )
    options = {} if head == "token_classification" else {"truncation": True}
    same(pipeline(task, folder)(LONG, **options), theirs(task, folder, 50)(LONG, **options))


def test_a_text_beyond_the_limit_is_reported_once(saved: Saved) -> None:
    model: Any = load(saved("bert", "token_classification", id2label=NER))
    model.max_seq_length = 12
    with pytest.warns(UserWarning, match="stride= reads all of it") as told:
        pipeline("ner", model)(LONG)
    assert len(told) == 1


def test_what_a_tokenizer_is_told_is_known(saved: Saved) -> None:
    fill = pipeline("fill-mask", saved("bert", "masked_lm"))
    with pytest.raises(TypeError, match=r"tokenizer_kwargs has foo=True; it takes truncation, max_length"):
        fill(MASKED[0], tokenizer_kwargs={"foo": True})
    with pytest.raises(PredictError, match="no targets"):
        fill(MASKED[0], targets=[])


# What transformers' own tests of pipelines expect to fail, and with what.
REFUSED: list[tuple[str, Any, dict[str, Any], type[Exception]]] = [
    ("text-classification", [[TEXTS[0], TEXTS[1]]], {}, ValueError),
    ("text-classification", [TEXTS], {}, ValueError),
    ("text-classification", None, {}, ValueError),
    ("fill-mask", "no mask", {}, ValueError),
    ("fill-mask", [*MASKED, "no mask"], {}, ValueError),
    ("fill-mask", MASKED[0], {"targets": []}, ValueError),
    ("fill-mask", MASKED[0], {"targets": [""]}, ValueError),
    ("token-classification", None, {}, ValueError),
    ("token-classification", 3, {}, ValueError),
    ("token-classification", [3], {}, ValueError),
    ("token-classification", TEXTS[0], {"aggregation_strategy": "most"}, ValueError),
    ("zero-shot-classification", None, {"candidate_labels": "a"}, TypeError),
    ("zero-shot-classification", TEXTS[0], {"candidate_labels": ""}, ValueError),
    ("zero-shot-classification", TEXTS[0], {"candidate_labels": []}, ValueError),
    ("zero-shot-classification", TEXTS[0], {"candidate_labels": None}, TypeError),
    ("zero-shot-classification", TEXTS[0], {"candidate_labels": "a", "hypothesis_template": "none"}, ValueError),
    ("zero-shot-classification", TEXTS[0], {"candidate_labels": "a", "hypothesis_template": "{label}"}, ValueError),
    ("zero-shot-classification", "", {"candidate_labels": "a"}, ValueError),
    ("zero-shot-classification", ["a", ""], {"candidate_labels": "a"}, ValueError),
    ("token-classification", ["a", "b"], {"offset_mapping": [[(0, 1)]]}, ValueError),
    ("token-classification", [], {}, ValueError),
    ("token-classification", LONG, {"stride": 4, "aggregation_strategy": "none"}, ValueError),
    ("text-classification", TEXTS[0], {"foo": 1}, TypeError),
    ("feature-extraction", TEXTS[0], {"truncation": True, "tokenize_kwargs": {"truncation": True}}, ValueError),
    ("question-answering", {"question": "who?", "context": ""}, {}, ValueError),
    ("question-answering", {"question": "who?", "context": None}, {}, ValueError),
    ("question-answering", {"question": "", "context": CONTEXT}, {}, ValueError),
    ("question-answering", {"question": None, "context": CONTEXT}, {}, ValueError),
    ("question-answering", {"question": "who?"}, {}, KeyError),
    ("question-answering", {"question": "who?", "context": CONTEXT}, {"top_k": 0}, ValueError),
]


@pytest.mark.parametrize(
    ("task", "given", "options", "fault"), REFUSED, ids=[f"{n}-{c[0]}" for n, c in enumerate(REFUSED)]
)
def test_faults_have_the_types_of_transformers(
    task: str, given: Any, options: dict[str, Any], fault: type[Exception], saved: Saved
) -> None:
    head, settings = HEADS[task]
    with pytest.raises(fault) as caught:
        pipeline(task, saved("bert", head, **settings))(given, **options)
    assert isinstance(caught.value, FlodlError)


@pytest.mark.parametrize("task", HEADS)
def test_a_model_or_a_folder_and_the_task_or_none(task: str, saved: Saved) -> None:
    head, settings = HEADS[task]
    folder = saved("bert", head, **settings)
    model = load(folder)
    for made in (pipeline(task, folder), pipeline(task, model), pipeline(model=model), pipeline(model=str(folder))):
        assert made.model.head == head
        assert made.tokenizer is made.model.tokenizer
        assert made.device.type == "cpu"
    assert pipeline(task, model).model is model
    assert task in repr(pipeline(task, model))
    assert str(folder) in repr(pipeline(task, model))


class Texts(torch.utils.data.Dataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


SEVERAL: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "text-classification": ([*TEXTS, PAIR["text"]], {}),
    "token-classification": ([*TEXTS, LONG], {"aggregation_strategy": "simple"}),
    "zero-shot-classification": ([*TEXTS, LONG], {"candidate_labels": LABELS}),
    "fill-mask": (MASKED, {"top_k": 2}),
    "feature-extraction": (TEXTS, {}),
    "question-answering": (
        [{"question": "who ran?", "context": CONTEXT}, {"question": "who?", "context": CONTEXT}],
        {},
    ),
}


@pytest.mark.parametrize("form", [iter, Texts, Stream])
@pytest.mark.parametrize("task", SEVERAL)
@pytest.mark.filterwarnings("ignore:.*longer than the model")
def test_a_generator_or_a_torch_dataset_gives_an_iterator(task: str, form: Callable[..., Any], saved: Saved) -> None:
    head, settings = HEADS[task]
    items, options = SEVERAL[task]
    made = pipeline(task, saved("bert", head, **settings), **options)
    found = made(form(items))
    assert isinstance(found, Iterator)
    if form is Texts:
        assert len(found) == len(items)  # type: ignore[arg-type]
    same(list(found), made(items))
    same(list(made(inputs=form(items))), made(sequences=items))


@pytest.mark.transformers
@pytest.mark.parametrize("task", [task for task in SEVERAL if task != "question-answering"])
@pytest.mark.filterwarnings("ignore")
def test_a_column_of_rows_gives_the_answers_of_transformers(task: str, saved: Saved) -> None:
    from transformers.pipelines.pt_utils import KeyDataset

    head, settings = HEADS[task]
    items, options = SEVERAL[task]
    folder = saved("bert", head, **settings)
    column = KeyDataset([{"text": text} for text in items], "text")
    same(list(pipeline(task, folder)(column, **options)), list(theirs(task, folder)(column, **options)))


@pytest.mark.parametrize("field", ["id2label", "label2id"])
def test_labels_that_are_set_are_used_and_saved(field: str, saved: Saved, tmp_path: Path) -> None:
    model: Any = load(saved("bert", "sequence_classification", id2label=NLI))
    names = {0: "no", 1: "perhaps", 2: "yes"}
    setattr(model.config, field, names if field == "id2label" else {name: number for number, name in names.items()})
    model.save_pretrained(tmp_path / "renamed")
    for found in (model, load(tmp_path / "renamed")):
        assert found.config.id2label == names
        assert found.config.label2id == {"no": 0, "perhaps": 1, "yes": 2}
        assert pipeline("text-classification", found)(TEXTS[0])[0]["label"] in names.values()
    stored = json.loads((tmp_path / "renamed" / "config.json").read_text("utf-8"))
    assert stored["id2label"] == {str(number): name for number, name in names.items()}
    with pytest.raises(ValueError, match="id2label"):
        model.config.id2label = {0: "one"}
    assert model.config.id2label == names


def test_labels_of_a_call_replace_those_of_the_pipeline(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification", id2label=NLI)
    made = pipeline("zero-shot-classification", folder, candidate_labels=LABELS)
    assert made(TEXTS[0], ["a"])["labels"] == ["a"]
    assert sorted(made(sequences=TEXTS[0])["labels"]) == sorted(LABELS)


def test_questions_as_the_removed_pipeline_took_them(saved: Saved) -> None:
    model: Any = load(saved("bert", "question_answering"))
    ask = pipeline("question-answering", model)
    question, context = "who ran?", "ada lives in paris and the cat ran"
    one = ask(question=question, context=context)
    assert list(one) == ["score", "start", "end", "answer"]
    same(ask({"question": question, "context": context}), one)
    same(ask([{"question": question, "context": context}]), one)
    assert len(ask(question=question, context=context, top_k=3)) == 3
    same(ask(question=[question, question], context=context), [one, one])
    assert len(ask(question=question, context=context, max_answer_len=1)["answer"].split()) == 1
    long = "HuggingFace was founded in Paris." * 20
    default = ask(question=question, context=long)
    same(default, ask(question=question, context=long, max_answer_len=15))
    assert default != ask(question=question, context=long, max_answer_len=30)
    narrow = ask(question=question, context=long, max_seq_length=24)
    same(narrow, ask(question=question, context=long, max_seq_len=24))
    assert narrow != default
    same(ask(question=question, context=long, max_question_len=2), default)
    stated = ask(question=question, context=long, max_seq_len=32)
    model.max_seq_length = 24
    same(ask(question=question, context=long, max_seq_len=32), stated)
    same(ask(question=question, context=long), narrow)


def test_what_is_cut_is_said(saved: Saved) -> None:
    made = pipeline("ner", saved("bert", "token_classification", id2label=NER))
    with pytest.warns(UserWarning, match="stride= reads all of it"):
        made(LONG)


def test_faults_of_loading_have_the_types_of_transformers(saved: Saved, tmp_path: Path) -> None:
    folder = saved("bert")
    (folder / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    cases: list[tuple[type[Exception], Callable[[], Any]]] = [
        (OSError, lambda: load(tmp_path / "absent")),
        (OSError, lambda: flodl_hf.AutoTokenizer.from_pretrained(tmp_path / "absent")),
        (OSError, lambda: flodl_hf.AutoModel.from_pretrained("owner/none", local_files_only=True)),
        (FileNotFoundError, lambda: load(folder)),
        (ValueError, lambda: flodl_hf.AutoTokenizer.from_pretrained(tmp_path / "empty")),
        (ValueError, lambda: flodl_hf.AutoConfig.from_pretrained(tmp_path / "empty")),
        (KeyError, lambda: pipeline("text-generation", folder)),
    ]
    for kind, call in cases:
        with pytest.raises(kind) as caught:
            call()
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, FlodlError)
        assert (type(again), str(again), again.details) == (
            type(caught.value),
            caught.value.message,
            caught.value.details,
        )


def test_what_cannot_be_is_refused(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification", id2label=NLI)
    with pytest.raises(ConfigError, match="no model is named"):
        pipeline("sentiment-analysis")
    with pytest.raises(ConfigError, match="no task 'text-generation'"):
        pipeline("text-generation", folder)
    with pytest.raises(ConfigError, match="no task 'text-clasification', did you mean 'text-classification'"):
        pipeline("text-clasification", folder)
    with pytest.raises(ConfigError, match="needs a model for token_classification"):
        pipeline("ner", load(folder))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        pipeline("text-classification", folder, trust_remote_code=True)
    with pytest.raises(ConfigError, match="already loaded"):
        pipeline("text-classification", load(folder), torch_dtype="bfloat16")
    with pytest.raises(TypeError, match="no keyword topk"):
        pipeline("text-classification", folder, topk=3)
    made = pipeline("text-classification", folder)
    with pytest.raises(TypeError, match="aggregation_strategy"):
        made(TEXTS[0], aggregation_strategy="first")
    with pytest.raises(PredictError, match="2 inputs"):
        made(TEXTS[0], TEXTS[1])


def test_the_package_shows_what_it_offers_and_nothing_else() -> None:
    shown = [name for name in dir(flodl_hf) if not name.startswith("__")]
    assert sorted(shown) == sorted(flodl_hf.__all__)
    assert all(getattr(flodl_hf, name) for name in shown)


def test_a_text_of_few_characters_may_have_many_tokens() -> None:
    """Four a character, as byte-level pieces of emoji are."""

    class Few:
        max_tokens = 12

        @staticmethod
        def tokenizer(text: str, truncation: bool, max_length: int) -> dict[str, list[int]]:
            count = 2 + sum(len(character.encode()) for character in text)
            return {"input_ids": [0] * (min(count, max_length) if truncation else count)}

    assert [too_long(Few, text) for text in ("😀😀", "😀😀😀", "a" * 10, "a" * 11)] == [False, True, False, True]
