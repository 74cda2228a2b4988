"""Spark: a data frame answered partition by partition, by one model in each Python worker.

Outputs are exactly once by Spark's own commit protocol: a task that is run again, or twice, writes to a place of its
own, and of each partition one attempt is committed. Answers depend on their row alone, so attempts are alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from flodl_hf.jobs.partitions import Partitions
from flodl_hf.jobs.tables import Kind

__all__ = ["answers", "spark_type"]


def answers(frame: Any, model: str | os.PathLike[str], **words: Any) -> Any:
    """Return a Spark data frame with the answers' columns behind its own: those of `flodl_hf.predict_file`.

    The model is loaded here once, to learn what its answers hold, and once in each Python worker of the executors,
    which Spark keeps (``spark.python.worker.reuse``). Give each worker its share of a host's processors with
    ``spark.executorEnv.OMP_NUM_THREADS``; ``spark.sql.execution.arrow.maxRecordsPerBatch`` says how many rows come
    together.

    Args:
        frame: with a column of texts.
        model: a folder or Hub name that every executor can read.
        **words: as in `flodl_hf.jobs.partitions.Partitions`: columns, ``on_error``, options of the model's method,
            all of them of JSON's types.

    Raises:
        DataError: columns cannot be told.
        PredictError: the model has no such option.
    """
    names = list(frame.columns)
    kinds = _held(os.fspath(model), json.dumps(names), json.dumps(words)).kinds
    added = ", ".join(f"`{name}` {spark_type(kind)}" for name, kind in kinds.items())
    own = ", ".join(f"{_quoted(field.name)} {field.dataType.simpleString()}" for field in frame.schema.fields)
    run = partial(_batches, os.fspath(model), json.dumps(names), json.dumps(words))
    return frame.mapInArrow(run, f"{own}, {added}")


def spark_type(kind: Kind) -> str:
    """Return a kind of value in Spark's language of schemas."""
    if isinstance(kind, list):
        return f"array<{spark_type(kind[0])}>"
    if isinstance(kind, dict):
        return f"struct<{', '.join(f'`{name}`: {spark_type(inner)}' for name, inner in kind.items())}>"
    return {"text": "string", "float": "float", "int": "int", "vector": "array<float>"}[kind]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _batches(model: str, names: str, words: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield each record batch of a partition with its answers."""
    held = _held(model, names, words)
    for batch in batches:
        yield held.arrow(batch)


@lru_cache(maxsize=2)
def _held(model: str, names: str, words: str) -> Partitions:
    """Return the model of this process, loaded once for all partitions that it is given."""
    found: Sequence[str] = json.loads(names)
    return Partitions(model, found, **json.loads(words))
