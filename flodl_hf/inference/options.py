"""How prediction runs: the one group of keywords that every method which predicts takes.

Decides names, defaults and valid values. The options are implemented by the modules that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

import torch

from flodl.devices import all_devices, find_device
from flodl.errors import nearest
from flodl_hf.checkpoints.keywords import PRECISION_SPELLINGS
from flodl_hf.errors import PredictError

Precision: TypeAlias = Literal["exact", "fp32", "tf32", "bf16", "fp16", "int8"]
"""How prediction computes.

"exact" repeats the reference arithmetic on the weights as loaded; "fp32", "bf16" and "fp16" compute in that
dtype; "tf32" multiplies float32 with 10 bits of mantissa (NVIDIA); "int8" multiplies integers (CPU). On CUDA
"fp32" adds up three fp16 products for each float32 one, nearly as exactly (`flodl_hf.nn.kernels.fp16_split`).
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
    return None if precision is None else _DTYPES.get(PRECISION_SPELLINGS.get(precision, precision))


def check_name(precision: str | None) -> Precision | None:
    """Return the name as in `Precision`, or None.

    Raises:
        PredictError: an unknown name.
    """
    names = get_args(Precision)
    precision = PRECISION_SPELLINGS.get(precision, precision) if isinstance(precision, str) else precision
    if precision is not None and precision not in names:
        raise PredictError(
            f"precision={precision!r} is unknown; expected one of {', '.join(names)}{nearest(str(precision), names)}",
            precision=precision,
        )
    return cast("Precision | None", precision)


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
    if device.type != "cpu":
        return None if precision in ("bf16", "fp16") else "is not known to run there"
    if precision == "tf32":
        return "tf32 is a number format of NVIDIA's devices"
    if precision == "fp16":
        return "processors multiply fp16 more slowly than fp32; use fp32, bf16 or int8"
    from flodl_hf.inference.cpu import missing

    return missing(precision)


class RunKeywords(TypedDict, total=False):
    """Keywords of a call that control how it runs; omitted ones use the values of `EncoderModel.runtime`."""

    precision: Precision | None
    token_budget: int | None
    devices: Sequence[torch.device | str] | None
    batch_invariant: bool
    window: int | None
    progress: bool | None
    long_texts: Literal["windows", "truncate", "error"] | None  # only of calls that read texts


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How prediction runs.

    Args:
        precision: see `Precision`; None keeps the weights' own dtype and fuses products.
        token_budget: most tokens of a batch; None takes what suits the device, and a device that runs out
            of memory continues with half.
        devices: devices that share the work, each with its copy of the weights; None is the model's own, "auto"
            all available devices. A device may be named several times and then runs as many batches concurrently.
        batch_invariant: an answer depends on its text alone, bit for bit: each row runs by itself.
        window: most texts that are sorted and answered together; None starts small and grows, so that the
            first answers of a stream come soon.
        progress: whether it is shown how far a call is; None shows it for lists that take longer than a second.
    """

    precision: Precision | None = None
    token_budget: int | None = None
    devices: tuple[torch.device, ...] | None = None
    batch_invariant: bool = False
    window: int | None = None
    progress: bool | None = None

    def changed(self, keywords: dict[str, Any]) -> RunOptions:
        """Return the options with some replaced.

        Raises:
            TypeError: a keyword is none of them.
            PredictError: a value makes no sense.
            DeviceError: a device is not available.
        """
        if not keywords:
            return self
        names = [field.name for field in fields(self)]
        for name in keywords:
            if name not in names:
                raise TypeError(
                    f"unexpected keyword argument {name!r}{nearest(name, names)}; beside the method's own arguments, "
                    f"expected one of {', '.join(names)}"
                )
        values = dict(keywords)
        devices = values.get("devices")
        if devices is not None:
            if isinstance(devices, str) and devices == "auto":
                devices = all_devices()
            if isinstance(devices, str) or not isinstance(devices, Sequence) or not len(devices):
                raise PredictError(f"devices={devices!r}; expected a list of at least one device", devices=devices)
            values["devices"] = tuple(find_device(device) for device in devices)
        found = replace(self, **values)
        for name in ("token_budget", "window"):
            value = getattr(found, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PredictError(f"{name}={value!r}; expected an integer of at least 1, or None", **{name: value})
        return replace(found, precision=check_name(found.precision))
