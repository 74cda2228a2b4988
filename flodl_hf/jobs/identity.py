"""Identity of a file job: everything that changes its answers, as JSON that two runs of one job have in common.

Files and tensors are identified by their SHA-256, settings by their value. Names of folders, devices, batch sizes and
the number of processes are not part of it, so a job can resume on another device or with a copy of the model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flodl_hf.nn.prompts import PromptedEmbedding

RUNNING = frozenset((
    "devices", "device", "batch_size", "token_budget", "window", "progress", "weights", "revision", "local_files_only",
    "head", "part_rows", "overwrite", "on_progress", "should_stop", "untrained", "model", "source", "target",
))  # fmt: skip
"""Options of a file job that change no answer, or whose effect is part of the model's or the input's identity."""

# Keys of config.json that change no answer, and names of folders and files.
_INERT = frozenset((
    "_name_or_path", "_commit_hash", "transformers_version", "transformers_weights", "architectures", "dtype",
    "torch_dtype", "use_cache", "initializer_range", "auto_map",
))  # fmt: skip
# Fields of recipes that repeat what other fields contain, or that contain names of folders.
_REPEATED = frozenset(("files", "stated", "transformer"))
_THREADS = 4


def input_identity(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def model_identity(model: Any, task: str | None = None) -> dict[str, Any]:
    """Return everything of a model that changes its answers.

    Args:
        model: the model.
        task: the adapter of the checkpoint whose weights are added (``embed(task=)``), if any.
    """
    recipe = model.sentence_recipe
    if task is not None and not (recipe is not None and recipe.routes):
        from flodl_hf.models.adapters.task_adapters import adapted

        model = adapted(model, task)
    config, tokenizer = model.config, model.tokenizer
    source = {key: value for key, value in config.source.items() if key not in _INERT}
    found = {
        "class": type(model).__name__,
        "config": _digest(by_value([source, config.labels, config.problem_type, config.label_thresholds])),
        "tokenizer": _digest([tokenizer.fingerprint(), by_value(tokenizer.settings, skip=("raw",))]),
        "max_tokens": model.max_tokens,
        "weights": _digest(_tensors(model.graph)),
        "adapters": _adapter_settings(model.graph),
        "recipe": by_value(recipe),
    }
    routed = {} if model.routed is None else dict(model.routed.items())
    return found | ({"routes": [model_identity(one) for one in routed.values()]} if routed else {})


def option_identity(options: Mapping[str, Any], method: Any, run_options: Any) -> dict[str, Any]:
    """Return the options of a call that change answers, without those that have their default value.

    Args:
        options: keywords of ``method``.
        method: the method of the model.
        run_options: the model's `flodl_hf.inference.RunOptions`, which apply where the call gives no value.
    """
    usual = {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}
    usual |= {field.name: field.default for field in fields(run_options)}
    whole = {field.name: getattr(run_options, field.name) for field in fields(run_options)}
    whole |= {name: value for name, value in options.items() if value is not None}
    return {
        name: by_value(value)
        for name, value in whole.items()
        if name not in RUNNING and (name not in usual or value != usual[name])
    }


def by_value(value: Any, skip: tuple[str, ...] = ()) -> Any:
    """Return a setting as JSON types; tensors and bytes become their SHA-256.

    Raises:
        TypeError: the value has a type whose content is not known, so its identity is not known either.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): by_value(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [by_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(by_value(item) for item in value)
    if isinstance(value, Tensor):
        return _digest(_tensor(value))
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, nn.Module):
        return _tensors(value)
    if is_dataclass(value):
        names = (field.name for field in fields(value) if field.name not in (*skip, *_REPEATED))
        return {"class": type(value).__name__} | {name: by_value(getattr(value, name)) for name in names}
    raise TypeError(f"identity: found a {type(value).__name__}, expected a type whose content can be hashed")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _tensors(module: nn.Module) -> list[Any]:
    """Return name, shape, dtype and SHA-256 of each parameter; sha256 releases the interpreter lock."""
    named = sorted(module.named_parameters())
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="flodl-hf-hash") as pool:
        hashes = list(pool.map(_tensor, (tensor for _, tensor in named)))
    return [[name, *found] for (name, _), found in zip(named, hashes, strict=True)]


def _tensor(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()]


def _adapter_settings(graph: nn.Module) -> dict[str, Any]:
    """Return the numbers of attached adapters that are not tensors: scales of LoRA, sides of IA3."""
    return {
        f"{path}.{name}": value
        for path, module in graph.named_modules()
        if type(module).__module__ == "flodl_hf.nn.adapter_layers" or type(module) is PromptedEmbedding
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and name not in ("training", "dropout")
        and isinstance(value, (bool, int, float, str))
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, by dotted path: the value before and the value now."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *now}):
        was, is_ = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            found |= differences(was, is_, f"{path}{key}.")
        elif was != is_:
            found[path + key] = (was, is_)
    return found
