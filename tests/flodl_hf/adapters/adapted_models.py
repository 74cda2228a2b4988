"""Adapters that are as if trained."""

from __future__ import annotations

from typing import Any

import torch


def moved(model: Any, name: str = "default", seed: int = 1) -> Any:
    """Return the model with an adapter that is as if trained."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model._held_adapters.known[name].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter) * 0.1)
    return model
