"""One running cell of the matrix: a checkpoint from transformers, loaded on both sides.

Everything is created on first use, and shared by the checks of the cell.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from flodl_hf.families import families, named
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.joined_tensors import as_whole, part_of, split

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig
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
        if settings.get("type_vocab_size") == 1:
            file = folder / "tokenizer.json"
            file.write_text(re.sub(r'("type_id": ?)1', r"\g<1>0", file.read_text("utf-8")), "utf-8")
        return folder

    def load(self, attention: str = "sdpa", dtype: torch.dtype | None = None) -> EncoderModel:
        """Return our model, freshly loaded."""
        return head_named(self.cell.head).model.from_pretrained(self.folder, attention=attention, dtype=dtype)

    def load_theirs(self, attention: str = "sdpa", folder: Path | None = None) -> Any:
        """Return transformers' model, freshly loaded; see `flodl_hf.parity.reference.Reference`."""
        from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
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
        head = self.cell.head
        if head == "base":
            return {}
        if head == "question_answering":
            start = torch.randint(0, width, (rows,), generator=generator)
            # One position is outside the row, and must not count.
            start[-1] = width + 3
            return {"start_positions": start, "end_positions": (start + 1).clamp(max=width + 3)}
        one = {
            "sequence_classification": (NUM_LABELS, (rows,)), "multiple_choice": (width, (rows,)),
            "next_sentence": (2, (rows,)), "replaced_tokens": (2, ids.shape),
        }  # fmt: skip
        if head in one:
            return {"labels": torch.randint(0, *one[head], generator=generator)}
        pairs: dict[str, Tensor] = {}
        if head == "pretraining":
            ordered = self.cell.record.heads["pretraining"].relation_output == "sop_logits"
            word = "sentence_order_label" if ordered else "next_sentence_label"
            pairs = {word: torch.randint(0, 2, (rows,), generator=generator)}
        classes = NUM_LABELS if head == "token_classification" else self.ours.config.encoder.vocab_size
        chosen = torch.randint(0, classes, ids.shape, generator=generator)
        return {"labels": torch.where(mask, chosen, -100)} | pairs

    def loss(self, output: Any, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss of either side's output; for the encoder alone a sum of squares."""
        if labels:
            return output.loss
        return sum(value.square().sum() for value in output.to_tuple() if isinstance(value, Tensor))  # type: ignore[return-value]

    def pairs(
        self, ours: EncoderModel, theirs: Any, read: Callable[[Tensor], Any] = Tensor.detach
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield our name of each parameter, with what ``read`` returns of it on both sides."""
        family, head = self.cell.record, self.cell.head
        names = family.key_map(ours.config.encoder, head)
        known = dict(theirs.named_parameters(remove_duplicate=False))
        aliases = {} if head == "base" else {canonical: alias for alias, canonical in family.heads[head].aliases}
        for name, parameter in ours.graph.named_parameters():
            stored = names.theirs(name)
            # The reference computes with the alias of a repeated tensor where it keeps both.
            options = [aliases.get(stored, stored), stored, *names.also(name)]
            places = (place for option in options for place in (option, option.removeprefix(family.base_prefix + ".")))
            found = next(place for place in places if as_whole(place) in known)
            value, part = read(known[as_whole(found)]), part_of(found)
            yield name, read(parameter), value if part is None or value is None else split(value, part)


Status = Literal["pass", "fail", "unsupported", "no reference", "not run"]

# Sums in another order: some hundred fp32 additions of numbers near one; larger ones are rounded at their own size.
REORDERED = 1e-5


@dataclass(frozen=True)
class Evidence:
    """Result of one check of one cell.

    Attributes:
        check: name of the check.
        status: one of five words.
        detail: the compared values, or why they were not compared.
        measured: the largest difference; None if nothing is measured.
        where: the first module or tensor that differs.
    """

    check: str
    status: Status
    detail: str
    measured: float | None = None
    where: str | None = None


def gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, in float64."""
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max())


def verdict(check: str, gaps: Mapping[str, float], what: str, bound: float = 0.0) -> Evidence:
    """Return the evidence for named differences, all of which must be within ``bound``."""
    worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else float("inf"), default=None)
    measured = gaps[worst] if worst is not None else 0.0
    good = bool(gaps) and all(each <= bound for each in gaps.values())
    text = "equal to the bit" if measured == 0.0 else f"largest difference {measured:.3g} in {worst}"
    return Evidence(check, "pass" if good else "fail", f"{len(gaps)} {what}, {text}", measured, None if good else worst)


