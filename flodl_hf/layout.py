"""How the tokens of a batch lie in memory, and the few operations that depend on it.

An encoder is token-wise but for three things: where a token stands in its own text, which token
opens a text, and which tokens may attend to which. Those three are asked of a layout:

* `Padded`: one row a text, shorter rows filled up, tensors are ``(batch, seq, ...)``;
* `Packed`: texts end to end with no filling, tensors are ``(tokens, ...)``.

Families and heads are written once against this interface; attention (`flodl_hf.attention`) is the
only other place that tells the two apart. Masks are boolean with True = keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from flodl.errors import PredictError

__all__ = ["Layout", "Packed", "Padded"]


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch of rows filled up to one length.

    Args:
        mask: True where a token is real, ``(batch, seq)``; None where every token is.
    """

    mask: Tensor | None = None

    @classmethod
    def of(cls, attention_mask: Tensor | None) -> Padded:
        """Return the layout that an ``attention_mask`` (1 or True = keep, ``(batch, seq)``) describes.

        A mask that keeps everything is dropped, which lets attention use kernels that take no mask
        (and is what transformers does, so that the two stay equal to the bit). Inside a traced
        function the contents cannot be asked and the mask is kept.

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

    @property
    def attention_mask(self) -> Tensor | None:
        """The mask as attention wants it, ``(batch, 1, 1, seq)``, or None."""
        return None if self.mask is None else self.mask[:, None, None, :]

    def positions(self, ids: Tensor) -> Tensor:
        """Return 0..seq-1 as ``(1, seq)``: one row that broadcasts over the batch."""
        return torch.arange(ids.shape[1], device=ids.device)[None, :]

    def running_count(self, keep: Tensor) -> Tensor:
        """Return for each token how many kept ones its row holds up to and including it, like ``keep``."""
        return keep.cumsum(dim=1)

    def first(self, hidden: Tensor) -> Tensor:
        """Return the state of each text's first token, ``(batch, hidden)``."""
        return hidden[:, 0]

    def keep(self, hidden: Tensor) -> Tensor | None:
        """Return the mask shaped to multiply ``hidden``, ``(batch, seq, 1)``; None where nothing is masked."""
        return None if self.mask is None else self.mask[:, :, None]


@dataclass(frozen=True, slots=True)
class Packed:
    """Texts laid end to end.

    Args:
        offsets: where each text starts, and the total at the end, ``(texts + 1,)``, int32.
        lengths: the same as Python numbers, known without asking the device.
    """

    offsets: Tensor
    lengths: tuple[int, ...]

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
        """Tokens in the longest text."""
        return max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in all texts together."""
        return sum(self.lengths)

    def _starts(self, num_tokens: int) -> Tensor:
        counts = (self.offsets[1:] - self.offsets[:-1]).long()
        return torch.repeat_interleave(self.offsets[:-1].long(), counts, output_size=num_tokens)

    def positions(self, ids: Tensor) -> Tensor:
        """Return each token's place in its own text, ``(tokens,)``."""
        return torch.arange(ids.shape[0], device=ids.device) - self._starts(ids.shape[0])

    def running_count(self, keep: Tensor) -> Tensor:
        """Return for each token how many kept ones its text holds up to and including it, ``(tokens,)``."""
        total = keep.cumsum(dim=0)
        before = torch.cat([total.new_zeros(1), total])[self._starts(keep.shape[0])]
        return total - before

    def first(self, hidden: Tensor) -> Tensor:
        """Return the state of each text's first token, ``(texts, hidden)``."""
        return hidden[self.offsets[:-1].long()]

    def keep(self, hidden: Tensor) -> Tensor | None:
        """Return None: nothing in a packed batch is filling."""
        return None

    def pack(self, rows: Tensor) -> Tensor:
        """Return the real tokens of right-filled ``(texts, seq, ...)`` rows as ``(tokens, ...)``."""
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])

    def unpack(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return one ``(length, ...)`` view for each text."""
        return tokens.split(list(self.lengths))


Layout = Padded | Packed

# Registered so that graphs which take a layout can be exported and traced: its tensors are leaves.
pytree.register_dataclass(Padded, serialized_type_name="flodl_hf.Padded")  # type: ignore[arg-type]
pytree.register_pytree_node(
    Packed,
    lambda layout: ([layout.offsets], layout.lengths),
    lambda children, lengths: Packed(next(iter(children)), lengths),
    serialized_type_name="flodl_hf.Packed",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
