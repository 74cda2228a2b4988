"""Shared base of heads with one tensor of scores: one call, with the loss on request."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.models.outputs import ScoresOutput


class ScoringModel(EncoderModel):
    """An encoder with a head that returns one tensor of scores."""

    output: ClassVar[type[ScoresOutput]]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        return_dict: bool = True,
    ) -> ScoresOutput | tuple[Any, ...]:
        """Return the scores, and the loss if labels were given.

        Args:
            input_ids: token ids, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all.
            token_type_ids: 0 for the first text, 1 for the second, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            labels: what `loss` of this head takes.
            inputs_embeds: embeddings of words, ``(batch, seq, embedding_size)``, instead of ids.
            output_hidden_states: also return the states after the embeddings and each layer.
            output_attentions: also return each layer's weights, ``(batch, heads, seq, seq)``; eager attention has them.
            return_dict: False gives a tuple.

        Raises:
            PredictError: ids that are not ``(batch, seq)``, or a label that has no class.
        """
        logits, _, seen = self._run_graph(
            input_ids, attention_mask, token_type_ids, position_ids, embeds=inputs_embeds,
            hidden_states=output_hidden_states, attentions=output_attentions,
        )  # fmt: skip
        loss = None if labels is None else self.loss(logits, labels)
        output = self.output(loss, logits, **seen)
        return output if return_dict else output.to_tuple()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of ``logits`` against ``labels``, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")
