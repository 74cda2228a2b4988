"""flodl_hf.compat.transformers beside transformers: pipelines, tokenizers, Trainer, and libraries that check these classes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flodl_hf

from .conftest import GOLDEN

TEXTS = ["hello", "some words", "world", "a b", "x"]

CALLS: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("text-classification", "bert-sequence_classification", (TEXTS[:3],), {"top_k": None}),
    ("token-classification", "bert-token_classification", ("hello world",), {"aggregation_strategy": "simple"}),
    ("fill-mask", "bert-masked_lm", ("hello [MASK]",), {"top_k": 3}),
    ("feature-extraction", "bert-base", ("hello",), {}),
]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture
def ours(transformers: Any) -> Any:
    import flodl_hf.compat.transformers

    return flodl_hf.compat.transformers


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in numbers(value[name])]
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in numbers(part)]
    return [] if isinstance(value, str) or value is None else [float(value)]


@pytest.mark.parametrize(("task", "folder", "inputs", "options"), CALLS, ids=[call[0] for call in CALLS])
def test_pipelines(transformers: Any, ours: Any, check: Any, task: str, folder: str, inputs: Any, options: Any) -> None:
    pipe = ours.pipeline(task, str(GOLDEN / folder), device=-1)
    reference = transformers.pipeline(task, str(GOLDEN / folder), device=-1)
    assert isinstance(pipe, type(reference))
    assert type(pipe.model).__name__ == type(reference.model).__name__
    check(f"transformers {task}", numbers(pipe(*inputs, **options)), numbers(reference(*inputs, **options)))


def test_question_answering_is_a_pipeline_too(transformers: Any, ours: Any) -> None:
    pipe = ours.pipeline("question-answering", str(GOLDEN / "bert-question_answering"))
    assert isinstance(pipe, transformers.Pipeline)
    assert set(pipe(question="who", context="some words")) == {"answer", "score", "start", "end"}


def test_tokenizers(transformers: Any, classifier: str) -> None:
    own = flodl_hf.AutoTokenizer.from_pretrained(classifier)
    found = own.to_transformers()
    assert isinstance(found, transformers.PreTrainedTokenizerFast)
    expected = transformers.AutoTokenizer.from_pretrained(classifier)
    for form in ({}, {"padding": True}, {"truncation": True, "max_length": 6}):
        assert dict(found(TEXTS, **form)) == dict(expected(TEXTS, **form)) == dict(own(TEXTS, **form))


def test_models_share_parameters_and_can_be_pickled(transformers: Any, classifier: str, tmp_path: Path) -> None:
    import torch

    model = flodl_hf.load(classifier)
    found = model.to_transformers()
    assert isinstance(found, transformers.PreTrainedModel)
    assert {id(p) for p in found.parameters()} == {id(p) for p in model.parameters()}
    ids = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([1])}
    expected = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()(**ids)
    with torch.no_grad():
        assert torch.allclose(found.eval()(**ids).logits, expected.logits, atol=1e-6)
        assert torch.allclose(pickle.loads(pickle.dumps(found))(**ids).loss, expected.loss, atol=1e-6)
    found.save_pretrained(tmp_path)
    again = type(found).from_pretrained(tmp_path)
    again.load_state_dict(transformers.AutoModelForSequenceClassification.from_pretrained(classifier).state_dict())
    with torch.no_grad():
        assert torch.allclose(again.eval()(**ids).logits, expected.logits, atol=1e-6)


def losses_of(transformers: Any, model: Any, tokenizer: Any, folder: Path, **more: Any) -> tuple[Any, list[float]]:
    rows = [{**tokenizer(text), "labels": number % 2} for number, text in enumerate(TEXTS * 2)]
    settings = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=5, save_steps=2, logging_steps=1, learning_rate=1e-3,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    collator = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=rows, processing_class=tokenizer, data_collator=collator
    )
    trainer.train(**more)
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("kind", ["converted", "own", "own tokenizer"])
def test_trainer(transformers: Any, plain_classifier: str, check: Any, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("accelerate")
    import torch

    torch.manual_seed(0)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(plain_classifier)
    theirs = transformers.AutoTokenizer.from_pretrained(plain_classifier)
    _, expected = losses_of(transformers, reference, theirs, tmp_path / "reference")
    model = flodl_hf.load(plain_classifier)
    tokenizer = model.tokenizer if kind == "own tokenizer" else model.tokenizer.to_transformers()
    given = model.to_transformers() if kind == "converted" else model
    trainer, found = losses_of(transformers, given, tokenizer, tmp_path / "ours")
    check("transformers.Trainer losses", found, expected)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    losses_of(
        transformers, given, tokenizer, tmp_path / "ours", resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2")
    )
    assert all(torch.allclose(value, model.state_dict()[name], atol=1e-6) for name, value in after.items())
    if kind == "converted":
        folder = tmp_path / "ours" / "checkpoint-4"
        scores = [labels[0].score for labels in model.eval().predict(TEXTS)]
        assert [labels[0].score for labels in flodl_hf.load(folder).predict(TEXTS)] == pytest.approx(scores, abs=1e-6)
        opened = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        inputs = model.tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            check("checkpoint", opened(**inputs).logits, model(**inputs).logits)
    assert trainer.predict([dict(model.tokenizer(TEXTS[0]))]).predictions.shape == (1, model.num_labels)


def test_gradio_accepts_the_pipeline(ours: Any, classifier: str) -> None:
    gradio = pytest.importorskip("gradio")
    pipe = ours.pipeline("text-classification", classifier)
    # Only the interface is made: gradio 6.31 names classes that transformers 5 lacks when it calls any pipeline.
    interface = gradio.Interface.from_pipeline(pipe)
    assert [type(part).__name__ for part in interface.output_components] == ["Label"]


def test_shap_explains_the_pipeline(transformers: Any, ours: Any, classifier: str, check: Any) -> None:
    shap = pytest.importorskip("shap")
    values = []
    for pipeline in (ours.pipeline, transformers.pipeline):
        pipe = pipeline("text-classification", classifier, top_k=None)
        values.append(shap.Explainer(pipe, seed=0)(["hello some words"], silent=True).values[0])
    check("shap", *values, 1e-5)


def test_mlflow_logs_the_pipeline(transformers: Any, ours: Any, classifier: str, check: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("mlflow.transformers")
    pipe = ours.pipeline("text-classification", classifier)
    path = str(tmp_path / "model")
    mlflow.transformers.save_model(transformers_model=pipe, path=path, pip_requirements=["transformers"])
    loaded = mlflow.transformers.load_model(path)
    assert isinstance(loaded, transformers.TextClassificationPipeline)
    check("mlflow", numbers(loaded(TEXTS[:3])), numbers(pipe(TEXTS[:3])))


def test_langchain_accepts_the_pipeline(ours: Any, classifier: str) -> None:
    found = pytest.importorskip("langchain_huggingface")
    pipe = ours.pipeline("text-classification", classifier)
    assert found.HuggingFacePipeline(pipeline=pipe).pipeline is pipe
    assert np.isfinite(pipe(TEXTS[0])[0]["score"])


def test_one_label_after_several_opens_in_transformers(transformers: Any, tmp_path: Path) -> None:
    source = flodl_hf.load(GOLDEN / "bert-sequence_classification")
    source.config = source.config.changed(problem_type="single_label_classification")
    source.save_pretrained(tmp_path / "several")
    model = flodl_hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "several", num_labels=1)
    model.save_pretrained(tmp_path / "one")
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "one").config.num_labels == 1
