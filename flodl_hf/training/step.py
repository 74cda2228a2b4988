"""One batch through the model, and its loss as a sum and a count.

The loss without weights and smoothing is the model's own, operation by operation, so that a run equals a plain
loop to the bit. How sums and counts become a step is decided in `flodl.train.step`.

Noise on word embeddings in training (NEFTune, arXiv:2310.05914) is drawn by a hash of the row's seed, the token's place
in the row and its place in the vector, so it depends on the row, the epoch and the run's seed alone. It is uniform
within ``alpha / sqrt(tokens * width)``, with the tokens of the row itself; the reference uses the padded width of the
batch. It is computed on the device of the batch, so steps can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.data import Where
from flodl.errors import TrainError
from flodl.train import Loss
from flodl_hf.nn.layout import Layout, Packed, Padded
from flodl_hf.nn.prompts import prefix_of
from flodl_hf.nn.task_heads import IGNORED_LABEL, classification_loss, span_loss, token_loss

LossFunction = Callable[[Tensor, Tensor], Any]


def own_loss(call: LossFunction, scores: Tensor, labels: Tensor, rows: Any) -> Loss:
    """Return the loss of a user's function for some items, as a sum and a count.

    A value per item is summed; a mean is over the items, or over the items of whole-number labels that are
    not -100. Both, and a pair ``(sum, count)`` or a `Loss`, give the same step for any micro-batch size.

    Args:
        call: called with scores ``(items, classes)`` and labels ``(items,)``, or ``(items, ...)`` as the task has them.
        rows: number of items, if labels do not define it.

    Raises:
        TrainError: it returns something else.
    """
    given = call(scores, labels)
    if isinstance(given, Loss):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return Loss(*given)
    kept = labels != IGNORED_LABEL if not labels.is_floating_point() and labels.dim() == 1 else None
    count = rows if kept is None else kept.sum()
    if isinstance(given, Tensor) and given.dim() == 0:
        return Loss.mean(given, count)
    if isinstance(given, Tensor) and given.shape[:1] == labels.shape[:1]:
        each = given if given.dim() == 1 else given.flatten(1).mean(1)
        return Loss((each if kept is None else torch.where(kept, each, 0.0)).sum(), count)
    shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
    raise TrainError(
        f"loss: found {type(given).__name__}{shape}; expected a mean, a value for each of the {len(labels)} items, a "
        "pair (sum, count), or a flodl.train.Loss",
        found=type(given).__name__,
    )


SEEDS = "noise_seeds"
"""The part of a batch with a seed for each row, int64 ``(rows,)``."""
WORD_EMBEDDINGS = "encoder.embeddings.word"
MASK = 0xFFFFFFFF
STEP = 0x61C88647
"""Between the numbers of neighbours before they are mixed."""


def row_seeds(position: Where, rows: Sequence[int], purpose: str = "noise") -> NDArray[np.int64]:
    """Return a seed below 2**31 for each row of a batch, for this epoch and purpose."""
    return np.asarray([int(position.rng(purpose, row).integers(1 << 31, 1)[0]) for row in rows], np.int64)


@contextmanager
def noisy(model: Any, alpha: float, batch: Any) -> Iterator[None]:
    """Add noise to the word embeddings of ``model`` inside the context, in training mode."""
    word: nn.Module = model.graph.get_submodule(WORD_EMBEDDINGS)
    if not word.training or SEEDS not in batch:
        yield
        return

    def add(module: nn.Module, inputs: Any, states: Tensor) -> Tensor:
        noise = uniform_noise(*_tokens(batch, states.shape[:-1]), states.shape[-1])
        return states + (noise * alpha).to(states.dtype)

    handle = word.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _tokens(batch: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token the seed and length of its row, and its place in it, in the shape of the batch."""
    seeds = batch[SEEDS]
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"][1:].to(torch.int64)
        at = torch.arange(math.prod(shape), device=seeds.device)
        row = torch.searchsorted(ends, at, right=True).clamp(max=len(seeds) - 1)
        starts = batch["cu_seqlens"][:-1].to(torch.int64)
        return tuple(part.view(shape) for part in (seeds[row], (ends - starts)[row], at - starts[row]))  # type: ignore[return-value]
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    place = torch.arange(shape[1], device=seeds.device)[None]
    return seeds[:, None].expand(*shape), lengths.expand(*shape), place.expand(*shape)


