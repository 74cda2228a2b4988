"""What loading, placing and migrating give back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Checkpoint", "LoadReport", "MigrateReport"]


@dataclass(frozen=True)
class Checkpoint:
    """The contents of one checkpoint file, checked and copied out of it.

    Attributes:
        tensors: every tensor by name, on the CPU, in the dtype of the file, in file order.
        structural_hash: 64 hexadecimal digits, or empty when the file does not say.
        version: version of the file's format; 0 for a safetensors file that flodl did not write.
        metadata: free texts that came with the tensors.
        format: ``"safetensors"`` or ``"fdl"``.
        path: the file, for messages.
    """

    tensors: dict[str, Tensor]
    structural_hash: str
    version: int
    metadata: dict[str, str]
    format: str
    path: str = ""


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        loaded: names copied into the model.
        skipped: names that only the file has.
        missing: names that only the model has; their values were left alone.
        cast: ``(name, dtype in the file, dtype in the model)`` of each loaded tensor that changed dtype.
    """

    loaded: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True when file and model have exactly the same names."""
        return not self.skipped and not self.missing


@dataclass(frozen=True)
class MigrateReport:
    """What a migration did.

    Attributes:
        unchanged: names found in both, with equal shapes.
        remapped: ``(old name, new name)`` of entries matched by shape and dtype.
        dropped: names of the file that nothing in the model matched.
        missing: names of the model that nothing in the file matched.
    """

    unchanged: list[str] = field(default_factory=list)
    remapped: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True when every entry of the file found its place and the model lacks none."""
        return not self.dropped and not self.missing
