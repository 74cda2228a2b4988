"""``task="replaced"`` with a generator, the pretraining of ELECTRA (Clark et al. 2020, arXiv:2003.10555).

A small masked language model samples tokens for masked positions; the discriminator predicts for each
token whether it was replaced. One step trains both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.data import Where
from flodl.errors import ConfigError
from flodl.metrics import Accuracy, Classification
from flodl.train import Loss
from flodl_hf.inference.metrics import Perplexity
from flodl_hf.models.building import tie_tensors
from flodl_hf.nn.prompts import prefix_of
from flodl_hf.nn.task_heads import IGNORED_LABEL, token_loss
from flodl_hf.tokenization.alignment import IGNORE
from flodl_hf.tokenization.readers.columns import Columns, infer_columns
from flodl_hf.training.masked import CollateShares, MaskedTask, Masking, make_masking
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows, EncodedRows, TakenRows, filled
from flodl_hf.training.step import STEP, Kind, Objective, layout_of, mixed, row_seeds, score
from flodl_hf.training.task import Scorer, Source

if TYPE_CHECKING:
    from flodl_hf.heads.masked_lm import MaskedLM
    from flodl_hf.models.adapters.settings import Settings
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

CHUNK_ROWS = 512
"""Positions whose noise is computed together: hashes of a whole vocabulary need several times the memory of scores."""


@torch.no_grad()
def drawn(scores: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    """Sample a class for each row of scores from their softmax, int64 ``(rows,)``.

    Args:
        scores: ``(rows, classes)``.
        seeds: of the text that each row belongs to, int64 ``(rows,)``.
        places: of the rows in their texts.
    """
    columns = torch.arange(scores.shape[1], device=scores.device) * STEP
    found = []
    for part, base in zip(scores.split(CHUNK_ROWS), mixed(mixed(seeds) + places).split(CHUNK_ROWS), strict=True):
        # Between 0 and 1; near 0, where noise is large, float32 represents all 32 bits.
        number = (mixed(base[:, None] + columns).to(torch.float32) + 0.5) * 2.0**-32
        found.append((part.float() - torch.log(-torch.log1p(-number))).argmax(1))
    return torch.cat(found)


class CollateMasked(CollateShares):
    """Makes a batch of masked texts; ``labels`` contains the masked words.

    For each mask there are also ``mask_places``, its position in the batch, ``mask_labels``, its token,
    ``mask_offsets``, its position in its row, and ``mask_seeds``, the seed of its row. ``attended`` marks tokens
    that are no padding. If batches have few shapes, masks are padded to the maximum number of a shape, with the label
    -100.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        batch = super().__call__(rows, position)
        lengths, masking = TakenRows.of(rows).lengths, cast("Masking", self.masking)
        labels = batch["labels"].numpy().reshape(-1)
        flat = np.flatnonzero(labels != IGNORE)
        if "attention_mask" in batch:
            attended = batch["attention_mask"].numpy() != 0
            row, offsets = np.divmod(flat, attended.shape[1])
            slots = len(attended)
        else:
            attended = np.arange(len(labels)) < lengths.sum()
            ends = np.cumsum(lengths)
            row = np.searchsorted(ends, flat, side="right")
            offsets = flat - (ends - lengths)[row]
            slots = len(batch["cu_seqlens"]) - 1
        # of each row a share, and one at least; more where the shortest word has more
        room = max(int(masking.probability * labels.size) + slots, len(flat)) if self.settled else len(flat)
        seeds = row_seeds(position, position.indices, "sample")
        masks = {"places": flat, "labels": labels[flat], "offsets": offsets, "seeds": seeds[row]}
        per_mask = filled({f"mask_{name}": value for name, value in masks.items()}, room)
        return {**batch, **per_mask, "attended": torch.from_numpy(attended)}


EMBEDDINGS = "encoder.embeddings"


