"""Names of transformers' ``TrainingArguments`` and scripts, converted to our options.

``finetune(learning_rate=2e-5, num_train_epochs=3, warmup_ratio=0.1)`` works. A name with another
meaning here raises an error with the replacement. A name that changes no number is accepted and ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

from flodl_hf.checkpoints.keywords import PRECISION_SPELLINGS

Found = dict[str, Any]
"""Our options, as a word or several make them."""


def _epochs(value: Any, options: Mapping[str, Any]) -> Found:
    if isinstance(value, (int, float)) and value != int(value):
        raise ValueError("epochs are whole here; give epochs=, and max_steps= to stop within one")
    return {"epochs": value}


def _batch_size(value: Any, options: Mapping[str, Any]) -> Found:
    # ours are the rows of a step over all devices
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and options.get("devices") is not None:
        from flodl.devices import training_devices

        places = training_devices(options["devices"])
        world = places if isinstance(places, int) else 1 if isinstance(places, str) or places is None else len(places)
    return {"batch_size": value * world if isinstance(value, int) else value}


def _warmup_ratio(value: Any, options: Mapping[str, Any]) -> Found:
    if isinstance(value, (int, float)) and value >= 1:
        raise ValueError("from 1 up warmup= is a number of steps; a share is below 1")
    return {"warmup": value} if value else {}


def _schedule(value: Any, options: Mapping[str, Any]) -> Found:
    name = str(getattr(value, "value", value))
    if name in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError("schedule='plateau' counts epochs, with its own patience and factor; set it explicitly")
    if name == "constant" and (options.get("warmup_ratio") or options.get("warmup_steps") or options.get("warmup")):
        raise ValueError("transformers ignores its warmup; use constant_with_warmup, or remove the warmup")
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


def _curve(value: Any, options: Mapping[str, Any]) -> Found:
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("schedule_options= is a map of names to values")
    return {"schedule_options": {_CURVE.get(name, name): part for name, part in value.items()}}


def _optimizer(value: Any, options: Mapping[str, Any]) -> Found:
    name = str(getattr(value, "value", value))
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        return {"optimizer": "adamw"}
    if name == "sgd":
        return {"optimizer": "sgd", **({} if "beta1" in options or "adam_beta1" in options else {"beta1": 0.0})}
    raise ValueError("optimizer= is adamw or sgd here")


def _strategy(value: Any, options: Mapping[str, Any], ours: str, steps: str) -> Found:
    name = str(getattr(value, "value", value))
    if name == "no" and ours == "eval_every":
        raise ValueError("evaluation runs after each epoch; remove eval= to skip it")
    if name not in ("epoch", "no", "steps"):
        raise ValueError(f"expected epoch, or steps with {ours}=")
    return {ours: 500} if name == "steps" and not (options.get(steps) or options.get(ours)) else {}


def _metric(value: Any, options: Mapping[str, Any]) -> Found:
    if value is None:
        return {}
    greater = options.get("greater_is_better")
    name = str(value)
    name = name if name in ("loss", "eval_loss") else name.removeprefix("eval_")
    if greater and name in ("loss", "eval_loss"):
        raise ValueError("of a loss less is better; leave greater_is_better out")
    return {"metric": f"-{name}" if greater is False else name}


def _greater(value: Any, options: Mapping[str, Any]) -> Found:
    if value is not None and not (options.get("metric_for_best_model")):
        raise ValueError("use metric= with '-' before the name if lower is better")
    return {}


def _data_seed(value: Any, options: Mapping[str, Any]) -> Found:
    if value is not None and value != options.get("seed", 42):
        raise ValueError("seed= decides the order of data as well")
    return {}


def _resume(value: Any, options: Mapping[str, Any]) -> Found:
    if isinstance(value, (str, os.PathLike)):
        raise ValueError("use resume=True, and checkpoints= for the folder; the newest checkpoint is loaded")
    return {"resume": bool(value)} if value else {}


def _device(value: Any, options: Mapping[str, Any]) -> Found:
    if value is not None and not isinstance(value, str) and not hasattr(value, "type"):
        raise ValueError("expected the name of one device; devices= is for several")
    return {} if value is None else {"devices": str(value)}


def _order(value: Any, options: Mapping[str, Any]) -> Found:
    name = str(getattr(value, "value", value))
    if name in ("random", "group_by_length"):
        return {"group_by_length": name == "group_by_length"}
    raise ValueError("rows come in a new order in each epoch; group_by_length=True puts similar lengths together")


def _labels(value: Any, options: Mapping[str, Any]) -> Found:
    if not isinstance(value, Mapping) or sorted(int(k) for k in value) != list(range(len(value))):
        raise ValueError("labels= is a list of names in the order of their numbers")
    return {"labels": [value[k] for k in sorted(value, key=int)]}


class TrainerWords(TypedDict, total=False):
    """Names of transformers that ``finetune`` accepts, each with its conversion (see `TAKEN`)."""

    adam_beta1: Annotated[float, "beta1"]
    adam_beta2: Annotated[float, "beta2"]
    adam_epsilon: Annotated[float, "eps"]
    auto_find_batch_size: Annotated[bool, {"micro_batch_size": "auto"}]
    bf16: Annotated[bool, {"precision": "bf16"}]
    data_seed: Annotated[int | None, _data_seed]
    disable_tqdm: Annotated[bool, lambda value, options: {}]
    doc_stride: Annotated[int, "stride"]
    early_stopping_patience: Annotated[int, "early_stopping"]
    eval_steps: Annotated[int | None, "eval_every"]
    eval_strategy: Annotated[Any, partial(_strategy, ours="eval_every", steps="eval_steps")]
    evaluation_strategy: Annotated[Any, partial(_strategy, ours="eval_every", steps="eval_steps")]
    fp16: Annotated[bool, {"precision": "fp16"}]
    full_determinism: Annotated[bool, {"deterministic": True}]
    gradient_accumulation_steps: Annotated[int, "accumulate"]
    greater_is_better: Annotated[bool | None, _greater]
    id2label: Annotated[Mapping[int, str], _labels]
    label_smoothing_factor: Annotated[float, "label_smoothing"]
    learning_rate: Annotated[float, "lr"]
    line_by_line: Annotated[bool, lambda value, options: {"concatenate": not value}]
    load_best_model_at_end: Annotated[bool, "keep_best"]
    logging_dir: Annotated[str | None, "log_dir"]
    lr_scheduler_kwargs: Annotated[Mapping[str, Any] | None, _curve]
    lr_scheduler_type: Annotated[Any, _schedule]
    max_seq_length: Annotated[int | None, "max_length"]
    metric_for_best_model: Annotated[str | None, _metric]
    mlm_probability: Annotated[float, "mask_probability"]
    neftune_noise_alpha: Annotated[float | None, "neftune"]
    no_cuda: Annotated[bool, {"devices": "cpu"}]
    num_train_epochs: Annotated[float, _epochs]
    optim: Annotated[Any, _optimizer]
    per_device_eval_batch_size: Annotated[int, "eval_batch_size"]
    per_device_train_batch_size: Annotated[int, _batch_size]
    report_to: Annotated[Any, lambda value, options: {"trackers": () if value in ("none", None) else value}]
    resume_from_checkpoint: Annotated[bool | None, _resume]
    save_steps: Annotated[int, "save_every"]
    save_strategy: Annotated[Any, partial(_strategy, ours="save_every", steps="save_steps")]
    save_total_limit: Annotated[int | None, "keep_last"]
    tf32: Annotated[bool | None, {"precision": "tf32"}]
    torch_compile: Annotated[bool, "compile"]
    train_sampling_strategy: Annotated[Any, _order]
    use_cpu: Annotated[bool, {"devices": "cpu"}]
    warmup_ratio: Annotated[float, _warmup_ratio]
    warmup_steps: Annotated[float, lambda value, options: {"warmup": value} if value else {}]
    device: Annotated[Any, _device]


TAKEN: dict[str, Any] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(TrainerWords, include_extras=True).items()
}
"""Accepted names with our option, the options that a true value sets, or a function of the value and all options."""

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
    "device_map": "a model is not split among devices; use devices= for the number of devices",
    **dict.fromkeys(("dtype", "torch_dtype"), "trained weights are float32; use precision= for the computation"),
    "eval_dataset": "use eval=",
    "eval_delay": "set eval_every= to a larger number of steps",
    "eval_on_start": "call flodl_hf.evaluate with the model before the run",
    "fp16_full_eval": "evaluation is in float32 under fp16",
    "fsdp": "use shard='fsdp', which splits weights, gradients and the optimiser's state among ranks",
    **dict.fromkeys(("hub_model_id", "hub_strategy", "push_to_hub"), "call push_to_hub of the result's model"),
    "ignore_data_skip": "a resumed run continues at its position in the data",
    "include_for_metrics": "use metrics=, a function of predictions and truth",
    "model_init": "pass the name of a model, which is opened in each call",
    "num_labels": "use labels=, their names; by default they are inferred from the data",
    "optim_args": "use beta1=, beta2= and eps=",
    "output_dir": "use out=, the folder of the trained model, and checkpoints= for the folder of checkpoints",
    "overwrite_output_dir": "use overwrite=True",
    "preprocess_logits_for_metrics": "use metrics=, a function of predictions and truth",
    **dict.fromkeys(("processing_class", "tokenizer"), "the tokenizer is the model's; set model.tokenizer for another"),
    "train_dataset": "use train=",
    "use_liger_kernel": "fused kernels are used where they apply",
}
"""Names with another meaning here, and the replacement."""


FORMER: dict[str, Any] = {
    "adaptive_layers": False, "allow_change": [], "capture": True, "ema_warmup": True, "eval_delay": 0,
    "eval_start": False, "fused": True, "ia3": [], "log_every": 20, "lora_dropout": 0.0, "lora_kinds": [],
    "lora_targets": [], "prompt_encoder_kind": "mlp", "rules": [], "watch": [],
}  # fmt: skip
"""Options that recipes of earlier versions contain, with their default, which is the behaviour now."""


def translated(options: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return options with our names, and the problems of transformers' names.

    Args:
        known: our options, which are unchanged.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    problems: list[str] = []
    for name, value in options.items():
        # Recipes of denoising runs had fused: false.
        denoises = name == "fused" and str(options.get("vector_loss")).startswith("Denoising")
        if name in INERT or denoises or (name in FORMER and value in (None, FORMER[name])):
            continue
        if name == "batch_size" and value == "auto":
            problems.append(
                "batch_size: found 'auto', expected a number; micro_batch_size='auto' uses as many rows as fit"
            )
            continue
        if name in REFUSED:
            if value is not None and not (isinstance(value, (bool, str, list, tuple)) and not value):
                problems.append(f"{name}: not supported; {REFUSED[name]}")
            continue
        try:
            found = _ours(name, value, options) if name in known or name in TAKEN else {name: value}
        except ValueError as fault:
            problems.append(f"{name}: found {getattr(value, 'value', value)!r}; {fault}")
            continue
        for ours, part in found.items():
            if ours in values and (values[ours] != part or origin[ours] == name):
                problems.append(f"{name} and {origin[ours]} are both {ours}, with two values; give one")
            values[ours], origin[ours] = part, name
    return values, problems


def _ours(name: str, value: Any, options: Mapping[str, Any]) -> Found:
    """Return our options for the value of a name that we or transformers have."""
    if name not in TAKEN:
        if name == "precision":
            word = getattr(value, "value", str(value).removeprefix("torch."))
            value = PRECISION_SPELLINGS.get(word, word)
        elif name == "max_steps" and value == -1:
            value = None
        elif name == "long_texts" and value == "cut":  # in recipes of earlier versions
            value = "truncate"
        return {} if name == "gradient_checkpointing" and value is None else {name: value}
    conversion = TAKEN[name]
    if isinstance(conversion, str):
        return {} if value is None else {conversion: value}
    if isinstance(conversion, dict):
        return conversion if value else {}
    found: Found = conversion(value, options)
    return found
