"""Results of a comparison: a row each, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["equal", "rounded", "differs", "not run"]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: the compared property.
        status: "equal", "rounded" (of the size of half precision's rounding), "differs" or "not run".
        difference: the largest, as a share of the largest number of the reference; None if not measured.
        cause: the explanation of a difference, or a further remark.
    """

    what: str
    status: Status
    difference: float | None = None
    cause: str = ""


@dataclass
class Report:
    """All comparisons of one endpoint.

    Attributes:
        target: the endpoint.
        source: the expected model.
        rows: the comparisons.
    """

    target: str
    source: str
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing differs."""
        ran = [row for row in self.rows if row.status != "not run"]
        return bool(ran) and all(row.status != "differs" for row in ran)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON types."""
        return {"passed": self.passed, **asdict(self)}

    def table(self) -> str:
        """Return the rows as aligned text."""
        cells = [("compared", "", "difference", "cause")]
        cells += [(row.what, row.status, _said(row.difference), row.cause) for row in self.rows]
        widths = [max(len(cell[i]) for cell in cells) for i in range(3)]
        return "\n".join("  ".join([*(cell[i].ljust(widths[i]) for i in range(3)), cell[3]]).rstrip() for cell in cells)


def _said(difference: float | None) -> str:
    """Return a difference as text; differences by summation order are not shown as numbers."""
    if difference is None:
        return ""
    return f"{difference:.1e}" if difference >= 1e-6 else "below 1e-6"
