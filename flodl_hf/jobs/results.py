"""Progress and result of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
