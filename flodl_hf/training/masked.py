"""Masked language modelling on plain text: one row per line with windows of long lines, or concatenated lines.

Masks are drawn again in each epoch of training, and are constant in evaluation. Some losses are the sum of a mean over
masked tokens and a mean over other items (all tokens, or pairs of texts). A micro-batch, or the share of one rank,
contains other proportions of both than the whole step. `CollateShares` therefore gives each batch the factor of its
mean over masked tokens, so that the step does not depend on how it is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data import Where
from flodl.errors import ConfigError
from flodl_hf.tokenization.alignment import IGNORE, chosen_tokens, mask_tokens, num_masked
from flodl_hf.tokenization.readers.columns import Columns, check_texts
from flodl_hf.training.rows import SPECIAL, CollateRows, EncodedRows, RowBuilder, TakenRows
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task, encode_chunks

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer
    from flodl_hf.training.options import Options


@dataclass(frozen=True)
class Masking:
    """Masking for a masked language model, drawn again for each row and epoch.

    Args:
        mask_id: the mask token.
        vocabulary: the size of the vocabulary.
        probability: share of tokens.
        whole_words: choose whole words.
        mask_share: share of the chosen tokens that become the mask token.
        random_share: share that becomes a random token.
    """

    mask_id: int
    vocabulary: int
    probability: float
    whole_words: bool
    mask_share: float = 0.8
    random_share: float = 0.1

    def __call__(self, row: Mapping[str, Any], position: Where, index: int) -> dict[str, Any]:
        """Return the row with tokens hidden, and ``labels`` for these."""
        special, choice = self._choice(row, position, index)
        ids, labels = mask_tokens(
            row["input_ids"].tolist(),
            special,
            mask_id=self.mask_id,
            random_ids=self.vocabulary,
            mask_share=self.mask_share,
            random_share=self.random_share,
            **choice,
        )
        rest = {name: value for name, value in row.items() if name != "words"}
        return {**rest, "input_ids": np.asarray(ids), "labels": np.asarray(labels)}

    def number(self, row: Mapping[str, Any], position: Where, index: int) -> int:
        """Return the number of masked tokens of a row."""
        special, choice = self._choice(row, position, index)
        return chosen_tokens(special, **choice).size

    def _choice(self, row: Mapping[str, Any], position: Where, index: int) -> tuple[list[bool], dict[str, Any]]:
        """Return which tokens are special, and the arguments that select the others."""
        words = row["words"].tolist()
        whole = [None if word < 0 else word for word in words] if self.whole_words else None
        rng = position.rng("mask", index)
        return [word == SPECIAL for word in words], {"rng": rng, "probability": self.probability, "words": whole}


def make_masking(tokenizer: Tokenizer, options: Options, **shares: float) -> Masking:
    """Return the masking function; ``shares`` as for `Masking`.

    Raises:
        ConfigError: the tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        raise ConfigError("tokenizer: found no mask token, expected one for masked words", problems=["mask"])
    return Masking(
        tokenizer.mask_token_id, tokenizer.vocab_size, options.mask_probability, options.whole_words, **shares
    )


@dataclass(frozen=True, kw_only=True)
class CollateShares(CollateRows):
    """Makes batches with ``words_share``, the factor of the mean over masked tokens of a batch.

    Args:
        rows: all rows.
        numbers: masked tokens of each row; of whole words as many tokens as are drawn.
        batches: which rows form a batch.
        accumulate: batches of a step.
        by_rows: count rows; by default tokens.
    """

    rows: EncodedRows
    numbers: NDArray[np.int64] = field(compare=False)
    batches: Any
    accumulate: int
    by_rows: bool
    _known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_step(cls, usual: CollateRows, rows: EncodedRows, batches: Any, accumulate: int, *, by_rows: bool) -> Self:
        """Return a collate function with the layout of ``usual``, for steps of ``accumulate`` batches."""
        masking: Any = usual.masking
        free = np.add.reduceat((rows.columns["words"] != SPECIAL).astype(np.int64), rows.ends - rows.lengths).tolist()
        numbers = np.asarray([num_masked(count, masking.probability) for count in free], np.int64)
        further = {"batches": batches, "accumulate": accumulate, "by_rows": by_rows}
        return cls.like(usual, rows=rows, numbers=numbers, **further)

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        batch = super().__call__(rows, position)
        items = len(rows) if self.by_rows else int(TakenRows.of(rows).lengths.sum())
        whole, whole_masked = self._of_step(position)
        share = (int((batch["labels"] != IGNORE).sum()) * whole) / (items * max(whole_masked, 1))
        return {**batch, "words_share": torch.tensor([share], dtype=torch.float64)}

    def _of_step(self, position: Where) -> tuple[int, int]:
        """Return the number of tokens or rows of the step that a batch is part of, and of masked tokens."""
        first = position.number // self.accumulate
        # Entries are replaced as a whole: several threads may make batches.
        epoch, plan = self._known.get("plan", (None, None))
        if epoch != position.epoch:
            plan = self.batches.plan(position.epoch)
            self._known["plan"] = position.epoch, plan
        key = position.seed, position.epoch, first
        known, counts = self._known.get("step", (None, (0, 0)))
        if known != key:
            step = range(first * self.accumulate, min((first + 1) * self.accumulate, len(plan)))
            rows = np.concatenate([plan[i] for i in step])
            items = len(rows) if self.by_rows else int(self.rows.lengths[rows].sum())
            counts = items, self.masked(position, rows)
            self._known["step"] = key, counts
        return counts

    def masked(self, position: Where, rows: NDArray[np.int64]) -> int:
        """Return the number of masked tokens of some rows."""
        masking: Any = self.masking
        if not masking.whole_words:
            return int(self.numbers[rows].sum())
        return sum(masking.number(self.rows.get(i), position, i) for i in rows.tolist())


