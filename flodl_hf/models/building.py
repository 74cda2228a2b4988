"""The graph of a configuration and a task: put together, matched with a folder's headers, filled with checked values.

Values are in one dtype and finite, and ties are compared. The model is changed only after all of them have passed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flodl.errors import CheckpointError, ConfigError, capped, nearest, printable
from flodl.graph import FlowBuilder, Graph
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.folders import WEIGHTS_KEY, weights_named
from flodl_hf.checkpoints.keywords import DTYPE_SPELLINGS
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.loaded import LoadReport
from flodl_hf.checkpoints.weights.loading import Plan, class_of, head_of, plan_load
from flodl_hf.checkpoints.weights.manifest import DTYPES, SourceManifest, StoredTensor
from flodl_hf.nn.layers import Activation


def build_graph(config: ModelConfig, head: str, *, pooler: bool) -> Graph:
    """Return the graph of one task: ids to token states, then the pooler and the head that it takes.

    Args:
        config: the model's configuration.
        head: a head's name, or "base".
        pooler: for "base", also compute the pooler's output (named ``pooler_output``).

    Raises:
        ConfigError: the family has no such head.
    """
    family, spec = config.family, config.family.heads.get(head)
    if spec is None and head != "base":
        raise ConfigError(f"{family.model_type} has no {head} head; it has {', '.join(family.heads)}", problems=[head])
    flow = states_of(family.encoder(config.encoder))
    apart = pooler if spec is None else spec.relation is not None
    if apart and family.pooler is not None:
        flow = flow.fork(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
    if spec is None:
        return flow.build()
    if spec.relation is not None:
        related = spec.relation(config.encoder, config.num_labels)
        flow = flow.fork(related, name="relation").using(pooled="pooler_output").tag("relation")
    if spec.pooled:
        assert family.pooler is not None
        flow = flow.through(family.pooler(config.encoder), name="pooler").using("layout").tag("pooler_output")
    return flow.through(spec.body(config.encoder, config.num_labels), name="head").using("layout").build()


def states_of(encoder: nn.Module) -> FlowBuilder:
    """Return the beginning of a graph, from ids to token states."""
    flow = FlowBuilder(encoder, name="encoder").input("token_type_ids", "position_ids", default=None).input("layout")
    return flow.using("token_type_ids", "position_ids", "layout").tag("last_hidden_state")


def empty_graph(config: ModelConfig, head: str, *, pooler: bool) -> Graph:
    """Return the graph of one task on ``meta``, where parameters have shapes and no values; as `build_graph`."""
    try:
        with torch.device("meta"), _WithoutInitialisation():
            return build_graph(config, head, pooler=pooler)
    except RuntimeError as fault:
        # A Ctrl-C inside torch's mode switch: torch finds no mode to restore and raises this error instead.
        before = fault.__context__
        while before is not None and not isinstance(before, KeyboardInterrupt):
            before = before.__context__
        if before is not None and "mode stack" in str(fault):
            raise KeyboardInterrupt from None
        raise


class _WithoutInitialisation(TorchFunctionMode):
    """Leaves new tensors unfilled: on ``meta`` there is nothing to fill, and random kernels take seconds to load."""

    # Calls of torch.nn.init functions arrive as these functions, others as tensor methods.
    FILLING = frozenset(
        [
            getattr(torch.nn.init, name)
            for name in ("normal_", "uniform_", "kaiming_uniform_", "constant_", "ones_", "zeros_")
        ]
        + [torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_]
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in self.FILLING:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def open_weights(folder: Path, config: ModelConfig) -> Checkpoint:
    """Open a folder's weights: the files that its configuration names, else files with the default names.

    Raises:
        ConfigError: the configuration names a file that is absent or is not a weight file.
    """
    stated = config.source.get(WEIGHTS_KEY)
    return Checkpoint.open(folder, named=weights_named(stated, config.where) if stated else None)


def plan_folder(
    config: ModelConfig,
    head: str,
    stored: Mapping[str, StoredTensor],
    source: str,
    *,
    relabelled: bool = False,
    strict: bool = False,
    pooler: bool = True,
) -> tuple[Plan, Graph]:
    """Return which stored tensor fills which parameter, and the graph to fill, without any memory.

    Args:
        config: the folder's configuration.
        head: the task.
        stored: the files' tensors, from their headers.
        source: the folder, for messages.
        relabelled: the labels were given by the caller, so a classifier of another size may start fresh.
        strict: raise on unknown tensors under any prefix.
        pooler: have the encoder alone compute the pooler's output, if the file has its tensors.

    Raises:
        CheckpointError: tensors are missing, unexpected or mis-shaped.
        ConfigError: the family has no such head.
    """
    graph = empty_graph(config, head, pooler=pooler and any("pooler" in name for name in stored))
    spec = None if head == "base" else config.family.heads[head]
    architectures = config.source.get("architectures")
    written = head_of(config.family, architectures, head)
    custom = None if written else class_of(architectures)
    plan = plan_load(
        config.family,
        config.family.key_map(config.encoder, head),
        {name: tuple(tensor.shape) for name, tensor in graph.named_parameters(remove_duplicate=False)},
        stored,
        head=head,
        source_head=written,
        tie_words=config.tie_words,
        source=source,
        renew=(spec.classifier,) if spec and spec.classifier and relabelled else (),
        config=config.encoder,
        custom=custom,
        # Code of a repository may compute with any tensor of its files.
        settled=bool(config.family.tiny) and not strict and not config.source.get("auto_map"),
    )
    plan.report.notes += config.notes
    if custom is not None and head == "base":
        plan.report.notes.append(
            f"architectures: {printable(custom, 60)} is none of our classes; this is the encoder alone"
        )
    if head == "base" and architectures is None:
        others = sorted({why.split()[-2] for why in plan.report.ignored.values() if why.endswith(" head")})
        if others:
            also = f"; the file also contains the head of {' and '.join(others)}, which head= loads"
            plan.report.notes.append(f"architectures: absent, so this is the encoder alone{also}")
    return plan, graph


def tie_tensors(graph: Graph, ties: Iterable[Any]) -> None:
    """Make each tie's second name refer to the first one's parameter."""
    for tie in ties:
        module, _, leaf = tie.also.rpartition(".")
        setattr(graph.get_submodule(module), leaf, graph.get_parameter(tie.kept))


def assign(graph: Graph, tensors: Mapping[str, Tensor], owners: Mapping[str, nn.Module] | None = None) -> None:
    """Give each named parameter its tensor, without a copy.

    Args:
        graph: the graph with the parameters.
        tensors: by parameter name.
        owners: the graph's modules by path, for callers with many tensors.
    """
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        owner = graph.get_submodule(module) if owners is None else owners[module]
        if leaf not in owner._parameters:
            raise CheckpointError(f"{name} is not a parameter of the model", name=name)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def initialise(graph: nn.Module, only: Iterable[str], scale: float) -> None:
    """Give fresh values to parameters as transformers does: normal weights, zero biases, norms at one.

    Args:
        graph: the network.
        only: names to initialise; empty means all.
        scale: standard deviation of weights.
    """
    chosen = set(only)
    for prefix, module in graph.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if chosen and name not in chosen:
                continue
            with torch.no_grad():
                if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                    parameter.fill_(1.0 if leaf == "weight" else 0.0)
                elif leaf == "bias":
                    parameter.zero_()
                elif not isinstance(module, Activation):
                    parameter.normal_(0.0, scale)
                    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                        parameter[module.padding_idx].zero_()


FLOATS = ("float32", "float16", "bfloat16", "float64")


def check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """Return a floating dtype from torch's or its name; None and "auto" as they are.

    Raises:
        ConfigError: not a floating dtype.
    """
    if dtype is None or dtype == "auto":
        return dtype
    named = DTYPE_SPELLINGS.get(dtype, dtype.removeprefix("torch.")) if isinstance(dtype, str) else ""
    found = getattr(torch, named, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = nearest(str(dtype), FLOATS)
        raise ConfigError(f"dtype={dtype!r}{hint}; expected one of {', '.join(FLOATS)}", problems=["dtype"])
    return found


def settle_dtype(
    dtype: torch.dtype | str | None, config: ModelConfig, plan: Plan, manifest: SourceManifest
) -> torch.dtype:
    """Return the one dtype of the loaded model; an implicit cast is recorded in the report.

    Args:
        dtype: the caller's; None and "auto" take the configuration's, else the files', as transformers does.
        config: the configuration; its ``dtype`` or ``torch_dtype`` decides.
        plan: which tensors are used.
        manifest: of the files.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    kinds = sorted({_word(DTYPES[plan.stored[name].dtype]) for name in plan.placed.values()})
    why, chosen = next(
        (
            (why, found)
            for why, value in _stated_dtypes(config.source, manifest)
            if (found := _dtype(value)) is not None
        ),
        ("the usual dtype", torch.float32),
    )
    if set(kinds) - {_word(chosen)}:
        plan.report.notes.append(
            f"weights are stored in {' and '.join(kinds)}; all are cast to {_word(chosen)}, {why}, as transformers does"
        )
    return chosen


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(value: Any) -> torch.dtype | None:
    """Return the dtype that a value names, if weights can have it."""
    if isinstance(value, Mapping):  # one for each part of a model; of an encoder that is all of it
        value = value.get("", "float32")
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    return found if isinstance(found, torch.dtype) and found in _BITS else None


