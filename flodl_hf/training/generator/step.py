"""One step of a generator and a discriminator: words drawn for masked places, and the sum of both losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.train import Loss
from flodl_hf.nn.adapter_layers.prompts import lead_of
from flodl_hf.nn.encoder.losses import IGNORED_LABEL, token_loss
from flodl_hf.training.generator.sampling import drawn
from flodl_hf.training.step import Kind, Objective, layout_of, score

__all__ = ["JointObjective", "Scored"]


class Scored(NamedTuple):
    """What both models say of a batch.

    Attributes:
        tokens: the discriminator's score of each token, in the layout of the batch.
        replaced: 1 for tokens that were replaced, 0 for a text's own, -100 for what fills up; like ``tokens``.
        words: the generator's scores of words at each mask, ``(masks, words)``.
    """

    tokens: Tensor
    replaced: Tensor
    words: Tensor


@dataclass(frozen=True)
class JointObjective(Objective):
    """The generator's mean loss over masks, and ``weight`` times the discriminator's over all tokens of the texts.

    No gradient goes through the words that are drawn. Micro-batches of a step weigh by their tokens; ``words_share`` of
    a batch has the mean over its masks count as it does in the whole step.

    Args:
        weight: of the discriminator's loss.
    """

    kind: Kind = field(default="replaced")
    weight: float = 50.0

    def score(self, model: Any, batch: Any) -> Any:
        """Return `Scored`."""
        return model.one_pass(self._scored, batch)

    def _scored(self, model: Any, batch: Any) -> Scored:
        ids, labels = batch["input_ids"], batch["labels"]
        words = _words(model.beside, batch)
        chosen = drawn(words.detach(), batch["mask_seeds"], batch["mask_offsets"])
        masked = labels != IGNORED_LABEL
        slots = (masked.flatten().cumsum(0) - 1).clamp(min=0)
        own = torch.where(masked, labels, ids)
        filled = torch.where(masked, chosen[slots].view_as(ids), ids)
        replaced = torch.where(batch["attended"], (filled != own).to(labels.dtype), IGNORED_LABEL)
        return Scored(score(model, {**batch, "input_ids": filled}), replaced, words)

    def of(self, scores: Any, batch: Any) -> Loss:
        """Return the loss of scores that are known already, with both parts of it as further figures."""
        labels = batch["mask_labels"]
        words = token_loss(scores.words, labels, upcast=scores.words.dtype != torch.float64)
        tokens = self._replaced(
            scores.tokens.reshape(-1), scores.replaced.reshape(-1), settled="places" in batch or scores.tokens.is_cuda
        )
        value = words * batch["words_share"][0].to(words.dtype) + self.weight * tokens.as_mean()
        masks = (labels != IGNORED_LABEL).sum()
        parts = {"generator_loss": (words * masks, masks), "discriminator_loss": (tokens.as_sum(), tokens.count)}
        return Loss.mean(value, tokens.count, parts)

    def by_row(self, scores: Any, batch: Any) -> Tensor:
        """Return four numbers for each token, in the layout of the batch.

        These are the discriminator's score, whether the token was replaced, whether the generator's first word is the
        text's own (-1 where nothing was masked), and the generator's loss.
        """
        labels, masked = batch["mask_labels"], batch["labels"] != IGNORED_LABEL
        words = scores.words.float()
        slots = (masked.flatten().cumsum(0) - 1).clamp(min=0)
        right = (words.argmax(-1) == labels).float()[slots].view_as(masked)
        lost = F.cross_entropy(words, labels, reduction="none")[slots].view_as(masked)
        found = [scores.tokens.float(), scores.replaced.float()]
        return torch.stack([*found, torch.where(masked, right, -1.0), torch.where(masked, lost, 0.0)], -1)


def _words(generator: Any, batch: Any) -> Tensor:
    """Return the generator's scores of words at the masks of a batch, and of no other tokens."""
    layout, graph = layout_of(batch), generator.graph
    ids, types, led, lead = batch["input_ids"], batch.get("token_type_ids"), layout, lead_of(graph)
    if lead is not None:
        ids, types, led = lead.rows(ids, types, layout)
    states = graph.get_submodule("encoder")(ids, token_type_ids=types, layout=led)
    if lead is not None:
        states = layout.behind(lead.count, states)
    flat = states.reshape(-1, states.shape[-1])
    return graph.get_submodule("head")(flat.index_select(0, batch["mask_places"]), layout=layout)