def attach_generator(
    model: EncoderModel, name: str, seed: int, options: Mapping[str, Any], adapter: Settings | None = None
) -> None:
    """Attach a generator to a model, unless it has the same one.

    Args:
        model: the discriminator.
        name: folder or Hub name.
        seed: seed of the masked-LM head, if the folder has none.
        options: further options of ``from_pretrained``.
        adapter: added to the generator and trained instead of its weights; None for none.

    Raises:
        ConfigError: the two are of different families or read different words, or the adapter does not fit.
    """
    start = (name, seed, options, adapter)
    if model.beside is not None and model.beside.__dict__.get("begun_from") == start:
        return
    from flodl_hf.heads.auto import head_named

    kind: Any = head_named("masked_lm").model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = kind.from_pretrained(name, dtype=torch.float32, **{"weights": "memory", **options})
        problems = _differences(model, generator)
        if problems:
            raise ConfigError(f"generator: {name}: {'; '.join(problems)}", problems=problems)
        if generator.tokenizer is None:
            generator.tokenizer = model.tokenizer
        try:
            if adapter is not None:
                generator.add_adapter(adapter)
        except ConfigError as fault:
            raise ConfigError(f"generator: {name}: {fault.message}", problems=fault.problems) from None
    if model.active_adapter is None and generator.active_adapter is None:
        # embeddings are shared where they are as wide; an adapter belongs to its own base, so a base shares none
        ours, theirs = _embeddings(model), _embeddings(generator)
        _put(generator, {n: ours[n] for n, value in theirs.items() if n in ours and ours[n].shape == value.shape})
    generator.__dict__["begun_from"] = start
    model.beside = generator


def _differences(model: EncoderModel, generator: MaskedLM) -> list[str]:
    """Return differences of the families and vocabularies of a discriminator and its generator."""
    own, other, problems = model.config, generator.config, []
    if other.model_type != own.model_type:
        problems.append(f"found a {other.model_type} model; expected {own.model_type}, as the discriminator is")
    if other.encoder.vocab_size != own.encoder.vocab_size:
        problems.append(f"found {other.encoder.vocab_size:,} words; expected {own.encoder.vocab_size:,}")
    elif generator.tokenizer is not None and model.tokenizer is not None:
        theirs, ours = generator.tokenizer.get_vocab(), model.tokenizer.get_vocab()
        apart = [word for word, number in theirs.items() if ours.get(word) != number]
        if apart:
            problems.append(
                f"found {len(apart):,} words under other numbers than the discriminator has them, such as "
                f"{apart[0]!r} as {theirs[apart[0]]}; expected one vocabulary"
            )
    return problems


def _embeddings(model: EncoderModel) -> dict[str, nn.Parameter]:
    return dict(model.graph.get_submodule(EMBEDDINGS).named_parameters())


def shared_names(model: EncoderModel, generator: MaskedLM) -> list[str]:
    """Return the names of the embeddings that a generator shares with the discriminator."""
    ours = _embeddings(model)
    return [name for name, value in _embeddings(generator).items() if ours.get(name) is value]


def _put(generator: MaskedLM, tables: dict[str, nn.Parameter]) -> None:
    """Give the generator's embeddings these parameters, and its decoder the words where it had them before."""
    graph = generator.graph
    parameters = dict(graph.named_parameters(remove_duplicate=False))
    ties = generator.config.family.heads["masked_lm"].ties
    tied = [tie for tie in ties if parameters[tie.kept] is parameters[tie.also]]
    embeddings = graph.get_submodule(EMBEDDINGS)
    for name, table in tables.items():
        inside, _, leaf = name.rpartition(".")
        setattr(embeddings.get_submodule(inside), leaf, table)
    tie_tensors(graph, tied)


class Scored(NamedTuple):
    """Outputs of both models for a batch.

    Attributes:
        tokens: the discriminator's score of each token, in the layout of the batch.
        replaced: 1 for tokens that were replaced, 0 for a text's own, -100 for what fills up; like ``tokens``.
        words: the generator's scores of words at each mask, ``(masks, words)``.
    """

    tokens: Tensor
    replaced: Tensor
    words: Tensor


