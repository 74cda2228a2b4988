"""Arguments of finetune, dry_run and find_lr: problems are reported together, and other libraries' words are named."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled, sentences

import flodl
import flodl_hf
from flodl.errors import ConfigError, DataError
from flodl_hf import load
from flodl_hf.models.adapters import IA3, Lora, Prefix, Prompt
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.training import dry_run, find_lr, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import FinetuneArguments, FinetuneOptions, FinetuneWords, make_options

TEXTS = sentences()


class Frame:
    """A data frame, as far as comparisons are concerned."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("The truth value of a DataFrame is ambiguous.")


PAIRS = [{"anchor": a, "positive": b} for a, b in zip(TEXTS[:8], TEXTS[8:16], strict=True)]
RANKED = [
    {"query": a, "passage": b, "label": i % 2} for i, (a, b) in enumerate(zip(TEXTS[:8], TEXTS[8:16], strict=True))
]
SEVERAL = [{"text": text, "label": ["a", "b"][: 1 + i % 2]} for i, text in enumerate(TEXTS[:8])]

TOGETHER: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "values, combinations and the task": (
        labelled(8),
        {"epochs": 0, "early_stopping": 2, "matryoshka": [8], "class_weights": {"z": 1}, "freeze": ["nothing"]},
        ["epochs", "early_stopping", "matryoshka", "class_weights", "freeze"],
    ),
    "a ranker": (
        RANKED,
        {"task": "rank", "class_weights": "balanced", "loss_options": {"scale": 1}, "long_texts": "windows"},
        ["class_weights", "loss_options", "long_texts"],
    ),
    "a ranker of lists": (
        RANKED,
        {"task": "rank", "loss": "LambdaLoss", "neftune": 5, "labels": ["x"], "loss_options": {"k": "many"}},
        ["neftune", "labels", "loss_options"],
    ),
    "vectors": (
        PAIRS,
        {"class_weights": "balanced", "micro_batch_size": 2, "pooling": "middle", "matryoshka": [4096]},
        ["class_weights", "micro_batch_size", "pooling", "matryoshka"],
    ),
    "several labels": (SEVERAL, {"class_weights": {"a": 2.0}, "label_smoothing": 0.1}, ["label_smoothing"]),
    "schedules": (
        labelled(8),
        {"schedule": "polynomial", "schedule_options": {"power": -1}, "warmup": 2.5, "metric": "f1"},
        ["schedule_options", "warmup", "metric"],
    ),
    "ema and policy": (labelled(8), {"ema": 0.9, "policy": "cadence"}, ["ema"]),
    "ema and async": (labelled(8), {"ema": 0.9, "policy": "async", "adapter": {"type": "lora", "dropout": 1.0}}, ["ema", "adapter"]),
    "nothing to train": (labelled(8), {"freeze": ["encoder", "pooler", "head"]}, ["freeze"]),
    "packed answers": (
        TABLES["question_answering"](8), {"layout": "packed", "compat": "transformers", "labels": ["a"]}, ["layout", "labels"],
    ),
    "a model and data of others": (
        None, {"train_dataset": Frame(), "eval_dataset": Frame(), "adapter": 3},
        ["train_dataset", "eval_dataset", "adapter"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", [finetune, dry_run, find_lr])
@pytest.mark.parametrize("case", TOGETHER)
def test_all_problems_are_reported_together_before_anything_starts(
    case: str, call: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, options, names = TOGETHER[case]
    monkeypatch.setattr("flodl_hf.training.rows.RowBuilder.add", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(ConfigError) as fault:
        call(base, train=rows, **options)
    problems = [problem.partition(":")[0].split("_of")[0] for problem in fault.value.problems]
    assert sorted({problem.split(" ")[0] for problem in problems}) == sorted(names)


def test_an_invalid_call_leaves_a_model_in_memory_as_it_was(base: Path) -> None:
    model = load(base, head="sequence_classification")
    with pytest.raises(ConfigError):
        finetune(model, train=labelled(8), lora=2, freeze=["nothing"])
    assert not model.adapters


def test_every_keyword_of_finetune_is_a_keyword_of_trials() -> None:
    named = [name for name, one in inspect.signature(finetune).parameters.items() if one.kind == one.KEYWORD_ONLY]
    assert set(named) == set(FinetuneArguments.__annotations__) - set(FinetuneWords.__annotations__)


def test_a_run_has_at_most_ninety_keywords() -> None:
    named = set(inspect.signature(finetune).parameters) - {"options"}
    assert len(named | set(FinetuneOptions.__annotations__)) <= 90


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (labelled(16), {"adapter": Lora(r=2)}),
        (PAIRS, {"loss": "MultipleNegativesRankingLoss", "task": "embedding", "adapter": Prefix(num_virtual_tokens=2)}),
    ],
    ids=["adapter", "loss"],
)
def test_trials_use_adapters_and_named_losses(rows: Any, options: Any, base: Path, tmp_path: Path) -> None:
    more = {"out": tmp_path / "out", "overwrite": True, "progress": False, "callbacks": (), "batch_size": 4}
    assert dry_run(base, train=rows, **options, **more).steps > 0
    assert find_lr(base, train=rows, steps=8, low=1e-5, high=1e-2, **options, **more).losses
    assert not (tmp_path / "out").exists()


MODELS = {"module": torch.nn.Linear(2, 2), "number": 3}


@pytest.mark.parametrize("call", [finetune, dry_run, find_lr])
@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_none_are_refused_with_the_way_to_give_one(kind: str, call: Any) -> None:
    with pytest.raises(ConfigError) as fault:
        call(MODELS[kind], train=labelled(8), epochs=0)
    problems = fault.value.problems
    assert [problem.partition(":")[0] for problem in problems] == ["model", "epochs"]
    assert "flodl_hf.load" in problems[0]


@pytest.mark.transformers
def test_a_model_of_transformers_is_refused_with_the_way_to_give_one() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(ConfigError, match="save_pretrained") as fault:
        finetune(transformers.BertForSequenceClassification(config), train=labelled(8))
    assert len(fault.value.problems) == 1


NAMES = {
    "Trainer": "flodl_hf.finetune", "TrainingArguments": "flodl_hf.finetune", "SentenceTransformer": "flodl_hf.load",
    "CrossEncoder": "flodl_hf.load", "BertModel": "flodl_hf.AutoModel", "LoraConfig": "flodl_hf.models.adapters.Lora",
    "RobertaForTokenClassification": "flodl_hf.AutoModelForTokenClassification", "AutoModelForCausalLM": "no equivalent",
    "BertTokenizerFast": "flodl_hf.AutoTokenizer", "DebertaV2Config": "flodl_hf.AutoConfig",
    "DataCollatorWithPadding": "finetune", "EarlyStoppingCallback": "flodl.train.Callback",
    "T5ForConditionalGeneration": "no equivalent", "SentenceTransformerTrainer": "flodl_hf.finetune",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_imports_of_names_of_other_libraries_name_the_equivalent(name: str) -> None:
    with pytest.raises(ImportError) as fault:
        exec(f"from flodl_hf import {name}")
    assert NAMES[name] in str(fault.value)
    assert not hasattr(flodl_hf, "nothing_like_it")


def test_both_packages_have_a_version() -> None:
    assert flodl_hf.__version__ == flodl.__version__ != ""


PEFT: list[tuple[Any, dict[str, Any], Any]] = [
    (Lora, {"r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["query", "value"]},
     Lora(4, 16, 0.1, ("query", "value"))),
    (Lora, {"r": 16}, Lora(16, 8)),  # peft's LoraConfig has lora_alpha=8
    (Lora, {"r": 4, "lora_alpha": 4, "use_rslora": True, "use_dora": True, "bias": "none", "task_type": "SEQ_CLS",
            "rank_pattern": {"key": 2}}, Lora(4, 4, rslora=True, dora=True, ranks={"key": 2})),
    (IA3, {"target_modules": ["key", "down"], "feedforward_modules": ["down"]}, IA3(("key", "down"), ("down",))),
    (Prompt, {"num_virtual_tokens": 5, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "good or bad"},
     Prompt(5, "good or bad")),
    (Prompt, {"num_virtual_tokens": 5, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM"},
     Prompt(5, encoder=8, kind="lstm")),
    (Prefix, {"num_virtual_tokens": 5, "encoder_hidden_size": 8, "prefix_projection": True}, Prefix(5, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "ours"), PEFT)
def test_settings_take_the_arguments_of_pefts_configurations(kind: Any, words: dict[str, Any], ours: Any) -> None:
    assert kind(**words) == ours


@pytest.mark.parametrize(
    "words",
    [{"layers_to_transform": [1]}, {"rank": 2}, {"target_modules": r".*\.(key|value)"}],
    ids=str,
)
def test_arguments_of_peft_without_an_equivalent_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as fault:
        Lora(r=4, **words)
    assert len(fault.value.problems) == 1


def test_the_base_model_shares_the_parameters(base: Path) -> None:
    model = load(base, head="sequence_classification")
    model.eval()
    inner: Any = model.base_model
    assert isinstance(inner, EncoderModel)
    assert inner.base_model is inner
    encoded = model.tokenizer(["a good film"], return_tensors="pt")
    theirs = load(base, head="base").eval()
    assert torch.equal(inner(**encoded).last_hidden_state, theirs(**encoded).last_hidden_state)
    for parameter in inner.parameters():
        parameter.requires_grad_(False)
    assert {n.partition(".")[0] for n, p in model.graph.named_parameters() if p.requires_grad} == {"head"}
    for name in ("classifier", "bert", "encoder"):
        with pytest.raises(AttributeError, match=r"head|base_model"):
            getattr(model, name)


def test_records_are_read_by_the_names_of_pipelines(base: Path) -> None:
    model = load(base, head="sequence_classification")
    found: Any = model.predict(["a good film"], untrained=True)[0]
    assert found[0]["label"] == found["label"] == found[0].label
    assert dict(found[0])["score"] == found["score"]
    with pytest.raises(KeyError):
        found[0]["nothing"]
    tags: Any = load(base, head="token_classification", labels=["O", "B-X"]).predict(["a good film"], untrained=True)
    assert all(entity["entity_group"] == entity.label for entity in tags[0])


def test_options_are_checked_by_plan_job_too(base: Path) -> None:
    with pytest.raises(ConfigError) as fault:
        plan_job(base, labelled(8), None, make_options({"metric": "f1", "matryoshka": [8]}))
    assert [problem.partition(":")[0] for problem in fault.value.problems] == ["matryoshka", "metric"]


@pytest.mark.parametrize(
    "words", [{"truncation": True, "max_length": 6}, {"max_length": 6}, {"truncate": True, "max_length": 6}]
)
def test_predict_truncates_in_the_words_of_pipelines(words: dict[str, Any], base: Path) -> None:
    model = load(base, head="sequence_classification").eval()
    text = " ".join(TEXTS[:4])
    found: Any = model.predict([text], untrained=True, **words)[0]
    encoded = model.tokenizer([text], truncation=True, max_length=6, return_tensors="pt")
    assert encoded["input_ids"].shape[1] == 6
    with torch.no_grad():
        expected = model(**encoded).logits.softmax(-1)[0]
    assert sorted(one.score for one in found) == pytest.approx(sorted(expected.tolist()), abs=1e-6)
    whole: Any = model.predict([text], untrained=True, truncation=False)[0]
    assert whole[0].score != found[0].score


def test_a_run_logs_its_task_epochs_evaluations_and_warnings(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = labelled(24)
    with caplog.at_level("INFO", logger="flodl_hf.training"):
        finetune(base, train=rows[:16], eval=rows[16:], epochs=2, batch_size=8, max_length=6, progress=False)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert any(level == "INFO" and "'text'" in line and "'label'" in line for level, line in lines)
    assert sum(line.startswith("epoch ") for _, line in lines) == 2
    assert sum(line.startswith("step ") for _, line in lines) == 2
    assert any(level == "WARNING" and "longer than 6 tokens" in line for level, line in lines)


def test_a_run_of_seconds_prints_what_the_command_prints(
    base: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = labelled(24)
    given: dict[str, Any] = {"train": rows[:16], "eval": rows[16:], "epochs": 2, "batch_size": 8, "max_length": 6}
    finetune(base, **given)
    lines = capfd.readouterr().err.splitlines()
    starts = (
        "task sequence_classification",
        "epoch 1: loss",
        "epoch 2: loss",
        "step 2: eval_loss",
        "step 4: eval_loss",
    )
    assert [sum(line.startswith(start) for line in lines) for start in starts] == [1] * 5
    assert any(line.startswith("warning: ") and "longer than 6 tokens" in line for line in lines)
    monkeypatch.setenv("FLODL_VERBOSITY", "quiet")
    finetune(base, **given)
    assert {line.partition(":")[0] for line in capfd.readouterr().err.splitlines()} == {"warning"}


SAME_TEXT = [{"anchor": f"{TEXTS[0]} {i}", "positive": TEXTS[1 + (i == 3)]} for i in range(4)]
WARNED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "float ratings": ([{"text": t, "rating": 1.0 + i % 3} for i, t in enumerate(TEXTS[:9])], {}, "rating"),
    "float ratings of a CSV file": (
        [{"text": t, "rating": f"{1 + i % 3}.0"} for i, t in enumerate(TEXTS[:9])], {}, "rating",
    ),
    "integer ratings": ([{"text": t, "rating": 1 + i % 3} for i, t in enumerate(TEXTS[:9])], {}, ""),
    "float classes 0 and 1": ([{"text": t, "label": float(i % 2)} for i, t in enumerate(TEXTS[:8])], {}, ""),
    "ratings as numbers": (
        [{"text": t, "rating": 1.0 + i % 3} for i, t in enumerate(TEXTS[:9])], {"problem_type": "regression"}, "",
    ),
    "a title": ([{"title": t[::-1], "body": t, "label": i % 2} for i, t in enumerate(TEXTS[:8])], {}, "'title'"),
    "a title and named columns": (
        [{"title": t[::-1], "body": t, "label": i % 2} for i, t in enumerate(TEXTS[:8])],
        {"columns": {"text": "body", "label": "label"}}, "",
    ),
    "a title of words": ([{"title": t[::-1], "words": t.split(), "tags": ["O"] * len(t.split())} for t in TEXTS[:8]],
                         {}, "'title'"),
    "a title of pairs": ([{"title": "a", **row} for row in PAIRS], {"task": "embedding"}, "'title'"),
    "labels that differ by case": (
        [{"text": t, "label": ("good", "Good ")[i % 2]} for i, t in enumerate(TEXTS[:8])], {}, "'Good ', 'good'",
    ),
    "the same text": (SAME_TEXT, {"task": "embedding", "batch_size": 4}, "2 of 4 rows"),
    "the same text, permitted": (SAME_TEXT, {"task": "embedding", "batch_size": 4, "no_duplicates": False}, ""),
    "numbers beside a text": ([{"id": str(i), "text": t, "label": i % 2} for i, t in enumerate(TEXTS[:8])], {}, ""),
    "a length": (labelled(8), {"max_length": 100_000}, "max_length"),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_what_is_decided_for_the_user_is_a_warning(case: str, base: Path) -> None:
    rows, options, named = WARNED[case]
    notes = plan_job(base, rows, None, make_options({"batch_size": 8, **options})).notes
    assert len(notes) == (1 if named else 0), notes
    assert all(named in note for note in notes)


MENU = [{"question": f"what is {i}", "choices": ["one", "two"], "answer": i % 2} for i in range(8)]
LISTED = [{"query": f"film {i}", "docs": ["one", "two"], "labels": [1, 0]} for i in range(8)]
CLASSED = [{"sentence": f"film {i}", "label": float(i % 2)} for i in range(8)]
NUMBERED = [{"text": f"film {i}", "label": i % 2} for i in range(8)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([*LISTED, {**LISTED[0], "labels": [1, "x"]}], {"task": "rank", "loss": "ListNetLoss"}, "row 8: labels"),
        ([*CLASSED, {**CLASSED[0], "label": float("nan")}], {"task": "embedding"}, "no label in 1 of 9 rows"),
        (NUMBERED, {"class_weights": {0: 1.0, "x": 2.0}}, "'x'"),
        (PAIRS, {"loss_options": {"scale": None}}, "scale"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(rows: Any, options: Any, message: str, base: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        finetune(base, train=rows, **options)


def test_class_weights_may_be_named_by_numbers(base: Path) -> None:
    from flodl_hf.training.job import plan_job
    from flodl_hf.training.options import make_options

    job = plan_job(base, NUMBERED, None, make_options({"class_weights": {0: 1.0, 1: 2.0}, "labels": ["0", "1"]}))
    assert job.objective.weights == (1.0, 2.0)


def test_a_text_is_no_list_of_choices() -> None:
    from flodl_hf.training.choices import ChoiceTask, choice_columns

    columns: Any = choice_columns(MENU[0])
    with pytest.raises(DataError, match="0 choices"):
        ChoiceTask(columns)._read({**MENU[0], "choices": "abc"})
