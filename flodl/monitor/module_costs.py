"""What the parts of a model take in one pass: time, memory that stays until backward, norms of gradients.

Times are those of the device. Memory is what is still taken when a part is done: on CUDA by the allocator's count, on a
processor by what autograd keeps, parameters left out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flodl.graph.heat import Heat
from flodl.graph.modules import modules_of

__all__ = ["Look", "look_at"]


@contextlib.contextmanager
def look_at(model: nn.Module) -> Iterator[Look]:
    """Look at the passes in this block; afterwards ``time``, ``memory`` and ``gradient`` colour pictures.

    Args:
        model: a graph or any other module; call it, and ``backward`` on its loss, in the block.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    look = Look(model, device)
    look.begin(gradients=True, memory=True)
    try:
        yield look
    finally:
        look.end()
        look.close()


class Look:
    """One look at a pass, by hooks on the parts of a model.

    Args:
        model: what is looked at.
        device: where it computes.

    Attributes:
        is_scaled: whether norms are those of sums, to be brought to the norm of the step.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.is_scaled = False
        self._handles: list[Any] = []
        self._running: dict[int, list[Any]] = {}
        self._spans: list[tuple[int, Any, Any]] = []
        self._norms: dict[int, torch.Tensor] = {}
        self._done: Any = None
        self._memory: _Allocated | _Saved | None = None

    @property
    def is_counting(self) -> bool:
        """Whether bytes are counted."""
        return self._memory is not None

    @property
    def time(self) -> Heat:
        """Seconds of the forward passes by path."""
        return Heat("time", self.read(None)[0])

    @property
    def memory(self) -> Heat:
        """Bytes that stay until backward by path, those of several passes together."""
        return Heat("memory", self.bytes())

    @property
    def gradient(self) -> Heat:
        """Norms of the gradients by path."""
        return Heat("gradient", self.read(None)[1])

    def begin(self, *, gradients: bool, memory: bool = False) -> None:
        """Begin to look.

        Args:
            gradients: take norms when a backward pass arrives at a parameter.
            memory: count bytes; on CUDA that costs the host some microseconds a part.
        """
        if memory:
            self._memory = _Allocated(self.device) if self.device.type == "cuda" else _Saved(self.model)
        for module in {id(module): module for _, module in modules_of(self.model)}.values():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        if gradients:
            self.is_scaled = True
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._grown))

    def end(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        if self._memory is not None:
            self._memory.end()
        if self._done is None:
            self._done = self._mark()

    def close(self) -> None:
        """Wait for the device."""
        if isinstance(self._done, torch.cuda.Event):
            self._done.synchronize()

    def take(self, norms: dict[int, torch.Tensor]) -> None:
        """Take norms by the identity of a parameter."""
        self._norms = norms
        self._done = self._mark()

    def is_known(self) -> bool:
        """Return whether the device is done with it."""
        return not isinstance(self._done, torch.cuda.Event) or self._done.query()

    def read(self, whole: float | None) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds and norms by path; norms such that all together come to ``whole`` where that is given."""
        spent: dict[int, float] = {}
        for key, begin, end in self._spans:
            spent[key] = spent.get(key, 0.0) + _between(begin, end)
        squares = _squares(self._norms)
        factor = 1.0
        total = math.sqrt(math.fsum(squares.values()))
        if whole is not None and math.isfinite(whole) and total > 0:
            factor = whole / total
        seconds: dict[str, float] = {}
        gradients: dict[str, float] = {}
        for path, module in modules_of(self.model):
            if id(module) in spent:
                seconds[path] = float(f"{spent[id(module)]:.4g}")
            own = [squares[id(p)] for p in module.parameters() if id(p) in squares]
            if own:
                gradients[path] = float(f"{factor * math.sqrt(math.fsum(own)):.4g}")
        return seconds, {path: norm for path, norm in gradients.items() if math.isfinite(norm)}

    def bytes(self) -> dict[str, int]:
        """Return bytes by path, where they were counted."""
        found = {} if self._memory is None else self._memory.bytes
        return {path: found[id(module)] for path, module in modules_of(self.model) if id(module) in found}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._memory is not None:
            self._memory.enter(id(module))
        self._running.setdefault(id(module), []).append(self._mark())

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._running.get(id(module)):
            self._spans.append((id(module), self._running[id(module)].pop(), self._mark()))
        if self._memory is not None:
            self._memory.leave(id(module))

    def _grown(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self._norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad.detach().float())

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class _Allocated:
    """What the allocator of a CUDA device holds more when a part is done than before it began."""

    def __init__(self, device: torch.device) -> None:
        self.bytes: dict[int, int] = {}
        self._device = device
        self._before: dict[int, list[int]] = {}

    def enter(self, key: int) -> None:
        self._before.setdefault(key, []).append(torch.cuda.memory_allocated(self._device))

    def leave(self, key: int) -> None:
        if self._before.get(key):
            grown = torch.cuda.memory_allocated(self._device) - self._before[key].pop()
            self.bytes[key] = self.bytes.get(key, 0) + max(0, grown)

    def end(self) -> None:
        self._before.clear()


class _Saved:
    """What autograd keeps of a part's pass: each storage once, those of parameters and buffers not at all."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[int, int] = {}
        own = (*model.parameters(), *model.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._open: list[int] = []
        self._seen: dict[int, set[int]] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
        self._hooks.__enter__()

    def enter(self, key: int) -> None:
        self._open.append(key)
        self.bytes.setdefault(key, 0)

    def leave(self, key: int) -> None:
        # Entries above the part's own were left by an exception that somebody inside caught.
        if key in self._open:
            while self._open.pop() != key:
                pass

    def end(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            for key in set(self._open) if place not in self._own else ():
                seen = self._seen.setdefault(key, set())
                if place not in seen:
                    seen.add(place)
                    self.bytes[key] += storage.nbytes()
        return tensor


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def _squares(norms: dict[int, torch.Tensor]) -> dict[int, float]:
    if not norms:
        return {}
    values = torch.stack([norm.to(torch.float64) for norm in norms.values()]).square().tolist()
    return dict(zip(norms, values, strict=True))