@dataclass(frozen=True)
class JointObjective(Objective):
    """The generator's mean loss over masks, and ``weight`` times the discriminator's over all tokens of the texts.

    No gradient goes through the words that are drawn. Micro-batches of a step weigh by their tokens; ``words_share`` of
    a batch has the mean over its masks count as it does in the whole step.

    Args:
        weight: of the discriminator's loss.
    """

    kind: Kind = field(default="replaced")
    weight: float = 50.0

    def score(self, model: Any, batch: Any) -> Any:
        """Return `Scored`."""
        return model._one_pass(self._scored, batch)

    def _scored(self, model: Any, batch: Any) -> Scored:
        ids, labels = batch["input_ids"], batch["labels"]
        words = _words(model.beside, batch)
        chosen = drawn(words.detach(), batch["mask_seeds"], batch["mask_offsets"])
        masked = labels != IGNORED_LABEL
        slots = (masked.flatten().cumsum(0) - 1).clamp(min=0)
        own = torch.where(masked, labels, ids)
        filled = torch.where(masked, chosen[slots].view_as(ids), ids)
        replaced = torch.where(batch["attended"], (filled != own).to(labels.dtype), IGNORED_LABEL)
        return Scored(score(model, {**batch, "input_ids": filled}), replaced, words)

    def of(self, scores: Any, batch: Any) -> Loss:
        """Return the loss of computed scores, with both parts of it as further figures."""
        labels = batch["mask_labels"]
        words = token_loss(scores.words, labels, upcast=scores.words.dtype != torch.float64)
        tokens = self._replaced(
            scores.tokens.reshape(-1), scores.replaced.reshape(-1), settled="places" in batch or scores.tokens.is_cuda
        )
        value = words * batch["words_share"][0].to(words.dtype) + self.weight * tokens.as_mean()
        masks = (labels != IGNORED_LABEL).sum()
        parts = {"generator_loss": (words * masks, masks), "discriminator_loss": (tokens.as_sum(), tokens.count)}
        return Loss.mean(value, tokens.count, parts)

    def by_row(self, scores: Any, batch: Any) -> Tensor:
        """Return four numbers for each token, in the layout of the batch.

        These are the discriminator's score, whether the token was replaced, whether the generator's first word is the
        text's own (-1 where nothing was masked), and the generator's loss.
        """
        labels, masked = batch["mask_labels"], batch["labels"] != IGNORED_LABEL
        words = scores.words.float()
        slots = (masked.flatten().cumsum(0) - 1).clamp(min=0)
        right = (words.argmax(-1) == labels).float()[slots].view_as(masked)
        lost = F.cross_entropy(words, labels, reduction="none")[slots].view_as(masked)
        found = [scores.tokens.float(), scores.replaced.float()]
        return torch.stack([*found, torch.where(masked, right, -1.0), torch.where(masked, lost, 0.0)], -1)


def _words(generator: Any, batch: Any) -> Tensor:
    """Return the generator's scores of words at the masks of a batch, and of no other tokens."""
    layout, graph = layout_of(batch), generator.graph
    ids, types, led, lead = batch["input_ids"], batch.get("token_type_ids"), layout, prefix_of(graph)
    if lead is not None:
        ids, types, led = lead.rows(ids, types, layout)
    states = graph.get_submodule("encoder")(ids, token_type_ids=types, layout=led)
    if lead is not None:
        states = layout.behind(lead.count, states)
    flat = states.reshape(-1, states.shape[-1])
    return graph.get_submodule("head")(flat.index_select(0, batch["mask_places"]), layout=layout)


