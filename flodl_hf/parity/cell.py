"""One running cell of the matrix: a checkpoint from transformers, loaded on both sides.

Everything is created on first use, and shared by the checks of the cell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from flodl_hf.auto import head_named
from flodl_hf.families import families, named
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.nn.layers.parts import Part, as_whole, part_of, split
from flodl_hf.parity.inputs import AwkwardBatch, as_choices, awkward_batches
from flodl_hf.parity.shapes import settings_of, variants_of

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer


NUM_LABELS = 5


@dataclass(frozen=True, order=True)
class Cell:
    """A family with a head, at one of the family's variants."""

    family: str
    head: str
    variant: str = "base"

    @property
    def name(self) -> str:
        """The cell in one word, for tables and tests."""
        return f"{self.family}/{head_named(self.head).short}" + (f"/{self.variant}" if self.variant != "base" else "")

    @property
    def record(self) -> Family:
        """The family's record."""
        family = named(self.family)
        assert family is not None
        return family

    @property
    def architecture(self) -> str:
        """Transformers' class name."""
        return self.record.class_prefix + head_named(self.head).hf_suffix


def all_cells(size: str = "tiny") -> list[Cell]:
    """Return families x heads x variants, in the order of the tables."""
    return [
        Cell(family.model_type, head.name, variant)
        for family in families()
        for variant in variants_of(family, size) or ("base",)
        for head in HEADS
    ]


@cache
def _vocabulary() -> Tokenizer:
    from flodl_hf.training.demo import learn_vocabulary

    return learn_vocabulary()


