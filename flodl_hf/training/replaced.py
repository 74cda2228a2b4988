"""Which tokens of a text were replaced: ELECTRA's discriminator, as transformers computes its loss.

In plain text, tokens are replaced by random tokens of the vocabulary: again in each epoch of training, and constant in
evaluation. Alternatively, words have tags that mark replaced ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flodl.data import Where
from flodl.data.rng import Rng
from flodl.errors import DataError
from flodl.metrics import Classification
from flodl_hf.tokenization.alignment import mask_tokens
from flodl_hf.tokenization.readers.columns import Columns, check_texts, infer_columns, refuse_rows
from flodl_hf.training.masked import words_of
from flodl_hf.training.options import Options
from flodl_hf.training.rows import SPECIAL, RowBuilder
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task, encode_chunks

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

KNOWN = {0: 0, 1: 1, "0": 0, "1": 1, "original": 0, "replaced": 1}


@dataclass(frozen=True)
class Replacing:
    """Replaces tokens of a row, drawn again for each row and epoch; rows with labels are unchanged.

    Args:
        others: ids of possible replacements.
        probability: share of tokens.
    """

    others: tuple[int, ...]
    probability: float

    def __call__(self, row: Mapping[str, Any], position: Where, index: int) -> dict[str, Any]:
        """Return the row with some tokens replaced, and ``labels``: 1 for these, 0 for the text's own."""
        return dict(row) if "labels" in row else self.drawn(row, position.rng("replace", index))

    def drawn(self, row: Mapping[str, Any], rng: Rng) -> dict[str, Any]:
        """Return the row as these random numbers have it."""
        own = np.asarray(row["input_ids"], np.int64)
        special = [word == SPECIAL for word in np.asarray(row["words"]).tolist()]
        ids, _ = mask_tokens(
            own.tolist(), special, mask_id=0, random_ids=self.others, rng=rng, probability=self.probability,
            mask_share=0.0, random_share=1.0,
        )  # fmt: skip
        rest = {name: value for name, value in row.items() if name != "words"}
        return {**rest, "input_ids": ids, "labels": (ids != own).astype(np.int64)}


@dataclass(frozen=True)
class ReplacedTask(Task):
    """Whether each token is the text's own.

    Args:
        columns: the column of texts, or the columns of words and tags.
        probability: share of tokens that are replaced.
        seed: decides which ones are in evaluation.
    """

    columns: Columns
    probability: float = 0.15
    seed: int = 42

    head = "replaced_tokens"
    kind = "replaced"
    main_metric = "f1"

    @classmethod
    def plan(cls, source: Source) -> Task:
        """Return the task of texts, or of words with tags; with a generator if one is named."""
        rows, options = source.rows[:200], source.options
        if options.generator is not None:
            from flodl_hf.training.generator import GeneratorTask

            return GeneratorTask.plan(source)
        columns = infer_columns(rows, **dict(options.columns or {}))
        if (columns.text if columns.words is None else columns.tags) is None:
            names = list(rows[0])
            raise DataError(f"train: found the columns {names}; expected texts, or words and tags", names=names)
        return cls(columns, options.mask_probability, options.seed)

    def masking(self, tokenizer: Tokenizer, options: Options | None = None) -> Replacing:
        """Return the function that replaces tokens, by random tokens that are not special."""
        special = set(tokenizer.all_special_ids)
        return Replacing(tuple(k for k in range(tokenizer.vocab_size) if k not in special), self.probability)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the windows of each text; lines without a token are left out."""
        words, tags = self.columns.words, self.columns.tags
        source: Any = self.columns.text if words is None else words
        if words is None:
            check_texts(examples, source, "train" if training else "eval")
        known = [] if words is None else _read_tags(examples, words, tags, "train" if training else "eval")
        draw = None if training or known else self.masking(tokenizer)
        builder, owner, truth = RowBuilder(limits.types), 0, []
        texts = [row[source] for row in examples]
        how = {"max_tokens": limits.max_tokens, "stride": limits.stride or 0, "words": words is not None}
        for i, group in encode_chunks(tokenizer, texts, **how):
            for row in group:
                if all(row.special):
                    continue
                labels: list[int] = []
                if known:
                    labels = [0 if word is None else known[i][word] for word in row.word_ids]
                    builder.add(row, owner, {"labels": labels})
                elif draw is None:
                    builder.add(row, owner, {"words": words_of(row)})
                else:
                    given = {"input_ids": row.ids, "words": words_of(row)}
                    made = draw.drawn(given, Rng(self.seed, "replaced", owner))
                    labels = made["labels"].tolist()
                    builder.add(row, owner, {"labels": labels}, ids=made["input_ids"])
                truth += [] if training else [labels]
                owner += 1
        return Prepared(builder.build(), None if training else partial(_Scorer, truth))


def _read_tags(examples: Examples, words: str, tags: str | None, table: str) -> list[list[int]]:
    """Return 1 for each replaced word and 0 for others, by example.

    Raises:
        DataError: tags that are neither, or as many as there are no words.
    """
    found, wrong = [], []
    for i, row in enumerate(examples):
        given, line = row.get(tags or ""), row.get(words)
        counts = [len(part) if isinstance(part, (list, tuple)) else 0 for part in (given, line)]
        if not isinstance(given, (list, tuple)) or counts[0] != counts[1]:
            wrong.append(f"row {i}: {counts[0]} tags for {counts[1]} words")
        elif strange := [tag for tag in given if isinstance(tag, (bool, float)) or tag not in KNOWN]:
            wrong.append(f"row {i}: {strange[0]!r}")
        else:
            found.append([KNOWN[tag] for tag in given])
    refuse_rows(
        table, "tags that cannot be", wrong,
        f"for each word 1 or 'replaced', else 0 or 'original', in column {tags!r}",
    )  # fmt: skip
    return found


class _Scorer(Scorer):
    def __init__(self, labels: Sequence[Sequence[int]]) -> None:
        super().__init__(Classification(2, "binary"))
        self.labels = labels

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the scores of the tokens of one window; return predicted and true labels."""
        found, true = (scores[0] > 0).long(), list(self.labels[example])
        self.parts[0].update(found, torch.tensor(true))
        return found.tolist(), true
