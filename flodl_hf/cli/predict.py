"""``flodl-hf predict``: texts in, answers out, for whatever task the checkpoint was written for.

Texts of the command line and of standard input are answered here; a file of them (``--in``, ``--out``) is
`flodl_hf.jobs`'s.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flodl.errors import ConfigError, printable
from flodl_hf.checkpoints.weights.prefetch import prefetching
from flodl_hf.cli import STARTED
from flodl_hf.cli import options as shared
from flodl_hf.cli.command import StrictCommand
from flodl_hf.cli.options import AGGREGATIONS, FILE, RUN, argument, chosen, option, with_parameters
from flodl_hf.cli.shared import (
    as_json,
    check_places,
    device_said,
    emit_json,
    plain,
    progress,
    reporting,
    say,
    say_timing,
    stdin_lines,
    tell,
)
from flodl_hf.errors import PredictError
from flodl_hf.families.schema.tasks import task_named

if TYPE_CHECKING:
    from flodl_hf.jobs import FileResult, Progress

MOST_DRAWN = 1_000
"""Most answers that --html draws."""
ANSWERS = "Answers"
_THRESHOLD = "Least score of a label, for classes; tuned for the thresholds stored in the model."
_HTML = "Also write the answers as a page, drawn as notebooks draw them; at most 1,000."
_OUT = "File to write: .jsonl, .csv, .tsv or .parquet; - is standard output."
TEXT = argument("text", list[str] | None, "TEXT", "Texts; none reads lines from stdin.", None)
QUESTION = option("question", str, "The question, for question answering.", "--question", "-q", panel=ANSWERS)
QUERY = option("query", str, "Order texts by how well they fit this, with a model of one label.", panel=ANSWERS)
OPTIONS = (
    option("top_k", int, "Most answers for each text.", min=1, panel=ANSWERS),
    option("threshold", str, _THRESHOLD, metavar="NUMBER|tuned", panel=ANSWERS),
    option("aggregation", AGGREGATIONS, "What carries an entity's label.", panel=ANSWERS),
    option("no_answer", bool, "Allow 'there is no answer', for question answering.", default=False,
           panel=ANSWERS),
    shared.LONG,
    shared.PRECISION,
    shared.BATCH_SIZE,
    option("batch_invariant", bool, "Let an answer depend on its text alone, bit for bit; slower.", "--batch-invariant",
           default=False, panel=RUN),
)  # fmt: skip
"""Keywords of the model's method."""
_ALL = ("precision", "batch_size", "batch_invariant", "long_texts")
"""Options of all tasks."""
IN = shared.SOURCE.replace(default=None)
OUT = option("out", Path, _OUT, "--out", "-o", panel=FILE)
FILES = (
    shared.FORMAT,
    option(
        "header", bool, "Whether a CSV or TSV file has one; by default its looks.", "--header/--no-header", panel=FILE
    ),
    shared.TEXT_COLUMN,
    option("pair_column", str, "Column of second texts, for models of pairs.", panel=FILE),
    option("question_column", str, "Column of questions.", panel=FILE),
    option("context_column", str, "Column of texts that contain the answers.", panel=FILE),
    option("query_column", str, "Column of queries.", panel=FILE),
    option("id_column", str, "Column that is kept, and comes first.", panel=FILE),
    option("keep", str, "Columns to keep: all, none, or a,b; all unless there is an --id-column.", panel=FILE),
    shared.ON_ERRORS,
    shared.PART_ROWS,
    shared.OVERWRITE,
    shared.DEVICES,
)
"""Keywords of `flodl_hf.jobs.predict_file` in addition to those of `OPTIONS`."""
LOADING = (shared.WEIGHT, shared.REVISION, shared.LOCAL)


class Command(StrictCommand):
    """The command, with a short help."""

    rare = frozenset((
        "batch_invariant", "batch_size", "weights", "header", "format", "pair_column", "question_column",
        "context_column", "query_column", "page", "part_rows", "revision", "keep",
    ))  # fmt: skip


