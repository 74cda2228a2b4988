"""The span of a context that answers a question, from data in the shape of SQuAD.

A long context is read in overlapping windows. In a window without the whole answer, the target
is the first token, which means "no answer" (Devlin et al. 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from flodl.errors import DataError, printable
from flodl_hf.inference.metrics import AnswerF1
from flodl_hf.tokenization.alignment import answer_positions
from flodl_hf.tokenization.readers.columns import Columns, check_texts, column_names, refuse_rows
from flodl_hf.training.rows import RowBuilder
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task, encode_chunks

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

WINDOW_TOKENS = 384
STRIDE = 128


@dataclass(frozen=True)
class AnswerTask(Task):
    """The answer to a question in its context.

    Args:
        columns: the columns of questions, contexts and answers.
    """

    columns: Columns

    headed = True
    head = "question_answering"
    kind = "spans"
    main_metric = "f1"

    @classmethod
    def plan(cls, source: Source) -> AnswerTask:
        """Return the task of questions with answers."""
        if source.columns.answers is None:
            names = column_names(source.rows[:200])
            raise DataError(
                f"train: found questions and no column with answers among {names}; expected the answers as in SQuAD, "
                "{'text': [...], 'answer_start': [...]}; set columns={'answers': ...}",
                names=names,
            )
        return cls(source.columns)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the windows of each question with its context."""
        columns: Any = self.columns
        question, context = columns.question, columns.context
        for name in (question, context):
            check_texts(examples, name, "finetune")
        builder, faults = RowBuilder(limits.types), []
        truth: list[tuple[Any, str, list[str]]] = []
        questions, contexts = [row[question].strip() for row in examples], [row[context] for row in examples]
        how = {"max_tokens": limits.max_tokens, "stride": limits.shared(STRIDE, 3), "cut": "second"}
        for i, windows in encode_chunks(tokenizer, questions, contexts, **how):
            row = examples[i]
            try:
                found = _answers(row.get(columns.answers), row[context])
            except DataError as fault:
                faults.append(f"row {i}: {fault}")
                continue
            span = None if not found else (found[0][1], found[0][1] + len(found[0][0]))
            for window, (first, last) in zip(windows, answer_positions(windows, span), strict=True):
                builder.add(window, i, start_positions=np.int64(first), end_positions=np.int64(last))
            if not training:
                truth.append((list(windows), row[context], [text for text, _ in found]))
        refuse_rows("finetune", "answers that are not understood", faults, "texts of the context, with their starts")
        return Prepared(builder.build(), None if training else partial(_Scorer, truth))


def _answers(value: Any, context: str) -> list[tuple[str, int]]:
    """Return the accepted answers with their starts.

    Raises:
        DataError: an answer is not at its stated start, or not in the context.
    """
    if isinstance(value, Mapping) and not isinstance(value.get("text"), str):
        items = list(zip_longest(value.get("text") or (), value.get("answer_start") or ()))
    else:
        several = [value] if isinstance(value, (str, Mapping)) and value else list(value or ())
        items = [
            (one.get("text"), one.get("answer_start")) if isinstance(one, Mapping) else (one, None) for one in several
        ]
    found = []
    for text, start in items:
        if not isinstance(text, str) or not text:
            raise DataError(f"the answer {text!r} is no text")
        try:
            at = context.find(text) if start is None else int(start)
        except (TypeError, ValueError):
            raise DataError(f"the answer's start {printable(str(start), 60)} is no integer") from None
        if at < 0 or context[at : at + len(text)] != text:
            raise DataError(
                f"the answer {printable(text, 60)} is not in the context{'' if start is None else f' at {at}'}"
            )
        found.append((text, at))
    return found


class _Scorer(Scorer):
    """Metrics of answers; ``truth`` has for each question its windows, its context and the accepted answers."""

    def __init__(self, truth: Sequence[tuple[Any, str, list[str]]]) -> None:
        super().__init__(AnswerF1())
        self.truth = truth
        self.no_answer = any(not answers for _, _, answers in truth)

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the scores of the windows of one question, each ``(tokens, 2)``.

        Returns:
            The predicted answer and the accepted answers.
        """
        from flodl_hf.inference.batch import Placed
        from flodl_hf.inference.spans import decode_answers_batch
        from flodl_hf.inference.token_table import table_of

        windows, context, answers = self.truth[example]
        table = table_of(windows, [0] * len(scores))
        (best,) = decode_answers_batch(Placed.of(scores), table, [context], no_answer=self.no_answer)
        found = best[0].text if best else ""
        self.parts[0].update([found], [answers])
        return found, list(answers)
