"""Run of one process over the input, part after part.

Each part is predicted separately, so its content does not depend on interruptions or on the ranks of other parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from flodl.errors import DataError, FlodlError, capped
from flodl_hf.errors import PredictError
from flodl_hf.jobs.columns import renamed
from flodl_hf.jobs.identity import input_identity
from flodl_hf.jobs.parts import DamagedPart, Parts
from flodl_hf.jobs.plan import Plan
from flodl_hf.jobs.ranks import Rank, Workers, wait_for_parts
from flodl_hf.jobs.tasks import faulty_items
from flodl_hf.tokenization.readers.rows import Row, RowFault, Rows

MAX_FAULTS = 20  # invalid rows whose message is stored
START_SKEW_S = 15.0  # ranks that are started together start within this time
PROGRESS_S = 0.2  # interval of progress reports
BLOCK_ROWS = 64  # results that are encoded together


@dataclass(frozen=True)
class Progress:
    """Progress of a job.

    Attributes:
        rows: rows that all ranks predicted in this run.
        tokens: tokens of the model of this process in this run.
        done: position in the input, in bytes or rows.
        total: size of the input in the same unit; None if unknown.
        seconds: time since the start of the first part.
        waiting: number of parts of other ranks that this one waits for.
    """

    rows: int
    tokens: int
    done: int
    total: int | None
    seconds: float
    waiting: int = 0


@dataclass
class FileResult:
    """Result of a job.

    Attributes:
        target: the output file.
        is_whole: whether the output was written; False for a stopped run, and for all ranks but 0.
        rows: rows of the input, of all ranks and runs as far as known.
        written: rows of the output.
        faulty: rows that could not be predicted; omitted, or written without a result.
        faults: messages of the first of them.
        empty: rows with empty or blank texts; they get the result of an empty text.
        truncated: rows whose text was truncated.
        parts: parts of the output.
        resumed: parts that existed when this run started.
        seconds: time of this run without loading.
        new_rows: rows that all ranks predicted in this run.
        tokens: tokens of all ranks in this run.
        columns: columns of the input that the model read, in its order.
    """

    target: Path
    is_whole: bool = False
    rows: int = 0
    written: int = 0
    faulty: int = 0
    faults: list[str] = field(default_factory=list)
    empty: int = 0
    truncated: int = 0
    parts: int = 0
    resumed: int = 0
    seconds: float = 0.0
    new_rows: int = 0
    tokens: int = 0
    columns: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types, with rates."""
        rate = 1.0 / max(self.seconds, 1e-9)
        return {
            **{name: value for name, value in self.__dict__.items() if name not in ("target", "columns")},
            "columns": list(self.columns),
            "out": str(self.target),
            "rows_per_s": round(self.new_rows * rate, 1),
            "tokens_per_s": round(self.tokens * rate, 1),
        }


