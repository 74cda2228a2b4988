"""Where a pass of a model spends time and memory, and the norms of its gradients, measured by hooks on modules.

On a CUDA device times are measured by events on the current stream, otherwise by the host clock. Additions and merges
of a graph are part of its generated forward pass; their time is in the total only.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flodl.graph.picture import Heat
from flodl.graph.tree import modules_of


@dataclass(frozen=True)
class NodeTime:
    """Time of one node of a graph in one call.

    Attributes:
        id: node id.
        name: name of the child module.
        tags: tags of its output.
        level: distance from the inputs.
        seconds: time spent in the module.
    """

    id: str
    name: str
    tags: tuple[str, ...]
    level: int
    seconds: float

    @property
    def key(self) -> str:
        """The first tag, otherwise the node id: the name of its history."""
        return self.tags[0] if self.tags else self.id


@dataclass(frozen=True)
class Profile:
    """Times of one call of a graph.

    Attributes:
        total_s: seconds of the call.
        nodes: nodes with a module, in the order of the plan.
    """

    total_s: float
    nodes: tuple[NodeTime, ...]


@contextlib.contextmanager
def look_at(model: nn.Module) -> Iterator[Profiler]:
    """Measure the passes in this block; ``time``, ``memory`` and ``gradient`` of the result colour pictures.

    Args:
        model: a graph or any other module; call it in the block, and ``backward`` on its loss.
    """
    profiler = Profiler(model, modules_of(model), gradients=True, memory=True)
    try:
        yield profiler
    finally:
        profiler.end()
        profiler.wait()


class Profiler:
    """Measures passes of a model until `end`.

    Args:
        model: the model.
        modules: measured modules with their paths.
        gradients: measure norms when a backward pass reaches a parameter.
        memory: count bytes that autograd keeps for the backward pass.
        last_call: measure the last call of the model only, which ``modules`` must contain.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list[tuple[str, nn.Module]],
        *,
        gradients: bool = False,
        memory: bool = False,
        last_call: bool = False,
    ) -> None:
        self.model, self.modules, self.measures_gradients, self._last_call = model, modules, gradients, last_call
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._running: list[tuple[int, Any]] = []
        self._spans: list[tuple[int, Any, Any]] = []
        self._norms: dict[int, Tensor] = {}
        self._done: Any = None
        self._bytes: dict[int, int] | None = None
        self._hooks = contextlib.ExitStack()
        if memory:
            self._bytes, self._seen = {}, set()
            self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
            hooks = torch.autograd.graph.saved_tensors_hooks(self._add_saved, lambda tensor: tensor)
            self._hooks.enter_context(hooks)
        self._handles: list[Any] = []
        for module in {id(module): module for _, module in modules}.values():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        for parameter in model.parameters() if gradients else ():
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._add_norm))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the forward passes by path."""
        spent: dict[int, float] = defaultdict(float)
        # The last call failed if a module is still running.
        for key, begin, end in () if self._last_call and self._running else self._spans:
            spent[key] += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        return {path: spent[id(module)] for path, module in self.modules if id(module) in spent}

    @property
    def time(self) -> Heat:
        """Seconds of the forward passes by path."""
        return Heat("time", {path: float(f"{seconds:.4g}") for path, seconds in self.seconds().items()})

    @property
    def memory(self) -> Heat:
        """Bytes kept until backward by path, of all passes together."""
        found = self._bytes or {}
        return Heat("memory", {path: found[id(module)] for path, module in self.modules if id(module) in found})

    @property
    def gradient(self) -> Heat:
        """Norms of the gradients by path."""
        return self.scaled_gradient(None)

    def scaled_gradient(self, whole: float | None) -> Heat:
        """Return the norms of the gradients, scaled so that the norm of all gradients is ``whole`` if given."""
        norms = torch.stack([n.double() for n in self._norms.values()]).tolist() if self._norms else []
        squares = {key: norm * norm for key, norm in zip(self._norms, norms, strict=True)}
        total = math.sqrt(math.fsum(squares.values()))
        factor = whole / total if whole is not None and math.isfinite(whole) and total > 0 else 1.0
        values = {}
        for path, module in self.modules:
            own = [squares[id(p)] for p in module.parameters() if id(p) in squares]
            norm = factor * math.sqrt(math.fsum(own))
            if own and math.isfinite(norm):
                values[path] = float(f"{norm:.4g}")
        return Heat("gradient", values)

    def set_norms(self, norms: dict[int, Tensor]) -> None:
        """Set the norms of gradients by the identity of the parameter."""
        self._norms, self._done = norms, self._mark()

    def end(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._hooks.close()
        if self._done is None:
            self._done = self._mark()

    def wait(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def is_ready(self) -> bool:
        """Return whether the device has finished the measured passes."""
        return not isinstance(self._done, torch.cuda.Event) or self._done.query()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._last_call and module is self.model:
            self._device = next((p.device for p in module.parameters()), self._device)
            self._running, self._spans = [], []
        elif self._last_call and not self._running:
            return  # a module that is called without the model
        if self._bytes is not None:
            self._bytes.setdefault(id(module), 0)
        self._running.append((id(module), self._mark()))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Modules that ended by an exception left entries above the module's own.
        while self._running:
            key, begin = self._running.pop()
            if key == id(module):
                self._spans.append((key, begin, self._mark()))
                break

    def _add_saved(self, tensor: Tensor) -> Tensor:
        """Count a storage once for each module, parameters and buffers excluded."""
        if self._bytes is not None and tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            for key in {key for key, _ in self._running} if place not in self._own else ():
                if (key, place) not in self._seen:
                    self._seen.add((key, place))
                    self._bytes[key] += storage.nbytes()
        return tensor

    def _add_norm(self, parameter: Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self._norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad.detach().float())

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
