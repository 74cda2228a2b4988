"""Batches that are awkward on purpose: the shapes in which two implementations part first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig


AWKWARD_TEXTS = (
    "",
    "a",
    "Hello, world!",
    "don't stop-me now... it's 3.14% (approx.) @home #tag",
    "tea\u00a0cup with a no-break space",
    "the \ufb01rst \ufb01le, \uff21\uff22\uff23, \u2116 5, x\u00b2",
    "cafe\u0301 na\u00efve \u0130stanbul \u00dfeta",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji and a flag \U0001f1eb\U0001f1f7",
    "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "tabs\tand\nnew\r\nlines   and    spaces",
    "http://example.org/a?b=c&d=e_f user@example.org",
    "antidisestablishmentarianism " * 3,
)


@dataclass(frozen=True)
class AwkwardBatch:
    """One batch as keyword arguments, with a name for its edge case."""

    name: str
    inputs: dict[str, Tensor]


def awkward_batches(config: ModelConfig, *, seed: int = 0, longest: int = 48) -> Iterator[AwkwardBatch]:
    """Yield batches of random ids for this configuration, the same for the same seed.

    A row alone; rows of mixed lengths filled on the right; rows of one token; the longest rows that the
    position table or ``longest`` allows, unfilled; and mixed rows with a second text.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = min(longest, config.max_tokens or longest)
    pad = getattr(config.encoder, "pad_token_id", 0) or 0
    types = config.token_types > 1

    def batch(lengths: list[int]) -> dict[str, Tensor]:
        width = max(lengths)
        ids = torch.randint(0, config.encoder.vocab_size, (len(lengths), width), generator=generator)
        # The padding id occurs only as padding, as in text.
        ids = torch.where(ids == pad, (ids + 1) % config.encoder.vocab_size, ids)
        mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        return {"input_ids": torch.where(mask, ids, pad), "attention_mask": mask.long()}

    yield AwkwardBatch("one row", batch([min(7, limit)]))
    yield AwkwardBatch("mixed lengths", batch([min(n, limit) for n in (11, 3, 19, 1)]))
    yield AwkwardBatch("single tokens", batch([1, 1]))
    yield AwkwardBatch("longest rows", batch([limit, limit]))
    if types:
        inputs = batch([min(n, limit) for n in (13, 5, 9)])
        second = torch.arange(inputs["input_ids"].shape[1])[None] >= 4
        inputs["token_type_ids"] = (second & (inputs["attention_mask"] == 1)).long()
        yield AwkwardBatch("second texts", inputs)


def as_choices(batch: AwkwardBatch) -> AwkwardBatch:
    """Return a batch with its rows as choices: two of each prompt for an even row count, else of one prompt."""
    rows = len(batch.inputs["input_ids"])
    choices = 2 if rows > 2 and rows % 2 == 0 else rows
    return AwkwardBatch(batch.name, {key: value.unflatten(0, (-1, choices)) for key, value in batch.inputs.items()})
