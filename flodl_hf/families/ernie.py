"""ERNIE 1.0 to 3.0 (Sun et al. 2019, https://arxiv.org/abs/1904.09223).

BERT under another name. It departs from BERT in:

* from 2.0 on the training task has an id, and its embedding is added to each token; our calls pass
  none, and the reference then uses task 0, as does this encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema.config_rows import Row, boolean, count
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.nn.encoder import Embeddings, bert_block, chain, stack
from flodl_hf.nn.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ErnieConfig(bert.BertConfig):
    """The settings of an ERNIE encoder: BERT's, and the tasks of its training.

    Attributes:
        task_types: rows of the task table.
        uses_tasks: whether there is one.
    """

    task_types: int = 3
    uses_tasks: bool = False


CONFIG = (
    *bert.CONFIG,
    Row("task_types", "task_type_vocab_size", count(), 3),
    Row("uses_tasks", "use_task_id", boolean(), False),
)


class ErnieEmbeddings(Embeddings):
    """Words, token types, positions and task 0 summed, normalised and dropped.

    Args:
        *args: as of `Embeddings`.
        task_types: rows of the task table.
        **options: as of `Embeddings`.
    """

    def __init__(self, *args: Any, task_types: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.task = nn.Embedding(task_types, args[1])

    def summed(
        self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, layout: Layout
    ) -> Tensor:
        """Return the sum of a token's embeddings, ``(..., size)``."""
        states = super().summed(input_ids, token_type_ids, position_ids, layout)
        return states + self.task(input_ids.new_zeros(()).expand_as(input_ids))


def encoder(c: ErnieConfig) -> Graph:
    """Return the graph from ids to token states."""
    tasks: dict[str, Any] = {"kind": ErnieEmbeddings, "task_types": c.task_types} if c.uses_tasks else {}
    return chain(bert.embeddings(c, **tasks), stack(bert_block(c) for _ in range(c.num_layers)))


KEYS = rows_under("ernie", bert.KEYS)

FAMILY = bert.FAMILY.renamed(
    "ernie", "Ernie", base_prefix="ernie", config=ErnieConfig, rows=CONFIG, left_out=bert.FAMILY.left_out,
    keys=(*KEYS[:3], KeyRow("encoder.embeddings.task", "ernie.embeddings.task_type_embeddings"), *KEYS[3:]),
    encoder=encoder, pretraining={"ErnieForPreTraining": "masked_lm"},
    tiny={"base": {"use_task_id": True}, "without tasks": {}},
    real={"base": {"vocab_size": 40000, "max_position_embeddings": 2048, "type_vocab_size": 4, "use_task_id": True}},
)  # fmt: skip
