"""A CUDA device made ready while weights are still being read: its context, libraries and kernels.

What a first answer would wait for has little to do with the weights: the driver makes a context, libraries make their
handles, Triton is imported and identifies itself by a hash of all its files, kernels are loaded (compiled, on the first
run of a machine). Threads do that beside the reading.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from threading import Thread
from typing import TYPE_CHECKING

import torch

from flodl.graph import Graph

if TYPE_CHECKING:
    from flodl_hf.tables.trials import LayerSizes

__all__ = ["Warming"]

# Tokens of batches whose products are tried; of sizes between them the library chooses mostly the same kernels.
LARGE = (65_536, 49_152, 32_768, 16_384, 8_192, 4_096, 1_024, 256)

_IMPORTED = ("flodl_hf.tables.arrange", "flodl_hf.runtime.session", "flodl_hf.decode.classes")


class Warming:
    """Threads that make a device ready; those of its libraries start at once.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = [self._start(_identify_triton), self._start(_make_handles, device)]

    @staticmethod
    def _start(what: Callable[..., None], *args: object) -> Thread:
        thread = Thread(target=what, args=args, name="flodl-hf-warm", daemon=True)
        thread.start()
        return thread

    def layers(self, graph: Graph, dtype: torch.dtype) -> None:
        """Go on with the kernels of a graph's layers; its tensors are not read.

        Args:
            graph: of the model.
            dtype: of its weights on the device.
        """
        if dtype in (torch.float16, torch.bfloat16, torch.float32):
            self._threads.append(self._start(_load_kernels, graph, self.device, dtype, tuple(self._threads)))

    def wait(self) -> None:
        """Return when the device is ready; what a first prediction imports is imported meanwhile."""
        for name in _IMPORTED:
            if any(thread.is_alive() for thread in self._threads):
                import_module(name)
        for thread in self._threads:
            thread.join()


def _identify_triton() -> None:
    # Once a process Triton hashes its whole installation, which takes longer than loading a kernel.
    with suppress(Exception):
        if find_spec("triton") is not None:
            import_module("triton.runtime.cache").triton_key()


def _make_handles(device: torch.device) -> None:
    # What is wrong with a device is told by the first use that somebody waits for.
    with suppress(RuntimeError), torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(16, 16, device=device, dtype=dtype)
            torch.nn.functional.linear(x, x, x[0])


def _load_kernels(graph: Graph, device: torch.device, dtype: torch.dtype, before: tuple[Thread, ...]) -> None:
    from flodl_hf.kernels.trust import trusted
    from flodl_hf.tables.arrange import prediction_sizes, splits
    from flodl_hf.tables.trials import buckets, prediction

    for thread in before:
        thread.join()
    where = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    sizes = prediction_sizes(graph)
    if dtype == torch.float32:
        splits(where, sizes, rehearse=True)
        return
    for each in sizes:
        trusted("prediction", where, dtype, each, prediction, rehearse=True)
        trusted("buckets", where, dtype, (each.heads, each.width // each.heads), buckets, rehearse=True)
    # A first answer needs none of these, so nobody waits for them.
    Thread(target=_load_products, args=(where, dtype, tuple(sizes)), name="flodl-hf-warm-large", daemon=True).start()


def _load_products(device: torch.device, dtype: torch.dtype, sizes: tuple[LayerSizes, ...]) -> None:
    """Have the library load the kernels that it chooses for large batches, some 10 ms each."""
    from flodl_hf.tables.trials import multiply

    with suppress(RuntimeError), torch.inference_mode(), torch.cuda.device(device):
        for tokens, each in product(LARGE, sizes):
            multiply(device, dtype, tokens, each)
