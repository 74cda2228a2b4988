"""Decisions before the first row: columns, task, writer, and identity of the job."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.errors import DataError, printable
from flodl_hf.jobs.columns import ColumnArgs, choose_columns, colliding_columns, is_doubtful, item_of, renamed
from flodl_hf.jobs.identity import input_identity, model_identity, option_identity
from flodl_hf.jobs.parts import Parts
from flodl_hf.jobs.tasks import Answerer, answerer_for, method_of, with_old_names
from flodl_hf.jobs.vectors import vector_writer
from flodl_hf.jobs.write import Writer
from flodl_hf.tokenization.readers.files import format_of
from flodl_hf.tokenization.readers.rows import STDIN, Row, Rows

# Rows of a part: few, so that little is lost by an interruption, but enough to occupy the device.
CPU_PART = 2048
CUDA_PART = 32_768


@dataclass(frozen=True)
class Plan:
    """Decisions before the first row."""

    model: Any
    source: Path
    answerer: Answerer
    writer: Writer
    rename: Mapping[str, str]
    item: Callable[[Mapping[str, Any]], Any]
    on_error: str
    part_rows: int
    columns: tuple[str, ...] | None
    read: tuple[str, ...]
    identity: dict[str, Any]

    def open(self, rows: Rows) -> Rows:
        """Request the required columns of ``rows``, and return it."""
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
    args: ColumnArgs,
    on_error: str,
    part_rows: int | None,
    options: Mapping[str, Any],
) -> Plan:
    """Return the plan of a job.

    Raises:
        DataError: columns are ambiguous, or have the name of a result column.
        PredictError: the model has no such option.
    """
    from flodl_hf.checkpoints.system import own_version

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
        choice = choose_columns(model.head, names, args, own)
        if rows.guessed_header and is_doubtful(names, args):
            warnings.warn(
                f"{source}: the first line, {printable(names[0], 60)}, is used as a header. If it is a text, set "
                "header=False; otherwise set text_column= to its name.",
                stacklevel=3,
            )
    else:
        # An empty file has no columns; the output contains the result columns only.
        choice = choose_columns(model.head, ["text", "question"], ColumnArgs(query=args.query, keep="none"), own)
    caller = "predict_file" if options.get("store") is None else "encode_file"
    options = with_old_names(model, choice.task, options, caller)
    answerer = answerer_for(model, choice, options, caller)
    with_errors = on_error == "null"

    # Explicitly kept columns must not collide with result columns; if all are kept, colliding ones are renamed.
    keeps_all = args.keep == "all" or (args.keep is None and args.id_column is None)
    taken = (*answerer.columns, *(["error"] if with_errors else [])) if keeps_all else ()
    rename = colliding_columns(names, taken)
    new_name = {name: rename.get(name, name) for name in (*names, *(rows.types or ()))}
    writer = vector_writer(
        kind,
        None if choice.keep is None else tuple(new_name[name] for name in choice.keep),
        answerer.columns,
        parts.target,
        with_errors=with_errors,
        lead=None if args.id_column is None else new_name.get(args.id_column, args.id_column),
        names=[new_name[name] for name in names],
        types=None if rows.types is None else {new_name[name]: kind for name, kind in rows.types.items()},
        first=[renamed(row, rename) for row in first],
    )
    # Tables are read column by column.
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
    # As after reading the manifest, so that equal values compare equal.
    identity = json.loads(json.dumps(identity))
    return Plan(model, source, answerer, writer, rename, item_of(choice), on_error, size, wanted, choice.read, identity)
