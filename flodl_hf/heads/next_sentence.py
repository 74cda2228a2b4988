"""Whether one text follows another.

Transformers' class: ``BertForNextSentencePrediction``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.nn import functional as F

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.errors import PredictError
from flodl_hf.heads.prediction_keywords import PAIRS
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.inference.batch import Pending, Related, Scores
from flodl_hf.inference.classes import decode_classes
from flodl_hf.inference.inputs import Encoded, encode, split_pairs
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Labels
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.models.outputs import NextSentenceOutput
from flodl_hf.nn.task_heads import check_labels

__all__ = ["NextSentence"]

FOLLOWS = ("follows", "other")
"""Labels of the two scores: the second text follows the first, or it is a random text."""


@accept_keywords(PAIRS)
def predict(
    self: EncoderModel,
    pairs: tuple[str, str] | Iterable[tuple[str, str]],
    *,
    strict: bool = False,
    untrained: bool = False,
    **run: Unpack[RunKeywords],
) -> Any:
    """Return for each pair the probabilities that its second text "follows" and that it does not ("other").

    A pair too long for the model is read in windows of its longer text, and scores are the mean over the windows,
    weighted by their tokens; see `SequenceClassifier.predict`.

    Args:
        pairs: ``(first, second)``, or several in a list; an iterator gives an iterator.
        strict: raise on a pair that does not fit into one window.
        untrained: predict although parts of the model have random values.
        **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
            `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

    Raises:
        PredictError: the input is not pairs, or the model has no tokenizer or an untrained head.
    """
    tokenizer = self._ready("predict", untrained=untrained)
    single = isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(text, str) for text in pairs)

    def encoded(chunk: list[Any]) -> Encoded:
        first, second = split_pairs(chunk, "predict")
        if second is None:
            raise PredictError("predict: found single texts; expected pairs (first, second)")
        return encode(tokenizer, first, second, max_tokens=self.max_tokens, strict=strict)

    def finish(chunk: list[Any], rows: Encoded, scores: Pending) -> list[Any]:
        return decode_classes(
            scores.stacked(), FOLLOWS, owners=rows.table.owners, weights=rows.table.counts, texts=len(chunk),
            problem_type="single_label_classification",
        )  # fmt: skip

    if isinstance(pairs, str):
        raise PredictError("predict: found a string; expected a pair (first, second), or several in a list")
    work = Scores(True) if self._per_text else Related()
    return Session(self, run).answer(pairs, encoded, work, finish, single=single, kind=Labels)


class NextSentence(ScoringModel):
    """An encoder that predicts whether a second text follows the first; logits are ``(batch, 2)``."""

    head: ClassVar[str] = "next_sentence"
    _per_text: ClassVar[bool] = True
    output = NextSentenceOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, 2)``.
            labels: 0 where the second text follows, 1 where it does not, ``(batch,)``.
        """
        check_labels(labels, 2)
        return F.cross_entropy(logits.view(-1, 2), labels.to(logits.device).view(-1))

    predict = predict
