"""Keywords of ``finetune`` for type checkers; `flodl_hf.training.options` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from flodl_hf.training.training_arguments import TrainerWords

__all__ = ["EvaluateOptions", "FinetuneOptions", "FinetuneWords"]


class FinetuneOptions(TypedDict, total=False):
    """The fields of `flodl_hf.training.options.Options` as keywords; a test compares the two."""

    task: str | None
    columns: Mapping[str, str] | None
    labels: Sequence[str] | None
    new_head: bool | None
    problem_type: str | None
    epochs: int
    max_steps: int | None
    batch_size: int | None
    accumulate: int
    micro_batch_size: int | str | None
    tokens_per_batch: int | None
    group_by_length: bool | None
    layout: str
    max_length: int | None
    stride: int | None
    long_texts: str
    lr: float
    schedule: Any
    schedule_options: Mapping[str, Any] | None
    warmup: float
    optimizer: str
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float | None
    layerwise_decay: float | None
    freeze: Sequence[str]
    class_weights: Any
    label_smoothing: float
    dropout: float | None
    lora: int | None
    lora_alpha: float | None
    lora_dropout: float
    lora_targets: Sequence[str]
    lora_kinds: Sequence[str]
    ia3: Sequence[str]
    prompt_tokens: int | None
    prompt_text: str | None
    prompt_encoder: int | None
    prompt_encoder_kind: str
    prefix_tokens: int | None
    prefix_encoder: int | None
    neftune: float | None
    ema: float | None
    precision: str
    gradient_checkpointing: bool
    attention: str
    seed: int
    deterministic: bool
    capture: bool
    fused: bool
    compile: bool
    log_every: int
    on_nan: str
    compat: str | None
    eval_every: int | None
    eval_batch_size: int | None
    metric: str | None
    keep_best: bool
    tune_thresholds: bool
    early_stopping: int | None
    concatenate: bool
    whole_words: bool
    mask_probability: float
    generator: str | None
    vector_loss: Any
    loss_options: Mapping[str, Any] | None
    matryoshka: Sequence[str]
    guide: str | None
    pooling: str | None
    normalize: bool | None
    prompts: Any
    projection: Mapping[str, Any] | None
    no_duplicates: bool
    mixing: str
    cache_tokens: int | None
    trackers: Sequence[str]
    log_dir: str | None
    profile: str | None
    report: bool
    save_every: int | None
    checkpoints: str | None
    keep_last: int
    keep_checkpoints: bool
    resume: bool
    allow_change: Sequence[str]
    devices: Any
    policy: str | None
    shard: str | None
    revision: str | None
    local_files_only: bool


class FinetuneWords(FinetuneOptions, TrainerWords, total=False):
    """Keywords of `flodl_hf.training.finetune`: its options and the names of transformers."""


class EvaluateOptions(TypedDict, total=False):
    """Keywords of `flodl_hf.evaluate`: the options of `flodl_hf.finetune` that concern data and evaluation."""

    task: str | None
    columns: Mapping[str, str] | None
    problem_type: str | None
    max_length: int | None
    stride: int | None
    long_texts: str
    batch_size: int | None
    layout: str
    precision: str
    attention: str
    seed: int
    concatenate: bool
    whole_words: bool
    mask_probability: float
    loss: str | None
    vector_loss: str | None
    loss_options: Mapping[str, Any] | None
    matryoshka: Sequence[str]
    pooling: str | None
    normalize: bool | None
    revision: str | None
    local_files_only: bool
