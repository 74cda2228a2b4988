"""Whether a gradient is finite, and its norm: after the backward pass, or while it still runs.

With `BESIDE`, parts of the gradient that are whole are looked at on a second stream of the device, so that
reading them costs little; after the backward pass one small kernel is left between it and the update. What
follows from a fault is decided in `flodl.train.on_device`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["GradientWatch", "find_faults"]

BESIDE = False
"""Whether CUDA devices use a second stream for it: less between the backward pass and the update, more launches."""
PARTS = 8  # about so many looks at a gradient
LEAST_BYTES = 4 << 20  # not worth a look of its own


def find_faults(tensors: Sequence[torch.Tensor], found: torch.Tensor, one: torch.Tensor) -> None:
    """Set ``found`` (float32, one number) to 1 where a tensor holds something that is not finite.

    Args:
        tensors: are written to, with what they hold.
        one: float32, 1.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # one kernel takes tensors of one dtype
        part = [tensor for tensor in tensors if tensor.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(part, found, one)  # pyright: ignore[reportPrivateImportUsage]


class GradientWatch:
    """Looks at the gradients of a model.

    Args:
        model: whose gradients.
        device: where they are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and BESIDE else None
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self._hooks: dict[nn.Parameter, Any] = {}
        self._on = False
        self._busy = False
        self._begin()

    def _begin(self) -> None:
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0
        self._norms: list[torch.Tensor] = []
        self._seen: list[torch.Tensor] = []

    @contextlib.contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """Look at gradients as they become whole; the backward pass inside is the only one of its step."""
        self._begin()
        if not wanted or self._side is None:
            yield
            return
        learning = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in learning:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._note)
        self._enough = max(LEAST_BYTES, sum(p.numel() * p.element_size() for p in learning) // PARTS)
        # Autograd has threads of its own, whose current streams are not those of the forward pass.
        self._main = torch.cuda.current_stream(self._side.device)
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _note(self, parameter: torch.Tensor) -> None:
        if not self._on or parameter.grad is None:
            return
        self._waiting.append(parameter.grad)
        self._bytes += parameter.grad.numel() * parameter.grad.element_size()
        if self._bytes >= self._enough:
            assert self._side is not None
            self._side.wait_stream(self._main)
            with torch.no_grad(), torch.cuda.stream(self._side):
                norms = _norms(self._waiting)
                self._norms += norms
                self._seen.append(torch.stack(norms))
            self._waiting, self._bytes, self._busy = [], 0, True

    def check(self, loss: torch.Tensor, found: torch.Tensor) -> None:
        """Find faults in the loss, which is written to, and in all gradients; see `find_faults`."""
        if self._side is None:
            norms = _norms([p.grad for p in self.model.parameters() if p.grad is not None])
            self._row = torch.stack([loss.to(norms[0].dtype), *norms])
            find_faults([self._row], found, self.one)
            return
        current = torch.cuda.current_stream(loss.device)
        if self._busy:
            current.wait_stream(self._side)
        find_faults([*self._waiting, loss, *self._seen], found, self.one)
        if self._waiting:
            # Nothing waits for these norms, so they are found beside the update.
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                self._norms += _norms(self._waiting)
            self._waiting = []
        self._busy = True

    def figures(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss and the norms that together are the gradient's, ``(1 + norms,)``."""
        if self._side is None:
            return self._row
        dtype = self._norms[0].dtype
        with torch.cuda.stream(self._side):
            row = torch.stack([loss.to(dtype), *self._norms])
        self.join()
        return row

    def join(self) -> None:
        """Have the device go on only when the second stream is done."""
        if self._busy and self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._busy = False

    def release(self) -> None:
        """Leave the parameters as they were found."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    return [norm if norm.dtype == torch.float64 else norm.to(torch.float32) for norm in found]
