"""What a run is of: the input, the model and the options, as JSON that two runs of one job have in common.

Decides what makes the parts of one run unfit for another. Weights are told apart by a sample of every tensor: a guard
against a mistake, not against forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["differences", "input_identity", "model_identity"]

ENDS = 1 << 20  # bytes read at each end of the input
SAMPLE = 1024  # values read of each tensor


def input_identity(path: Path) -> dict[str, Any]:
    """Return what tells one state of a file from another: size, time of the last change, and a hash of both ends."""
    stat = path.stat()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(ENDS))
        file.seek(max(0, stat.st_size - ENDS))
        digest.update(file.read(ENDS))
    return {"size": stat.st_size, "modified_ns": stat.st_mtime_ns, "ends": digest.hexdigest()[:32]}


def model_identity(model: Any) -> dict[str, Any]:
    """Return what tells one model from another: class, device kind, and hashes of configuration, tokenizer, weights."""
    weights = hashlib.sha256()
    for name, tensor in model.graph.named_parameters():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().cpu()
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        weights.update(sample.view(torch.uint8).numpy().tobytes())
    config = json.dumps(model.config.source, sort_keys=True, default=str)
    return {
        "class": type(model).__name__,
        "device": model.device.type,
        "runtime": str(getattr(model, "runtime", None)),
        "config": hashlib.sha256(config.encode()).hexdigest()[:32],
        "tokenizer": model.tokenizer.fingerprint(),
        "weights": weights.hexdigest()[:32],
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return what differs by dotted path: what it was, and what it is."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *now}):
        was, is_ = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            found |= differences(was, is_, f"{path}{key}.")
        elif was != is_:
            found[path + key] = (was, is_)
    return found