class Run:
    """One process's run over the input."""

    def __init__(
        self,
        plan: Plan,
        rank: Rank,
        parts: Parts,
        rows: Rows,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        workers: Workers | None = None,
        wait_for_ranks: Callable[[float], None] | None = None,
    ) -> None:
        self._plan, self._rank, self._parts, self._rows = plan, rank, parts, rows
        self._on_progress, self._should_stop, self._workers = on_progress, should_stop, workers
        self._wait_for_ranks = wait_for_ranks
        self._tokens = self._new_rows = self._truncated = 0
        self._started = self._last_report = time.monotonic()
        self._began = time.time()

    def count(self, tokens: int) -> None:
        """Count tokens; called after each batch, and also detects lost workers."""
        self._tokens += tokens
        self._check()

    def count_truncated(self, texts: int, tokens: int) -> None:
        """Count truncated texts."""
        self._truncated += texts

    def figures(self) -> dict[str, Any]:
        """Return the numbers of rows and tokens of this rank."""
        return {"rows": self._new_rows, "tokens": self._tokens}

    def go(self) -> FileResult:
        """Predict this rank's parts; rank 0 then waits for the others and joins all parts."""
        result = FileResult(self._parts.target, columns=self._plan.read)
        there: set[int] = set()
        number, stopped = self._walk(there)
        if not stopped and self._rank.rank == 0 and self._all_there(number, there):
            if self._wait_for_ranks is not None:
                self._wait_for_ranks(START_SKEW_S)
            self._join(number)
            result.is_whole = True
        return self._result(result, range(number), there)

    def _walk(self, there: set[int]) -> tuple[int, bool]:
        """Predict all unfinished parts of this rank; return the number of parts, and whether a stop was requested."""
        number = 0
        parts = self._read()
        with closing(_ahead(parts) if self._is_ahead() else parts) as parts:
            for part in parts:
                if self._is_over():
                    return number, True
                if part.record is not None:
                    self._compare(part)
                    # Of an earlier run, and not of a faster rank of this run.
                    mine = self._rank.world == 1 or self._rank.owns(part.number)
                    if mine or part.record.get("time", 0.0) < self._began - START_SKEW_S:
                        there.add(part.number)
                elif part.rows:
                    self._predict(part)
                number = part.number + 1
                self._report_progress()
        return number, False

    def _join(self, count: int) -> None:
        """Write the output.

        Raises:
            PredictError: finished parts were damaged; they count as unfinished from now on.
        """
        try:
            self._finish(count)
        except DamagedPart as first:
            damaged = [n for n in range(count) if n == first.number or not self._parts.is_whole(n)]
            for number in damaged:
                self._parts.discard(number)
            raise PredictError(
                f"{self._parts.folder}: finished parts were damaged ({damaged[:10]}); expected the "
                "bytes of their records. No output was written, and the other parts are kept. Check the disk and "
                f"{self._parts.again}, which predicts the damaged parts again",
                path=str(self._parts.folder),
                parts=damaged,
            ) from None

    def _is_ahead(self) -> bool:
        # An accelerator would idle while rows are read; a CPU would read with the same cores.
        return self._plan.model.device.type != "cpu"

    def _read(self) -> Generator[_Part, None, None]:
        """Yield all parts in order; parts of this rank have their rows."""
        number, size = 0, self._plan.part_rows
        while True:
            record, mine = self._parts.record(number), self._rank.owns(number)
            if record is not None and mine and not self._parts.is_whole(number):
                self._parts.discard(number)
                record = None
            if record is None and mine:
                if not (rows := self._rows.take(size)):
                    return
                yield _Part(number, None, self._rows.digest, rows, *self._items(rows))
            elif self._rows.skip(size):
                yield _Part(number, record, self._rows.digest)
            else:
                return
            number += 1

    def _finish(self, count: int) -> None:
        identity = self._plan.identity["input"]
        if "stream" not in identity and input_identity(self._plan.source) != identity:
            raise DataError(
                f"{self._plan.source}: was changed while it was read, expected an unchanged file. Start over with "
                "--overwrite (overwrite=True).",
                path=str(self._plan.source),
            )
        self._records = [self._parts.record(number) or {} for number in range(count)]
        self._parts.finish(count, self._plan.writer)

    def _all_there(self, count: int, there: set[int]) -> bool:
        others = [n for n in range(count) if not self._rank.owns(n) and n not in there]

        def on_wait(left: int) -> bool:
            self._report_progress(waiting=left)
            return self._is_over()

        return wait_for_parts(self._parts, self._rank, others, on_wait)

    def _check(self) -> None:
        if self._workers is not None:
            self._workers.check(self._parts.again)

    def _is_over(self) -> bool:
        self._check()
        return self._should_stop is not None and self._should_stop()

    def _result(self, result: FileResult, numbers: range, there: set[int]) -> FileResult:
        records = self._records if result.is_whole else [self._parts.record(n) or {} for n in numbers]
        for name in ("rows", "written", "faulty", "empty", "truncated"):
            setattr(result, name, sum(r.get(name, 0) for r in records))
        result.faults = [fault for r in records for fault in r.get("faults", ())][:MAX_FAULTS]
        result.parts, result.resumed = sum(map(bool, records)), len(there)
        new = [r for n, r in enumerate(records) if n not in there]
        result.new_rows = sum(r.get("rows", 0) for r in new)
        result.tokens = sum(r.get("tokens", 0) for r in new)
        result.seconds = round(time.monotonic() - self._started, 3)
        return result

    def _compare(self, part: _Part) -> None:
        """Raise if a stream differs from the one of the earlier run."""
        if part.record is not None and part.record.get("digest") != part.digest:
            raise DataError(
                f"{self._plan.source}: the rows of part {part.number} differ from the earlier run, expected "
                "the same input. Send it again, or start over with --overwrite (overwrite=True).",
                part=part.number,
            )

    # ---- one part --------------------------------------------------------------------------------------

    def _predict(self, part: _Part) -> None:
        plan, items, faults = self._plan, part.items, part.faults
        record: dict[str, Any] = {}
        while True:
            if faults and plan.on_error == "stop":
                raise self._refusal(part.rows, faults)
            good = [place for place in range(len(items)) if place not in faults]
            try:
                lines = self._lines(part, plan.answerer.run([items[place] for place in good]), record)
                self._parts.commit(part.number, plan.writer.part(lines), record)
                break
            except _Refusal as refusal:
                raise refusal.fault from None
            except PredictError as fault:
                if hasattr(fault, "finished"):  # an error of the disk
                    raise
                self._explain(fault, items, good, faults)
            except FlodlError as fault:
                self._explain(fault, items, good, faults)
        self._new_rows += len(part.rows)

    def _items(self, rows: Sequence[Row]) -> tuple[list[Any], list[Any], dict[int, str]]:
        """Return the model's input and the kept cells of each row, and the errors by index."""
        items: list[Any] = []
        kept: list[Any] = []
        faults: dict[int, str] = {}
        writer, item, rename = self._plan.writer, self._plan.item, self._plan.rename
        for place, row in enumerate(rows):
            cells = given = None
            try:
                cells = writer.keep(renamed(row, rename))
                if row.fault is not None or row.values is None:
                    raise RowFault(row.fault or "no values")
                given = item(row.values)
            except RowFault as fault:
                faults[place] = str(fault)
            items.append(given)
            kept.append(cells)
        for place, reason in writer.misfits([renamed(row, rename) for row in rows] if rename else rows).items():
            faults[place], kept[place] = reason, None
        return items, kept, faults

    def _lines(self, part: _Part, answers: Iterator[Any], record: dict[str, Any]) -> Iterator[Any]:
        """Yield the lines of a part as results arrive, and complete its record."""
        plan, tokens, truncated, late = self._plan, self._tokens, self._truncated, dict(part.faults)
        rows, kept, faults = part.rows, part.kept, part.faults
        writer, values = plan.writer, plan.answerer.values
        written = 0
        for first in range(0, len(rows), BLOCK_ROWS):
            self._report_progress(more=first)
            places = range(first, min(first + BLOCK_ROWS, len(rows)))
            found = list(map(values, islice(answers, sum(place not in faults for place in places))))
            if len(found) == len(places):
                with suppress(RowFault):  # the row is identified below, where rows are written separately
                    lines = writer.lines(kept[first : places.stop], found)
                    written += len(found)
                    yield from lines
                    continue
            given = iter(found)
            for place in places:
                reason = faults.get(place)
                if reason is None:
                    try:
                        lines = writer.lines([kept[place]], [next(given)])
                        written += 1
                        yield from lines
                        continue
                    except RowFault as fault:
                        reason = late[place] = str(fault)
                        if plan.on_error == "stop":
                            raise _Refusal(self._refusal(rows, late)) from None
                if plan.on_error == "null":
                    cells = kept[place] if kept[place] is not None else writer.keep(None)
                    written += 1
                    yield writer.missing(cells, f"{rows[place].place}: {reason}")
        messages = [f"{rows[place].place}: {late[place]}" for place in sorted(late)]
        record |= {
            "rows": len(rows), "written": written, "faulty": len(late), "faults": messages[:MAX_FAULTS],
            "tokens": self._tokens - tokens, "digest": part.digest, "time": time.time(),
            "empty": sum(plan.answerer.empty(item) for item in part.items if item is not None),
            "truncated": self._truncated - truncated,
        }  # fmt: skip

    def _explain(self, fault: FlodlError, items: Sequence[Any], good: Sequence[int], faults: dict[int, str]) -> None:
        """Find the rows that caused an error, or raise it again."""
        found = faulty_items(self._plan.model, self._plan.answerer, [items[place] for place in good])
        if not found:
            raise fault
        faults |= {good[place]: reason for place, reason in found.items()}

    def _refusal(self, rows: Sequence[Row], faults: Mapping[int, str]) -> DataError:
        places = sorted(faults)
        lines = [f"{rows[place].place}: {faults[place]}" for place in places]
        undecoded = any("expected UTF-8" in fault for fault in faults.values())
        return DataError(
            f"{self._plan.source}: {len(lines)} row{'s' * (len(lines) > 1)} cannot be predicted:\n{capped(lines)}\n"
            "expected a text in every row. Omit such rows with --on-error skip, which resumes from the finished "
            "parts, write them without a result with --on-error null, or correct the file "
            f"{'(iconv -f LATIN1 -t UTF-8 converts one) ' if undecoded else ''}and start over with --overwrite",
            rows=[rows[place].number for place in places],
            problems=lines,
        )

    def _report_progress(self, more: int = 0, waiting: int = 0) -> None:
        now = time.monotonic()
        if self._on_progress is None or now - self._last_report < PROGRESS_S:
            return
        self._last_report = now
        others = [self._parts.read_rank_status(r) for r in range(self._rank.world) if r != self._rank.rank]
        rows = self._new_rows + more + sum(o.get("rows", 0) for o in others if not o.get("over") or waiting)
        tokens = self._tokens + sum(o.get("tokens", 0) for o in others if not o.get("over") or waiting)
        done, total = self._rows.position()
        self._on_progress(Progress(rows, tokens, done, total, now - self._started, waiting))


@dataclass(frozen=True)
class _Part:
    """A part: of another rank, finished earlier, or with its rows and their inputs."""

    number: int
    record: dict[str, Any] | None
    digest: str | None
    rows: Sequence[Row] = ()
    items: Sequence[Any] = ()
    kept: Sequence[Any] = ()
    faults: dict[int, str] = field(default_factory=dict)


def _ahead(parts: Iterator[_Part]) -> Generator[_Part, None, None]:
    """Yield ``parts``, reading the next one in a thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="flodl-hf-read") as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part


class _Refusal(Exception):
    """Carries the error of a row out of the generator of lines."""

    def __init__(self, fault: DataError) -> None:
        super().__init__(str(fault))
        self.fault = fault