def _stated_dtypes(source: Mapping[str, Any], manifest: SourceManifest) -> Iterator[tuple[str, Any]]:
    """Yield the dtypes from which transformers infers a model's, with the reason.

    They are those of config.json, else the index's, else that of the first floating tensor of the first file, used or
    not: in order of names in safetensors, in order of storage in files of torch.
    """
    for key in ("dtype", "torch_dtype"):
        yield f"as {key} in config.json specifies", source.get(key)
    yield f"as {manifest.index_name} says", manifest.index_metadata.get("dtype")
    first = manifest.files[0].name
    names = [name for name, stored in manifest.tensors.items() if stored.file == first]
    for name in sorted(names) if first.endswith(".safetensors") else names:
        yield f"the dtype of {printable(name)[1:-1]}", DTYPES[manifest.tensors[name].dtype]


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

    def wait(self, source: str, report: LoadReport, *, allowed: bool) -> None:
        """Return when all were looked through.

        Args:
            source: the weight file or its index, for messages.
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
                f"{source}: {len(lines)} tensors contain values that are not finite, expected numbers:\n"
                f"{capped(lines)}\n"
                "Nothing was loaded. Such a model answers nonsense, often in numbers that look right; fetch or save "
                "the checkpoint again (in float32 where values do not fit), or pass allow_nonfinite=True to look "
                "into it.",
                where=source,
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
            warnings.warn(
                f"{report.source}: {also} differs from {kept}, which config.json ties it to; both are used, as in "
                "transformers. If this is intended, set tie_word_embeddings to false in config.json.",
                stacklevel=2,
            )
    report.tied = (*report.tied, *(tie.also for tie in equal))
    return equal


def check_duplicates(plan: Plan, values: Mapping[str, Tensor], carried_names: list[str]) -> None:
    """Keep repeated tensors whose values differ, so that export writes what was read, and warn of them."""
    for repeated, kept in plan.duplicates:
        if not torch.equal(values[repeated], values[kept]):
            message = f"{repeated} differs from {kept}; the latter is used, as transformers does"
            plan.report.notes.append(message)
            remedy = "One of them is stale: remove it from the file, or fetch it again."
            warnings.warn(f"{plan.report.source}: {message}. {remedy}", stacklevel=2)
            carried_names.append(repeated)
