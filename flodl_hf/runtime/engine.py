"""Rows of tokens through a model, without filling, and the scores back in the order of the rows.

Decides how a batch is laid out and where it runs. Knows no text and no task beyond "one result a
row" and "one result a token".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flodl_hf.layout import Packed
from flodl_hf.runtime.plan import plan_batches

if TYPE_CHECKING:
    from flodl_hf.model import EncoderModel

__all__ = ["Engine", "Tokens", "evaluating"]

# Small chunks keep activations in a processor's cache; an accelerator wants large products.
CPU_BUDGET = 1024
CUDA_BUDGET = 32_768


class Tokens(Protocol):
    """The part of a tokenised row that a model reads."""

    @property
    def ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def type_ids(self) -> Sequence[int]: ...  # noqa: D102


@contextmanager
def evaluating(model: EncoderModel) -> Iterator[None]:
    """Hold the model in evaluation mode without gradients, and put its mode back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


class Engine:
    """Runs rows through one model.

    Args:
        model: the model; its mode is held in evaluation during a run.
        token_budget: most tokens of a batch; None takes what suits the device.
    """

    def __init__(self, model: EncoderModel, token_budget: int | None = None) -> None:
        self.model = model
        self.token_budget = token_budget or (CUDA_BUDGET if model.device.type == "cuda" else CPU_BUDGET)

    def scores(self, rows: Sequence[Tokens]) -> list[Tensor]:
        """Return the head's scores of each row on the CPU: ``(tokens, classes)``, or ``(classes,)`` for whole rows."""
        return self._run(rows, self._graph, per_row=self.model.per_text)

    def states(self, rows: Sequence[Tokens]) -> list[Tensor]:
        """Return each row's token states, ``(tokens, hidden)``, on the CPU."""
        return self._run(rows, self._encode, per_row=False)

    def pooled(self, rows: Sequence[Tokens]) -> list[Tensor]:
        """Return the pooler's output for each row, ``(hidden,)``, on the CPU."""
        pooler = self.model.graph.get_submodule("pooler")
        return self._run(rows, lambda i, t, layout: pooler(self._encode(i, t, layout), layout=layout), per_row=True)

    def scores_at(self, rows: Sequence[Tokens], places: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the head's scores at some tokens of each row, ``(places, classes)``; the rest is never computed."""
        results: list[Tensor] = [torch.empty(0)] * len(rows)
        head = self.model.graph.get_submodule("head")
        with evaluating(self.model):
            for batch, ids, types, layout in self._batches(rows):
                states = self._encode(ids, types, layout)
                starts = layout.offsets.tolist()
                wanted = [starts[n] + place for n, i in enumerate(batch) for place in places[i]]
                picked = states[torch.tensor(wanted, device=states.device, dtype=torch.long)]
                scores = head(picked, layout=layout).cpu()
                for i, part in zip(batch, scores.split([len(places[i]) for i in batch]), strict=True):
                    results[i] = part
        return results

    def _run(
        self,
        rows: Sequence[Tokens],
        step: Callable[[Tensor, Tensor | None, Packed], Tensor],
        *,
        per_row: bool,
    ) -> list[Tensor]:
        results: list[Tensor] = [torch.empty(0)] * len(rows)
        with evaluating(self.model):
            for batch, ids, types, layout in self._batches(rows):
                out = step(ids, types, layout).cpu()
                for i, part in zip(batch, out.unbind(0) if per_row else layout.unpack(out), strict=True):
                    results[i] = part
        return results

    def _batches(self, rows: Sequence[Tokens]) -> Iterator[tuple[list[int], Tensor, Tensor | None, Packed]]:
        device = self.model.device
        types_used = (
            self.model.config.family.uses_token_types and getattr(self.model.config.encoder, "type_vocab_size", 0) > 1
        )
        for batch in plan_batches([len(row.ids) for row in rows], self.token_budget):
            ids = torch.tensor([t for i in batch for t in rows[i].ids], device=device)
            types = torch.tensor([t for i in batch for t in rows[i].type_ids], device=device) if types_used else None
            yield batch, ids, types, Packed.of([len(rows[i].ids) for i in batch], device)

    def _graph(self, ids: Tensor, types: Tensor | None, layout: Packed) -> Tensor:
        return self.model.graph(ids, token_type_ids=types, layout=layout)

    def _encode(self, ids: Tensor, types: Tensor | None, layout: Packed) -> Tensor:
        return self.model.graph.get_submodule("encoder")(ids, token_type_ids=types, layout=layout)
