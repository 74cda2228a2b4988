"""Streams of training data: the number of rows that a run reads before its first step."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flodl.errors import ConfigError
from flodl_hf.training.options import BATCH_SIZE, Options

__all__ = ["stream_part"]

MANY = 1_000_000
"""Number of rows after which a warning is logged."""


def stream_part(source: Any, options: Options, share: float | None) -> Any:
    """Return ``source``, or, if it has no length, an iterator over the rows of ``max_steps`` steps.

    Args:
        source: data; a function is called for them.
        options: the choices of the run; without ``max_steps`` a stream is read to its end.
        share: evaluation rows to split off, a share below 1 or a number; None for none.

    Raises:
        ConfigError: with an option, the number of required rows is unknown.
    """
    if callable(source) and not isinstance(source, (str, os.PathLike, Mapping, Iterable)) and not _is_sized(source):
        source = source()
    if isinstance(source, (str, os.PathLike, Mapping)) or _is_sized(source) or not isinstance(source, Iterable):
        return source
    if options.max_steps is None:
        return _counted(source)
    for name in ("tokens_per_batch", "concatenate"):
        if getattr(options, name):
            raise ConfigError(
                f"{name}: found training data without a length, and batches of an unknown number of its rows; expected "
                "batches of batch_size rows, or the rows in a list",
                problems=[name],
            )
    own = options.ranks if options.policy in ("cadence", "async") else 1  # batches of each rank
    rows = options.max_steps * options.accumulate * (options.batch_size or BATCH_SIZE) * own
    if share is not None:
        rows = rows + int(share) if share >= 1 else math.ceil(rows / max(1 - share, 1e-9)) + 1
    return itertools.islice(source, rows)


def _is_sized(source: Any) -> bool:
    try:
        return len(source) >= 0
    except TypeError:
        return False


def _counted(source: Iterable[Any]) -> Iterator[Any]:
    for number, row in enumerate(source, start=1):
        yield row
        if number == MANY:
            warnings.warn(
                f"train: {MANY:,} rows are read, and the stream has not ended; one without an end needs max_steps=, "
                "which limits the number of rows",
                stacklevel=2,
            )
