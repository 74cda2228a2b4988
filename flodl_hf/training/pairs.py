"""Tasks on pairs of texts: next sentence prediction and pretraining.

One head predicts only the relation of both texts (``BertForNextSentencePrediction``), another one also masked words
(``BertForPreTraining``, ``AlbertForPreTraining``). Without labels, half of the pairs, selected by the seed, are
modified: their second text is from another row, or for ALBERT both texts are swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.data.rng import Rng
from flodl.errors import DataError
from flodl.metrics import Classification
from flodl.train import Loss
from flodl_hf.inference.metrics import Perplexity
from flodl_hf.nn.task_heads import IGNORED_LABEL, token_loss
from flodl_hf.tokenization.readers.columns import Columns, check_texts, pair_columns, refuse_rows
from flodl_hf.tokenization.readers.targets import as_numbers
from flodl_hf.training.masked import CollateShares, make_masking, words_of
from flodl_hf.training.options import Options
from flodl_hf.training.rows import RELATED, CollateRows, EncodedRows, RowBuilder
from flodl_hf.training.step import Kind, LossFunction, Objective, run_model
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task, encode_chunks

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

FOLLOWS = ("follows", "other")
"""Names of the labels 0 and 1, as in `flodl_hf.heads.next_sentence`."""


@dataclass
class PairTask(Task):
    """Whether two texts belong together, and with ``head="pretraining"`` also masked words.

    Args:
        columns: the columns of the texts, and of the label if there is one.
        head: ``"next_sentence"`` or ``"pretraining"``.
        ordered: pairs without a label are spoilt by exchanging both texts.
        seed: decides which of them are.
    """

    columns: Columns
    head: str = "next_sentence"
    ordered: bool = False
    seed: int = 42

    names = FOLLOWS
    per_row = True

    def __post_init__(self) -> None:
        masked = self.head == "pretraining"
        self.kind, self.main_metric = ("pairs", "-eval_loss") if masked else ("single_label", "accuracy")

    @classmethod
    def plan(cls, source: Source) -> PairTask:
        """Return the task of a table of pairs."""
        columns = pair_columns(source.rows, source.options.columns, source.name)
        return cls(columns, source.name, source.known.ordered, source.options.seed)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return a row for each pair; of those too long for one the longer text gives way."""
        pairs, labels = self._pairs(examples, "train" if training else "eval")
        masked = self.head == "pretraining"
        builder, cut, named = RowBuilder(limits.types), 0, RELATED if masked else "labels"
        how = {"max_tokens": limits.max_tokens, "offsets": masked, "cut": "longest", "overflow": "truncate"}
        for i, (row, *_) in encode_chunks(tokenizer, *map(list, zip(*pairs, strict=True)), **how):
            builder.add(row, i, {"words": words_of(row)} if masked else None, **{named: np.int64(labels[i])})
            cut += row.truncated
        return Prepared(builder.build(), None if training else partial(_Scorer, labels, words=masked), cut)

    def _pairs(self, examples: Examples, table: str) -> tuple[list[tuple[str, str]], list[int]]:
        """Return pairs, with 0 for related texts and 1 for others.

        Raises:
            DataError: values that are no texts, or labels that are neither.
        """
        columns: Any = self.columns
        for column in (columns.text, columns.text_pair):
            check_texts(examples, column, table)
        pairs = [(row[columns.text], row[columns.text_pair]) for row in examples]
        if columns.label is not None:
            return pairs, _read_labels([row.get(columns.label) for row in examples], columns.label, table)
        if len(pairs) < 2 and not self.ordered:
            raise DataError(f"{table}: found one pair without a label; expected more rows to combine it with", rows=1)
        found, labels = [], []
        for i, (first, second) in enumerate(pairs):
            draw = Rng(self.seed, "pair", i)
            spoilt = bool(draw.uniforms(1)[0] < 0.5)
            if spoilt and self.ordered:
                first, second = second, first
            elif spoilt:
                second = pairs[(i + 1 + draw.integer(len(pairs) - 1)) % len(pairs)][1]
            found.append((first, second))
            labels.append(int(spoilt))
        return found, labels

    def masking(self, tokenizer: Tokenizer, options: Options) -> Any:
        """Return the masking function; None for pairs alone."""
        return make_masking(tokenizer, options) if self.kind == "pairs" else None

    def objective(self, options: Options, weights: tuple[float, ...] | None, own: LossFunction | None, /) -> Objective:
        """Return the loss of training."""
        return PretrainingObjective() if self.kind == "pairs" else super().objective(options, weights, own)

    def collate(self, usual: CollateRows, rows: EncodedRows, batches: Any, accumulate: int) -> CollateRows:
        """Return the collate function of steps of ``accumulate`` batches."""
        if self.kind != "pairs":
            return usual
        return CollateShares.of_step(usual, rows, batches, accumulate, by_rows=True)


