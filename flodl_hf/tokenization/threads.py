"""A batch of texts tokenised by several threads, also where the library's own threads are switched off.

``TOKENIZERS_PARALLELISM=false`` stops the tokenizers library from using more than one core. It is set for the library's
threads, which a fork may find half alive, mostly by other libraries, for the whole process and all that it starts (a
pipeline of transformers does, at its first batch); texts would then be tokenised slower than an accelerator reads them.
So batches are then cut into parts, which threads of our own take; those live for one call, so that a fork never finds
them. Who wants fewer cores used says so by ``RAYON_NUM_THREADS``, which counts for both kinds of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["over_threads"]

_VARIABLE = "TOKENIZERS_PARALLELISM"
# What the library reads as "no".
_OFF = ("", "off", "false", "f", "no", "n", "0")
# Texts below which starting threads costs more than it gives.
_LEAST = 256


def switched_off() -> bool:
    """Return whether the library uses one core now."""
    value = os.environ.get(_VARIABLE)
    return value is not None and value.lower() in _OFF


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _most_threads() -> int:
    asked = os.environ.get("RAYON_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else 1 << 16


def over_threads(run: Callable[[list[Any]], list[Any]], batch: list[Any], each: int = 1) -> list[Any]:
    """Return ``run(batch)``, in parts side by side where the library would not do so itself.

    Args:
        run: tokenises a list and lets go of the interpreter meanwhile.
        batch: texts, pairs, or blocks of texts.
        each: texts in each of them.
    """
    if len(batch) * each < _LEAST or not switched_off():
        return run(batch)
    workers = min(16, cores(), _most_threads())
    if workers == 1:
        return run(batch)
    # More parts than threads: texts differ in length.
    size = max(_LEAST // 4 // each, 1, -(-len(batch) // (4 * workers)))
    with ThreadPoolExecutor(workers, thread_name_prefix="flodl-hf-tokenise") as pool:
        parts = pool.map(run, [batch[i : i + size] for i in range(0, len(batch), size)])
        return [encoding for part in parts for encoding in part]