@reporting
@with_parameters((
    shared.MODEL, TEXT, QUESTION, QUERY, shared.HEAD, *OPTIONS, shared.WEIGHT, IN, OUT, *FILES,
    option("page", Path, _HTML, "--html", panel=ANSWERS), shared.DEVICE, shared.REVISION, shared.LOCAL, shared.JSON,
    shared.TIMING, shared.HELP_ALL,
))  # fmt: skip
def command(
    model: str,
    text: list[str] | None,
    question: str | None,
    query: str | None,
    head: str,
    source: str | None,
    out: Path | None,
    page: Path | None,
    device: str,
    json_output: bool,
    timing: bool,
    **values: Any,
) -> None:
    """Predict from texts, from the lines of standard input, or from a file (--in) to a file (--out).

    The checkpoint sets the output: labels, entities, an answer (--question), the words for [MASK], an embedding, or an
    order (--query). A file may have any number of rows; the same command resumes an interrupted run.
    """
    options, files, loading = (chosen(values, rows) for rows in (OPTIONS, FILES, LOADING))
    if "threshold" in options:
        with suppress(ValueError):  # "tuned" stays a word, and other words are refused by `predict`
            options["threshold"] = float(options["threshold"])
    if page is not None and (source is not None or out is not None):
        _misused("--html draws the answers to texts; it does not support --in and --out")
    if source is not None and out is not None and not text:
        check_places("prediction", {"model": model, "source": source, "out": out})
        keywords = {**files, "question": question, "query": query, "head": head, **options, **loading}
        process_file("predict_file", model, source, out, keywords, device, json_output, timing=timing)
        return
    if source is not None or out is not None:
        _misused(
            "--in and --out cannot be combined with text arguments"
            if text
            else f"--in needs --out FILE as well, or --out - for standard output: --in {source} --out -"
            if source is not None
            else "--out needs --in FILE as well; standard input is --in - --format text"
        )
    if files:
        named = [f"--{name.replace('_', '-')}" for name in files]
        _misused(f"{', '.join(named)}: needs --in FILE and --out FILE")
    check_places("prediction", {"model": model, "text": text})
    if text is None and sys.stdin.isatty():
        say("reading texts from standard input, one a line (Ctrl-D ends)")
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        what = "is a folder; expected a file" if page.is_dir() else "its folder does not exist; make it first"
        raise ConfigError(f"--html: {page}: {what}", problems=["html"])
    with prefetching(model, {"device": device, "weights": values["weights"]}):
        imported = _import_torch() if timing else 0.0
        from flodl_hf.checkpoints.folders import expect_tokenizer
        from flodl_hf.heads.auto import load

        expect_tokenizer(model, "predict")
        loaded = load(model, head=head, **loading, device=device_said(device))
    ready = time.perf_counter()
    texts = iter(text) if text is not None else stdin_lines()
    if query is not None:
        answers = ranked(loaded, list(texts), query, options)
    else:
        answers = answer(loaded, texts, question=question, options=options)
    drawn = _told(answers, json_output, most=0 if page is None else MOST_DRAWN)
    if timing:
        say_timing({"import": imported - STARTED, "load": ready - imported, "predict": time.perf_counter() - ready})
    if page is not None:
        from flodl_hf.training.report.answers import write_page

        write_page(page, model, drawn)
        say(f"drawn in {page}")


def _import_torch() -> float:
    """Import torch while the weights are read, and return the time of ``time.perf_counter()``."""
    import torch  # noqa: F401

    return time.perf_counter()


def _told(answers: Iterator[tuple[str, Any]], json_output: bool, most: int) -> list[tuple[str, Any]]:
    """Print each text with its answer; return the first ``most`` of them."""
    kept: list[tuple[str, Any]] = []
    answered = False
    for given, found in answers:
        answered = True
        if len(kept) < most:
            kept.append((given, found))
        if json_output:
            # One object a line, so that any number of texts can be piped on.
            line = {"text": given, "result": plain(found)}
            line |= {"empty": True} if getattr(found, "empty", False) else {}
            typer.echo(as_json(line))
        else:
            tell(given, bold=True)
            tell(show(found))
    if not answered:
        say("no texts were given: as arguments, or one a line on standard input")
    return kept


def _misused(text: str) -> None:
    say(text)
    raise typer.Exit(2)


