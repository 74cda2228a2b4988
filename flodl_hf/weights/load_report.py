"""What became of every tensor of a source, told to whoever loaded it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flodl.errors import capped

__all__ = ["LoadReport"]


@dataclass
class LoadReport:
    """What became of every tensor of the source, and of the model.

    Attributes:
        source: where the tensors came from.
        head: the task the model was loaded for.
        source_head: the task the file was written for, or None when it does not say.
        matched: our names that were filled, with the stored name each came from.
        renamed: stored names that are not today's Hugging Face names, with today's.
        ignored: stored names that this model does not use, with the reason.
        new: our names that the file does not have; they hold fresh random values.
        tied: our names that share the tensor of another.
        untied: ties that the configuration asks for and the file's values contradict.
        dtypes: how many tensors of each stored dtype were used.
        prefixed: whether encoder tensors carry the family's prefix in the file.
        notes: anything else worth knowing.
    """

    source: str
    head: str
    source_head: str | None = None
    matched: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    dtypes: dict[str, int] = field(default_factory=dict)
    prefixed: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        """Whether every tensor came from the file, so that predictions mean something."""
        return not self.new

    def __repr__(self) -> str:
        named = {"new": self.new, "ignored": self.ignored, "renamed": self.renamed, "notes": self.notes}
        more = "".join(f", {len(found)} {name}" for name, found in named.items() if found)
        return f"LoadReport({self.head} from {self.source}: {len(self.matched)} tensors{more})"

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.matched)} tensors for {self.head}"]
        if self.tied:
            lines.append(f"tied: {', '.join(self.tied)}")
        if self.untied:
            lines.append(f"not tied, because the file's values differ: {', '.join(self.untied)}")
        if self.renamed:
            lines.append(f"{len(self.renamed)} names in an older style")
        if self.new:
            lines.append(f"new, untrained:\n{capped(list(self.new))}")
        if self.ignored:
            lines.append(f"not used:\n{capped([f'{name}: {why}' for name, why in self.ignored.items()])}")
        lines += self.notes
        return "\n".join(lines)
