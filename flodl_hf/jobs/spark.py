"""Spark: a data frame predicted partition by partition, with one model in each Python worker.

Spark's commit protocol makes the output exactly-once: of several attempts of a task, one is committed. Results depend
only on their row, so all attempts are equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from flodl_hf.jobs.partitions import Partitions
from flodl_hf.jobs.tables import Kind


def answers(frame: Any, model: str | os.PathLike[str], **words: Any) -> Any:
    """Return a Spark data frame with the result columns of `flodl_hf.predict_file` after its own columns.

    The model is loaded once here, to determine the columns, and once in each Python worker of the executors
    (``spark.python.worker.reuse``). Set the processors of each worker with ``spark.executorEnv.OMP_NUM_THREADS``, and
    the rows of a batch with ``spark.sql.execution.arrow.maxRecordsPerBatch``.

    Args:
        frame: data frame with a column of texts.
        model: a folder or Hub name that every executor can read.
        **words: as for `flodl_hf.jobs.partitions.Partitions`: columns, ``on_error``, options of the model's method;
            JSON types only.

    Raises:
        DataError: columns are ambiguous.
        PredictError: the model has no such option.
    """
    names = list(frame.columns)
    kinds = _partitions(os.fspath(model), json.dumps(names), json.dumps(words)).kinds
    added = ", ".join(f"`{name}` {spark_type(kind)}" for name, kind in kinds.items())
    own = ", ".join(f"{_quoted(field.name)} {field.dataType.simpleString()}" for field in frame.schema.fields)
    run = partial(_batches, os.fspath(model), json.dumps(names), json.dumps(words))
    return frame.mapInArrow(run, f"{own}, {added}")


def spark_type(kind: Kind) -> str:
    """Return a kind of value as a Spark type."""
    if isinstance(kind, list):
        return f"array<{spark_type(kind[0])}>"
    if isinstance(kind, dict):
        return f"struct<{', '.join(f'`{name}`: {spark_type(inner)}' for name, inner in kind.items())}>"
    return {"text": "string", "float": "float", "int": "int", "vector": "array<float>"}[kind]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _batches(model: str, names: str, words: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield each record batch of a partition with its results."""
    partitions = _partitions(model, names, words)
    for batch in batches:
        yield partitions.arrow(batch)


@lru_cache(maxsize=2)
def _partitions(model: str, names: str, words: str) -> Partitions:
    """Return the model of this process, loaded once for all its partitions."""
    found: Sequence[str] = json.loads(names)
    return Partitions(model, found, **json.loads(words))
