"""Precision of training: float32, TF32, bfloat16 autocast, or float16 with a loss scale."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flodl.errors import TrainError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class Precision:
    """The autocast context and the loss scale of one precision.

    Args:
        name: ``"fp32"`` (as the parameters are), ``"tf32"`` (float32 with TF32 matrix products on
            CUDA), ``"bf16"`` or ``"fp16"`` (autocast; float16 with a dynamic loss scale).

    Attributes:
        entered: True after `context` was called.
        products: dtype of matrix products under autocast; None without autocast.

    Raises:
        TrainError: another name.
    """

    entered = False

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in PRECISIONS:
            raise TrainError(f"precision: found {name!r}, expected one of {', '.join(PRECISIONS)}.", found=name)
        self.name, self.device = name, device
        self.products = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if name == "tf32":
            torch.set_float32_matmul_precision("high")

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward and loss run."""
        self.entered = True
        if self.products is not None:
            return torch.autocast(self.device.type, dtype=self.products)
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale as JSON values; empty without one."""
        return dict(self.scaler.state_dict()) if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale of `state_dict`."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
