"""The embedding task: rows of tables, losses, and settings of the embeddings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flodl.errors import ConfigError, DataError
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.errors import PredictError
from flodl_hf.inference.pooling import check_pooling
from flodl_hf.training.losses import CACHED, LOSSES, USUAL, AdaptiveLayerLoss, MatryoshkaLoss, loss_named, make_loss
from flodl_hf.training.losses.pairs import MSELoss
from flodl_hf.training.masked import words_of
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows, EncodedRows, RowBuilder
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Task, encode_chunks
from flodl_hf.training.vectors.step import CollateTexts, TextBatches, TextRows, VectorObjective, rows_of_texts
from flodl_hf.training.vectors.tables import (
    METRICS,
    HeldOut,
    TextTable,
    VectorScorer,
    expect_equal_widths,
    main_metric,
    read_table,
)

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

CACHE = 32_768
"""Tokens per forward pass for a loss with a cached name."""


@dataclass
class EmbeddingTask(Task):
    """Vectors of texts.

    Args:
        tables: mapping of names to training tables.
        losses: for each of them its loss.
        options: the choices of the run.
        recipe: settings of the embeddings; set when the model is known.
        trains: whether the task is trained, and not only evaluated.
        guide: the model that `options.guide` names, once it is loaded.
        needs_words: whether rows contain the word of each token.
    """

    tables: Mapping[str, TextTable]
    losses: tuple[Any, ...]
    options: Options
    recipe: Any = None
    trains: bool = True
    guide: Any = None
    needs_words: bool = False

    name = "embedding"
    head = "base"
    kind = "vectors"
    per_row = True
    attaches = True
    trained: ClassVar[type[VectorObjective]] = VectorObjective
    scores: ClassVar[Callable[[HeldOut], Scorer]] = VectorScorer

    usual: ClassVar[Mapping[Any, str]] = USUAL
    table: ClassVar[Mapping[str, Any]] = LOSSES
    evaluated: ClassVar[Mapping[Any, str]] = USUAL
    """Default losses of evaluation data, for the forms that the losses of training do not take."""
    forms: ClassVar[tuple[str, ...]] = (*USUAL, "pair_classes")
    """Data that a function of the user can be the loss of."""

    def __post_init__(self) -> None:
        self.first = next(iter(self.tables.values()))
        self.columns = self.first.columns
        self.main_metric = main_metric(self.first.form)
        self.is_ragged = any(len({*map(len, table.texts)}) > 1 for table in self.tables.values())

    @classmethod
    def loss_named(cls, word: str, options: Options) -> Any:
        """Return the loss of a name, with the settings of the run."""
        return make_loss(word, options.loss_options, cls.table)

    # --- data ---------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, examples: Examples, options: Options, source: str) -> TextTable:
        """Return a table of such examples."""
        return read_table(examples, options.columns, source)

    def held_out(self, examples: Examples) -> TextTable:
        """Return evaluation examples.

        Raises:
            DataError: no loss takes them, or their metrics need a layer that only another loss would train.
        """
        table = self.read(examples, self.options, "eval")
        forms = {one.form for one in self.tables.values()}
        if "pair_classes" not in forms:
            table = table.as_scores
        if table.form == "binary" and "scored" in forms and "binary" not in forms:
            table = replace(table, form="scored")
        if table.form == "pair_classes" and table.form not in forms:
            raise DataError(
                f"eval: pairs have names of classes ({', '.join(table.names[:5])}), which {self.name} was not trained "
                "for; expected numbers of how alike texts are, or training rows with such classes",
                names=list(table.names),
            )
        fitting = self._fitting(table.form)
        if not fitting and table.form not in self.evaluated:
            expected = ", ".join(
                dict.fromkeys([*self.evaluated, *(form for loss in self.losses for form in loss.forms)])
            )
            raise DataError(
                f"found {table.form}, of which {self.name} has no loss; expected {expected}", form=table.form
            )
        loss = fitting[0] if fitting else self._usual(table.form)
        return table if getattr(loss, "ragged", False) else expect_equal_widths(table, "eval")

    def _fitting(self, form: Any) -> list[Any]:
        """Return the losses of training that accept evaluation data of a form, for the last layer only."""
        plain = [loss.loss if isinstance(loss, AdaptiveLayerLoss) else loss for loss in self.losses]
        guided = self._teaches(form) and self.options.guide is not None
        return [loss for loss in plain if form in loss.forms or guided]

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the examples as rows; for training, the tables of the task."""
        tables = [*self.tables.values()] if training else [self.held_out(examples)]
        numbers: dict[str, int] = {}
        parts, texts, cut, prompted = [], [], 0, False
        for table in tables:
            twice = 2 if table.form == "texts" else 1  # a text and itself, with another dropout (Gao et al. 2021)
            learned = table.prompted(self.options.prompts)
            evaluated = learned if training else self._evaluated_texts(table)
            prompted = evaluated != learned
            rows = [row * twice for row in learned]
            if prompted:
                both = [zip(*pair, strict=True) for pair in zip(learned, evaluated, strict=True)]
                rows = [tuple(text for pair in texts for text in pair) for texts in both]
            part, short = self.encode(rows, tokenizer, limits)
            if table.labels is not None:
                part.values["labels"] = table.labels
            if self.options.guide is not None:
                teaches = self._teaches(table.form)
                guided = self._guided([row * twice for row in (table.texts if teaches else learned)])
                part.values["labels" if teaches else "guide"] = guided
            parts.append(part)
            ids = np.full((len(table.texts), table.width), -1, np.int64)
            for own, row in zip(ids, table.texts, strict=True):
                own[: len(row)] = [numbers.setdefault(text, len(numbers)) for text in row]
            texts.append(ids)
            cut += short
        truth = HeldOut(tables[0].form, texts[0], tables[0].labels, prompted)
        scorer = None if training else partial(self.scores, truth)
        return Prepared(TextRows(parts, texts), scorer, cut)  # type: ignore[arg-type]

    def _evaluated_texts(self, table: TextTable) -> list[tuple[str, ...]]:
        """Return evaluation texts with the prompts of sentence-transformers' evaluators.

        Anchors and candidates of retrieval are encoded as by `encode_query` and `encode_document`, other texts as by
        `encode`. Forms without metrics have the prompts of the loss.
        """
        recipe = self.recipe
        if not METRICS[table.form] or recipe.late is not None or not recipe.include_prompt:
            return table.prompted(self.options.prompts)
        if table.form not in ("pairs", "triplets", "teacher_scores"):
            return table.prompted(recipe.resolve_prompt("finetune"))
        query, document = recipe.prompts.get("query", ""), recipe.prompts.get("document", "")
        return [(query + first, *(document + text for text in others)) for first, *others in table.texts]

    def encode(
        self, rows: Sequence[Sequence[str]], tokenizer: Tokenizer, limits: LengthLimits
    ) -> tuple[EncodedRows, int]:
        """Return rows of tokens with the lengths of their texts, and how many texts were cut."""
        with_words, lower = self.needs_words, self.recipe is not None and self.recipe.lower_case
        builder, cut, lengths = RowBuilder(limits.types), 0, list[int]()
        flat = [text.lower() if lower else text for row in rows for text in row]
        how = {"max_tokens": limits.max_tokens, "offsets": with_words, "overflow": "truncate"}
        for i, (row, *_) in encode_chunks(tokenizer, flat, **how):
            builder.add(row, i, {"words": words_of(row)} if with_words else None)
            lengths.append(len(row.ids))
            cut += row.truncated
        return rows_of_texts(builder, lengths, list(map(len, rows))), cut

    def _teaches(self, form: Any) -> bool:
        """Return whether labels of data of a form are the vectors of the guide."""
        return form in ("texts", "pairs") and any(isinstance(_innermost(loss), MSELoss) for loss in self.losses)

    def _guided(self, rows: Sequence[Sequence[str]]) -> Any:
        """Return the guide's vectors of all texts, ``(rows, texts, size)``, each text once through it."""
        from flodl_hf.heads.base import BaseModel

        if self.guide is None:
            here: Any = self.options.local_files_only
            self.guide = BaseModel.from_pretrained(str(self.options.guide), local_files_only=here)
        known: dict[str, int] = {}
        places = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for own, row in zip(places, rows, strict=True):
            own[: len(row)] = [known.setdefault(text, len(known)) for text in row]
        vectors: Any = self.guide.embed(list(known))
        return vectors.float().numpy()[places]

    # --- the run ------------------------------------------------------------------------------------------------

    @property
    def unrecorded(self) -> str | None:
        """Why steps on CUDA are not captured; None if they are."""
        if self.options.cache_tokens is not None:
            return "texts go through the model in parts (cache_tokens), cut by their lengths"
        if self.is_ragged:
            return "examples have different numbers of texts"
        return "ranks exchange vectors within a step" if self.options.ranks > 1 else None

    def settle(self, model: EncoderModel) -> list[str]:
        """Configure the embeddings of the model from the options, and attach modules; return notes for the user.

        Raises:
            ConfigError: a pooling, or a size of vectors, that cannot be.
        """
        options, before = self.options, model.sentence_recipe
        names: Any = tuple(options.pooling.split("+")) if options.pooling else before.pooling if before else ("mean",)
        problems = []
        try:
            check_pooling(names)
        except PredictError as fault:
            problems.append(f"pooling: {fault}")
        if before is not None:
            further = before.splade is not None or before.late is not None or before.changes_states
            if before.routes:
                ways = ", ".join(before.routes)
                problems.append(f"the folder has routes ({ways}) with separate modules, which cannot be trained")
            elif further or (before.dense and self.trains):
                problems.append("the folder has further modules than pooling, which are not trained here")
            if options.prompts and not before.include_prompt:
                problems.append("prompts: the folder's pooling excludes the tokens of prompts, as no training does")
        if "pooler" in names:
            problems.append("pooling: the pooler's output is not trained here; expected mean, cls or another")
        scaled = options.normalize if options.normalize is not None else before.normalize if before else True
        size = model.config.encoder.hidden_size * len(names)
        dims = map(int, options.matryoshka)
        problems += [f"matryoshka: {dim} of vectors of {size} features" for dim in dims if dim > size]
        if problems:
            raise ConfigError(f"finetune: {'; '.join(problems)}", problems=problems)
        if before is None:
            made = SentenceTransformerConfig(names, scaled, options.max_length)
        elif (before.pooling, before.normalize) != (names, scaled):
            kept = "config_sentence_transformers.json"
            made = replace(before, pooling=names, normalize=scaled, files={})
            if kept in before.files:
                from flodl_hf.checkpoints.sentence.writing import recipe_files

                files = recipe_files(made, model.config.encoder.hidden_size)
                made = replace(made, files={**files, kept: before.files[kept]})
        else:
            made = before
        model.sentence_recipe = self.recipe = made
        if self.start is not None:
            self.start(model)
        return self._prompt_notes()

    def _prompt_notes(self) -> list[str]:
        """Return, as a note, prompts of columns that the training tables do not have."""
        prompts = self.options.prompts
        names = {name for table in self.tables.values() for source in set(table.sources) for name in source}
        absent = [] if isinstance(prompts, str) else [repr(name) for name in prompts or () if name not in names]
        return absent and [f"prompts: found {', '.join(absent)}, expected columns of texts: {', '.join(sorted(names))}"]

    def conclude(self, model: EncoderModel) -> None:
        """Detach the additional module, if any."""
        model.beside = None

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return the maximum tokens of a text in the folder, if stated."""
        recipe = model.sentence_recipe
        return [recipe.max_tokens] if recipe is not None and recipe.max_tokens is not None else []

    def objective(self, *_: Any) -> VectorObjective:
        """Return the loss of training."""
        options = self.options
        return self._objective(self.losses, shared=options.ranks > 1, cache_tokens=options.cache_tokens)

    def of_held_out(self, prepared: Prepared, *_: Any) -> VectorObjective:
        """Return the loss of evaluation data: the loss of training if it accepts such data, for the last layer only."""
        truth: HeldOut = prepared.scorer().truth
        fitting = self._fitting(truth.form)
        return self._objective((fitting[0] if fitting else self._usual(truth.form),), prompted=truth.prompted)

    def _usual(self, form: Any) -> Any:
        """Return the default loss of evaluation data."""
        return make_loss(self.evaluated[form], None, {**LOSSES, **self.table})

    def main_metric_of(self, held_out: Prepared) -> str:
        """Return the first metric of the form of the evaluation data."""
        return main_metric(held_out.scorer().truth.form)

    def _objective(self, losses: tuple[Any, ...], **further: Any) -> VectorObjective:
        """Return the objective of some losses; ``trained`` is the class for losses of the run."""
        recipe, kind = self.recipe, self.trained if losses[0] in self.losses else VectorObjective
        layers = any(isinstance(loss, AdaptiveLayerLoss) for loss in losses)
        return kind(losses, recipe.pooling, recipe.normalize, layers, dense=recipe.dense, **further)

    def collate_held_out(self, usual: CollateRows, rows: TextRows) -> CollateRows:
        """Return the collate function for evaluation: that of training, if there is one."""
        made: Any = usual if isinstance(usual, CollateTexts) else super().collate_held_out(usual, rows)
        return replace(made, further=None)

    def collate(self, usual: CollateRows, rows: TextRows, batches: Any, accumulate: int) -> CollateTexts:
        """Return the collate function, in the same layout as ``usual``."""
        lengths = (usual.layout == "padded" and not usual.settled) or self.options.cache_tokens is not None
        return CollateTexts.like(usual, lengths=lengths, is_ragged=self.is_ragged)

    def batches(self, rows: TextRows) -> TextBatches:
        """Return the batches.

        Raises:
            DataError: a table of which no batch can be made.
        """
        options = self.options
        in_batch = [loss.in_batch for loss in self.losses]
        apart = [
            alone and options.no_duplicates and table.form in ("pairs", "triplets", "texts")
            for alone, table in zip(in_batch, self.tables.values(), strict=True)
        ]
        least = _least(self.losses, options)
        made = TextBatches(rows.texts, options.rows_in_batch, options.seed, apart, options.mixing, least)
        for name, texts, parts in zip(self.tables, rows.texts, made.by_table(0), strict=True):
            if not parts:
                raise DataError(
                    f"{name or 'train'}: of {len(texts)} rows no batch can be made that has {least} examples with "
                    "different texts. Add rows, or set no_duplicates=False if a text may come twice in a batch",
                    rows=len(texts),
                    expected=least,
                )
        return made


def _least(losses: Sequence[Any], options: Options) -> int:
    """Return the fewest examples of a batch: one for each rank, and one to compare with where a loss does."""
    return max(2 if any(loss.in_batch for loss in losses) else 1, options.ranks)


def _innermost(loss: Any) -> Any:
    while hasattr(loss, "loss"):
        loss = loss.loss
    return loss


def plan_embedding(
    train: Mapping[str, Examples], options: Options, own: Any = None, kind: type[EmbeddingTask] = EmbeddingTask
) -> tuple[EmbeddingTask, Options]:
    """Return the embedding task of these tables, and the options with inferred values.

    Args:
        train: mapping of names to tables; the name of a single table is empty.
        options: the choices of the run.
        own: a loss of the user's own.
        kind: which vectors.

    Raises:
        ConfigError, DataError: options or columns that do not fit; all options are listed.
    """
    tables = {name: kind.read(rows, options, name or "train") for name, rows in train.items()}
    problems = []
    if options.policy not in (None, "sync") and options.ranks > 1:
        problems.append("policy: ranks share the texts of a batch, so they step together; expected sync")
    asked = options.vector_loss
    named = dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(tables, asked)
    problems += [f"vector_loss: there is no table {name!r}" for name in named if name not in tables]
    losses, cached = [], False
    for name, table in list(tables.items()):
        if table.form not in kind.usual and own is None and named.get(name) is None:
            table = tables[name] = table.as_scores
        word = named.get(name) or kind.usual.get(table.form)
        if word is None:
            usual = ", ".join(kind.usual)
            problems.append(f"{name or 'train'}: {kind.name} has no loss of {table.form}; expected {usual}")
            continue
        loss: Any = own if own is None or hasattr(own, "forms") else _Own(own, kind.forms)
        if loss is None and isinstance(word, str):
            cached = cached or loss_named(word, kind.table) in CACHED
            loss = kind.loss_named(word, options)
        elif loss is None:
            loss = word
        if table.form not in loss.forms and table.as_scores.form in loss.forms:
            table = tables[name] = table.as_scores
        if not getattr(loss, "ragged", False):
            expect_equal_widths(table, name or "train")
        kind_of_loss = type(_innermost(loss))
        if table.form not in loss.forms and not (isinstance(loss, MSELoss) and options.guide is not None):
            problems.append(
                f"vector_loss: {kind_of_loss.__name__} takes {', '.join(loss.forms)}; the table {name or 'train'} has "
                f"{table.form}"
            )
        if kind.name == "multivector" and kind_of_loss in LOSSES.values():
            problems.append(
                f"vector_loss: found {kind_of_loss.__name__}, which compares one vector for each text; expected one of "
                f"{', '.join(kind.table)}"
            )
        if loss.by_guide and options.guide is None:
            problems.append(f"guide: {type(loss).__name__} needs a second model; expected its folder or name")
        if options.matryoshka and "matryoshka" not in kind.refused:
            dims = tuple(int(dim) for dim in options.matryoshka)
            if isinstance(loss, AdaptiveLayerLoss):
                loss = replace(loss, loss=MatryoshkaLoss(loss.loss, dims))
            else:
                loss = MatryoshkaLoss(loss, dims)
        losses.append(loss)
    least = _least(losses, options)
    if options.rows_in_batch < least:
        shared = f"shared by {options.ranks} ranks" if options.ranks > 1 else "of a loss that compares examples"
        problems.append(f"batch_size: {options.rows_in_batch}, {shared}; expected at least {least}")
    if problems:
        raise ConfigError(f"finetune: {'; '.join(problems)}", problems=problems)
    guide: Any = None if options.guide is None else os.fspath(options.guide)
    options = replace(options, guide=guide, policy="sync" if options.ranks > 1 else options.policy)
    if cached and options.cache_tokens is None:
        options = replace(options, cache_tokens=CACHE)
    return kind(tables, tuple(losses), options), options


@dataclass(frozen=True)
class _Own:
    """A loss of the user's own: ``loss(vectors, labels)`` with one ``(examples, size)`` for each text."""

    call: Any
    forms: tuple[str, ...]
    in_batch: bool = True
    by_guide: bool = False
    ragged: bool = False

    def __call__(self, vectors: Any, labels: Any, own: slice | None = None) -> Any:
        return self.call(vectors, labels)
