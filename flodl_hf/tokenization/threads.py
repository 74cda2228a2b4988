"""A batch of texts tokenised by several threads, also if the library's own threads are switched off.

``TOKENIZERS_PARALLELISM=false`` limits the tokenizers library to one core, because its threads do not survive a fork.
Other libraries set it for the whole process (a pipeline of transformers does at its first batch), and tokenization is
then slower than an accelerator. In this case batches are cut into parts and encoded by threads of this module, which
exist for one call only. ``RAYON_NUM_THREADS`` limits both kinds of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["over_threads"]

_VARIABLE = "TOKENIZERS_PARALLELISM"
# Values that the library reads as "no".
_OFF = ("", "off", "false", "f", "no", "n", "0")
# With fewer texts, starting threads takes longer than it saves.
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
    """Return ``run(batch)``, in parallel parts if the library itself uses one core.

    Args:
        run: tokenises a list and releases the interpreter lock.
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