# ---- texts ---------------------------------------------------------------------------------------------


def answer(
    model: Any, texts: Iterator[str], *, question: str | None, options: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield each text with its answer, some at a time."""
    from flodl_hf.inference.pipeline import WINDOW

    method = getattr(model, task_named(model.head).methods[0])

    def results(chunk: list[str]) -> list[Any]:
        if model.head == "question_answering":
            if question is None:
                raise PredictError("predict: this checkpoint answers questions; give one with --question")
            return method([(question, context) for context in chunk], **options)
        found = method(chunk, **options)
        # The shortest numbers that read back as the same 32-bit ones.
        return [[float(str(x)) for x in row] for row in found.float().numpy()] if model.head == "base" else found

    _known(model, {**options, **({} if question is None else {"question": question})})
    size = 1 if sys.stdin.isatty() else WINDOW
    while chunk := list(islice(texts, size)):
        yield from zip(chunk, results(chunk), strict=True)


def _known(model: Any, options: dict[str, Any]) -> None:
    takes = {*task_named(model.head).options, *_ALL}
    if wrong := [f"--{name.replace('_', '-')}" for name in options if name not in takes]:
        raise PredictError(f"predict: this checkpoint ({model.head}) has no use for {', '.join(wrong)}", problems=wrong)


def ranked(model: Any, texts: list[str], query: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the texts that fit the query, best first."""
    if not hasattr(model, "rerank"):
        raise PredictError("predict: --query needs a checkpoint that classifies texts, with one label")
    if wrong := [name for name in options if name not in (*task_named("rank").options, *_ALL)]:
        raise PredictError(f"predict: --query has no use for {', '.join(wrong)}", problems=wrong)
    for found in model.rerank(query, texts, **options):
        yield texts[found.index], [found]


def show(result: Any) -> str:
    """Return an answer as indented lines."""
    lines = ["  (empty)"] if getattr(result, "empty", False) else []
    if result and isinstance(result[0], float):
        more = f" ... ({len(result)} numbers)" if len(result) > 8 else ""
        return "  " + " ".join(f"{x:.4f}" for x in result[:8]) + more
    for item in result:
        if isinstance(item, list):
            lines += ["  mask:", *("  " + line for line in show(item).splitlines())]
        elif hasattr(item, "label") and hasattr(item, "start"):
            lines.append(f"  {item.label:<12} {item.score:.4f}  {item.word}  [{item.start}:{item.end}]")
        elif hasattr(item, "label"):
            note = f"  ({item.windows} windows)" if item.windows > 1 else ""
            lines.append(f"  {item.label:<12} {item.score:.4f}{note}")
        elif hasattr(item, "index"):
            lines.append(f"  {item.score:.4f}  (text {item.index + 1})")
        elif hasattr(item, "token"):
            lines.append(f"  {item.token:<12} {item.score:.4f}  {item.sequence}")
        elif item.no_answer:
            lines.append(f"  (no answer)  {item.score:.4f}")
        else:
            lines.append(f"  {item.text}  {item.score:.4f}  [{item.start}:{item.end}]")
    return "\n".join(lines) or "  (nothing found)"


# ---- files ---------------------------------------------------------------------------------------------


def process_file(
    name: str,
    model: str,
    source: str,
    out: Path,
    options: dict[str, Any],
    device: str,
    json_output: bool,
    *,
    doing: str = "predicting",
    empty: str = "they are answered as empty texts",
    timing: bool = False,
) -> None:
    """Process a file into a file or, as JSON lines, onto standard output; nothing is stored there to resume from.

    Args:
        name: function of `flodl_hf.jobs`.
        model: the model.
        source: the input.
        out: the output; ``-`` is standard output.
        options: keywords of the function.
        device: device of the model, unless ``options`` contains ``devices``.
        json_output: print the result as JSON.
        doing: text of the progress bar.
        empty: what happens to empty texts.
        timing: print the seconds of each phase.
    """
    one = "devices" not in options
    with prefetching(model, {"device": device if one else None, "weights": options.get("weights")}):
        imported = _import_torch() if timing else 0.0
        if one:
            options = {**options, "device": device_said(device)}
        from flodl_hf import jobs

        run = partial(_run_file, getattr(jobs, name), model, source, options=options, doing=doing, empty=empty)
        if str(out) != "-":
            result = run(out, json_output=json_output)
        else:
            with tempfile.TemporaryDirectory(prefix="flodl-hf-") as folder:
                target = Path(folder) / "answers.jsonl"
                with redirect_stdout(sys.stderr):
                    result = run(target, json_output=False, called="standard output")
                with target.open("rb") as answers:
                    shutil.copyfileobj(answers, sys.stdout.buffer)
                sys.stdout.buffer.flush()
    if timing:
        load_s = time.perf_counter() - imported - result.seconds
        say_timing({"import": imported - STARTED, "load": load_s, "predict": result.seconds})


def _run_file(
    run: Callable[..., FileResult],
    model: str,
    source: str,
    out: Path,
    *,
    options: dict[str, Any],
    json_output: bool,
    doing: str,
    empty: str,
    called: str | None = None,
) -> FileResult:
    """Process a file with a progress bar and exit status by signal.

    ``called`` is the name of the output in messages if it is not its path.
    """
    from flodl.signals import StopSignals
    from flodl_hf.jobs.parts import Parts
    from flodl_hf.jobs.ranks import Rank

    is_first = "devices" in options or Rank.from_env().rank == 0
    with StopSignals() as signals, progress() as bar:
        bar.disable = bar.disable or json_output or not is_first
        control = {"on_progress": _bar(bar, signals, doing), "should_stop": lambda: signals.number != 0}
        result = run(model, source, out, **options, **control)
    if is_first and json_output:
        emit_json(result.to_dict())
    elif is_first:
        _tell(result, empty, called or str(result.target))
    if is_first and result.is_whole and not result.rows:
        say(f"warning: {source}: has no rows, so that there are none to write", always=True, fg="yellow")
    if signals.number and not result.is_whole:
        if is_first:
            what = f"{result.parts} parts are kept in {out.name}.parts" if result.parts else "no part was finished"
            say(f"stopped: {what}; {Parts(out, '').again} to resume")
        raise typer.Exit(128 + signals.number)
    return result


def _bar(bar: Any, signals: Any, doing: str) -> Callable[[Progress], None]:
    task: list[Any] = []
    warned: list[bool] = []

    def update(now: Progress) -> None:
        if signals.number and not warned:
            warned.append(True)
            say("finishing this part; interrupt again to stop immediately and lose it")
        if bar.disable:
            return
        if not task:
            task.append(bar.add_task(doing, total=now.total, completed=now.done, note=""))
        rate = 1 / max(now.seconds, 1e-9)
        note = f"{now.rows:,} rows  {now.rows * rate:,.0f} rows/s"
        note += f"  {now.tokens * rate:,.0f} tokens/s" if now.tokens else ""
        if now.waiting:
            note += f"  waiting for {now.waiting} parts"
        bar.update(task[0], completed=now.done, note=note)

    return update


def _tell(result: FileResult, empty: str, called: str) -> None:
    figures = result.to_dict()
    if result.columns:
        say(f"read: column{'s' * (len(result.columns) > 1)} {', '.join(map(printable, result.columns))}")
    if result.is_whole:
        tokens = f", {figures['tokens_per_s']:,.0f} tokens/s" if result.tokens else ""
        tell(
            f"{called}: {result.written:,} row{'' if result.written == 1 else 's'} in {result.seconds:.1f} s "
            f"({figures['rows_per_s']:,.0f} rows/s{tokens})"
        )
    if result.resumed:
        say(f"{result.resumed} of {result.parts} parts were reused from an earlier run")
    if result.empty:
        say(f"empty rows: {result.empty:,}; {empty}")
    if result.faulty:
        left = result.rows - result.written
        what = f"{left:,} left out" if left else "written without an answer"
        say(f"{result.faulty:,} of {result.rows:,} rows could not be answered ({what}):")
        for fault in result.faults:
            say(f"  {fault}")
        if result.faulty > len(result.faults):
            say(f"  ... and {result.faulty - len(result.faults):,} more")
