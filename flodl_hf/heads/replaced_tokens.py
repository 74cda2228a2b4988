"""Which tokens of a text were replaced by others.

Transformers' class: ``ElectraForPreTraining``, the discriminator.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.heads.prediction_keywords import MASKS
from flodl_hf.heads.scoring import ScoringModel
from flodl_hf.inference.batch import Pending, Placed, Scores
from flodl_hf.inference.entities import TagScheme, decode_entities_batch
from flodl_hf.inference.inputs import Encoded, as_text_list, encode
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.results import Entities, is_empty
from flodl_hf.models.outputs import ReplacedTokensOutput

__all__ = ["ReplacedTokens"]

LABELS = ("original", "replaced")


class ReplacedTokens(ScoringModel):
    """An encoder that detects replaced tokens; logits are ``(batch, seq)``."""

    head: ClassVar[str] = "replaced_tokens"
    output = ReplacedTokensOutput

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ReplacedTokensOutput | tuple[Any, ...]:
        """Return a score for each token, and the loss if labels were given.

        Args:
            input_ids: token ids, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all. Others do not count in the loss.
            token_type_ids: 0 for the first text, 1 for the second, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            labels: 1 for replaced tokens, 0 for the text's own, ``(batch, seq)``.
            **kwargs: ``inputs_embeds``, ``output_hidden_states``, ``output_attentions`` and ``return_dict``, as in
                other tasks.
        """
        whole = kwargs.pop("return_dict", True)
        output: Any = super().forward(input_ids, attention_mask, token_type_ids, position_ids, **kwargs)
        if labels is not None:
            output.loss = self.loss(output.logits, labels, attention_mask)
        return output if whole else output.to_tuple()

    def loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: ``(batch, seq)``.
            labels: 1 for replaced tokens, 0 for the text's own, ``(batch, seq)``.
            attention_mask: 1 for tokens that count, ``(batch, seq)``; None counts all.
        """
        labels = labels.to(logits.device)
        if attention_mask is not None:
            counted = attention_mask.to(logits.device) == 1
            logits, labels = logits[counted], labels[counted]
        return F.binary_cross_entropy_with_logits(logits, labels.float())

    @accept_keywords(MASKS)
    def predict(
        self,
        texts: str | Iterable[str],
        *,
        replaced_only: bool = True,
        strict: bool = False,
        untrained: bool = False,
        **run: Unpack[RunKeywords],
    ) -> Any:
        """Return for each text the tokens that were probably replaced: label, score, word, start, end.

        A text longer than the model's maximum is read in overlapping windows; each token is scored where it has most
        context.

        Args:
            texts: texts; an iterator gives an iterator. One text alone gives its tokens.
            replaced_only: leave out tokens that are more probably the text's own; False gives every token, with the
                probability of its label.
            strict: raise on a text that does not fit into one window.
            untrained: predict although parts of the model have random values.
            **run: how to run (``precision``, ``devices``, ``batch_invariant``, ``token_budget``, ...), see
                `flodl_hf.inference.RunOptions`; options that are not passed keep their `runtime` values.

        Raises:
            PredictError: the model has no tokenizer or an untrained head.
        """
        tokenizer = self._ready("predict", untrained=untrained)
        texts = as_text_list(texts, "predict")
        scheme = TagScheme.detect(LABELS)
        limit = self.max_tokens
        stride = 64 if limit is None else min(64, max(0, (limit - 2) // 2))
        tokens = partial(encode, tokenizer, max_tokens=limit, stride=stride, strict=strict, offsets=True)

        def finish(chunk: list[str], encoded: Encoded, scores: Pending) -> list[Any]:
            placed = scores.placed()
            # The sigmoid of a score is the second of the softmax of zero and it.
            both = torch.stack([torch.zeros_like(placed.values), placed.values], -1)
            return decode_entities_batch(
                Placed(both, placed.starts), encoded.table, chunk, scheme, aggregation="none",
                ignore_labels=LABELS[:1] if replaced_only else (),
            )  # fmt: skip

        return Session(self, run).answer(
            texts, tokens, Scores(False), finish, single=isinstance(texts, str), kind=Entities, blank=is_empty
        )
