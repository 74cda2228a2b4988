"""Speed of a device: its peak for matrix products, operations of a token, and tokens per second.

The peak is measured on the running server, without a table of devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

# Large enough to occupy the device, small enough to finish quickly.
CUDA_SIZE, CPU_SIZE = 4096, 512
REPEATS = 5


def measure_peak(device: Any, dtype: Any) -> float:
    """Return the operations per second of a matrix product, the best of several runs; multiply and add count as two.

    Args:
        device: the device.
        dtype: type of the matrices.
    """
    import torch

    cuda = device.type == "cuda"
    size, times = (CUDA_SIZE, 10) if cuda else (CPU_SIZE, 1)
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    best = math.inf
    with torch.inference_mode():
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        product = torch.empty_like(matrix)
        ways: list[Callable[[], Any]] = [lambda: torch.mm(matrix, matrix, out=product)]
        if device.type == "cpu":
            from flodl_hf.nn.backends.cpu import OneDnnLinear, has_onednn

            # On other processors than Intel's, torch's product reaches about half of oneDNN's speed.
            if has_onednn(dtype):
                pack_message = OneDnnLinear(matrix, None, at_once=True)
                ways.append(lambda: pack_message(matrix))
        for way in ways * REPEATS:
            wait()
            started = time.perf_counter()
            for _ in range(times):
                way()
            wait()
            best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 * times / best


def operations_of_token(model: Any) -> int:
    """Return the operations of an encoder's projections for one token, without attention."""
    from flodl_hf.nn.layers import EncoderLayer

    encoder = model.graph.get_submodule("encoder")
    layers = [part for part in encoder.modules() if isinstance(part, EncoderLayer)]
    # Layers with shared weights are one module, called once for each layer of the configuration.
    again = model.config.num_layers / len(layers) - 1 if layers else 0
    return round(_weights(encoder) + again * sum(map(_weights, layers))) * 2


def _weights(module: Any) -> int:
    from torch import nn

    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


class TokenRate:
    """Tokens per second of a device at full load.

    A small batch takes nearly as long as a larger one, so it counts only if it was faster than the known rate, or if no
    larger batch was possible.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def now(self) -> float:
        """Tokens per second; 0 before the first batch."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def ran(self, tokens: int, seconds: float, *, full: bool) -> None:
        """Add a batch.

        Args:
            tokens: its tokens.
            seconds: its time on the device.
            full: whether no larger batch was possible.
        """
        faster = tokens > self.now * seconds
        if seconds > 0 and (full or faster):
            # A rate that is too low would refuse requests for which there is capacity.
            keep = 0.5 if faster else 0.9
            self._tokens = keep * self._tokens + tokens
            self._seconds = keep * self._seconds + seconds
