"""Words behind masks, learned from plain text: one row a line, a long line in several windows.

What is masked is drawn anew in each epoch for training, and always alike for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flodl.data import Columns
from flodl.metrics import Metric
from flodl_hf.finetuning.rows import SPECIAL, EncodedRows, RowBuilder
from flodl_hf.finetuning.step import Kind
from flodl_hf.finetuning.task import CHUNK, Examples, Prepared, Room, check_texts

if TYPE_CHECKING:
    from flodl_hf.tokenizer import Tokenizer

__all__ = ["MaskedTask"]


@dataclass(frozen=True)
class MaskedTask:
    """The words behind masks.

    Args:
        columns: which column holds texts.
    """

    columns: Columns
    head: str = "masked_lm"
    kind: Kind = "words"
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None
    main_metric: str = "-eval_loss"
    per_row: bool = False

    def prepare(self, examples: Examples, tokenizer: Tokenizer, room: Room, *, training: bool) -> Prepared:
        """Return the windows of each text with the word of each token; lines without a token are left out."""
        text = self.columns.text
        assert text is not None
        check_texts(examples, text, "finetune")
        builder, owner = RowBuilder(room.types), 0
        for start in range(0, len(examples), CHUNK):
            windows = tokenizer.encode_rows(
                [row[text] for row in examples[start : start + CHUNK]],
                max_tokens=room.max_tokens,
                stride=room.stride or 0,
            )
            for group in windows:
                for row in group:
                    if not all(row.special):
                        builder.add(row, owner, {"words": _words(row)})
                        owner += 1
        return Prepared(builder.build(), None if training else ())

    def scorer(self, prepared: Prepared) -> _Scorer:
        """Return a scorer that has seen nothing."""
        return _Scorer()

    def label_counts(self, rows: EncodedRows) -> None:
        """Return None: words are not weighed."""
        return


def _words(row: object) -> list[int]:
    """Return the word of each token; tokens of the text that are in no word are words of their own."""
    words: list[int] = []
    extra = 1_000_000  # beyond the words of any row
    for place, (word, special) in enumerate(zip(row.word_ids, row.special, strict=True)):  # type: ignore[attr-defined]
        words.append(SPECIAL if special else extra + place if word is None else word)
    return words


class _Scorer:
    """Has nothing to add to the loss, from which perplexity follows."""

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Take in nothing: what was masked is known to the loss alone."""

    def metrics(self) -> Sequence[Metric]:
        """Return none."""
        return ()

    def compute(self) -> dict[str, float]:
        """Return no figures."""
        return {}
