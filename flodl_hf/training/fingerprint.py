"""Identity of a training run, used to check that a checkpoint belongs to it.

Options are compared as values, data and the starting model as hashes. A resumed run compares them with its checkpoint
(`flodl.train.saving.resume`), in addition to the values of the trainer: order and size of batches, optimiser, schedule,
precision, seed, ranks. An option is compared unless a table in this module states that the trainer compares it, or why
it changes no number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl_hf.models.adapters.settings import flat_words
from flodl_hf.training.rows import EncodedRows

if TYPE_CHECKING:
    from flodl_hf.training.job import Job

__all__ = ["fingerprint_of"]

_BYTES = torch.uint8

BY_THE_TRAINER = (
    *("batch_size", "accumulate", "micro_batch_size", "tokens_per_batch", "group_by_length", "devices", "policy"),
    *("lr", "schedule", "schedule_options", "warmup", "optimizer", "weight_decay", "beta1", "beta2", "eps"),
    *(
        "max_grad_norm",
        "layerwise_decay",
        "precision",
        "seed",
        "on_nan",
        "compat",
        "ema",
    ),
)
BY_HASH = ("columns", "revision")
CHANGES_NO_NUMBER = frozenset((
    "epochs", "max_steps", "gradient_checkpointing", "deterministic", "compile", "save_every", "checkpoints",
    "keep_checkpoints", "keep_last", "trackers", "log_dir", "profile", "report", "resume", "eval_batch_size",
    "local_files_only",
))  # fmt: skip
"""Options that determine length, checkpoints and reports of a run, or change numbers by rounding only."""

REMOVED = {"adaptive_layers": False, "eval_delay": 0}
"""Options of earlier versions that checkpoints contain, with the value that corresponds to the current behaviour."""


def fingerprint_of(job: Job) -> dict[str, Any]:
    """Return the values that define the numbers of a planned run, without the values of the trainer; JSON values."""
    passed = {*BY_THE_TRAINER, *BY_HASH, *CHANGES_NO_NUMBER, "class_weights", "metric", "lora", "adapter"}
    asked = {name: _plain(value) for name, value in job.options.to_dict().items() if name not in passed}
    with ThreadPoolExecutor(1) as beside:
        start = beside.submit(_start, job)
    sets = {} if job.evaluation is None else job.evaluation.sets
    judged = {
        f"eval rows{name and f' of {name}'}": _digest(one.prepared.rows, _answers(job.task, job.tables.evals[name]))
        for name, one in sets.items()
    }
    return {
        **REMOVED,
        **asked,
        **_plain(flat_words(job.options.adapter)),
        "loss": _plain(job.own.loss),
        "class_weights": job.objective.weights,
        "metric": job.metric,
        "model": start.result(),
        "train rows": _digest(job.rows, None),
        **judged,
    }


def _start(job: Job) -> str:
    """Return a hash of the starting model: its config, and its weights if it was given as a name."""
    start = hashlib.sha256(repr(job.model.config.encoder).encode())
    if job.named:
        beside = job.model.beside
        for name, tensor in [*job.model.graph.state_dict().items(), *(beside.state_dict().items() if beside else ())]:
            start.update(name.encode())
            tensor = tensor.to(job.model.dtype_in_shards or tensor.dtype)  # a run's start is one, in shards or not
            start.update(memoryview(tensor.detach().contiguous().view(-1).view(_BYTES).numpy()))
    return start.hexdigest()[:16]


def _digest(rows: EncodedRows, further: Any) -> str:
    """Return a hash of tokens, labels and windows, and of further evaluation values."""
    digest = hashlib.sha256()
    for part in ({**rows.columns, "lengths": rows.lengths}, {**rows.values, "owners": rows.owners}):
        for name in sorted(part):
            array = np.ascontiguousarray(part[name])
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    if further is not None:
        digest.update(json.dumps(further, default=str, ensure_ascii=True).encode())
    return digest.hexdigest()[:16]


def _answers(task: Any, rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    columns = task.columns
    found = [getattr(columns, role) for role in columns.__dataclass_fields__ if role != "task"]
    names = [name for part in found for name in (part if isinstance(part, tuple) else (part,))]
    return [[row.get(name) for name in names if name is not None] for row in rows]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return getattr(value, "__qualname__", type(value).__qualname__)
