"""What a device could do and what is asked of it: how fast it multiplies, and how many operations a token takes.

The peak is measured where the server runs, by a product of two matrices, so that no table of devices has to be true.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Pace", "Rate", "operations_of_token", "peak_of"]

# Large enough for a device to be busy, small enough to be done before anybody notices.
CUDA_SIZE, CPU_SIZE = 4096, 512
TRIES = 5


def peak_of(device: Any, dtype: Any) -> float:
    """Return the operations a second of a product of matrices, the best of a few; a multiplication and a sum are two.

    Args:
        device: where.
        dtype: what they hold.
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
            from flodl_hf.nn.backends.cpu_products import OneDnnLinear, has_onednn

            # On processors that are not Intel's, torch's own product reaches about half of what oneDNN's does.
            if has_onednn(dtype):
                packed = OneDnnLinear(matrix, None, at_once=True)
                ways.append(lambda: packed(matrix))
        for way in ways * TRIES:
            wait()
            started = time.perf_counter()
            for _ in range(times):
                way()
            wait()
            best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 * times / best


def operations_of_token(model: Any) -> int:
    """Return the operations that the projections of a model's encoder take for a token, without those of attention."""
    from flodl_hf.nn.layers.encoder_layer import EncoderLayer

    encoder = model.graph.get_submodule("encoder")
    layers = [part for part in encoder.modules() if isinstance(part, EncoderLayer)]
    # Layers that share their weights are one module, which is called as often as the configuration says.
    again = model.config.num_layers / len(layers) - 1 if layers else 0
    return round(_weights(encoder) + again * sum(map(_weights, layers))) * 2


def _weights(module: Any) -> int:
    from torch import nn

    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


class Pace:
    """How many tokens a second a device runs when there is enough to run.

    A batch of few tokens takes nearly as long as a larger one and says little of that, so it counts only where it was
    faster than what is known, or where nothing larger could be made.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def now(self) -> float:
        """Tokens a second; 0 before anything ran."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def ran(self, tokens: int, seconds: float, *, full: bool) -> None:
        """Note a batch.

        Args:
            tokens: how many it had.
            seconds: how long the device took for it.
            full: whether nothing larger could be made.
        """
        faster = tokens > self.now * seconds
        if seconds > 0 and (full or faster):
            # What is too low keeps requests out that there is room for.
            keep = 0.5 if faster else 0.9
            self._tokens = keep * self._tokens + tokens
            self._seconds = keep * self._seconds + seconds


class Rate:
    """How much there was a second, lately: what is older counts for less.

    Args:
        over_s: how far back, about.
    """

    def __init__(self, over_s: float = 10.0) -> None:
        self.over_s = over_s
        self._rate = 0.0
        self._at = time.monotonic()

    def add(self, amount: float) -> None:
        """Count something that is done now."""
        self._rate = self.now() + amount / self.over_s

    def now(self) -> float:
        """Return how much there is a second."""
        at = time.monotonic()
        self._rate *= math.exp((self._at - at) / self.over_s)
        self._at = at
        return self._rate
