"""All that is decided before the first row is answered: columns, task, writer, and what the run is of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.errors import DataError, printable
from flodl_hf.jobs.columns import ColumnArgs, choose_columns, is_doubtful, item_of
from flodl_hf.jobs.identity import input_identity, model_identity, option_identity
from flodl_hf.jobs.parts import Parts
from flodl_hf.jobs.renamed import renamed_writer
from flodl_hf.jobs.tasks import Answerer, answerer_for, method_of
from flodl_hf.jobs.vectors import vector_writer
from flodl_hf.jobs.write import Writer
from flodl_hf.readers.rows import STDIN, Row, Rows, format_of

__all__ = ["Plan", "make_plan"]

# Rows of a part: few enough that little is lost when a run is ended, many enough to fill a device.
CPU_PART = 2048
CUDA_PART = 32_768


@dataclass(frozen=True)
class Plan:
    """All that is decided before the first row is answered."""

    model: Any
    source: Path
    answerer: Answerer
    writer: Writer
    item: Callable[[Mapping[str, Any]], Any]
    on_error: str
    part_rows: int
    columns: tuple[str, ...] | None
    read: tuple[str, ...]
    identity: dict[str, Any]

    def open(self, rows: Rows) -> Rows:
        """Return ``rows`` after saying which columns will be asked for."""
        if self.columns is not None:
            rows.want(list(self.columns))
        return rows


def make_plan(
    model: Any,
    rows: Rows,
    source: Path,
    format: str | None,
    kind: str,
    parts: Parts,
    said: ColumnArgs,
    on_error: str,
    part_rows: int | None,
    options: Mapping[str, Any],
) -> Plan:
    """Return the plan of a run.

    Raises:
        DataError: the columns cannot be told, or clash with those of the answer.
        PredictError: the model has no such option.
    """
    from flodl_hf.checkpoints.version import own_version

    size = part_rows or (CUDA_PART if model.device.type == "cuda" else CPU_PART)
    first: list[Row] = []
    names, own = rows.names, rows.names is None
    if names is None or (kind in ("parquet", "arrow") and rows.types is None):
        first = rows.peek(size)
    if names is None:
        names = list(dict.fromkeys(name for row in first if row.values is not None for name in row.values))
        if first and not names:
            raise DataError(f"{source}: {first[0].place}: {first[0].fault or 'no columns'}", problems=[first[0].fault])
    if names:
        choice = choose_columns(model.head, names, said, own)
        if rows.guessed_header and is_doubtful(names, said):
            warnings.warn(
                f"{source}: the first line, {printable(names[0], 60)}, is taken for a header; if it is a text, say "
                "header=False; if it is none, text_column= with its name",
                stacklevel=3,
            )
    else:
        # An empty file has nothing to tell columns by; the answer's alone make the empty output.
        choice = choose_columns(model.head, ["text", "question"], ColumnArgs(query=said.query, keep="none"), own)
    answerer = answerer_for(model, choice, options)
    with_errors = on_error == "null"

    def make(keep: tuple[str, ...] | None, **columns: Any) -> Writer:
        return vector_writer(kind, keep, answerer.columns, parts.target, with_errors=with_errors, **columns)

    # Who names columns to keep is told where they clash; where all are kept, none is lost.
    everything = said.keep == "all" or (said.keep is None and said.id_column is None)
    taken = (*answerer.columns, *(["error"] if with_errors else [])) if everything else ()
    writer = renamed_writer(
        make, taken, keep=choice.keep, lead=said.id_column, names=names, types=rows.types, first=first
    )  # fmt: skip
    # Tables are read by column.
    wanted = None if rows.types is None else tuple(dict.fromkeys((*choice.read, *(choice.keep or ()))))
    method = method_of(model, choice.task, stored="store" in options)
    identity = {
        "version": own_version(),
        "input": {"stream": STDIN} if str(source) == STDIN else input_identity(source),
        "model": model_identity(model, options.get("task")),
        "options": {
            **choice.to_dict(), **option_identity(options, method, model.run_options),
            "read_as": format_of(source, format), "header": rows.has_header, "columns": list(names),
            "format": kind, "on_error": on_error,
        },
    }  # fmt: skip
    # As it is read back from the folder, so that equal values compare equal.
    identity = json.loads(json.dumps(identity))
    return Plan(model, source, answerer, writer, item_of(choice), on_error, size, wanted, choice.read, identity)
