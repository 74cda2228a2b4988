"""By what ranks sum their gradients, and why not by what would be faster."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Summed"]


@dataclass(frozen=True)
class Summed:
    """How the ranks of a run sum gradients.

    Attributes:
        by: ``"peer memory"`` (two GPUs write into each other's), ``"NCCL"`` or ``"gloo"``.
        reason: why not by peer memory, or, on GPUs, not by NCCL; None where there is nothing faster.
    """

    by: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.by if self.reason is None else f"{self.by}: {self.reason}"