def _read_labels(values: Sequence[Any], column: str, table: str) -> list[int]:
    """Return labels as numbers.

    Raises:
        DataError: a label is neither 0 nor 1, nor one of their names.
    """
    known = {0: 0, 1: 1, **{name: k for k, name in enumerate(FOLLOWS)}}
    values = as_numbers(values)
    wrong = [
        f"row {i}: {value!r}"
        for i, value in enumerate(values)
        if isinstance(value, (bool, list, dict)) or value not in known
    ]
    refuse_rows(
        table, f"labels in column {column!r} that cannot be", wrong,
        "0 or 'follows' where the texts belong together, 1 or 'other' where they do not",
    )  # fmt: skip
    return [known[value] for value in values]


@dataclass(frozen=True)
class PretrainingObjective(Objective):
    """The sum of two means, as in transformers: over the masked words of a step, and over its pairs.

    ``words_share`` of a batch makes the sum independent of how the step is split (`CollateShares`).
    """

    kind: Kind = field(default="pairs")

    def score(self, model: Any, batch: Any) -> Any:
        """Return scores of words and of pairs."""
        words, named = run_model(model, batch, ["relation"])
        return words, named["relation"]

    def of(self, scores: Any, batch: Any) -> Loss:
        """Return the loss of computed scores."""
        words, related = scores
        pairs = F.cross_entropy(related.view(-1, 2), batch[RELATED], ignore_index=IGNORED_LABEL)
        count = batch["real"].sum() if "real" in batch else related.shape[0]
        labels = batch["labels"]
        # The mean over no masked words is NaN.
        lost = torch.where((labels != IGNORED_LABEL).any(), token_loss(words, labels), 0.0)
        return Loss.mean(lost * batch["words_share"][0].to(lost.dtype) + pairs, count)

    def by_row(self, scores: Any, batch: Any) -> Tensor:
        """Return the sum and number of word losses and the pair scores of each row."""
        words, related = scores
        labels = batch["labels"]
        flat = F.cross_entropy(words.float().view(-1, words.shape[-1]), labels.view(-1), reduction="none")
        lost, counted = flat.view(labels.shape), (labels != IGNORED_LABEL).float()
        if "cu_seqlens" in batch:
            parts = [[row.sum() for row in part.split(batch["row_lengths"])] for part in (lost, counted)]
        else:
            parts = [list(lost.sum(1)), list(counted.sum(1))]
        return torch.cat([torch.stack([torch.stack(part) for part in parts], 1), related.float()], 1)


class _Scorer(Scorer):
    def __init__(self, labels: Sequence[int], *, words: bool) -> None:
        super().__init__(Classification(2, "binary"), *([Perplexity()] if words else []))
        self.labels = labels

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the scores of one pair; return them and its label."""
        found = scores[0][-2:]
        self.parts[0].update(found[None], torch.tensor([self.labels[example]]))
        for words in self.parts[1:]:
            words.add(scores[0][0], scores[0][1])
        return found.tolist(), self.labels[example]

    def compute(self) -> dict[str, float]:
        """Return the metrics of pairs, and the perplexity of masked words."""
        return {name: value for name, value in super().compute().items() if name != "loss"}
