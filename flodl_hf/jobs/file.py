"""`predict_file` writes a file of results, `encode_file` a file of vectors.

This module determines rank, model and input; `run` processes the rows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

from flodl.errors import DataError, nearest, printable
from flodl.garbage_collection import gc_frozen
from flodl_hf.checkpoints.folders import path_fault
from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import COUNTED, TRUNCATED
from flodl_hf.inference.quantize import PRECISIONS
from flodl_hf.inference.vector_files import SUFFIXES
from flodl_hf.jobs.columns import ColumnArgs
from flodl_hf.jobs.parts import Parts
from flodl_hf.jobs.plan import make_plan
from flodl_hf.jobs.ranks import Heartbeat, LostRank, Rank, Workers, device_names
from flodl_hf.jobs.run import FileResult, Progress, Run
from flodl_hf.jobs.tasks import VECTOR
from flodl_hf.jobs.write import output_format
from flodl_hf.tokenization.readers.files import open_rows
from flodl_hf.tokenization.readers.rows import STDIN
from flodl_hf.workers.messages import Stream

OnError = Literal["stop", "skip", "null"]


def predict_file(
    model: Any,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    header: bool | None = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    question: str | None = None,
    question_column: str | None = None,
    context_column: str | None = None,
    query: str | None = None,
    query_column: str | None = None,
    id_column: str | None = None,
    keep: str | Sequence[str] | None = None,
    on_error: OnError = "stop",
    part_rows: int | None = None,
    overwrite: bool = False,
    devices: int | str | Sequence[str] | None = None,
    head: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    weights: Literal["memory", "disk"] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Any,
) -> FileResult:
    """Predict every row of a file, write the results to another file, and return a summary.

    Memory use does not depend on the size of the file. Finished parts are stored in a folder next to ``target``. The
    same call resumes after any interruption and produces the same output as an uninterrupted run.

    Under torchrun, or if RANK and WORLD_SIZE are set, each process predicts its share of the parts, and rank 0 writes
    the file.

    Args:
        model: a model, or its folder or Hub name.
        source: a CSV, TSV, JSON lines, text, Parquet or Arrow file, optionally compressed (``.gz``); ``"-"`` is
            standard input.
        target: a ``.jsonl``, ``.csv``, ``.tsv``, ``.parquet`` or ``.arrow`` file.
        format: format of ``source``; default: by its suffix, and text for standard input.
        header: whether a CSV or TSV file has a header; None detects it.
        text_column: column of texts; default: the first one with a usual name.
        pair_column: column of second texts, for models of pairs.
        question: one question for all texts.
        question_column: column of questions.
        context_column: column of contexts.
        query: a query; each text gets its relevance, by a model with one label.
        query_column: column of queries.
        id_column: a column that is kept, as the first one.
        keep: "all", "none", or the columns to keep; default: "all" unless ``id_column`` is given.
        on_error: rows that cannot be predicted: "stop", "skip", or write with "null" results and a column ``error``.
        part_rows: rows of a part; None is 2,048 on a CPU and 32,768 on CUDA.
        overwrite: remove the parts and the output of an earlier run.
        devices: number of processes on this host, the device of each, or "auto" for all devices; ``model`` must be a
            folder or name.
        head: task of a model that is given by name; "auto" is the task of its folder.
        device: device on which to load it.
        revision: branch, tag or commit on the Hub.
        local_files_only: open no connection.
        weights: for a model that is given by name: "disk" reads it layer by layer, "memory" loads it; None decides by
            the available memory.
        on_progress: called several times a second.
        should_stop: called after each part; True ends the run.
        **options: options of the model's method: ``top_k``, ``long_texts``, ``threshold``, ``aggregation``,
            ``no_answer``, ...

    Raises:
        DataError: the input or a row of it is invalid; ``rows`` lists the rows.
        PredictError: parts of another job or an output exist, the disk is full, or an option is invalid.
    """
    job = {k: v for k, v in locals().items() if k not in (*_OWN, "options")} | options
    rank = Rank() if devices is not None else Rank.from_env()
    path, out = Path(source), Path(target)
    kind = output_format(out)
    names = device_names(devices) if devices is not None else []
    _check(path, out, on_error, part_rows, rank, len(names))
    if len(names) > 1:
        if not isinstance(model, (str, os.PathLike)):
            raise PredictError("predict_file: devices need a model's folder or name, which every process loads itself")
        rank, device = Rank(0, len(names), 0), names[0]
    elif names:
        device = names[0]
    parts = Parts(out, kind)
    if overwrite and rank.rank == 0:
        parts.clear()
    run: Run | None = None
    workers: Workers | None = None
    with ExitStack() as stack:
        if isinstance(model, (str, os.PathLike)):
            from flodl_hf.checkpoints.folders import expect_tokenizer
            from flodl_hf.heads.auto import load

            expect_tokenizer(model, "predict_file")
            if len(names) > 1:  # they load the model at the same time
                paths = {name: os.fspath(job[name]) for name in ("model", "source", "target")}
                workers = Workers({**job, **paths}, names)
                stack.callback(workers.stop)
            hub = {"revision": revision, "local_files_only": local_files_only}
            model = load(str(model), head=head, device=device or rank.device, weights=weights, **hub)
        model._ready("predict_file", untrained=bool(options.get("untrained")))
        columns = ColumnArgs(**{name: job[name] for name in ColumnArgs.__dataclass_fields__})
        heart = Heartbeat(parts, rank, lambda: {} if run is None else run.figures())
        if rank.rank:
            stack.enter_context(heart)
            if not heart.join(should_stop or (lambda: False)):
                return FileResult(out)
        begun = parts.known() if rank.rank or parts.has_parts() else None
        size = (begun or {}).get("part_rows", part_rows)
        if part_rows not in (None, size):
            warnings.warn(f"{out}: its parts were begun with {size} rows each; part_rows={part_rows} has no effect")
        rows = open_rows(source, format, header)
        stack.callback(rows.close)
        plan = make_plan(model, rows, path, format, kind, parts, columns, on_error, size, options)
        if rank.rank:
            parts.expect(plan.identity)
        else:
            if rank.world == 1:
                stack.callback(parts.drop_if_empty)
            parts.begin(plan.identity, plan.part_rows, replace=overwrite)
        run = Run(
            plan, rank, parts, plan.open(rows), on_progress=on_progress, should_stop=should_stop,
            workers=workers, wait_for_ranks=heart.wait_for_ranks if workers is None else None,
        )  # fmt: skip
        stack.callback(COUNTED.reset, COUNTED.set(run.count))
        stack.callback(TRUNCATED.reset, TRUNCATED.set(run.count_truncated))
        if not rank.rank:
            stack.enter_context(heart)
        stack.enter_context(gc_frozen())
        try:
            result = run.go()
        except LostRank as lost:
            raise lost.fault from None
        if workers is not None:
            workers.stop(finish=not result.is_whole)
    if result.truncated and result.is_whole:
        how = "pairs of long texts, the longer text first, as transformers does"
        if options.get("truncate") or options.get("long_texts") == "truncate":
            how = "texts to the model's maximum length, as long_texts='truncate' requests"
        if plan.answerer.columns.keys() & {"embedding", VECTOR}:
            how = "texts to the model's maximum length, as sentence-transformers does. long_texts='windows' reads "
            how += "whole texts in windows instead"
        warnings.warn(f"{source}: truncated {result.truncated:,} of {result.rows:,} {how}.", stacklevel=2)
    return result


def encode_file(
    model: Any,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    store: str = "float32",
    keep: str | Sequence[str] | None = None,
    **how: Any,
) -> FileResult:
    """Write the vector of every row's text, as ``encode`` returns it, and return a summary.

    Like `predict_file`, it uses bounded memory, and the same call resumes after any interruption.

    Args:
        model: a model, or its folder or Hub name; several ``devices`` need a folder or name.
        source: as for `predict_file`.
        target: a ``.npy`` file with vectors only; or ``.parquet``, ``.arrow`` or ``.jsonl`` with a column "vector".
        store: type of the stored numbers, one of `flodl_hf.inference.quantize.PRECISIONS`. "int8" and "uint8" have 255
            steps from the minimum to the maximum of each feature in the whole file; these ranges are written to
            ``TARGET.ranges.npy``.
        keep: columns to keep; default: "all" if the format has columns.
        **how: options of ``encode`` (``truncate_dim``, ``prompt``, ``prompt_name``, ``task``, ``precision`` ...) and of
            `predict_file` (``text_column``, ``on_error``, ``part_rows``, ``overwrite``, ``devices``, ``device`` ...).

    Raises:
        DataError: the input or a row of it is invalid, or the output's format does not support vectors.
        PredictError: as for `predict_file`.
    """
    out = Path(target)
    if out.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{out}: the suffix {out.suffix or '(none)'!r} does not support vectors, expected {', '.join(SUFFIXES)}",
            path=str(out),
        )
    if store not in PRECISIONS:
        raise PredictError(
            f"encode_file: store is {store!r}{nearest(store, PRECISIONS)}; expected one of {', '.join(PRECISIONS)}"
        )
    if not isinstance(model, (str, os.PathLike)) and getattr(model, "head", None) != "base":
        raise PredictError("encode_file: the model has no vectors. Load it as an encoder (AutoModel, head='base').")
    kept = "none" if keep is None and out.suffix.lower() == ".npy" else keep
    return predict_file(model, source, out, keep=kept, head="base", store=store, **how)


_OWN = ("devices", "device", "overwrite", "on_progress", "should_stop", "job")


def _check(path: Path, out: Path, on_error: str, part_rows: int | None, rank: Rank, processes: int) -> None:
    """Raise for arguments that are invalid for every model."""
    faults = []
    if on_error not in ("stop", "skip", "null"):
        faults.append(f"on_error is {on_error!r}; expected stop, skip or null")
    if part_rows is not None and part_rows < 1:
        faults.append(f"part_rows is {part_rows}; expected at least 1")
    if str(path) == STDIN and (rank.world > 1 or processes > 1):
        faults.append("standard input can be read by only one process. Write it to a file first")
    if fault := path_fault(out):
        faults.append(f"{printable(str(out), 400)} cannot be written: {fault}. Select another output")
    elif os.path.exists(path) and os.path.exists(out) and path.samefile(out):
        faults.append(f"input and output are the same file, {printable(str(out), 400)}. Select another output")
    if faults:
        raise PredictError(f"predict_file: {'; '.join(faults)}", problems=faults)


def serve(stream: Stream) -> None:
    """Predict this rank's parts of a job; the connection's end is the end of rank 0.

    Args:
        stream: connection to rank 0, which sends the job, and then a message to stop after the current part.
    """
    received, stop = stream.read(), Event()
    if received is None:
        return

    def listen() -> None:
        if stream.read() is None:
            os._exit(1)
        stop.set()

    Thread(target=listen, name="flodl-hf-stop", daemon=True).start()
    job = received[0]
    predict_file(job.pop("model"), job.pop("source"), job.pop("target"), should_stop=stop.is_set, **job)
