"""How prediction runs: the one group of keywords that every method which predicts takes.

Decides names, defaults and valid values. The options are implemented by the modules that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from flodl.devices import all_devices, find_device
from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.inference.precision import Precision, check_name

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model.model import GraphModel

__all__ = ["RunKeywords", "RunOptions", "options_of"]


class RunKeywords(TypedDict, total=False):
    """Keywords of a call that control how it runs; omitted ones use the values of `EncoderModel.runtime`."""

    precision: Precision | None
    token_budget: int | None
    devices: Sequence[torch.device | str] | None
    batch_invariant: bool
    window: int | None
    progress: bool | None


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

    def changed(self, given: dict[str, Any]) -> RunOptions:
        """Return the options with some replaced.

        Raises:
            TypeError: a keyword is none of them.
            PredictError: a value makes no sense.
            DeviceError: a device is not available.
        """
        if not given:
            return self
        names = [field.name for field in fields(self)]
        for name in given:
            if name not in names:
                raise TypeError(f"unexpected keyword argument {name!r}{nearest(name, names)}")
        values = dict(given)
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
        check_name(found.precision)
        return found


def options_of(model: GraphModel) -> RunOptions:
    """Return the default options of predictions of a model."""
    return model._run_options or RunOptions()
