"""The state of a run as tensors and JSON values, without pickle, so that it resumes to the bit.

Optimiser state is stored by parameter name, so it does not depend on the order of groups. Random states include
torch (CPU and the device of this rank), numpy and Python.

A checkpoint is written while training continues, by a thread of the training process. Tensors are copied to the host
one after the other on a separate stream, and copying, hashing and writing release the interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from flodl.checkpoint.safetensors_file import compose_head
from flodl.checkpoint.tensor_bytes import bytes_of
from flodl.distributed.group import Ranks
from flodl.distributed.sharded import like, put, whole, whole_parts
from flodl.errors import CheckpointError, TrainError, capped

Tensors = dict[str, torch.Tensor]
# Prefix of the names of shards that a rank saves.
SHARDS = "shard/"
# Prefix of the names of shards of weights.
MODEL = f"{SHARDS}model/"


def model_state(model: nn.Module, *, keep: bool = True) -> Tensors:
    """Return copies of `learned_tensors` in host memory, with sharded tensors gathered.

    Args:
        model: all ranks call this together for a sharded model.
        keep: False on ranks that only contribute their shards; each tensor is released after it was gathered.

    Raises:
        TrainError: the ``state_dict`` of the model has values other than tensors.
    """
    found: Tensors = {}
    for name, value in learned_tensors(model).items():
        gathered = whole(value)
        if keep:
            found[name] = to_cpu(gathered)
    return found


def learned_tensors(model: nn.Module) -> Tensors:
    """Return the parameters and persistent buffers themselves by name, without those in `fixed_names`.

    Raises:
        TrainError: the ``state_dict`` of the model has values other than tensors.
    """
    state, fixed = model.state_dict(), fixed_names(model)
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise TrainError(
            f"state_dict: found values other than tensors: {', '.join(odd[:5])}. Use buffers.",
            names=odd,
        )
    return {name: value for name, value in state.items() if name not in fixed}


def fixed_names(model: nn.Module) -> frozenset[str]:
    """Return the names of tensors that training does not change, such as the base of an adapter.

    The model lists them by a method ``fixed_names()`` or ``_fixed_names()``.
    """
    listed: Any = getattr(model, "_fixed_names", None) or getattr(model, "fixed_names", tuple)
    return frozenset(listed())


def whole_model(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the weights of a checkpoint by name, with the shards of ranks joined.

    Tensors of the type `flodl.checkpoint.stored_rows.StoredRows` are not read.

    Args:
        tensors: by file.
    """
    # A file without weights contains a tensor "empty" without values.
    found = {name: tensor for name, tensor in tensors["model"].items() if name != "empty" or tensor.shape != (0,)}
    return found | whole_parts(tensors, MODEL)


