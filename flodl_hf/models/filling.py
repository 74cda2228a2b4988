"""The values of a checkpoint: in one dtype, finite, ties compared, put into the model.

Fills the parameters planned from headers by `flodl_hf.checkpoints.weights.loading`; here the values are
checked. The model is changed only after all of them have passed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import CheckpointError, ConfigError, capped, nearest, printable
from flodl.graph import Graph
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.weights.checkpoint.manifest import DTYPES, SourceManifest
from flodl_hf.checkpoints.weights.load_report import LoadReport
from flodl_hf.checkpoints.weights.loading import Plan
from flodl_hf.models.building import assign

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """Return a floating dtype from torch's or its name; None and "auto" as they are.

    Raises:
        ConfigError: not a floating dtype.
    """
    if dtype is None or dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = nearest(str(dtype), _FLOATS)
        raise ConfigError(f"dtype={dtype!r}{hint}; expected one of {', '.join(_FLOATS)}", problems=["dtype"])
    return found


def settle_dtype(
    given: torch.dtype | str | None, config: ModelConfig, plan: Plan, manifest: SourceManifest
) -> torch.dtype:
    """Return the one dtype of the loaded model; an implicit cast is recorded in the report.

    Args:
        given: the caller's; None and "auto" take the configuration's, else the files', as transformers does.
        config: the configuration; its ``dtype`` or ``torch_dtype`` decides.
        plan: which tensors are used.
        manifest: of the files.
    """
    if isinstance(given, torch.dtype):
        return given
    kinds = sorted({_word(DTYPES[plan.stored[name].dtype]) for name in plan.placed.values()})
    key, chosen = _stated(config.source, ("dtype", "torch_dtype"))
    why = f"as {key} in config.json specifies"
    if chosen is None:
        why, chosen = _first_stored(manifest)
    if set(kinds) - {_word(chosen)}:
        plan.report.notes.append(
            f"weights are stored in {' and '.join(kinds)}; all are cast to {_word(chosen)}, {why}, as transformers does"
        )
    return chosen


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stated(source: Mapping[str, Any], keys: Iterable[str]) -> tuple[str, torch.dtype | None]:
    """Return the key and the dtype that JSON states; None where it states none that weights can have."""
    for key in keys:
        value = source.get(key)
        if isinstance(value, Mapping):  # one for each part of a model; of an encoder that is all of it
            value = value.get("", "float32")
        if isinstance(value, str):
            found = getattr(torch, value.removeprefix("torch."), None)
            if isinstance(found, torch.dtype) and found in _BITS:
                return key, found
    return "dtype", None


def _first_stored(manifest: SourceManifest) -> tuple[str, torch.dtype]:
    """Return the dtype that transformers infers when config.json has none, with the reason.

    It is the index's dtype, else that of the first floating tensor of the first file, used or not: in order of names in
    safetensors, in order of storage in files of torch.
    """
    _, stated = _stated(manifest.index_metadata, ("dtype",))
    if stated is not None:
        return f"as {manifest.index_name} says", stated
    first = manifest.files[0].name
    names = [name for name, stored in manifest.tensors.items() if stored.file == first]
    for name in sorted(names) if first.endswith(".safetensors") else names:
        found = DTYPES[manifest.tensors[name].dtype]
        if found in _BITS:
            return f"the dtype of {printable(name)[1:-1]}", found
    return "the usual dtype", torch.float32


# By dtype: the bits of a number without its sign, and the least of them that are not finite.
_BITS: dict[torch.dtype, tuple[torch.dtype, Any, int, int]] = {
    torch.float64: (torch.int64, np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float16: (torch.int16, np.uint16, 0x7FFF, 0x7C00),
    torch.bfloat16: (torch.int16, np.uint16, 0x7FFF, 0x7F80),
}
_MAX_THREADS = 4
_CHUNK = 1 << 18  # numbers looked at together: what fits into a core's cache beside their copy


class FiniteCheck:
    """Checks weights for values that are not finite, concurrently with the caller.

    One pass for the greatest number of each tensor. Without their signs, floating numbers are ordered as their bits
    are, with infinities and NaN above all others; so integers are compared, by threads without a lock. They
    have ended when the context of this is left: a process that ends while they are in torch's code is aborted.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        names: Iterable[str],
        dtype: torch.dtype,
        *,
        done: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Start looking.

        Args:
            values: tensors by stored name.
            names: which of them the model uses.
            dtype: dtype that they are cast to; a value beyond its range becomes infinite and is found too.
            done: called with each tensor when it was looked through.
        """
        self._pending = [(name, values[name]) for name in dict.fromkeys(names)]
        self._dtype, self._done = dtype, done
        self._faults: dict[str, str] = {}
        self._failed: BaseException | None = None
        count = min(_MAX_THREADS, len(self._pending), torch.get_num_threads())
        self._threads = [Thread(target=self._run, name="flodl-hf-finite", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            while True:
                try:
                    name, tensor = self._pending.pop()
                except IndexError:  # another thread took the last one
                    return
                largest = _largest_bits(tensor)
                if largest >= _BITS[tensor.dtype][3]:
                    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
                    self._faults[name] = f"{nans} NaN and {infinities} infinite of {tensor.numel():,} values"
                elif tensor.dtype != self._dtype:
                    value = torch.tensor([largest]).to(_BITS[tensor.dtype][0]).view(tensor.dtype)
                    if not math.isfinite(value.to(self._dtype).item()):
                        self._faults[name] = f"values to {value.item():.4g}, beyond {_word(self._dtype)}"
                if self._done is not None:
                    self._done(tensor)
        except BaseException as fault:
            self._failed = fault

    def __enter__(self) -> FiniteCheck:
        return self

    def __exit__(self, *error: object) -> None:
        self._pending.clear()  # nobody asks any more
        for thread in self._threads:
            thread.join()

    def wait(self, where: str, report: LoadReport, *, allowed: bool) -> None:
        """Return when all were looked through.

        Args:
            where: the weight file or its index, for messages.
            report: gets a note for each fault that is allowed.
            allowed: add a note instead of raising.

        Raises:
            CheckpointError: weights are not finite; all tensors are listed.
        """
        for thread in self._threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        lines = [f"{printable(name)[1:-1]}: {what}" for name, what in sorted(self._faults.items())]
        if allowed:
            report.notes += [f"not finite: {line}" for line in lines]
        elif lines:
            raise CheckpointError(
                f"{where}: {len(lines)} tensors contain values that are not finite, expected numbers:\n"
                f"{capped(lines)}\n"
                "Nothing was loaded. Such a model answers nonsense, often in numbers that look right; fetch or save "
                "the checkpoint again (in float32 where values do not fit), or pass allow_nonfinite=True to look "
                "into it.",
                where=where,
                problems=lines,
            )


def _largest_bits(tensor: Tensor) -> int:
    """Return the bits of the number that is farthest from zero, without its sign."""
    integers, unsigned, mask, _ = _BITS[tensor.dtype]
    flat = tensor.detach().reshape(-1).view(integers).numpy().view(unsigned)
    room = np.empty(min(_CHUNK, flat.size), unsigned)
    largest = 0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        largest = max(largest, int(np.bitwise_and(part, unsigned(mask), out=room[: part.size]).max()))
    return largest


def fill(graph: Graph, plan: Plan, values: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Give every placed parameter its tensor, letting go of each stored one as it is cast."""
    users: dict[str, int] = {}
    for name in plan.placed.values():
        users[name] = users.get(name, 0) + 1
    owners = dict(graph.named_modules(remove_duplicate=False))
    for ours, name in plan.placed.items():
        users[name] -= 1
        tensor = values[name] if users[name] else values.pop(name)
        assign(graph, {ours: tensor.to(dtype)}, owners)


