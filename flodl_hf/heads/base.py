"""The encoder alone: a state for each token, and for each text where there is a pooler.

Transformers' class: ``BertModel`` and its siblings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flodl_hf.heads.head import Head
from flodl_hf.model import EncoderModel
from flodl_hf.outputs import BaseOutput

__all__ = ["HEAD", "BaseModel"]


class BaseModel(EncoderModel):
    """An encoder without a task's head."""

    head: ClassVar[str] = "base"

    @property
    def has_pooler(self) -> bool:
        """Whether calls also give ``pooler_output``."""
        return "pooler" in dict(self.graph.named_children())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> BaseOutput | tuple[Any, ...]:
        """Return the states.

        Args:
            input_ids: token ids, ``(batch, seq)``.
            attention_mask: 1 for tokens to keep, ``(batch, seq)``; None keeps all.
            token_type_ids: 0 for the first text, 1 for the second, ``(batch, seq)``.
            position_ids: places in the position table, ``(batch, seq)``; None counts them.
            output_hidden_states: also return the states after the embeddings and each layer.
            return_dict: False gives a tuple.
        """
        wanted = ["pooler_output"] if self.has_pooler else []
        states, named, stages = self.run_graph(
            input_ids, attention_mask, token_type_ids, position_ids, wanted, hidden_states=output_hidden_states
        )
        output = BaseOutput(states, named.get("pooler_output"), stages)
        return output if return_dict else output.to_tuple()


HEAD = Head("base", "Model", BaseModel, "base")
