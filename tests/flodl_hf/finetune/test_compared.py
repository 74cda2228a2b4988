"""Each option of a fine-tune is compared when the run is taken up again, or a table says why it may be another."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from finetune_tables import labelled, lines

from flodl.distributed.group import join_ranks
from flodl.train.saving import resume
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import Options, make_options
from flodl_hf.training.training import BY_HASH, BY_THE_TRAINER, CHANGES_NO_NUMBER, fingerprint_of, make_builder

ROWS = [{**row, "other": row["text"][::-1]} for row in labelled(48)]
PAIRS = [{"anchor": a["text"], "positive": b["text"]} for a, b in zip(ROWS[:24], ROWS[24:], strict=True)]
BASIC: dict[str, Any] = {"batch_size": 8, "max_length": 24}
CHANGED: dict[str, Any] = {
    "task": "mlm", "columns": {"text": "other", "label": "label"}, "labels": ["praise", "complaint"], "new_head": True,
    "problem_type": "multi_label_classification", "epochs": 5, "max_steps": 4, "batch_size": 4, "accumulate": 2,
    "micro_batch_size": 2, "tokens_per_batch": 99, "group_by_length": True, "layout": "packed", "max_length": 8,
    "stride": 2, "long_texts": "windows", "lr": 1e-3, "schedule": "cosine", "schedule_options": {"power": 2},
    "warmup": 0.5, "optimizer": "sgd", "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.5, "eps": 1e-3,
    "max_grad_norm": 0.5, "layerwise_decay": 0.5, "freeze": ["embeddings"], "class_weights": [1.0, 2.0],
    "label_smoothing": 0.1, "dropout": 0.3, "lora": 2,
    "adapter": {"type": "lora", "alpha": 3}, "neftune": 5.0, "ema": 0.9, "precision": "bf16",
    "gradient_checkpointing": True, "attention": "eager", "seed": 3, "deterministic": True,
    "compile": True, "on_nan": "skip", "compat": "transformers", "eval_every": 3,
    "eval_batch_size": 3, "metric": "eval_loss", "keep_best": False,
    "tune_thresholds": True, "early_stopping": 2, "concatenate": True, "whole_words": True, "mask_probability": 0.3,
    "generator": None,
    "vector_loss": "MultipleNegativesSymmetricRankingLoss", "loss_options": {"scale": 50}, "matryoshka": ["8"], "guide": None, "pooling": "cls",
    "normalize": False, "prompts": "a cat", "projection": None, "no_duplicates": False, "mixing": "round_robin", "cache_tokens": 64,
    "trackers": ["csv"],
    "log_dir": "x", "profile": "x", "report": False, "save_every": 3, "checkpoints": "x", "keep_last": 3,
    "keep_checkpoints": True, "resume": True, "devices": 2, "policy": "cadence",
    "shard": "fsdp", "revision": None, "local_files_only": True,
}  # fmt: skip
"""Another value of each; None where it takes a second model, a Hub or a task of its own."""
WITH: dict[str, dict[str, Any]] = {
    **{name: {"task": "mlm"} for name in ("concatenate", "whole_words", "mask_probability")},
    **{name: {"schedule": "constant"} for name in ("epochs", "max_steps")},
    "columns": {"columns": {"text": "text", "label": "label"}},
    "schedule_options": {"schedule": "polynomial"},
    "stride": {"long_texts": "windows"},
}  # fmt: skip
VECTORS = (
    *("vector_loss", "loss_options", "matryoshka", "pooling", "normalize", "no_duplicates"),
    *("prompts", "mixing", "cache_tokens"),
)
SEVERAL = ("devices", "policy", "shard")
"""What the trainer compares as it finds the ranks."""


def told(base: Path, rows: Any, held_out: Any, **options: Any) -> dict[str, Any]:
    """Return what a fine-tune with these options compares."""
    job = plan_job(base, rows, held_out, make_options({**BASIC, **options}))
    with ExitStack() as stack:
        run = make_builder(job, lambda event: None, stack)
        run.set(identity=fingerprint_of(job))
        found = resume.recipe(run.trainer().prepare(join_ranks(device="cpu")))
        stack.callback(job.task.conclude, job.model)
    return found


def test_every_option_is_looked_at_here() -> None:
    assert sorted(CHANGED) == sorted(row.name for row in fields(Options))
    compared = {name for name, value in CHANGED.items() if value is None} - {*BY_HASH}
    assert not compared & {*BY_THE_TRAINER, *CHANGES_NO_NUMBER}  # so these are compared by their value


@pytest.mark.parametrize("name", [name for name, value in CHANGED.items() if value is not None and name not in SEVERAL])
def test_an_option_is_compared_or_may_change(name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.use_deterministic_algorithms", lambda *args, **options: None)
    rows, held_out = (PAIRS, None) if name in VECTORS else (ROWS[:40], ROWS[40:])
    if WITH.get(name, {}).get("task") == "mlm":
        rows, held_out = lines(40), None
    before = told(base, rows, held_out, **WITH.get(name, {}))
    after = told(base, rows, held_out, **{**WITH.get(name, {}), name: CHANGED[name]})
    assert (before == after) == (name in CHANGES_NO_NUMBER), {
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    }
