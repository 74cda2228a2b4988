"""How many steps of a run were replayed from captured graphs, what capturing took, and why the others were not."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Recorded"]


@dataclass(frozen=True)
class Recorded:
    """What became of the steps of one rank of a run on a device that captures them.

    Attributes:
        steps: all that this process took.
        replayed: those that were replayed.
        shapes: shapes of batches that were captured.
        first_s: seconds of this host in steps that were launched one operation at a time.
        capture_s: seconds of this host in capturing.
        reason: why steps are not captured, or no more; None where they are.
    """

    steps: int
    replayed: int
    shapes: int
    first_s: float = 0.0
    capture_s: float = 0.0
    reason: str | None = None

    @property
    def share(self) -> float:
        """The share of steps that were replayed."""
        return self.replayed / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        if self.reason is not None and not self.replayed:
            return f"steps were launched one operation at a time, because {self.reason}"
        made = f"{self.shapes} shape{'s' * (self.shapes != 1)} of batches captured in {self.capture_s:.1f} s"
        why = f"because {self.reason}" if self.reason is not None else "the first of each shape"
        others = f"; others were launched one operation at a time, {why}, and took {self.first_s:.1f} s"
        return (
            f"{self.share:.0%} of {self.steps:,} steps replayed, {made}{others if self.replayed < self.steps else ''}"
        )
