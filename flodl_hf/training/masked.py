"""Masked language modelling on plain text: one row per line with windows of long lines, or concatenated lines.

Masks are drawn again in each epoch of training, and are constant in evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flodl.errors import ConfigError
from flodl.metrics import Metric
from flodl_hf.readers.columns import Columns
from flodl_hf.training.rows import SPECIAL, RowBuilder
from flodl_hf.training.step import Kind
from flodl_hf.training.task import CHUNK, Examples, LengthLimits, Prepared, UnweightedTask, check_texts

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["MaskedTask", "words_of"]


@dataclass(frozen=True)
class MaskedTask(UnweightedTask):
    """The words behind masks.

    Args:
        columns: the column of texts.
        concatenate: put lines end to end and cut them into full rows.
    """

    columns: Columns
    concatenate: bool = False
    head: str = "masked_lm"
    kind: Kind = "words"
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None
    main_metric: str = "-eval_loss"
    per_row: bool = False

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the windows of each text with the word of each token; lines without a token are left out."""
        text = self.columns.text
        assert text is not None
        check_texts(examples, text, "finetune")
        builder, owner = RowBuilder(limits.types), 0
        if self.concatenate:
            for owner, row in enumerate(_full_rows([row[text] for row in examples], tokenizer, limits)):
                builder.add(row, owner, {"words": row.words})
            return Prepared(builder.build(), None if training else ())
        for start in range(0, len(examples), CHUNK):
            windows = tokenizer.encode_rows(
                [row[text] for row in examples[start : start + CHUNK]],
                max_tokens=limits.max_tokens,
                stride=limits.stride or 0,
            )
            for group in windows:
                for row in group:
                    if not all(row.special):
                        builder.add(row, owner, {"words": words_of(row)})
                        owner += 1
        return Prepared(builder.build(), None if training else ())

    def scorer(self, prepared: Prepared) -> _Scorer:
        """Return a new scorer."""
        return _Scorer()


@dataclass(frozen=True)
class _Filled:
    """A row of the lines' tokens between the tokens that the tokenizer puts around a text."""

    ids: list[int]
    type_ids: list[int]
    words: list[int]


def _full_rows(texts: Sequence[str], tokenizer: Tokenizer, limits: LengthLimits) -> Iterator[_Filled]:
    """Yield rows of exactly ``limits.max_tokens``, the last one as long as it comes; every token is in one of them.

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

    def filled(part: list[tuple[int, int]]) -> _Filled:
        ids = [*lead, *(token for token, _ in part), *trail]
        words = [*([SPECIAL] * len(lead)), *(word for _, word in part), *([SPECIAL] * len(trail))]
        return _Filled(ids, [0] * len(ids), words)

    waiting: list[tuple[int, int]] = []
    for line in _lines_end_to_end(texts, tokenizer):
        waiting += line
        while len(waiting) >= size:
            yield filled(waiting[:size])
            del waiting[:size]
    if any(word != SPECIAL for _, word in waiting):
        yield filled(waiting)


def _lines_end_to_end(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[tuple[int, int]]]:
    """Yield each line's tokens with their words, counted over all lines, after a separator from the line before."""
    between = [] if tokenizer.sep_token_id is None else [(tokenizer.sep_token_id, SPECIAL)]
    first_word, is_first = 0, True
    for start in range(0, len(texts), CHUNK):
        for (row,) in tokenizer.encode_rows(texts[start : start + CHUNK], max_tokens=None, add_special_tokens=False):
            if not len(row.ids):
                continue
            line: list[tuple[int, int]] = [] if is_first else list(between)
            last = None
            for token, word in zip(row.ids, row.word_ids, strict=True):
                # A token outside of words is a separate word.
                first_word += word is None or word != last
                line.append((token, first_word))
                last = word
            is_first = False
            first_word += 1
            yield line


def words_of(row: object) -> list[int]:
    """Return the word number of each token; tokens of the text outside of words have separate numbers."""
    words: list[int] = []
    extra = 1_000_000  # beyond the words of any row
    for place, (word, special) in enumerate(zip(row.word_ids, row.special, strict=True)):  # type: ignore[attr-defined]
        words.append(SPECIAL if special else extra + place if word is None else word)
    return words


class _Scorer:
    """No metrics: the perplexity is computed from the loss."""

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Do nothing: only the loss uses the masked tokens."""

    def metrics(self) -> Sequence[Metric]:
        """Return none."""
        return ()

    def compute(self) -> dict[str, float]:
        """Return no figures."""
        return {}
