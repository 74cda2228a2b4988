"""A batch of texts tokenised by several threads, also where the library's own threads were switched off.

``TOKENIZERS_PARALLELISM=false`` stops the tokenizers library from using more than one core. A user may wish that,
and is obeyed. But other libraries set it on the fly, for the whole process and for good (a pipeline of transformers
does, at its first batch), and texts would then be tokenised slower than an accelerator reads them. So what counts
is what the variable said when this package was imported: if it was switched off later, batches are cut into parts
and threads of our own take them. Those live for one call, so that a fork never finds them half alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flodl_hf

__all__ = ["over_threads"]

_VARIABLE = "TOKENIZERS_PARALLELISM"
# What the library reads as "no".
_OFF = ("", "off", "false", "f", "no", "n", "0")
# Texts below which starting threads costs more than it gives.
_LEAST = 256


def means_off(value: str | None) -> bool:
    """Return whether a value of the variable keeps the library to one core."""
    return value is not None and value.lower() in _OFF


def switched_off() -> bool:
    """Return whether the library uses one core now."""
    return means_off(os.environ.get(_VARIABLE))


_WISHED = means_off(flodl_hf._TOKENIZERS_PARALLELISM)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def over_threads(run: Callable[[list[Any]], list[Any]], batch: list[Any]) -> list[Any]:
    """Return ``run(batch)``, in parts side by side where the library would not do so itself.

    Args:
        run: tokenises a list and lets go of the interpreter meanwhile.
        batch: texts or pairs.
    """
    if len(batch) < _LEAST or _WISHED or not switched_off():
        return run(batch)
    workers = min(16, cores())
    if workers == 1:
        return run(batch)
    # More parts than threads: texts differ in length.
    size = max(_LEAST // 4, -(-len(batch) // (4 * workers)))
    with ThreadPoolExecutor(workers, thread_name_prefix="flodl-hf-tokenise") as pool:
        parts = pool.map(run, [batch[i : i + size] for i in range(0, len(batch), size)])
        return [encoding for part in parts for encoding in part]
