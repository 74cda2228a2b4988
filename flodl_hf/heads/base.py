"""The encoder alone: a state for each token, and for each text where there is a pooler.

Transformers' class: ``BertModel`` and its siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flodl_hf.heads.head import Head
from flodl_hf.model import EncoderModel
from flodl_hf.outputs import BaseOutput

if TYPE_CHECKING:
    from flodl_hf.decode.pooling import Pooling

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
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            wanted,
            hidden_states=output_hidden_states,
        )
        output = BaseOutput(states, named.get("pooler_output"), stages)
        return output if return_dict else output.to_tuple()

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        pooling: Pooling | Sequence[Pooling] | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        strict: bool = False,
        truncate: bool = False,
        untrained: bool = False,
    ) -> Tensor | Iterator[Tensor]:
        """Return one vector for each text, ``(texts, size)``; for an iterator, an iterator of vectors.

        A folder of sentence-transformers says how it pools; elsewhere tokens are averaged and vectors have
        length 1. A text longer than the model takes is read in windows whose vectors are averaged, weighted
        by their tokens.

        Args:
            texts: one text or several.
            pooling: "mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "last_token", "pooler", or several;
                None as the folder says, else "mean".
            normalize: scale vectors to length 1; None as the folder says, else True.
            truncate_dim: keep this many features.
            strict: raise on a text that does not fit into one window.
            truncate: keep only the first window of a long text, as sentence-transformers does.
            untrained: embed although the model holds random values.

        Raises:
            PredictError: the model has no tokenizer, or an option makes no sense.
        """
        from flodl_hf.runtime.stream import stream

        self.ready("embed", untrained=untrained)

        def step(chunk: list[str]) -> list[Tensor]:
            return list(self._embed(chunk, pooling, normalize, truncate_dim, strict, truncate))

        if isinstance(texts, str):
            return step([texts])[0]
        found = stream(texts, step)
        if not isinstance(found, list):
            return found
        return torch.stack(found) if found else torch.zeros(0, truncate_dim or self.config.encoder.hidden_size)

    def _embed(
        self,
        texts: list[str],
        pooling: Any,
        normalize: bool | None,
        truncate_dim: int | None,
        strict: bool,
        truncate: bool,
    ) -> Tensor:
        from flodl_hf.decode.pooling import finish_embeddings, pool_packed
        from flodl_hf.runtime import Engine
        from flodl_hf.runtime.inputs import encode

        tokenizer, recipe = self.tokenizer, self.sentence_recipe
        assert tokenizer is not None
        limit = self.max_tokens
        if recipe is not None and recipe.max_tokens is not None:
            limit = min(limit or recipe.max_tokens, recipe.max_tokens)
        if recipe is not None and recipe.lower_case:
            texts = [text.lower() for text in texts]
        names = pooling or (recipe.pooling if recipe else "mean")
        encoded = encode(tokenizer, texts, max_tokens=limit, strict=strict)
        rows, owners, weights = encoded.rows, encoded.owners, [max(1, c) for c in encoded.counts]
        if truncate:
            keep = [i for i, row in enumerate(rows) if row.window == 0]
            rows, owners, weights = (
                [rows[i] for i in keep],
                [owners[i] for i in keep],
                [weights[i] for i in keep],
            )
        engine = Engine(self)
        vectors: list[Tensor] = []
        if names == "pooler":
            vectors = [vector.float() for vector in engine.pooled(rows)]
        else:
            for states in engine.states(rows):
                ends = torch.tensor([0, len(states)])
                vectors.append(pool_packed(states, ends, names)[0])
        size = vectors[0].shape[-1] if vectors else 0
        total, share = torch.zeros(len(texts), size), torch.zeros(len(texts), 1)
        if len(rows) == len(texts):
            total = torch.stack(vectors)
        else:
            index = torch.tensor(owners)
            weight = torch.tensor(weights, dtype=torch.float32)[:, None]
            total = total.index_add(0, index, torch.stack(vectors) * weight) / share.index_add(0, index, weight)
        wanted = normalize if normalize is not None else (recipe.normalize if recipe else True)
        return finish_embeddings(total, truncate_dim=truncate_dim, normalize=wanted)


HEAD = Head("base", "Model", BaseModel, "base")
