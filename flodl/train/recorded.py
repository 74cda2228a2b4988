"""Summary of the steps of a run that were replayed from captured graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recorded:
    """Numbers of replayed and other steps of one rank, on a device that captures steps.

    Attributes:
        steps: steps of this process.
        replayed: replayed steps.
        shapes: captured shapes of batches.
        first_s: seconds of the host in steps that were launched one operation at a time.
        capture_s: seconds of the host in captures.
        reason: why steps are not captured, or not any more; None if they are.
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
