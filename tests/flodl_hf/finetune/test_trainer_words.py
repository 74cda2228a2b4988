"""Words of transformers' TrainingArguments: taken where they mean the same, else refused with ours and the reason."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from finetune_tables import labelled

from flodl.errors import ConfigError
from flodl_hf.training import finetune
from flodl_hf.training.options import Options, make_options
from flodl_hf.training.training_arguments import INERT, REFUSED, TAKEN, TrainerWords

NAMES = {f.name for f in fields(Options)}


class Kind(Enum):
    COSINE = "cosine"


# words of transformers, and the options that they are
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"learning_rate": 2e-5}, {"lr": 2e-5}),
    ({"num_train_epochs": 2.0}, {"epochs": 2}),
    ({"max_steps": -1}, {"max_steps": None}),
    ({"per_device_train_batch_size": 8}, {"batch_size": 8}),
    ({"per_device_train_batch_size": 8, "devices": 2}, {"batch_size": 16, "devices": 2}),
    ({"per_device_train_batch_size": 8, "devices": ["cpu"] * 3}, {"batch_size": 24, "devices": ["cpu"] * 3}),
    ({"per_device_eval_batch_size": 64}, {"eval_batch_size": 64}),
    ({"gradient_accumulation_steps": 4}, {"accumulate": 4}),
    ({"warmup_ratio": 0.1}, {"warmup": 0.1}),
    ({"warmup_steps": 100, "warmup_ratio": 0.0}, {"warmup": 100}),
    ({"lr_scheduler_type": "cosine"}, {"schedule": "cosine"}),
    ({"lr_scheduler_type": Kind.COSINE}, {"schedule": "cosine"}),
    ({"lr_scheduler_type": "constant"}, {"schedule": "constant"}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, {"schedule": "constant", "warmup": 5}),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"schedule": "cosine", "schedule_options": {"floor": 0.1}},
    ),
    (
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-7, "power": 2}},
        {"schedule": "polynomial", "schedule_options": {"end": 1e-7, "power": 2.0}},
    ),
    (
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 9, "decay_type": "cosine"},
        },
        {"schedule": "warmup_stable_decay", "schedule_options": {"decay": 9.0, "fall": "cosine"}},
    ),
    ({"optim": "adamw_torch_fused"}, {"optimizer": "adamw"}),
    ({"optim": "sgd"}, {"optimizer": "sgd", "beta1": 0.0}),
    ({"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}),
    ({"label_smoothing_factor": 0.1}, {"label_smoothing": 0.1}),
    ({"bf16": True, "fp16": False}, {"precision": "bf16"}),
    ({"fp16": True}, {"precision": "fp16"}),
    ({"tf32": True}, {"precision": "tf32"}),
    ({"tf32": None, "bf16": False}, {}),
    ({"gradient_checkpointing": None}, {}),
    ({"full_determinism": True, "data_seed": 42}, {"deterministic": True}),
    ({"eval_strategy": "epoch"}, {}),
    ({"eval_strategy": "steps", "eval_steps": 50}, {"eval_every": 50}),
    ({"evaluation_strategy": "steps"}, {"eval_every": 500}),
    ({"save_strategy": "steps", "save_steps": 50, "save_total_limit": 3}, {"save_every": 50, "keep_last": 3}),
    ({"save_strategy": "no", "save_total_limit": None}, {}),
    ({"load_best_model_at_end": False}, {"keep_best": False}),
    ({"metric_for_best_model": "eval_f1", "greater_is_better": True}, {"metric": "f1"}),
    ({"metric_for_best_model": "eval_loss"}, {"metric": "eval_loss"}),
    ({"metric_for_best_model": "perplexity", "greater_is_better": False}, {"metric": "-perplexity"}),
    ({"early_stopping_patience": 2}, {"early_stopping": 2}),
    ({"neftune_noise_alpha": 5.0}, {"neftune": 5.0}),
    ({"torch_compile": True}, {"compile": True}),
    ({"train_sampling_strategy": "random"}, {"group_by_length": False}),
    ({"max_seq_length": 256, "doc_stride": 64}, {"max_length": 256, "stride": 64}),
    ({"mlm_probability": 0.2, "line_by_line": True}, {"mask_probability": 0.2, "concatenate": False}),
    ({"resume_from_checkpoint": True}, {"resume": True}),
    ({"use_cpu": True}, {"devices": "cpu"}),
    ({"no_cuda": True, "disable_tqdm": True}, {"devices": "cpu"}),
    ({"id2label": {1: "good", 0: "bad"}}, {"labels": ("bad", "good")}),
    ({"learning_rate": 1e-4, "lr": 1e-4}, {"lr": 1e-4}),
    ({"logging_steps": 10, "remove_unused_columns": False, "dataloader_num_workers": 4, "do_train": True}, {}),
    ({"push_to_hub": False, "fsdp": "", "deepspeed": None, "torch_dtype": None}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME, ids=lambda words: ",".join(words) or "nothing")
def test_words_that_mean_the_same_are_taken(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert make_options(theirs) == make_options(ours)


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"num_train_epochs": 2.5}, "num_train_epochs: found 2.5; epochs are whole here; give epochs="),
    ({"warmup_ratio": 1.0}, "warmup_ratio: found 1.0; from 1 up warmup= is a number of steps"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "use constant_with_warmup"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "set it explicitly"),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"nope": 1}}, "cosine has no 'nope'"),
    ({"optim": "adafactor"}, "optim: found 'adafactor'; optimizer= is adamw or sgd"),
    ({"bf16": True, "fp16": True}, "fp16 and bf16 are both precision, with two values"),
    ({"learning_rate": 1e-4, "lr": 1e-5}, "lr and learning_rate are both lr"),
    ({"eval_strategy": "no"}, "remove eval="),
    ({"metric_for_best_model": "loss", "greater_is_better": True}, "of a loss less is better"),
    ({"greater_is_better": False}, "use metric= with '-' before the name"),
    ({"data_seed": 3}, "seed= decides the order of data as well"),
    ({"resume_from_checkpoint": "out/checkpoint-500"}, "use resume=True, and checkpoints="),
    ({"id2label": {0: "a", 2: "b"}}, "labels= is a list of names"),
    ({"train_sampling_strategy": "sequential"}, "rows come in a new order"),
    ({"learning_rat": 1e-4}, "no such option, did you mean 'learning_rate'"),
    ({"batch_size": "auto"}, "micro_batch_size='auto'"),
    ({"learning_rate": "fast"}, "lr: found 'fast'; expected a number"),
    *(({name: True}, f"{name}: not supported; {reason}") for name, reason in REFUSED.items()),
]


@pytest.mark.parametrize(("given", "says"), REASONS, ids=lambda part: part[:40] if isinstance(part, str) else None)
def test_words_that_mean_something_else_name_ours_and_the_reason(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        make_options(given)
    assert says in str(fault.value)
    assert len(fault.value.problems) == 1


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ConfigError) as fault:
        make_options({"output_dir": "out", "epoch": 3, "optim": "lion", "bf16": "yes", "precision": "fp8"})
    assert len(fault.value.problems) >= 4


def test_tables_do_not_overlap_and_the_types_name_what_is_taken() -> None:
    assert set(get_type_hints(TrainerWords)) == set(TAKEN)
    assert not set(TAKEN) & INERT
    assert not (set(TAKEN) | INERT) & set(REFUSED)
    assert not (set(TAKEN) | INERT | set(REFUSED)) & NAMES


@pytest.mark.transformers
def test_every_word_of_training_arguments_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {f.name for f in fields(transformers.TrainingArguments)}
    known = set(TAKEN) | INERT | set(REFUSED) | NAMES
    assert theirs <= known | UNKNOWN, sorted(theirs - known - UNKNOWN)
    assert not UNKNOWN & known


# Machinery of other packages and of a hosted service: "no such option" says it.
UNKNOWN = {
    "accelerator_config", "batch_eval_metrics", "ddp_backend", "debug", "do_predict", "enable_jit_checkpoint",
    "fsdp_config", "hub_always_push", "hub_private_repo", "hub_revision", "hub_token", "label_names",
    "liger_kernel_config", "optim_target_modules", "parallelism_config", "prediction_loss_only", "project",
    "restore_callback_states_from_checkpoint", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id",
    "activation_checkpointing", "activation_checkpointing_kwargs",
}  # fmt: skip


def test_a_run_in_their_words_is_the_run_in_ours(base: Path) -> None:
    rows = labelled(24)
    theirs = finetune(
        base, train=rows, learning_rate=1e-3, num_train_epochs=1, per_device_train_batch_size=8, warmup_ratio=0.5,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    ours = finetune(base, train=rows, lr=1e-3, epochs=1, batch_size=8, warmup=0.5, schedule="cosine")
    assert theirs.losses == ours.losses
    assert theirs.recipe == ours.recipe
    with pytest.raises(ConfigError, match="train_dataset: not supported; use train="):
        finetune(base, train_dataset=rows)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="train: found None"):
        finetune(base)
