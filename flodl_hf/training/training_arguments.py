"""Names of transformers' ``TrainingArguments`` and scripts, converted to our options.

``finetune(learning_rate=2e-5, num_train_epochs=3, warmup_ratio=0.1)`` works. A name with another
meaning here raises an error with the replacement. A name that changes no number is accepted and ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

__all__ = ["INERT", "REFUSED", "REMOVED", "TAKEN", "TrainerWords", "translated"]


class TrainerWords(TypedDict, total=False):
    """Words of transformers that ``finetune`` takes, for type checkers; a test compares it with `TAKEN`."""

    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    auto_find_batch_size: bool
    bf16: bool
    data_seed: int | None
    disable_tqdm: bool
    doc_stride: int
    early_stopping_patience: int
    eval_steps: int | None
    eval_strategy: Any
    evaluation_strategy: Any
    fp16: bool
    full_determinism: bool
    gradient_accumulation_steps: int
    greater_is_better: bool | None
    id2label: Mapping[int, str]
    label_smoothing_factor: float
    learning_rate: float
    line_by_line: bool
    load_best_model_at_end: bool
    logging_dir: str | None
    lr_scheduler_kwargs: Mapping[str, Any] | None
    lr_scheduler_type: Any
    max_seq_length: int | None
    metric_for_best_model: str | None
    mlm_probability: float
    neftune_noise_alpha: float | None
    no_cuda: bool
    num_train_epochs: float
    optim: Any
    per_device_eval_batch_size: int
    per_device_train_batch_size: int
    report_to: Any
    resume_from_checkpoint: bool | None
    save_steps: int
    save_strategy: Any
    save_total_limit: int | None
    tf32: bool | None
    torch_compile: bool
    train_sampling_strategy: Any
    use_cpu: bool
    warmup_ratio: float
    warmup_steps: float


class Refusal(ValueError):
    """The name has another meaning here; the text contains the replacement."""


Found = dict[str, Any]
"""Our options, as a word or several make them."""


def _renamed(name: str) -> Callable[[Any, Mapping[str, Any]], Found]:
    return lambda value, given: {} if value is None else {name: value}


def _flag(found: Found) -> Callable[[Any, Mapping[str, Any]], Found]:
    return lambda value, given: found if value else {}


def _trackers(value: Any, given: Mapping[str, Any]) -> Found:
    return {"trackers": () if value in ("none", None) else value}


def _epochs(value: Any, given: Mapping[str, Any]) -> Found:
    if isinstance(value, (int, float)) and value != int(value):
        raise Refusal("epochs are whole here; give epochs=, and max_steps= to stop within one")
    return {"epochs": value}


def _batch_size(value: Any, given: Mapping[str, Any]) -> Found:
    # ours are the rows of a step over all devices
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and given.get("devices") is not None:
        from flodl.devices import training_devices

        places = training_devices(given["devices"])
        world = places if isinstance(places, int) else 1 if isinstance(places, str) or places is None else len(places)
    return {"batch_size": value * world if isinstance(value, int) else value}


def _warmup_ratio(value: Any, given: Mapping[str, Any]) -> Found:
    if isinstance(value, (int, float)) and value >= 1:
        raise Refusal("from 1 up warmup= is a number of steps; a share is below 1")
    return {"warmup": value} if value else {}


def _schedule(value: Any, given: Mapping[str, Any]) -> Found:
    name = str(getattr(value, "value", value))
    if name in ("reduce_lr_on_plateau", "greedy"):
        raise Refusal("schedule='plateau' counts epochs, with its own patience and factor; set it explicitly")
    if name == "constant" and (given.get("warmup_ratio") or given.get("warmup_steps") or given.get("warmup")):
        raise Refusal("transformers ignores its warmup; use constant_with_warmup, or remove the warmup")
    return {"schedule": {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(name, name)}


_CURVE = {
    "num_cycles": "cycles",
    "min_lr": "end",
    "min_lr_rate": "floor",
    "min_lr_ratio": "floor",
    "lr_end": "end",
    "num_decay_steps": "decay",
    "num_stable_steps": "stable",
    "warmup_type": "rise",
    "decay_type": "fall",
}


def _curve(value: Any, given: Mapping[str, Any]) -> Found:
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise Refusal("schedule_options= is a map of names to values")
    return {"schedule_options": {_CURVE.get(name, name): part for name, part in value.items()}}


def _optimizer(value: Any, given: Mapping[str, Any]) -> Found:
    name = str(getattr(value, "value", value))
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        return {"optimizer": "adamw"}
    if name == "sgd":
        return {"optimizer": "sgd", **({} if "beta1" in given or "adam_beta1" in given else {"beta1": 0.0})}
    raise Refusal("optimizer= is adamw or sgd here")


def _strategy(ours: str, steps: str) -> Callable[[Any, Mapping[str, Any]], Found]:
    def taken(value: Any, given: Mapping[str, Any]) -> Found:
        name = str(getattr(value, "value", value))
        if name == "epoch":
            return {}
        if name == "steps":
            return {} if given.get(steps) or given.get(ours) else {ours: 500}
        if name == "no" and ours == "eval_every":
            raise Refusal("evaluation runs after each epoch; remove eval= to skip it")
        if name == "no":
            return {}
        raise Refusal(f"expected epoch, or steps with {ours}=")

    return taken


def _metric(value: Any, given: Mapping[str, Any]) -> Found:
    if value is None:
        return {}
    greater = given.get("greater_is_better")
    name = str(value)
    name = name if name in ("loss", "eval_loss") else name.removeprefix("eval_")
    if greater and name in ("loss", "eval_loss"):
        raise Refusal("of a loss less is better; leave greater_is_better out")
    return {"metric": f"-{name}" if greater is False else name}


def _greater(value: Any, given: Mapping[str, Any]) -> Found:
    if value is not None and not (given.get("metric_for_best_model")):
        raise Refusal("use metric= with '-' before the name if lower is better")
    return {}


def _data_seed(value: Any, given: Mapping[str, Any]) -> Found:
    if value is not None and value != given.get("seed", 42):
        raise Refusal("seed= decides the order of data as well")
    return {}


def _resume(value: Any, given: Mapping[str, Any]) -> Found:
    if isinstance(value, (str, os.PathLike)):
        raise Refusal("use resume=True, and checkpoints= for the folder; the newest checkpoint is loaded")
    return {"resume": bool(value)} if value else {}


def _order(value: Any, given: Mapping[str, Any]) -> Found:
    name = str(getattr(value, "value", value))
    if name in ("random", "group_by_length"):
        return {"group_by_length": name == "group_by_length"}
    raise Refusal("rows come in a new order in each epoch; group_by_length=True puts similar lengths together")


def _labels(value: Any, given: Mapping[str, Any]) -> Found:
    if not isinstance(value, Mapping) or sorted(int(k) for k in value) != list(range(len(value))):
        raise Refusal("labels= is a list of names in the order of their numbers")
    return {"labels": [value[k] for k in sorted(value, key=int)]}


TAKEN: dict[str, Callable[[Any, Mapping[str, Any]], Found]] = {
    "adam_beta1": _renamed("beta1"),
    "adam_beta2": _renamed("beta2"),
    "adam_epsilon": _renamed("eps"),
    "auto_find_batch_size": _flag({"micro_batch_size": "auto"}),
    "bf16": _flag({"precision": "bf16"}),
    "data_seed": _data_seed,
    "disable_tqdm": lambda value, given: {},  # `finetune` shows no progress then
    "doc_stride": _renamed("stride"),
    "early_stopping_patience": _renamed("early_stopping"),
    "eval_steps": _renamed("eval_every"),
    "eval_strategy": _strategy("eval_every", "eval_steps"),
    "evaluation_strategy": _strategy("eval_every", "eval_steps"),
    "fp16": _flag({"precision": "fp16"}),
    "full_determinism": _flag({"deterministic": True}),
    "gradient_accumulation_steps": _renamed("accumulate"),
    "greater_is_better": _greater,
    "id2label": _labels,
    "label_smoothing_factor": _renamed("label_smoothing"),
    "learning_rate": _renamed("lr"),
    "line_by_line": lambda value, given: {"concatenate": not value},
    "load_best_model_at_end": _renamed("keep_best"),
    "logging_dir": _renamed("log_dir"),
    "lr_scheduler_kwargs": _curve,
    "lr_scheduler_type": _schedule,
    "max_seq_length": _renamed("max_length"),
    "metric_for_best_model": _metric,
    "mlm_probability": _renamed("mask_probability"),
    "neftune_noise_alpha": _renamed("neftune"),
    "no_cuda": _flag({"devices": "cpu"}),
    "num_train_epochs": _epochs,
    "optim": _optimizer,
    "per_device_eval_batch_size": _renamed("eval_batch_size"),
    "per_device_train_batch_size": _batch_size,
    "report_to": _trackers,
    "resume_from_checkpoint": _resume,
    "save_steps": _renamed("save_every"),
    "save_strategy": _strategy("save_every", "save_steps"),
    "save_total_limit": _renamed("keep_last"),
    "tf32": _flag({"precision": "tf32"}),
    "torch_compile": _renamed("compile"),
    "train_sampling_strategy": _order,
    "use_cpu": _flag({"devices": "cpu"}),
    "warmup_ratio": _warmup_ratio,
    "warmup_steps": lambda value, given: {"warmup": value} if value else {},
}

INERT = frozenset({
    "average_tokens_across_devices", "dataloader_in_order", "dataloader_multiprocessing_context",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
    "do_eval", "do_train", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
    "gradient_checkpointing_kwargs", "include_num_input_tokens_seen", "length_column_name", "local_rank", "log_level",
    "log_level_replica", "log_on_each_node", "logging_first_step", "logging_nan_inf_filter",
    "logging_steps", "logging_strategy", "pad_to_max_length", "remove_unused_columns", "run_name",
    "save_on_each_node", "save_only_model", "save_safetensors", "skip_memory_metrics", "torch_compile_backend",
    "torch_compile_mode", "torch_empty_cache_steps", "use_cache",
})  # fmt: skip
"""Words that change no number of a run and have no counterpart."""

REFUSED = {
    "args": "give the values of TrainingArguments as keywords",
    "bf16_full_eval": "evaluation uses the precision of training; use precision='bf16'",
    "compute_loss_func": "use loss=, a function of scores and labels",
    "compute_metrics": "use metrics=, a function of predictions and truth that returns a mapping of metrics",
    "data_collator": "rows are put together as the task needs them",
    "dataloader_drop_last": "no row is left out here",
    "deepspeed": "weights are split among ranks by shard='fsdp' here, with torch's own FSDP2",
    "device": "use devices=",
    "device_map": "a model is not split among devices; use devices= for the number of devices",
    "dtype": "trained weights are float32; use precision= for the computation",
    "eval_dataset": "use eval=",
    "eval_on_start": "call flodl_hf.evaluate with the model before the run",
    "fp16_full_eval": "evaluation is in float32 under fp16",
    "fsdp": "use shard='fsdp', which splits weights, gradients and the optimiser's state among ranks",
    "hub_model_id": "call push_to_hub of the result's model",
    "hub_strategy": "call push_to_hub of the result's model",
    "ignore_data_skip": "a resumed run continues at its position in the data",
    "include_for_metrics": "use metrics=, a function of predictions and truth",
    "model_init": "pass the name of a model, which is opened in each call",
    "num_labels": "use labels=, their names; by default they are inferred from the data",
    "optim_args": "use beta1=, beta2= and eps=",
    "output_dir": "use out=, the folder of the trained model, and checkpoints= for the folder of checkpoints",
    "overwrite_output_dir": "use overwrite=True",
    "preprocess_logits_for_metrics": "use metrics=, a function of predictions and truth",
    "processing_class": "the tokenizer is the model's; set model.tokenizer for another",
    "push_to_hub": "call push_to_hub of the result's model",
    "tokenizer": "the tokenizer is the model's; set model.tokenizer for another",
    "torch_dtype": "trained weights are float32; use precision= for the computation",
    "train_dataset": "use train=",
    "use_liger_kernel": "use fused=, which is on by default",
}
"""Names with another meaning here, and the replacement."""

REMOVED: dict[str, tuple[Any, str]] = {
    "adaptive_layers": (False, "pass loss=AdaptiveLayerLoss(...) of flodl_hf.training.losses"),
    "backend": (None, "gradients are averaged by the backend of the device"),
    "discriminator_weight": (None, "the weight is 50, as in ELECTRA"),
    "ema_warmup": (True, "the moving average always warms up; flodl.train.Trainer has this setting"),
    "eval_delay": (0, "set eval_every to a larger number of steps"),
    "eval_start": (False, "call flodl_hf.evaluate with the model before the run"),
    "mask_padding": (None, "compat='transformers' includes padding in the loss of answers"),
    "rules": ((), "pass callbacks=[Rules(...)] of flodl_hf.training.observation"),
    "trend_every": (None, "pass callbacks=[Rules(..., trend_every=...)] of flodl_hf.training.observation"),
    "watch": ((), "pass callbacks=[Watch(...)] of flodl_hf.training.observation"),
}
"""Removed options: the former default, which recipes of earlier runs contain, and the replacement."""


def translated(given: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return options with our names, and the problems of transformers' names.

    Args:
        known: our options, which are unchanged.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    problems: list[str] = []
    for name, value in given.items():
        if name == "batch_size" and value == "auto":
            problems.append(
                "batch_size: found 'auto', expected a number; micro_batch_size='auto' uses as many rows as fit"
            )
            continue
        if name in REMOVED:
            default, replacement = REMOVED[name]
            if value is not None and (tuple(value) if isinstance(value, list) else value) != default:
                problems.append(f"{name}: this option was removed; {replacement}")
            continue
        if name in known:
            found = _ours(name, value)
        elif name in INERT:
            continue
        elif name in TAKEN:
            try:
                found = TAKEN[name](value, given)
            except Refusal as fault:
                problems.append(f"{name}: found {getattr(value, 'value', value)!r}; {fault}")
                continue
        else:
            if name in REFUSED:
                if value is not None and not (isinstance(value, (bool, str, list, tuple)) and not value):
                    problems.append(f"{name}: a word of transformers; {REFUSED[name]}")
                continue
            found = {name: value}
        for ours, part in found.items():
            if ours in values and (values[ours] != part or origin[ours] == name):
                problems.append(f"{name} and {origin[ours]} are both {ours}, with two values; give one")
            values[ours], origin[ours] = part, name
    return values, problems


def _ours(name: str, value: Any) -> Found:
    """Return an option that exists in both libraries, with transformers' values converted."""
    if name == "max_steps" and value == -1:
        return {name: None}
    if name == "gradient_checkpointing" and value is None:
        return {}
    return {name: value}
