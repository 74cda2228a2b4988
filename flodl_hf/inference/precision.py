"""The precisions that prediction may run in, and which device has which.

Decides names, dtypes and errors. A graph is converted to a precision in `flodl_hf.inference.prepared`
and, on a CPU, in `flodl_hf.inference.cpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch

from flodl.errors import nearest
from flodl_hf.errors import PredictError

__all__ = ["Precision", "check_name", "check_precision", "dtype_of", "multiplying"]

Precision: TypeAlias = Literal["exact", "fp32", "tf32", "bf16", "fp16", "int8"]
"""How prediction computes.

"exact" repeats the reference arithmetic on the weights as loaded; "fp32", "bf16" and "fp16" compute in that
dtype; "tf32" multiplies float32 with 10 bits of mantissa (NVIDIA); "int8" multiplies integers (CPU). On CUDA
"fp32" adds up three fp16 products for each float32 one, nearly as exactly (`flodl_hf.nn.kernels.halves`).
"""

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
}


def dtype_of(precision: Precision | None) -> torch.dtype | None:
    """Return what weights are cast to; None where they stay as they are."""
    return None if precision is None else _DTYPES.get(precision)


def check_name(precision: str | None) -> None:
    """Raise `PredictError` unless the name is one of `Precision`, or None."""
    names = get_args(Precision)
    if precision is not None and precision not in names:
        raise PredictError(
            f"precision={precision!r} is unknown; expected one of {', '.join(names)}{nearest(str(precision), names)}",
            precision=precision,
        )


def check_precision(precision: str | None, device: torch.device) -> None:
    """Raise unless the device has the precision.

    Raises:
        PredictError: the name is unknown, or the device lacks it; the message lists the available ones.
    """
    check_name(precision)
    if precision is None or precision in ("exact", "fp32"):
        return
    missing = _missing(precision, device)
    if missing:
        raise PredictError(
            f"precision={precision!r} on {device}: {missing}. Expected one that this device has; use fp32 or exact, "
            "which run everywhere.",
            precision=precision,
            device=str(device),
        )


def _missing(precision: str, device: torch.device) -> str | None:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if precision == "int8":
            return "int8 is for processors; use bf16 or fp16"
        if precision in ("tf32", "bf16") and capability < (8, 0):
            return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}; use fp16"
        return None
    if device.type == "cpu":
        return _missing_on_cpu(precision)
    return None if precision in ("bf16", "fp16") else "is not known to run there"


def _missing_on_cpu(precision: str) -> str | None:
    if precision == "tf32":
        return "tf32 is a number format of NVIDIA's devices"
    if precision == "fp16":
        return "processors multiply fp16 more slowly than fp32; use fp32, bf16 or int8"
    from flodl_hf.inference.cpu_features import missing

    return missing(precision)


@contextmanager
def multiplying(precision: Precision | None, device: torch.device) -> Iterator[None]:
    """Allow or forbid TF32 for float32 products on a CUDA device, by precision; restore the setting afterwards.

    The switch is the whole process's: calls of different precision on several threads take turns.
    """
    if device.type != "cuda" or precision not in ("tf32", "fp32", "exact"):
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
