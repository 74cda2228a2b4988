"""Pretraining heads: the word at each mask, and whether two texts are consecutive.

Transformers' classes: ``BertForPreTraining`` (does the second text follow?) and ``AlbertForPreTraining`` (are both in
order?).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from flodl_hf.heads.masked_lm import MaskedLM
from flodl_hf.heads.next_sentence import predict
from flodl_hf.models.outputs import PretrainingOutput
from flodl_hf.nn.task_heads import check_labels, token_loss

__all__ = ["Pretrainer"]


class Pretrainer(MaskedLM):
    """A masked-word model that also scores pairs of texts."""

    head: ClassVar[str] = "pretraining"

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        return_dict: bool = True,
    ) -> PretrainingOutput | tuple[Any, ...]:
        """Return both kinds of scores, and the sum of both losses if labels of both were given.

        Args:
            input_ids: token ids, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all.
            token_type_ids: 0 for the first text, 1 for the second, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            labels: words ``(batch, seq)``; -100 for tokens that do not count.
            next_sentence_label: 0 where the texts belong together, 1 where they do not, ``(batch,)``.
            sentence_order_label: the same, as ALBERT's class calls it.
            inputs_embeds: embeddings of words, ``(batch, seq, embedding_size)``, instead of ids.
            output_hidden_states: also return the states after the embeddings and each layer.
            output_attentions: also return each layer's weights, ``(batch, heads, seq, seq)``; eager attention has them.
            return_dict: False gives a tuple.

        Raises:
            PredictError: ids that are not ``(batch, seq)``, or a label that has no class.
        """
        words, named, seen = self._run_graph(
            input_ids, attention_mask, token_type_ids, position_ids, ["relation"], embeds=inputs_embeds,
            hidden_states=output_hidden_states, attentions=output_attentions,
        )  # fmt: skip
        related = next_sentence_label if sentence_order_label is None else sentence_order_label
        loss = None
        if labels is not None and related is not None:
            check_labels(labels, words.shape[-1])
            check_labels(related, 2)
            pairs = F.cross_entropy(named["relation"].view(-1, 2), related.to(words.device).view(-1))
            loss = token_loss(words, labels) + pairs
        scores: dict[str, Any] = {self.config.family.heads[self.head].relation_output: named["relation"], **seen}
        output = PretrainingOutput(loss, words, **scores)
        return output if return_dict else output.to_tuple()

    predict = predict