_TINY = {
    "vocab_size": 640, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "max_positions": 70,
    "type_vocab_size": 2,
}  # fmt: skip
_REAL = {
    "vocab_size": 30522, "hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072,
    "max_positions": 512, "type_vocab_size": 2,
}  # fmt: skip


def variants_of(family: Family, size: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of each variant of a family at a size, "tiny" or "real"; none where it states none."""
    return family.tiny if size == "tiny" else family.real


def settings_of(family: Family, size: str, variant: str = "base") -> dict[str, Any]:
    """Return keyword arguments of the family's configuration class in transformers."""
    sizes = _TINY if size == "tiny" else _REAL
    common = {row.key: sizes[row.field] for row in family.rows if row.field in sizes}
    return common | dict(variants_of(family, size)[variant])


AWKWARD_TEXTS = (
    "",
    "a",
    "Hello, world!",
    "don't stop-me now... it's 3.14% (approx.) @home #tag",
    "tea\u00a0cup with a no-break space",
    "the \ufb01rst \ufb01le, \uff21\uff22\uff23, \u2116 5, x\u00b2",
    "cafe\u0301 na\u00efve \u0130stanbul \u00dfeta",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji and a flag \U0001f1eb\U0001f1f7",
    "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "tabs\tand\nnew\r\nlines   and    spaces",
    "http://example.org/a?b=c&d=e_f user@example.org",
    "antidisestablishmentarianism " * 3,
)


@dataclass(frozen=True)
class AwkwardBatch:
    """One batch as keyword arguments, with a name for its edge case."""

    name: str
    inputs: dict[str, Tensor]


def awkward_batches(config: ModelConfig, *, seed: int = 0, longest: int = 48) -> Iterator[AwkwardBatch]:
    """Yield batches of random ids for this configuration, the same for the same seed.

    A row alone; rows of mixed lengths filled on the right; rows of one token; the longest rows that the
    position table or ``longest`` allows, unfilled; and mixed rows with a second text.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = min(longest, config.max_tokens or longest)
    pad = getattr(config.encoder, "pad_token_id", 0) or 0
    types = config.token_types > 1

    def batch(lengths: list[int]) -> dict[str, Tensor]:
        width = max(lengths)
        ids = torch.randint(0, config.encoder.vocab_size, (len(lengths), width), generator=generator)
        # The padding id occurs only as padding, as in text.
        ids = torch.where(ids == pad, (ids + 1) % config.encoder.vocab_size, ids)
        mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        return {"input_ids": torch.where(mask, ids, pad), "attention_mask": mask.long()}

    yield AwkwardBatch("one row", batch([min(7, limit)]))
    yield AwkwardBatch("mixed lengths", batch([min(n, limit) for n in (11, 3, 19, 1)]))
    yield AwkwardBatch("single tokens", batch([1, 1]))
    yield AwkwardBatch("longest rows", batch([limit, limit]))
    if types:
        inputs = batch([min(n, limit) for n in (13, 5, 9)])
        second = torch.arange(inputs["input_ids"].shape[1])[None] >= 4
        inputs["token_type_ids"] = (second & (inputs["attention_mask"] == 1)).long()
        yield AwkwardBatch("second texts", inputs)


def as_choices(batch: AwkwardBatch) -> AwkwardBatch:
    """Return a batch with its rows as choices: two of each prompt for an even row count, else of one prompt."""
    rows = len(batch.inputs["input_ids"])
    choices = 2 if rows > 2 and rows % 2 == 0 else rows
    return AwkwardBatch(batch.name, {key: value.unflatten(0, (-1, choices)) for key, value in batch.inputs.items()})
