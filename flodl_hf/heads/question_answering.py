"""The span of a context that answers a question.

Transformers' class: ``BertForQuestionAnswering`` and its siblings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flodl_hf.heads.head import Head
from flodl_hf.heads.losses import span_loss
from flodl_hf.model import EncoderModel
from flodl_hf.outputs import QuestionAnsweringOutput

__all__ = ["HEAD", "QuestionAnswerer"]


class QuestionAnswerer(EncoderModel):
    """An encoder that scores each token as the first and as the last of the answer."""

    head: ClassVar[str] = "question_answering"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> QuestionAnsweringOutput | tuple[Any, ...]:
        """Return both scores of each token, each ``(batch, seq)``, and the loss if positions were given.

        Args:
            input_ids: token ids of question and context, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all.
            token_type_ids: 0 for the question, 1 for the context, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            start_positions: token of the answer's start, ``(batch,)``; outside the row it does not count.
            end_positions: token of the answer's end, ``(batch,)``.
            output_hidden_states: also return the states after the embeddings and each layer.
            return_dict: False gives a tuple.
        """
        logits, _, stages = self.run_graph(
            input_ids, attention_mask, token_type_ids, position_ids, hidden_states=output_hidden_states
        )
        start, end = self.split(logits)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(start, end, start_positions, end_positions)
        output = QuestionAnsweringOutput(loss, start, end, stages)
        return output if return_dict else output.to_tuple()

    @staticmethod
    def split(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return start and end scores, each ``(...)``, of the head's ``(..., 2)``."""
        start, end = logits.split(1, dim=-1)
        return start.squeeze(-1).contiguous(), end.squeeze(-1).contiguous()


HEAD = Head("question_answering", "ForQuestionAnswering", QuestionAnswerer, "qa")
