"""What a run tells of itself: how far it is, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FileResult", "Progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        rows: rows done by all ranks in this run.
        tokens: tokens that went through this process's model in this run.
        done: how far the input is read, in bytes or rows.
        total: how far it goes, in the same unit; None where that is not known.
        seconds: since the first part was begun.
        waiting: parts of other ranks that this one waits for.
    """

    rows: int
    tokens: int
    done: int
    total: int | None
    seconds: float
    waiting: int = 0


@dataclass
class FileResult:
    """What came of a run.

    Attributes:
        target: the output file.
        is_whole: whether it was written; False for a run that was stopped, and for all ranks but the first.
        rows: rows of the input, by all ranks and runs as far as this one knows.
        written: rows of the output.
        faulty: rows that could not be answered, left out or written without an answer.
        faults: the first of them, in words.
        empty: rows whose texts are empty or white space alone; they are answered as the model answers an empty text.
        truncated: rows whose text was longer than the model takes and was truncated.
        parts: parts of the output.
        resumed: parts that were there when this run began.
        seconds: time this run took, loading left out.
        new_rows: rows answered in this run, by all ranks.
        tokens: tokens that went through the models in this run, by all ranks.
        columns: the columns of the input that the model read, in its order.
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