def settle_ties(plan: Plan, values: Mapping[str, Tensor], report: LoadReport) -> list[Any]:
    """Return the ties with two equal stored tensors; record the others as untied, and warn of them."""
    equal = []
    for tie, kept, also in plan.compare:
        if torch.equal(values[kept], values[also]):
            equal.append(tie)
        else:
            report.untied = (*report.untied, tie.also)
            message = f"{also} differs from {kept}, which config.json ties it to; both are used, as in"
            _warn_of_two(
                report, f"{message} transformers. If this is intended, set tie_word_embeddings to false in config.json"
            )
    report.tied = (*report.tied, *(tie.also for tie in equal))
    return equal


def check_duplicates(plan: Plan, values: Mapping[str, Tensor], carried_names: list[str]) -> None:
    """Keep repeated tensors whose values differ, so that export writes what was read, and warn of them."""
    for repeated, kept in plan.duplicates:
        if not torch.equal(values[repeated], values[kept]):
            message = f"{repeated} differs from {kept}; the latter is used, as transformers does"
            plan.report.notes.append(message)
            _warn_of_two(plan.report, f"{message}. One of them is stale: remove it from the file, or fetch it again")
            carried_names.append(repeated)


def _warn_of_two(report: LoadReport, message: str) -> None:
    warnings.warn(f"{report.source}: {message}.", stacklevel=2)
