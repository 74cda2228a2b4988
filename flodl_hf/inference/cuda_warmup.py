"""A CUDA device made ready while weights are still being read: its context, libraries and kernels.

Most delays of a first answer do not depend on the weights: the driver creates a context, libraries create their
handles, Triton is imported and identifies itself by a hash of all its files, kernels are loaded (compiled, on the first
run on a machine). Threads do that while weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from threading import Thread, main_thread

import torch

from flodl.graph import Graph

# Tokens of the batches used to warm up products; between these sizes the library mostly chooses the same kernels.
LARGE = (65_536, 16_384, 8_192, 4_096, 2_048, 1_024, 512)
# Free memory of a device, in bytes, of which some is taken for that.
ROOM = 8 << 30

_IMPORTED = ("flodl_hf.nn.backends.choose", "flodl_hf.inference.pipeline", "flodl_hf.inference.classes")


class Warming:
    """Threads that initialise a device; those for its libraries start immediately.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = [self._start(_identify_triton), self._start(_make_handles, device)]

    @staticmethod
    def _start(what: Callable[..., None], *args: object) -> Thread:
        # The end of the process waits for it: one that is ended in torch's code aborts the process.
        thread = Thread(target=what, args=args, name="flodl-hf-warm")
        thread.start()
        return thread

    def layers(self, graph: Graph, dtype: torch.dtype) -> None:
        """Warm up the kernels of a graph's layers; its tensors are not read.

        Args:
            graph: of the model.
            dtype: of its weights on the device.
        """
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return
        handles = self._threads[-1]
        own = self._start(_load_kernels, graph, self.device, dtype, tuple(self._threads))
        self._threads.append(own)
        # A first answer needs none of these, so only the end of the process waits for them.
        before = own if dtype == torch.float32 else handles
        Thread(target=_load_products, args=(graph, self.device, dtype, before), name="flodl-hf-warm-large").start()

    def wait(self) -> None:
        """Wait until the device is ready; import the modules of a first prediction meanwhile."""
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
    # Errors of a device are raised by its first use in the caller's thread.
    with suppress(RuntimeError), torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(16, 16, device=device, dtype=dtype)
            torch.nn.functional.linear(x, x, x[0])


def _load_kernels(graph: Graph, device: torch.device, dtype: torch.dtype, before: tuple[Thread, ...]) -> None:
    from flodl_hf.nn.backends.choose import prediction_sizes, splits
    from flodl_hf.nn.backends.self_tests import buckets, prediction
    from flodl_hf.nn.kernels.self_test import trusted

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


def _load_products(graph: Graph, device: torch.device, dtype: torch.dtype, before: Thread) -> None:
    """Have the library load the kernels that it chooses for large batches, some 10 ms each."""
    from flodl_hf.nn.backends.choose import prediction_sizes, splits
    from flodl_hf.nn.backends.self_tests import multiply

    before.join()
    with suppress(RuntimeError), torch.inference_mode(), torch.cuda.device(device):
        sizes = prediction_sizes(graph)
        where = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.mem_get_info(where)[0] < ROOM or (dtype == torch.float32 and not splits(where, sizes)):
            return
        for tokens, each in product(LARGE, sizes):
            if not main_thread().is_alive():
                return
            multiply(where, dtype, tokens, each)
