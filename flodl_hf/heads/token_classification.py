"""A label for every token: named entities, parts of speech.

Transformers' class: ``BertForTokenClassification`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Unpack

from torch import Tensor

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.heads.prediction_keywords import ENTITIES
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.inference.batch import Pending, Scores
from flodl_hf.inference.entities import Aggregation, TagScheme, decode_entities_batch
from flodl_hf.inference.inputs import Encoded, as_text_list, encode
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Entities, is_empty
from flodl_hf.inference.transformers_results import token_classification
from flodl_hf.models.outputs import TokenClassificationOutput
from flodl_hf.nn.task_heads import check_labels, token_loss
from flodl_hf.tokenization.alignment import join_words

__all__ = ["TokenClassifier"]

# Tokens that neighbouring windows share: more than any entity, so that each is seen whole with context.
STRIDE = 64


class TokenClassifier(ScoringModel):
    """An encoder that labels tokens; logits are ``(batch, seq, labels)``."""

    head: ClassVar[str] = "token_classification"
    output = TokenClassificationOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, seq, labels)``.
            labels: ids ``(batch, seq)``; -100 for tokens that do not count.
        """
        check_labels(labels, self.num_labels)
        return token_loss(logits, labels)

    @accept_keywords(ENTITIES)
    def predict(
        self,
        texts: str | Iterable[str] | Iterable[Sequence[str]],
        *,
        aggregation: Aggregation = "first",
        ignore_labels: Collection[str] = ("O",),
        constrained: bool = False,
        words: bool = False,
        stride: int = STRIDE,
        strict: bool = False,
        untrained: bool = False,
        compat: Literal["transformers"] | None = None,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each text its entities in order: label, score, word, start, end; ``text[start:end]`` is the word.

        A text longer than the model's maximum is read in overlapping windows; each token is labelled where it has
        most context, so nothing is lost or doubled at a seam.

        Args:
            texts: texts; lists of words with ``words``; an iterator gives an iterator. One text alone gives its
                entities.
            aggregation: what carries a label: "first" (a word has its first token's), "average", "max",
                "simple" (each token its own), or "none" (one result a token).
            ignore_labels: labels that are left out; a text is one label.
            constrained: take the best sequence of labels that the tag scheme allows.
            words: texts are lists of words; ``words`` of each entity then contains their indices.
            stride: tokens that neighbouring windows share.
            strict: raise on a text that does not fit into one window.
            untrained: predict although parts of the model have random values.
            compat: "transformers" gives the dictionaries of its pipeline, and its flaws.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: the model has no tokenizer or an untrained head, or an option makes no sense.
            TokenizerError: a text is not a valid string, or too long with ``strict``.
        """
        tokenizer = self._ready("predict", untrained=untrained)
        texts = as_text_list(texts, "predict")
        scheme = TagScheme.detect(self.config.labels)
        # Windows that barely advance would never finish; they may share at most half a window.
        stride = stride if self.max_tokens is None else min(stride, max(0, (self.max_tokens - 2) // 2))
        # Letters of a text would be taken for labels.
        ignored = (ignore_labels,) if isinstance(ignore_labels, str) else ignore_labels

        tokens = partial(
            encode, tokenizer, max_tokens=self.max_tokens, stride=stride, words=words,
            strict=strict, offsets=True, snap=compat is None, records=compat is not None,
        )  # fmt: skip

        def finish(chunk: list[Any], encoded: Encoded, scores: Pending) -> list[Any]:
            joined = [join_words(text) for text in chunk] if words else None
            plain = [text for text, _ in joined] if joined else chunk
            spans = [extents for _, extents in joined] if joined else None
            placed = scores.placed()
            if compat is not None:
                rows = placed.rows(encoded.table)
                return self._as_transformers(rows, encoded, plain, spans, aggregation, ignored)
            return decode_entities_batch(
                placed, encoded.table, plain, scheme, aggregation=aggregation, ignore_labels=ignored,
                constrained=constrained, word_spans=spans,
            )  # fmt: skip

        single = isinstance(texts, str) or (
            words and isinstance(texts, Sequence) and len(texts) > 0 and isinstance(texts[0], str)
        )
        told: dict[str, Any] = (
            {"blank": _without_words, "given": lambda item: join_words(item)[0]} if words else {"blank": is_empty}
        )
        return Session(self, run).answer(
            texts, tokens, Scores(False), finish, single=single, kind=Entities if compat is None else None, **told
        )

    def _as_transformers(
        self,
        logits: list[Tensor],
        encoded: Encoded,
        texts: Sequence[str],
        spans: Sequence[Any] | None,
        aggregation: str,
        ignore_labels: Collection[str],
    ) -> list[Any]:
        tokenizer = self.tokenizer
        assert tokenizer is not None
        return [
            token_classification(
                own, rows, text, self.config.labels, tokenizer, aggregation_strategy=aggregation,
                ignore_labels=ignore_labels, word_spans=None if spans is None else spans[place],
            )
            for place, ((own, rows), text) in enumerate(zip(encoded.by_text(logits), texts, strict=True))
        ]  # fmt: skip


def _without_words(words: Any) -> bool:
    return isinstance(words, (list, tuple)) and all(isinstance(w, str) and not w.strip() for w in words)