def uniform_noise(seeds: Tensor, lengths: Tensor, places: Tensor, width: int) -> Tensor:
    """Return float32 noise ``(*tokens, width)``, uniform within ``1 / sqrt(lengths * width)``.

    Args:
        seeds: of each token's row, int64 ``(*tokens)``.
        lengths: tokens of each token's row.
        places: of the tokens in their rows.
    """
    base = mixed(mixed(seeds) + places)
    columns = torch.arange(width, device=seeds.device) * STEP
    bits = mixed(base[..., None] + columns)
    number = (bits >> 8).to(torch.float32) * 2.0**-23 - 1.0  # float32 represents 24 bits exactly
    return number * torch.rsqrt(lengths.to(torch.float32) * width)[..., None]


def mixed(value: Tensor) -> Tensor:
    """Return 32 bits, each of which depends on all bits of ``value``.

    Factors are below 2**31, so that int64 does not overflow.
    """
    value = value & MASK
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & MASK
    value = ((value ^ (value >> 15)) * 0x31848BAB) & MASK
    return value ^ (value >> 16)


Kind = Literal[
    "single_label", "multi_label", "regression", "tokens", "words", "spans", "vectors", "choices", "pairs", "replaced"
]
PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
"""Values of ``problem_type`` in ``config.json``, by kind."""


def score(model: Any, batch: Any) -> Tensor:
    """Return the head's scores of a batch, in the layout that the batch has."""
    return run_model(model, batch)[0]


def run_model(model: Any, batch: Any, outputs: Sequence[str] = ()) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the head's scores of a batch, in the layout that the batch has, and the graph's outputs of these names."""
    ids, types = batch["input_ids"], batch.get("token_type_ids")
    if "cu_seqlens" not in batch and not batch["attention_mask"].is_cuda:
        return model._run_graph(ids, batch["attention_mask"], types, None, outputs)[:2]
    layout = layout_of(batch)
    lead, led = prefix_of(model.graph), layout
    if lead is not None:
        ids, types, led = lead.rows(ids, types, layout)
    further: Any = {"outputs": list(outputs)} if outputs else {}
    found = model.graph(ids, token_type_ids=types, layout=led, **further)
    scores, named = found if outputs else (found, {})
    return scores if lead is None or model._per_text else layout.behind(lead.count, scores), named


def layout_of(batch: Any) -> Layout:
    """Return the layout of the tokens of a batch, created for each pass."""
    if "places" in batch:
        return Packed(batch["cu_seqlens"], (), batch["longest"], batch["places"], batch["opens"])
    if "cu_seqlens" in batch:
        return Packed(batch["cu_seqlens"], tuple(batch["row_lengths"]))
    mask = batch["attention_mask"]
    # Checking for padding would synchronise with the device, so the mask is kept.
    return Padded(mask != 0) if mask.is_cuda else Padded.of(mask)


def rows_of_scores(scores: Tensor, batch: Any, *, per_row: bool) -> list[Tensor]:
    """Return the scores of each row of a batch without padding: ``(classes,)`` or ``(tokens, classes)``."""
    if per_row:
        return list(scores.unbind(0))
    if "cu_seqlens" in batch:
        return list(scores.split(batch["row_lengths"]))
    lengths = batch["attention_mask"].sum(1).tolist()
    return [row[:length] for row, length in zip(scores, lengths, strict=True)]


class Scoring:
    """A loss that is computed from scores; called with a model and a batch it is a training step."""

    reads_num_rows = False  # counts are taken from the labels, so captured steps serve batches of any number of rows

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Return the loss of a batch."""
        return self.of(self.score(model, batch), batch)

    def score(self, model: Any, batch: Any) -> Any:
        """Return the head's scores of a batch."""
        return score(model, batch)

    def of(self, scores: Any, batch: Any, /) -> Loss:
        """Return the loss of computed scores."""
        raise NotImplementedError