@dataclass
class Bench:
    """The two sides of a cell. Use as a context manager: written files are removed at the end.

    Args:
        cell: the cell.
        size: "tiny" or "real".
        seed: seed of the weights and the batches.
        source: an existing checkpoint to use instead of a generated one.
    """

    cell: Cell
    size: str = "tiny"
    seed: int = 0
    source: Path | None = None
    _room: Any = field(default=None, init=False, repr=False)

    def __enter__(self) -> Self:
        self._room = tempfile.TemporaryDirectory(prefix="flodl-parity-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.cleanup()

    @property
    def room(self) -> Path:
        """A folder of this bench's own."""
        return Path(self._room.name)

    @cached_property
    def folder(self) -> Path:
        """The checkpoint, with its tokenizer."""
        if self.source is not None:
            return self.source
        from flodl_hf.parity.reference import make_checkpoint

        settings = settings_of(self.cell.record, self.size, self.cell.variant)
        settings["num_labels"] = 2 if self.cell.head in ("question_answering", "pretraining") else NUM_LABELS
        # Real sizes keep the published initialisation, tiny ones are spread out so that nothing is near zero.
        folder = make_checkpoint(
            self.room / "source", self.cell.architecture, settings, seed=self.seed,
            scale=0.3 if self.size == "tiny" else None,
        )  # fmt: skip
        _vocabulary().save_pretrained(folder)
        return folder

    def load(self, attention: str = "sdpa", dtype: torch.dtype | None = None) -> EncoderModel:
        """Return our model, freshly loaded."""
        return head_named(self.cell.head).model.from_pretrained(self.folder, attention=attention, dtype=dtype)

    def load_theirs(self, attention: str = "sdpa", folder: Path | None = None) -> Any:
        """Return transformers' model, freshly loaded; see `flodl_hf.parity.reference.Reference`."""
        from flodl_hf.checkpoints.weights.checkpoint.folder import Checkpoint
        from flodl_hf.parity.reference import load_reference

        place = folder or self.folder
        with Checkpoint.open(place) as opened:
            pooler = any("pooler" in name for name in opened.manifest.tensors)
        return load_reference(place, self.cell.architecture, attention=attention, pooler=pooler)

    @cached_property
    def ours(self) -> EncoderModel:
        """Our model in evaluation mode; checks that change it load their own."""
        return self.load()

    @cached_property
    def theirs(self) -> Any:
        """Transformers' model in evaluation mode; checks that change it load their own."""
        return self.load_theirs()

    def batches(self) -> Iterator[AwkwardBatch]:
        """Yield the awkward batches of this model; rows stand for choices where it scores those."""
        batches = awkward_batches(self.ours.config, seed=self.seed, longest=48 if self.size == "tiny" else 24)
        return map(as_choices, batches) if self.cell.head == "multiple_choice" else batches

    def labels(self, inputs: dict[str, Tensor], step: int = 0) -> dict[str, Tensor]:
        """Return labels that fit a batch, as keyword arguments of both sides; nothing for the encoder alone."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step)
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        rows, width = ids.shape[:2]
        if self.cell.head == "sequence_classification":
            return {"labels": torch.randint(0, NUM_LABELS, (rows,), generator=generator)}
        if self.cell.head == "question_answering":
            start = torch.randint(0, width, (rows,), generator=generator)
            # One position is outside the row, and must not count.
            start[-1] = width + 3
            return {"start_positions": start, "end_positions": (start + 1).clamp(max=width + 3)}
        if self.cell.head == "base":
            return {}
        if self.cell.head == "multiple_choice":
            return {"labels": torch.randint(0, width, (rows,), generator=generator)}
        if self.cell.head == "next_sentence":
            return {"labels": torch.randint(0, 2, (rows,), generator=generator)}
        if self.cell.head == "replaced_tokens":
            return {"labels": torch.randint(0, 2, ids.shape, generator=generator)}
        pairs: dict[str, Tensor] = {}
        if self.cell.head == "pretraining":
            ordered = self.cell.record.heads["pretraining"].relation_output == "sop_logits"
            word = "sentence_order_label" if ordered else "next_sentence_label"
            pairs = {word: torch.randint(0, 2, (rows,), generator=generator)}
        classes = NUM_LABELS if self.cell.head == "token_classification" else self.ours.config.encoder.vocab_size
        chosen = torch.randint(0, classes, ids.shape, generator=generator)
        return {"labels": torch.where(mask, chosen, -100)} | pairs

    def loss(self, output: Any, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss of either side's output; for the encoder alone a sum of squares."""
        if labels:
            return output.loss
        return sum(value.square().sum() for value in output.to_tuple() if isinstance(value, Tensor))  # type: ignore[return-value]

    def gradients(self, ours: EncoderModel, theirs: Any) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        """Yield our name of each tensor with both sides' gradients."""
        for name, mine, other, part in self._pairs(ours, theirs):
            yield name, mine.grad, other.grad if part is None or other.grad is None else split(other.grad, part)

    def parameters(self, ours: EncoderModel, theirs: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield our name of each tensor with both sides' values."""
        for name, mine, other, part in self._pairs(ours, theirs):
            yield name, mine, other if part is None else split(other.detach(), part)

    def _pairs(self, ours: EncoderModel, theirs: Any) -> Iterator[tuple[str, Tensor, Tensor, Part | None]]:
        """Yield our name of each tensor with ours, theirs, and the matching slice of theirs."""
        family, head = self.cell.record, self.cell.head
        names = family.key_map(ours.config.encoder, head)
        known = dict(theirs.named_parameters(remove_duplicate=False))
        aliases = {} if head == "base" else {canonical: alias for alias, canonical in family.heads[head].aliases}
        for name, parameter in ours.graph.named_parameters():
            stored = names.theirs(name)
            # The reference computes with the alias of a repeated tensor where it keeps both.
            options = [aliases.get(stored, stored), stored, *names.also(name)]
            found = next(place for option in options for place in self._places(option) if as_whole(place) in known)
            yield name, parameter, known[as_whole(found)], part_of(found)

    def _places(self, name: str) -> tuple[str, str]:
        return name, name.removeprefix(self.cell.record.base_prefix + ".")
