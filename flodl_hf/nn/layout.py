"""Memory layouts of the tokens of a batch, and the few operations that depend on them.

An encoder is token-wise but for a few things: the position of a token in its text, the first token of a text,
and which tokens may attend to which. A layout provides these:

* `Padded`: one row a text, shorter rows filled up, tensors are ``(batch, seq, ...)``;
* `Packed`: texts end to end, tensors are ``(tokens, ...)``; `flodl_hf.nn.buckets` pads one to a shape that
  other batches have too.

Families and heads are written once against this interface; attention (`flodl_hf.nn.attention`) is the
only other place that distinguishes the two. Masks are boolean with True = keep.

A layout is created for one call of a model. Values computed once per call and read by several layers (tables of
rotations, a half-precision copy of the states) are kept in its `memo`, and freed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from flodl_hf.errors import PredictError

__all__ = ["Layout", "Packed", "Padded"]

ByRows = Callable[..., Tensor]
"""``call(keep_mask, *rows)``: rows ``(texts, seq, ...)`` to rows; the mask ``(texts, seq)`` is None if all is kept."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch of rows filled up to one length.

    Args:
        mask: True where a token is real, ``(batch, seq)``; None where every token is.
    """

    mask: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, attention_mask: Tensor | None) -> Padded:
        """Return the layout that an ``attention_mask`` (1 or True = keep, ``(batch, seq)``) describes.

        A mask that keeps everything is dropped, which lets attention use kernels that take no mask
        (and is what transformers does, so that the two stay equal to the bit). Inside a traced
        function the contents are unknown and the mask is kept.

        Raises:
            PredictError: the mask is not two-dimensional.
        """
        if attention_mask is None:
            return cls(None)
        if attention_mask.dim() != 2:
            raise PredictError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, seq) with 1 for "
                "tokens to keep. Prepared 3-d and 4-d masks are not taken: pass the 2-d one.",
                shape=tuple(attention_mask.shape),
            )
        mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask != 0
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return cls(None)
        return cls(mask)

    def positions(self, ids: Tensor) -> Tensor:
        """Return 0..seq-1 as ``(1, seq)``: one row that broadcasts over the batch."""
        return torch.arange(ids.shape[1], device=ids.device)[None, :]

    def running_count(self, keep: Tensor) -> Tensor:
        """Return for each token the number of kept tokens in its row up to and including it, shaped like ``keep``."""
        return keep.cumsum(dim=1)

    def first(self, hidden: Tensor) -> Tensor:
        """Return the state of each text's first token, ``(batch, hidden)``."""
        return hidden[:, 0]

    def mean(self, hidden: Tensor) -> Tensor:
        """Return the mean state of each text's real tokens, ``(batch, hidden)``."""
        if self.mask is None:
            count = torch.full((hidden.shape[0], 1), hidden.shape[1], dtype=torch.int64, device=hidden.device)
            return hidden.sum(1) / count
        return (hidden * self.mask[:, :, None]).sum(1) / self.mask.sum(1, keepdim=True)

    def spread(self, values: Tensor) -> Tensor:
        """Return values of each text, ``(batch, size)``, for each of its tokens, ``(batch, 1, size)``."""
        return values[:, None]

    def keep(self, hidden: Tensor) -> Tensor | None:
        """Return the mask shaped to multiply ``hidden``, ``(batch, seq, 1)``; None where nothing is masked."""
        return None if self.mask is None else self.mask[:, :, None]

    def length(self, hidden: Tensor) -> int:
        """Return an upper bound of a text's tokens: the length of a row."""
        return hidden.shape[1]

    def rows(self, *tensors: Tensor) -> Iterator[tuple[Tensor | None, tuple[Tensor, ...]]]:
        """Yield rows of texts ``(texts, seq, ...)`` of each tensor, after the mask of kept tokens."""
        yield self.mask, tensors

    def by_rows(self, call: ByRows, *tensors: Tensor) -> Tensor:
        """Return ``call`` applied to rows of texts, ``(batch, seq, ...)`` in and out."""
        return call(self.mask, *tensors)

    def led(self, count: int) -> Padded:
        """Return the layout of the same texts with ``count`` tokens before each."""
        if self.mask is None:
            return Padded()
        return Padded(torch.cat([self.mask.new_ones(self.mask.shape[0], count), self.mask], 1))

    def before(self, lead: Tensor, values: Tensor) -> Tensor:
        """Return values of tokens, ``(batch, seq)``, with ``lead``, ``(count,)``, before each text's."""
        return torch.cat([lead.to(values).expand(values.shape[0], -1), values], 1)

    def behind(self, count: int, values: Tensor) -> Tensor:
        """Return what `before` put ``count`` tokens before, ``(batch, seq, ...)``, without them."""
        return values[:, count:].contiguous()

    def row_ends(self) -> Tensor | None:
        """Return the places up to each row's last real token, ``(batch,)``, int32; None where nothing is padding."""
        if self.mask is None:
            return None
        if "row_ends" not in self.memo:
            places = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device, dtype=torch.int32)
            self.memo["row_ends"] = (self.mask * places).amax(1)
        return self.memo["row_ends"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Concatenated texts.

    The computation of a forward pass of a *bucketed* layout depends on tensors and on three numbers alone: tokens,
    slots for texts, and ``longest``. So a pass recorded once (a captured CUDA graph, a compiled function)
    serves every batch of its bucket. `flodl_hf.nn.buckets` makes them.

    Args:
        offsets: where each text starts, and the total at the end, ``(texts + 1,)``, int32. A bucketed layout
            may end in slots without tokens.
        lengths: the lengths of the texts that have tokens, as Python numbers, known without reading from the
            device; empty where they are unknown, and then only ``longest`` bounds them.
        longest: upper bound of the lengths; 0 takes their maximum.
        places: each token's position in its text, ``(tokens,)``, int64; None counts them on demand. There may be
            more of them than tokens of texts (`flodl_hf.nn.buckets`): the rows behind belong to no text.
        opens: index of each text's first token, ``(texts,)``, int64, within the tokens even for a slot
            without any; None takes ``offsets``.
        ends: index after the last token of each token's text, ``(tokens,)``, int32; None if unknown.
        real: how many of the texts are real; those after them are filling that nothing reads. None: all.
    """

    offsets: Tensor
    lengths: tuple[int, ...]
    longest: int = 0
    places: Tensor | None = None
    opens: Tensor | None = None
    real: int | None = None
    ends: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, lengths: list[int] | tuple[int, ...], device: torch.device | str | None = None) -> Packed:
        """Return the layout of texts with these token counts.

        Raises:
            PredictError: a length is not positive.
        """
        if not lengths or min(lengths) < 1:
            raise PredictError(f"packed texts need at least one token each, found lengths {list(lengths)[:8]}")
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        offsets[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        return cls(offsets.to(device) if device is not None else offsets, tuple(lengths))

    @property
    def max_length(self) -> int:
        """Most tokens that a text may have: ``longest``, or the longest of the lengths."""
        return self.longest or max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in all texts together, padding included."""
        return self.places.shape[0] if self.places is not None else sum(self.lengths)

    @property
    def num_texts(self) -> int:
        """Slots for texts, padding included."""
        return self.offsets.shape[0] - 1

    def _starts(self, num_tokens: int) -> Tensor:
        if self.places is not None:
            return torch.arange(num_tokens, device=self.places.device) - self.places
        counts = (self.offsets[1:] - self.offsets[:-1]).long()
        return torch.repeat_interleave(self.offsets[:-1].long(), counts, output_size=num_tokens)

    def positions(self, ids: Tensor) -> Tensor:
        """Return each token's place in its own text, ``(tokens,)``."""
        if self.places is not None:
            return self.places
        return torch.arange(ids.shape[0], device=ids.device) - self._starts(ids.shape[0])

    def running_count(self, keep: Tensor) -> Tensor:
        """Return for each token the number of kept tokens in its text up to and including it, ``(tokens,)``."""
        total = keep.cumsum(dim=0)
        before = torch.cat([total.new_zeros(1), total])[self._starts(keep.shape[0])]
        return total - before

    def first(self, hidden: Tensor) -> Tensor:
        """Return the state of each text's first token, ``(texts, hidden)``."""
        return hidden[self.offsets[:-1].long() if self.opens is None else self.opens]

    def mean(self, hidden: Tensor) -> Tensor:
        """Return the mean state of each text's tokens, ``(texts, hidden)``; zeros for a slot without any."""
        values = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
        owners = self._owners(hidden.shape[0])
        # Tokens outside of any slot, where padding ends after the last one, add to a row that is dropped.
        total = values.new_zeros(self.num_texts + 1, *hidden.shape[1:]).index_add(0, owners, values)[:-1]
        count = (self.offsets[1:] - self.offsets[:-1]).clamp(min=1)[:, None]
        return (total / count).to(hidden.dtype)

    def _owners(self, num_tokens: int) -> Tensor:
        """Return the index of the text of each token; after the last one, for padding outside of any slot."""
        tokens = torch.arange(num_tokens, device=self.offsets.device, dtype=torch.int32)
        return torch.searchsorted(self.offsets[1:], tokens, right=True)

    def spread(self, values: Tensor) -> Tensor:
        """Return values of each text, ``(texts, size)``, for each of its tokens, ``(tokens, size)``."""
        return values[self._owners(self.num_tokens).clamp(max=self.num_texts - 1)]

    def keep(self, hidden: Tensor) -> Tensor | None:
        """Return None: padding in a packed batch is separate texts, so nothing has to be masked."""
        return None

    def pack(self, rows: Tensor) -> Tensor:
        """Return the real tokens of right-filled ``(texts, seq, ...)`` rows as ``(tokens, ...)``."""
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])

    def unpack(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return one ``(length, ...)`` view for each text that is not padding."""
        lengths = list(self.lengths if self.real is None else self.lengths[: self.real])
        return tokens[: sum(lengths)].split(lengths)

    def length(self, hidden: Tensor) -> int:
        """Return an upper bound of a text's tokens."""
        return self.max_length

    def led(self, count: int) -> Packed:
        """Return the layout of the same texts with ``count`` tokens before each, slots without tokens included."""
        shifts = torch.arange(self.num_texts + 1, device=self.offsets.device, dtype=self.offsets.dtype)
        offsets = self.offsets + count * shifts
        lengths = tuple(length + count for length in self.lengths)
        if lengths:
            lengths += (count,) * (self.num_texts - len(lengths))
        longest = self.longest + count if self.longest else 0
        if self.places is None:
            return Packed(offsets, lengths, longest, real=self.real)
        counted = torch.arange(count, device=self.places.device)
        places = self.before(counted, self.places + count)
        return Packed(offsets, lengths, longest, places, offsets[:-1].long(), self.real)

    def before(self, lead: Tensor, values: Tensor) -> Tensor:
        """Return values of tokens, ``(tokens,)``, with ``lead``, ``(count,)``, before each text's."""
        count, texts = len(lead), self.num_texts
        found = values.new_empty(len(values) + count * texts)
        found[self._behind(count, len(values))] = values
        starts = self.offsets[:-1, None] + count * torch.arange(texts, device=values.device)[:, None]
        found[starts + torch.arange(count, device=values.device)] = lead.to(values)
        return found

    def behind(self, count: int, values: Tensor) -> Tensor:
        """Return what `before` put ``count`` tokens before, ``(tokens, ...)``, without them."""
        return values[self._behind(count, len(values) - count * self.num_texts)]

    def _behind(self, count: int, num_tokens: int) -> Tensor:
        """Return the position of each token after ``count`` others are added before each text."""
        owners = self._owners(num_tokens).clamp(max=self.num_texts - 1)
        return torch.arange(num_tokens, device=self.offsets.device) + count * (owners + 1)

    def segment_ends(self) -> Tensor:
        """Return the index after the last token of each token's text, ``(tokens,)``, int32."""
        if self.ends is not None:
            return self.ends
        if "segment_ends" not in self.memo:
            if self.places is not None:
                found = self.offsets[1:][(self.places == 0).cumsum(0) - 1]
            else:
                counts = (self.offsets[1:] - self.offsets[:-1]).long()
                found = torch.repeat_interleave(self.offsets[1:], counts, output_size=self.num_tokens)
            self.memo["segment_ends"] = found
        return self.memo["segment_ends"]

    def rows(self, *tensors: Tensor) -> Iterator[tuple[Tensor | None, tuple[Tensor, ...]]]:
        """Yield rows of texts ``(texts, seq, ...)`` of each tensor, after the mask of kept tokens.

        Rows that belong to no text are omitted. Adjacent texts of one length are grouped, and
        not masked. If lengths are unknown to the host, all texts are yielded together in rows of the longest:
        shapes then follow from the layout alone.
        """
        if self.lengths:
            start = 0
            for length, run in groupby(self.lengths):
                count = len(list(run))
                part = slice(start, start + count * length)
                yield None, tuple(x[part].view(count, length, *x.shape[1:]) for x in tensors)
                start = part.stop
            return
        at, real = self.grid()
        # A slot without tokens keeps its first place, so that its weights have a sum; nothing reads it.
        keep = real | (torch.arange(at.shape[1], device=at.device) == 0)
        yield keep, tuple(x[at] for x in tensors)

    def by_rows(self, call: ByRows, *tensors: Tensor) -> Tensor:
        """Return ``call`` applied to rows of texts, for ``(tokens, ...)`` in and out."""
        parts = []
        for keep, rows in self.rows(*tensors):
            parts.append(call(keep, *rows))
        if not self.lengths:
            tokens = torch.arange(self.num_tokens, device=parts[0].device)
            return parts[0][self._owners(self.num_tokens), self.positions(tokens)]
        parts = [part.reshape(-1, *part.shape[2:]) for part in parts]
        behind = self.num_tokens - sum(self.lengths)
        if behind:  # rows of no text, which nothing reads
            parts.append(parts[0].new_zeros(behind, *parts[0].shape[1:]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the token at each place of each text, ``(texts, longest)``, and where there is one.

        Needs no numbers from the device; places without a token point at some token of the batch.
        """
        starts = self.offsets[:-1, None].long()
        at = starts + torch.arange(self.max_length, device=self.offsets.device)
        return at.clamp(max=self.num_tokens - 1), at < self.offsets[1:, None]


Layout = Padded | Packed


# What a layout may have in addition to its offsets.
_OPTIONAL = ("places", "opens", "ends")


def _flatten(layout: Packed) -> tuple[list[Tensor], tuple[Any, ...]]:
    given = tuple(name for name in _OPTIONAL if getattr(layout, name) is not None)
    tensors = [layout.offsets, *(getattr(layout, name) for name in given)]
    return tensors, (layout.lengths, layout.longest, layout.real, given)


def _unflatten(tensors: Iterable[Tensor], context: tuple[Any, ...]) -> Packed:
    lengths, longest, real, given = context
    offsets, *rest = tensors
    optional: dict[str, Any] = dict(zip(given, rest, strict=True))
    return Packed(offsets, lengths, longest, real=real, **optional)


# Registered so that graphs which take a layout can be exported and traced: its tensors are leaves.
pytree.register_pytree_node(
    Padded,
    lambda layout: ([] if layout.mask is None else [layout.mask], layout.mask is not None),
    lambda children, context: Padded(*children) if context else Padded(),
    serialized_type_name="flodl_hf.Padded",
    to_dumpable_context=bool,
    from_dumpable_context=bool,
)
pytree.register_pytree_node(
    Packed,
    _flatten,
    _unflatten,
    serialized_type_name="flodl_hf.Packed",
    to_dumpable_context=list,
    from_dumpable_context=lambda context: (tuple(context[0]), *context[1:3], tuple(context[3])),
)

CHUNK_ROWS = 4096
"""Features with gradients computed together: scores of a whole vocabulary would need twice their memory."""


def largest_of_texts(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the largest value of each feature in each text, ``(texts, size)``; 0 for a text without tokens.

    Args:
        values: ``(tokens, size)``.
        offsets: where each text begins, and the end of the last one, ``(texts + 1,)``.
    """
    return _Largest.apply(values, offsets)  # type: ignore[return-value]


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets.to(torch.int64).diff()
        found = torch.segment_reduce(values, "max", lengths=lengths, axis=0, unsafe=True)
        found = found.masked_fill((lengths == 0)[:, None], 0.0)
        ctx.save_for_backward(values, found, offsets, lengths)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        values, found, offsets, lengths = ctx.saved_tensors
        given = grad_outputs[0]
        tokens = torch.arange(len(values), device=values.device, dtype=offsets.dtype)
        owners = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True).clamp(max=len(found) - 1)
        outside = (tokens >= offsets[-1])[:, None]
        gradient = torch.empty_like(values)
        for start in range(0, values.shape[1], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            chosen = (values[:, part] == found[owners, part]) & ~outside
            equal = torch.segment_reduce(chosen.float(), "sum", lengths=lengths, axis=0, unsafe=True)
            share = given[:, part] / equal.clamp(min=1.0)
            gradient[:, part] = share[owners] * chosen
        return gradient, None
