"""`predict_file`: a file of texts to a file of answers; `encode_file`: to a file of vectors.

Decides what a call means: which process this is, which model, which input. How the rows are answered is `run`'s.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from flodl.errors import DataError, nearest, printable
from flodl.garbage_collection import gc_frozen
from flodl_hf.errors import PredictError
from flodl_hf.inference.quantize import PRECISIONS
from flodl_hf.inference.vector_files import SUFFIXES
from flodl_hf.jobs.columns import ColumnArgs
from flodl_hf.jobs.counting import counting_tokens
from flodl_hf.jobs.parts import Parts
from flodl_hf.jobs.plan import make_plan
from flodl_hf.jobs.ranks import Heartbeat, LostRank, Rank, Workers, device_names
from flodl_hf.jobs.results import FileResult, Progress
from flodl_hf.jobs.run import Run
from flodl_hf.jobs.tasks import VECTOR
from flodl_hf.jobs.write import output_format
from flodl_hf.readers.path_checks import path_fault
from flodl_hf.readers.rows import STDIN, open_rows

__all__ = ["encode_file", "predict_file"]

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
    restart: bool = False,
    devices: int | str | Sequence[str] | None = None,
    head: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    weights: Literal["memory", "disk"] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    parent: int | None = None,
    **options: Any,
) -> FileResult:
    """Answer every row of a file into another file, and return what came of it.

    Memory does not grow with the file. Finished parts are kept in a folder beside ``target``, so the same call goes on
    after any kind of end, and writes what an uninterrupted one would have written.

    Under torchrun, or wherever RANK and WORLD_SIZE are set, each process does its share of the parts, and rank 0
    writes the file.

    Args:
        model: a model, or the folder or Hub name of one.
        source: a CSV, TSV, JSON lines, text, Parquet or Arrow file, also packed (``.gz``); ``"-"`` is standard input.
        target: a ``.jsonl``, ``.csv``, ``.tsv``, ``.parquet`` or ``.arrow`` file.
        format: what ``source`` is; by default its suffix says, and standard input is text.
        header: whether a CSV or TSV file has a header; None decides by its looks.
        text_column: the column of texts; by default the first with a usual name.
        pair_column: the column of second texts, for models of pairs.
        question: one question to all texts.
        question_column: the column of questions.
        context_column: the column of the texts that hold the answers.
        query: score each text by how well it fits this query, with a model of one label.
        query_column: the column of queries.
        id_column: a column that is kept, and comes first.
        keep: "all", "none", or the columns that go on to the output; "all" unless there is an ``id_column``.
        on_error: what becomes of a row that cannot be answered: "stop", "skip" it, or write it with "null" answers and
            a column ``error``.
        part_rows: rows of a part; None takes 2,048 on a CPU and 32,768 on CUDA.
        restart: throw away what an earlier run left, output included.
        devices: how many processes on this host, the device of each, or "auto" for all; ``model`` is then a name.
        head: the task, where the model is a name; "auto" takes what it was written for.
        device: where to load it.
        revision: branch, tag or commit on the Hub.
        local_files_only: open no connection.
        weights: where the model is a name: "disk" reads it layer by layer from its files, "memory" holds it; None as
            there is room.
        on_progress: called some times a second.
        should_stop: asked after each part; True ends the run with what is done.
        parent: end with this process; for ranks that another one started.
        **options: of the model's method: ``top_k``, ``strict``, ``threshold``, ``aggregation``, ``no_answer``, ...

    Raises:
        DataError: the input or a row of it is faulty; ``rows`` lists the rows.
        PredictError: parts of another run, an output that is there, a full disk, an option that makes no sense.
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
    if restart and rank.rank == 0:
        parts.clear()
    if isinstance(model, (str, os.PathLike)):
        from flodl_hf.auto import load
        from flodl_hf.checkpoints.hub.folders import expect_tokenizer

        expect_tokenizer(model, "predict_file")
        hub = {"revision": revision, "local_files_only": local_files_only}
        model = load(str(model), head=head, device=device or rank.device, weights=weights, **hub)
    model.ready("predict_file", untrained=bool(options.get("untrained")))
    said = ColumnArgs(**{name: job[name] for name in ColumnArgs.__dataclass_fields__})
    run: Run | None = None
    with ExitStack() as stack:
        heart = Heartbeat(parts, rank, lambda: {} if run is None else run.figures(), parent)
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
        plan = make_plan(model, rows, path, format, kind, parts, said, on_error, size, options)
        if rank.rank:
            parts.expect(plan.identity)
        else:
            if rank.world == 1:
                stack.callback(parts.drop_if_empty)
            parts.begin(plan.identity, plan.part_rows, replace=restart)
        workers: Workers | None = None
        if len(names) > 1:
            paths = {name: os.fspath(job[name]) for name in ("model", "source", "target")}
            workers = Workers({**job, **paths}, names)
            stack.callback(workers.stop)
        again = None if str(path) == STDIN else lambda: plan.open(open_rows(source, format, header))
        run = Run(
            plan, rank, parts, plan.open(rows), reopen=again, on_progress=on_progress, should_stop=should_stop,
            workers=workers, wait_for_ranks=heart.wait_for_ranks if workers is None else None,
        )  # fmt: skip
        stack.enter_context(counting_tokens(run.count, run.count_truncated))
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
        how = "pairs whose texts are both long, the longer text first, as transformers does"
        if plan.answerer.columns.keys() & {"embedding", VECTOR}:
            how = "texts to the length that the model takes, as sentence-transformers does. --windows (windows=True) "
            how += "reads all of a text in windows instead"
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
    """Write the vector of every row's text, as ``encode`` makes it, and return what came of it.

    As `predict_file`: memory does not grow with the file, and the same call goes on after any kind of end.

    Args:
        model: a model, or the folder or Hub name of one; several ``devices`` need a name.
        source: as in `predict_file`.
        target: a ``.npy`` file, which holds vectors alone; or ``.parquet``, ``.arrow`` or ``.jsonl``, where they are in
            the column "vector".
        store: how numbers are kept, one of `flodl_hf.inference.quantize.PRECISIONS`. "int8" and "uint8" count in 255
            steps from the least to the greatest number of each feature in the whole file; these ranges are written
            beside it, to ``TARGET.ranges.npy``.
        keep: columns that go on to the output; "all" where the format has columns.
        **how: of ``encode`` (``truncate_dim``, ``prompt``, ``prompt_name``, ``task``, ``precision`` ...), and of
            `predict_file` (``text_column``, ``on_error``, ``part_rows``, ``restart``, ``devices``, ``device`` ...).

    Raises:
        DataError: the input or a row of it is faulty, or the output's format holds no vectors.
        PredictError: as `predict_file`.
    """
    out = Path(target)
    if out.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{out}: the suffix {out.suffix or '(none)'!r} names no format of vectors; expected {', '.join(SUFFIXES)}",
            path=str(out),
        )
    if store not in PRECISIONS:
        raise PredictError(
            f"encode_file: store is {store!r}{nearest(store, PRECISIONS)}; expected one of {', '.join(PRECISIONS)}"
        )
    if not isinstance(model, (str, os.PathLike)) and getattr(model, "head", None) != "base":
        raise PredictError("encode_file: the model makes no vectors; load it as an encoder (AutoModel, head='base')")
    kept = "none" if keep is None and out.suffix.lower() == ".npy" else keep
    return predict_file(model, source, out, keep=kept, head="base", store=store, **how)


_OWN = ("devices", "device", "restart", "on_progress", "should_stop", "parent", "job")


def _check(path: Path, out: Path, on_error: str, part_rows: int | None, rank: Rank, processes: int) -> None:
    """Refuse what makes no sense whatever the model is."""
    faults = []
    if on_error not in ("stop", "skip", "null"):
        faults.append(f"on_error is {on_error!r}; expected stop, skip or null")
    if part_rows is not None and part_rows < 1:
        faults.append(f"part_rows is {part_rows}; expected at least 1")
    if str(path) == STDIN and (rank.world > 1 or processes > 1):
        faults.append("standard input can be read by one process only; write it to a file first")
    if fault := path_fault(out):
        faults.append(f"no file can be written to {printable(str(out), 400)}, because {fault}; name another output")
    elif os.path.exists(path) and os.path.exists(out) and path.samefile(out):
        faults.append(f"input and output are one file, {printable(str(out), 400)}; name another output")
    if faults:
        raise PredictError(f"predict_file: {'; '.join(faults)}", problems=faults)