@dataclass(frozen=True)
class MaskedTask(Task):
    """The words behind masks.

    Args:
        columns: the column of texts.
        concatenate: put lines end to end and cut them into full rows.
    """

    columns: Columns
    concatenate: bool = False

    headed = True
    head = "masked_lm"
    kind = "words"
    main_metric = "-eval_loss"
    scores: ClassVar[type[Scorer]] = Scorer  # without metrics; the perplexity is computed from the loss

    @classmethod
    def plan(cls, source: Source) -> MaskedTask:
        """Return the task of texts alone."""
        return cls(source.columns, source.options.concatenate)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the windows of each text with the word of each token; lines without a token are left out."""
        text: Any = self.columns.text
        check_texts(examples, text, "finetune")
        builder, owner = RowBuilder(limits.types), 0
        if self.concatenate:
            for owner, row in enumerate(_full_rows([row[text] for row in examples], tokenizer, limits)):
                builder.add(row, owner, {"words": row.words})
            return Prepared(builder.build(), self.scores)
        how = {"max_tokens": limits.max_tokens, "stride": limits.stride or 0}
        for _, group in encode_chunks(tokenizer, [row[text] for row in examples], **how):
            for row in group:
                if not all(row.special):
                    builder.add(row, owner, {"words": words_of(row)})
                    owner += 1
        return Prepared(builder.build(), self.scores)

    def masking(self, tokenizer: Tokenizer, options: Options) -> Masking:
        """Return the masking function."""
        return make_masking(tokenizer, options)


def _full_rows(texts: Sequence[str], tokenizer: Tokenizer, limits: LengthLimits) -> Iterator[SimpleNamespace]:
    """Yield rows of exactly ``limits.max_tokens``, the last one as long as it comes; every token is in one of them.

    A row has the lines' tokens between those that the tokenizer puts around a text.

    Raises:
        ConfigError: the length of a row is unknown, or too small for a token.
    """
    frame = tokenizer.encode_rows(["a"], max_tokens=None)[0][0]
    inside = [place for place, special in enumerate(frame.special) if not special]
    lead, trail = list(frame.ids[: inside[0]]), list(frame.ids[inside[-1] + 1 :])
    if limits.max_tokens is None or limits.max_tokens <= len(lead) + len(trail):
        raise ConfigError(
            f"concatenate: rows have {limits.max_tokens or 'any number of'} tokens; expected more than the "
            f"{len(lead) + len(trail)} around a text, and a bound: set max_length",
            problems=["concatenate"],
        )
    size = limits.max_tokens - len(lead) - len(trail)
    tokens = chain.from_iterable(_lines_end_to_end(texts, tokenizer))
    while part := list(islice(tokens, size)):
        if len(part) == size or any(word != SPECIAL for _, word in part):
            ids = [*lead, *(token for token, _ in part), *trail]
            words = [*([SPECIAL] * len(lead)), *(word for _, word in part), *([SPECIAL] * len(trail))]
            yield SimpleNamespace(ids=ids, type_ids=[0] * len(ids), words=words)


def _lines_end_to_end(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[tuple[int, int]]]:
    """Yield each line's tokens with their words, counted over all lines, after a separator from the line before."""
    between = [] if tokenizer.sep_token_id is None else [(tokenizer.sep_token_id, SPECIAL)]
    line, first_word = list[tuple[int, int]](), 0
    for _, (row,) in encode_chunks(tokenizer, texts, max_tokens=None, add_special_tokens=False):
        if not len(row.ids):
            continue
        line, last = list(between if line else ()), None
        for token, word in zip(row.ids, row.word_ids, strict=True):
            # A token outside of words is a separate word.
            first_word += word is None or word != last
            line.append((token, first_word))
            last = word
        first_word += 1
        yield line


def words_of(row: object) -> list[int]:
    """Return the word number of each token; tokens of the text outside of words have separate numbers."""
    words: list[int] = []
    extra = 1_000_000  # beyond the words of any row
    for place, (word, special) in enumerate(zip(row.word_ids, row.special, strict=True)):  # type: ignore[attr-defined]
        words.append(SPECIAL if special else extra + place if word is None else word)
    return words