def load_model(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy ``tensors`` into the model, after a check of names, shapes and dtypes.

    A sharded model gets the shards of this rank.

    Raises:
        CheckpointError: they differ; ``problems`` lists every difference and nothing was copied.
    """
    check_fits(model, tensors)
    with torch.no_grad():
        for name, tensor in learned_tensors(model).items():
            put(tensor, tensors[name])


def check_fits(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Compare names, shapes and dtypes.

    Raises:
        CheckpointError: they differ; ``problems`` lists every difference.
    """
    own = learned_tensors(model)
    problems = [f"missing: {name}" for name in own if name not in tensors]
    problems += [f"not in the model: {name}" for name in tensors if name not in own]
    for name in own.keys() & tensors.keys():
        a, b = own[name], tensors[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            problems.append(f"{name}: saved {b.dtype} {tuple(b.shape)}, the model has {a.dtype} {tuple(a.shape)}")
    if problems:
        raise CheckpointError(
            "resume: the checkpoint does not fit the model:\n" + capped(sorted(problems)) + "\nBuild the same model.",
            problems=sorted(problems),
        )


def _named(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the optimiser with their names, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    return [(names.get(id(p), f"unnamed.{i}"), p) for i, p in enumerate(listed)]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of the optimiser themselves as ``"<parameter>::<entry>"``, and its options as JSON values."""
    tensors: Tensors = {}
    plain: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(model, optimizer):
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}::{entry}"] = value
            else:
                plain.setdefault(name, {})[entry] = _json(value, f"optimizer state {name}.{entry}")
    names = {id(p): name for name, p in _named(model, optimizer)}
    groups = []
    for group in optimizer.param_groups:
        options = {k: _json(v, f"optimizer option {k}") for k, v in group.items() if k != "params"}
        groups.append({"params": [names[id(p)] for p in group["params"]], **options})
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "plain": plain}


def _json(value: Any, label: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"tensor": value.item()}
    if isinstance(value, tuple):
        return {"tuple": [_json(part, label) for part in value]}
    if isinstance(value, (list, dict)) and not value:
        return value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TrainError(f"checkpoint: {label} is a {type(value).__name__}, which cannot be written as JSON.", where=label)


def _unjson(value: Any) -> Any:
    if isinstance(value, dict) and "tuple" in value:
        return tuple(_unjson(part) for part in value["tuple"])
    if isinstance(value, dict) and "tensor" in value:
        return value["tensor"]
    return value


def load_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Any], rest: Mapping[str, Any], changed: Iterable[str]
) -> None:
    """Load a saved state into the optimiser.

    Args:
        model: the model.
        optimizer: its optimiser.
        tensors: as of `optimizer_state`.
        rest: as of `optimizer_state`.
        changed: options of groups that keep their present values.

    Raises:
        CheckpointError: another class of optimiser, or other parameters; ``problems`` lists them and nothing was
            changed.
    """
    known = dict(_named(model, optimizer))
    saved = {name for group in rest["groups"] for name in group["params"]}
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    problems = [f"saved by {rest['kind']}, this is {kind}"] if rest["kind"] != kind else []
    if len(rest["groups"]) != len(groups):
        problems.append(f"saved with {len(rest['groups'])} parameter groups, this has {len(groups)}")
    problems += [f"not saved: {name}" for name in known if name not in saved]
    problems += [f"not optimised now: {name}" for name in sorted(saved) if name not in known]
    if problems:
        raise CheckpointError(
            "resume: the saved optimiser state does not fit:\n" + capped(problems) + "\nBuild the same optimiser.",
            problems=problems,
        )
    on_device = {id(p) for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    state: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, entry = key.rsplit("::", 1)
        parameter = known[name]
        found = tensor[...] if entry == "step" else like(parameter, tensor)
        if not hasattr(found, "full_tensor"):
            # Step counters are on the CPU unless the optimiser is fused or capturable.
            is_counter = entry == "step" and id(parameter) not in on_device
            # A copy, because a tensor of the arguments would share its memory.
            found = found.clone().to("cpu" if is_counter else parameter.device)
        state.setdefault(name, {})[entry] = found
    for name, entries in rest["plain"].items():
        state.setdefault(name, {}).update({k: _unjson(v) for k, v in entries.items()})
    optimizer.state.clear()
    # In the order of parameters, as the optimiser fills it.
    optimizer.state.update({parameter: state[name] for name, parameter in known.items() if name in state})
    # The kernel of the update depends on the device.
    kept = {"params", "fused", "foreach", "capturable", *changed}
    for group, options in zip(groups, rest["groups"], strict=True):
        for option, value in options.items():
            if option not in kept:
                group[option] = _like_before(group.get(option), _unjson(value))


def _like_before(before: Any, value: Any) -> Any:
    """Return the value of an option, copied into its present tensors if there are any."""
    if isinstance(before, torch.Tensor):
        return before.fill_(value)
    if isinstance(before, tuple) and isinstance(value, tuple) and len(before) == len(value):
        return tuple(map(_like_before, before, value))
    return value


def random_state(device: torch.device) -> tuple[Tensors, dict[str, Any]]:
    """Return the states of all random generators of this process."""
    kind, keys, place, has_gauss, gauss = np.random.get_state()
    tensors = {"random.torch": torch.get_rng_state(), "random.numpy": torch.from_numpy(keys.astype(np.int64))}  # type: ignore[union-attr]
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    version, words, next_gauss = random.getstate()
    rest = {"numpy": [kind, place, has_gauss, gauss], "python": [version, list(words), next_gauss]}
    return tensors, rest


def load_random(device: torch.device, tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> None:
    """Set all random generators of this process to a saved state."""
    torch.set_rng_state(tensors["random.torch"].clone())
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].clone(), device)
    kind, place, has_gauss, gauss = rest["numpy"]
    np.random.set_state((kind, tensors["random.numpy"].numpy().astype(np.uint32), place, has_gauss, gauss))
    version, words, next_gauss = rest["python"]
    random.setstate((version, tuple(words), next_gauss))


@contextlib.contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators of this process afterwards."""
    tensors, rest = random_state(device)
    try:
        yield
    finally:
        load_random(device, tensors, rest)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def check_same_model(ranks: Ranks, model: nn.Module) -> None:
    """Compare names, shapes and dtypes of the model over ranks, before any collective depends on them.

    Raises:
        TrainError: they differ; ``ranks_apart`` lists the ranks that differ from rank 0.
    """
    if ranks.solo:
        return
    lines = [f"{name} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for name, t in model.named_parameters()]
    lines += [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in model.named_buffers()]
    marks = ranks.gather(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    apart = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if apart:
        raise TrainError(
            f"the model of rank {', '.join(map(str, apart))} has other parameters or buffers; expected equal models.",
            ranks_apart=apart,
        )


def identity(model: nn.Module, optimizer: Optimizer, schedule: Any) -> dict[str, Any]:
    """Return the values of a new model, optimiser and schedule that determine the numbers of a run."""
    dropouts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            dropouts[str(module.p)] = dropouts.get(str(module.p), 0) + 1
    left_out = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
    if getattr(schedule, "reference", None) != 1.0 and hasattr(schedule, "lr"):
        left_out.add("lr")  # the schedule has the rate
    options = {name: None for group in optimizer.param_groups for name in group if name not in left_out}
    groups = {f"optimizer.{name}": [_plain(group.get(name)) for group in optimizer.param_groups] for name in options}
    return {"dropout": dropouts, "schedule": _value_of(schedule), **groups}


def _value_of(schedule: Any) -> Any:
    """Return the value of a schedule, without memory addresses."""
    text = repr(schedule)
    if " at 0x" not in text:
        return text
    kind = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    skipped = {"optimizer"}  # compared with its own options
    return {"kind": kind, **{k: _plain(v) for k, v in vars(schedule).items() if k not in skipped}}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(type(value), "__qualname__", "?")


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, on their device if they fit there, else in host memory.

    On CUDA a copy on the device takes about a thousandth of the time of a copy to the host.
    """
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    on_cuda = [tensor for tensor in found.values() if tensor.is_cuda]
    if on_cuda and not _fits(on_cuda):
        return {name: to_cpu(tensor) for name, tensor in found.items()}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def copy_in_background(model: nn.Module, worker: Executor) -> Future[Tensors]:
    """Return a future of copies of `learned_tensors` in host memory; training may continue at once."""
    taken = copies(learned_tensors(model))
    ready = event_after(taken.values())
    return worker.submit(lambda: dict(on_host(taken, ready)))


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def event_after(values: Iterable[object]) -> Any:
    """Return a CUDA event after which the tensors among ``values`` are complete; None if none is on CUDA."""
    device = next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def on_host(tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in host memory; tensors of a device are copied on a separate stream after ``ready``."""
    stream = None
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            yield name, tensor
            continue
        if stream is None:
            stream = torch.cuda.Stream(tensor.device)
            if ready is not None:
                stream.wait_event(ready)
        with torch.cuda.stream(stream):
            found = tensor.to("cpu")  # waits for this stream only
        yield name, found


def _fits(tensors: list[torch.Tensor]) -> bool:
    """Return whether copies leave the device at least as much free memory as they take."""
    device = tensors[0].device
    free, _ = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * sum(tensor.nbytes for tensor in tensors) <= free + spare


def safetensors_chunks(
    tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of ``tensors``, one tensor after the other.

    Args:
        tensors: contiguous tensors by name.
        ready: event after which the tensors are complete; None without CUDA tensors.
    """
    head, order = compose_head(tensors, {"format": "pt"})
    yield head
    for _, tensor in on_host({name: tensors[name] for name in order}, ready):
        yield bytes_of(tensor)