@dataclass(frozen=True)
class Objective(Scoring):
    """The loss of one task.

    Args:
        kind: kind of the loss.
        weights: weight of each label.
        smoothing: share of the target that is spread over all labels.
        mask_padding: spans only: exclude padding from the softmax. transformers includes padding, so that its loss
            depends on the padded length of a batch.
        own: the user's function in place of the task's loss; see `user_loss`. Batches are not filled up.
        noise: how much there is on word embeddings; see `flodl_hf.training.step`.
    """

    kind: Kind
    weights: tuple[float, ...] | None = None
    smoothing: float = 0.0
    mask_padding: bool = True
    own: LossFunction | None = None
    noise: float | None = None

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Return the loss of a batch."""
        if self.noise is None:
            return super().__call__(model, batch)
        with noisy(model, self.noise, batch):
            scores = self.score(model, batch)
        return self.of(scores, batch)

    def of(self, scores: Tensor, batch: Any) -> Loss:
        """Return the loss of computed scores."""
        if self.kind == "spans":
            return self._spans(scores, batch)
        labels = batch["labels"]
        if self.kind == "replaced":
            return self._replaced(scores.reshape(-1), labels.reshape(-1), settled="places" in batch or scores.is_cuda)
        if self.own is not None:
            flat = scores.reshape(-1, scores.shape[-1])
            whole = labels if self.kind in ("regression", "multi_label") else labels.reshape(-1)
            return own_loss(self.own, flat, whole, len(flat))
        if self.kind in ("regression", "multi_label"):
            if "real" in batch:
                return self._texts_of(scores, labels, batch["real"])
            return Loss.mean(self._texts(scores, labels), scores.shape[0])
        if self.weights is not None or self.smoothing:
            return self._weighted(scores, labels)
        if self.kind == "single_label":
            count = batch["real"].sum() if "real" in batch else scores.shape[0]
            return Loss.mean(self._texts(scores, labels), count)
        counted = (labels != IGNORED_LABEL).sum()
        return Loss.mean(token_loss(scores, labels, upcast=self.kind == "words"), counted)

    def _replaced(self, scores: Tensor, labels: Tensor, *, settled: bool) -> Loss:
        """Return the loss of tokens that are no padding.

        Args:
            settled: shapes must not depend on values, as on a device.
        """
        if self.own is not None:
            return own_loss(self.own, scores, labels, len(scores))
        counted = labels != IGNORED_LABEL
        if settled:
            each = F.binary_cross_entropy_with_logits(scores, labels.clamp(min=0).to(scores.dtype), reduction="none")
            return Loss((each * counted).sum(), counted.sum())
        wanted = labels[counted].to(scores.dtype)
        return Loss.mean(F.binary_cross_entropy_with_logits(scores[counted], wanted), len(wanted))

    def _texts(self, scores: Tensor, labels: Tensor) -> Tensor:
        if self.kind == "multi_label" and self.weights is not None:
            weight = _on(self.weights, scores.dtype, scores.device)
            return F.binary_cross_entropy_with_logits(scores, labels, weight=weight)
        return classification_loss(scores, labels, PROBLEM_TYPES[self.kind])

    def _texts_of(self, scores: Tensor, labels: Tensor, real: Tensor) -> Loss:
        """Return the loss of the texts that are no padding."""
        scores, labels = scores.view(len(real), -1), labels.view(len(real), -1)
        if self.kind == "regression":
            each = (scores - labels).square()
        else:
            weight = None if self.weights is None else _on(self.weights, scores.dtype, scores.device)
            each = F.binary_cross_entropy_with_logits(scores, labels, weight=weight, reduction="none")
        count = real.sum()
        return Loss.mean((each * real[:, None]).sum() / (count * each.shape[1]), count)

    def _weighted(self, scores: Tensor, labels: Tensor) -> Loss:
        flat, wanted = scores.view(-1, scores.shape[-1]), labels.view(-1)
        kept = wanted != IGNORED_LABEL
        weight, count = None, kept.sum()
        if self.weights is not None:
            weight = _on(self.weights, flat.dtype, flat.device)
            count = torch.where(kept, weight[wanted.clamp(min=0)], 0.0).sum()
        # A sum, since the mean of labels that all weigh 0 has a gradient that is no number.
        total = F.cross_entropy(
            flat, wanted, weight=weight, ignore_index=IGNORED_LABEL, label_smoothing=self.smoothing, reduction="sum"
        )
        return Loss(total, count)

    def _spans(self, scores: Tensor, batch: Any) -> Loss:
        count, lowest = scores.shape[0], torch.finfo(scores.dtype).min
        if "places" in batch:
            layout: Any = layout_of(batch)
            at, inside = layout.grid()
            scores = scores[at].masked_fill(~inside[:, :, None], lowest)
            count = batch["real"].sum()
        elif "cu_seqlens" in batch:
            rows = rows_of_scores(scores, batch, per_row=False)
            scores = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=lowest)
            count = len(rows)
        elif self.mask_padding:
            scores = scores.masked_fill((batch["attention_mask"] == 0)[:, :, None], lowest)
        start, end = (part.squeeze(-1).contiguous() for part in scores.split(1, dim=-1))
        starts, ends = batch["start_positions"], batch["end_positions"]
        if self.own is not None:
            both = torch.stack([starts, ends], 1)
            return own_loss(self.own, torch.stack([start, end], 2), both, count)
        return Loss.mean(span_loss(start, end, starts, ends), count)


@lru_cache(maxsize=8)
def _on(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights on a device; kept, because copying them at each step would make the host wait."""
    return torch.tensor(weights, dtype=dtype, device=device)