class _Scorer(Scorer):
    def __init__(self) -> None:
        super().__init__(Classification(2, "binary"), Accuracy(), Perplexity())

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the outputs of both models for one row; return the predicted and the true replacements."""
        tokens, first, words = self.parts
        score, replaced, right, lost = scores[0].unbind(-1)
        found, true = (score > 0).long(), replaced.long()
        tokens.update(found, true)
        masked = right >= 0
        first.update(right[masked].long(), torch.ones_like(right[masked], dtype=torch.long))
        words.add(lost.sum(dtype=torch.float64), masked.sum())
        return found.tolist(), true.tolist()

    def compute(self) -> dict[str, float]:
        """Return the metrics of replaced tokens, and of the generator."""
        tokens, first, words = (part.compute() for part in self.parts)
        tokens.pop("count", None)
        return {
            **tokens, "generator_accuracy": first["accuracy"], "generator_perplexity": words["perplexity"],
        }  # fmt: skip


MASK_SHARE = 0.85
"""Share of the selected tokens that are masked; the others are unchanged, as published."""


@dataclass(frozen=True)
class GeneratorTask(MaskedTask):
    """Replaced-token detection with a generator, which is trained as a masked language model.

    Args:
        columns: the column of texts.
        concatenate: put lines end to end and cut them into full rows.
        options: the run's.
    """

    options: Options = field(default_factory=Options)

    head = "replaced_tokens"
    kind = "replaced"
    attaches = True
    scores: ClassVar[type[Scorer]] = _Scorer

    @classmethod
    def plan(cls, source: Source) -> GeneratorTask:
        """Return the task of a generator and a discriminator."""
        rows, options = source.rows[:200], source.options
        columns = infer_columns(rows, **dict(options.columns or {}))
        if columns.words is not None or columns.text is None:
            raise ConfigError(f"generator: found the columns {list(rows[0])}; expected texts", problems=["generator"])
        return cls(Columns(task="masked-lm", text=columns.text), options.concatenate, options=options)

    @property
    def start(self) -> Callable[[EncoderModel], None]:
        """Attaches the generator to a model, on every rank."""
        options = self.options
        opening = {"attention": options.attention, "local_files_only": options.local_files_only}
        if options.shard and options.ranks > 1:
            opening["mapped"] = True  # as the discriminator is opened
        how: Any = {"name": str(options.generator), "options": opening, "adapter": options.adapter}
        return partial(attach_generator, seed=options.seed, **how)

    def settle(self, model: EncoderModel) -> list[str]:
        """Attach the generator to the model; return notes for the user."""
        self.start(model)
        generator: Any = model.beside
        shared = shared_names(model, generator)
        own, other = model.config.encoder, generator.config.encoder
        widths = f"the generator is {other.hidden_size} wide, the discriminator {own.hidden_size}"
        adapted = [name for name, part in (("discriminator", model), ("generator", generator)) if part.active_adapter]
        if adapted:
            return [f"{widths}; embeddings are not shared: an adapter of the {' and of the '.join(adapted)} is trained"]
        if not shared:
            return [f"{widths}; embeddings of {other.embedding_size} and {own.embedding_size} features are not shared"]
        names = sorted({name.partition(".")[0] for name in shared})
        return [f"{widths}; they share the discriminator's embeddings ({', '.join(names)})"]

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return the token limit of the generator, if it has one."""
        generator: Any = model.beside
        return [] if generator.max_tokens is None else [generator.max_tokens]

    def conclude(self, model: EncoderModel) -> MaskedLM | None:
        """Detach the generator and return it, with its own copy of the embeddings; None if it is detached already."""
        generator: Any = model.beside
        model.beside = None
        if generator is not None:
            theirs = _embeddings(generator)
            _put(generator, {n: nn.Parameter(theirs[n].detach().clone()) for n in shared_names(model, generator)})
        return generator

    def masking(self, tokenizer: Tokenizer, options: Options) -> Masking:
        """Return the masking function."""
        return make_masking(tokenizer, options, mask_share=MASK_SHARE, random_share=0.0)

    def objective(self, *_: Any) -> JointObjective:
        """Return the loss of training."""
        return JointObjective()

    def collate(self, usual: CollateRows, rows: EncodedRows, batches: Any, accumulate: int) -> CollateMasked:
        """Return the collate function of steps of ``accumulate`` batches."""
        return CollateMasked.of_step(usual, rows, batches, accumulate, by_rows=False)
