"""Launch the kernels of a layer as functions, those of training with gradients.

The arithmetic of training is autocast's: products in half precision, the residual stream and norms in float32,
gradients of weights in float32. Fewer numbers travel: a state's half-precision copy is written where the state is,
dropout, residual, norm and their gradients are one kernel each, and weights' gradients leave the product in float32.

Shapes: T tokens, D width of a state, N heads, H width of a head.
"""

# Autograd passes contexts and argument lists without types.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from flodl_hf.nn.kernels import rotary, rows, short_texts


class Tiles(NamedTuple):
    """How attention's kernels are cut while training.

    Attributes:
        tile: tokens of a program.
        met: tokens that it meets at a time.
        warps: of a program.
        stages: pipeline stages of its loop.
    """

    tile: int
    met: int
    warps: int
    stages: int


class Stripes(NamedTuple):
    """How sums of columns are cut.

    Attributes:
        high: rows that a program reads at a time.
        wide: columns of a program.
        warps: of a program.
        share: programs for each multiprocessor; 0 for one a stripe, whatever the rows.
    """

    high: int
    wide: int
    warps: int
    share: int


# These are the fastest settings that `python -m benchmarks.training_kernels` tries on an H200. In prediction: tokens of
# a program, and tokens per iteration; programs that rotate while reading process more per iteration.
TILE, MET, TURNED = 64, 32, 64
FORWARD, BACKWARD = Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2)
# With few rows narrow stripes are read by one program each, and no parts are left to add up.
FEW, MANY, CURVED = Stripes(256, 16, 8, 0), Stripes(128, 32, 8, 4), Stripes(32, 64, 4, 8)
FEW_ROWS = 2048
# Warps of a row of up to 1,024 numbers; warps and programs for each multiprocessor; numbers of a program and its warps.
NORM_WARPS, NORM_BACKWARD, ACTIVATE = 2, (8, 4), (1024, 4)


def _programs(device: torch.device, each: int) -> int:
    if device.type != "cuda":
        return each
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def _of_weight(d_out: Tensor, x: Tensor) -> Tensor:
    """Return the float32 gradient of a weight, ``(out, in)``."""
    if d_out.is_cuda:
        return torch.mm(d_out.t(), x, out_dtype=torch.float32)
    return torch.mm(d_out.t().float(), x.float())


def _added(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension, in an order that depends on the shape alone."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    high, wide = 64, 16
    rows.add_parts[(triton.cdiv(out.numel(), wide),)](parts, out, len(parts), out.numel(), high, wide, num_warps=8)
    return out


def _sums(d_out: Tensor, x: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient before the GELU (``d_out`` itself without ``x``), and the sums of its columns, float32."""
    tokens, width = d_out.shape
    d_x = d_out if x is None else torch.empty_like(d_out)
    plain = FEW if tokens <= FEW_ROWS else MANY
    high, wide, warps, share = plain if x is None else CURVED
    columns = triton.cdiv(width, wide)
    blocks = max(1, min(triton.cdiv(tokens, 2 * high), _programs(d_out.device, share) // columns))
    parts = torch.empty(blocks, width, dtype=torch.float32, device=d_out.device)
    rows.column_sums[(blocks, columns)](
        d_out, d_out if x is None else x, d_x, parts, tokens, width, high, wide, x is not None, tanh, num_warps=warps
    )
    return d_x, parts[0] if blocks == 1 else _added(parts)


class _Projected(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_half: Tensor, bias_half: Tensor | None, parts: int, *weights_and_biases: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight_half)
        ctx.sizes = [weight.shape[0] for weight in weights_and_biases[:parts]]
        ctx.set_materialize_grads(False)
        turned = weight_half.t()
        return torch.mm(x, turned) if bias_half is None else torch.addmm(bias_half, x, turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        d_out = grads[0].contiguous()
        x, weight_half = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_x = torch.mm(d_out, weight_half) if needs[0] else None
        middle = 4 + len(ctx.sizes)
        d_weights: list[Any] = [None] * len(ctx.sizes)
        d_biases: list[Any] = [None] * (len(needs) - middle)
        if any(needs[4:middle]):
            d_weights = list(_of_weight(d_out, x).split(ctx.sizes))
        if any(needs[middle:]):
            d_biases = list(_sums(d_out, None, False)[1].split(ctx.sizes))
        return d_x, None, None, None, *d_weights, *d_biases


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Return ``x @ weight.T + bias``, ``(T, outputs)``, in half precision.

    Args:
        x: ``(T, D)``, in half precision.
        weight: the weights in half precision, one below the other, ``(outputs, D)``.
        bias: the biases in half precision, ``(outputs,)``; None where there are none.
        weights: the parameters that ``weight`` copies, which get the gradients.
        biases: the parameters that ``bias`` copies; empty if the next operation sums their gradients.
    """
    return _Projected.apply(x, weight, bias, len(weights), *weights, *biases)  # type: ignore[return-value]


def mix(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, ends: Tensor, *, heads: int, kv_heads: int | None = None,
    window: int | None = None, bias: Tensor | None = None, angles: tuple[Tensor, Tensor] | None = None,
    wide: bool = False, halves: bool = True,
) -> Tensor:  # fmt: skip
    """Return what attention within each text mixes, ``(T, N*H)``; without gradients.

    Args:
        query: ``(T, N*H)``, fp16 or bf16, rows of one stride, H one of 16, 32, 64, 128.
        key: the same, as wide as its heads; ``value`` alike.
        value: see ``key``.
        places: each token's place in its text, ``(T,)``, integers.
        ends: index after the last token of each token's text, ``(T,)``, int32.
        heads: N.
        kv_heads: heads of keys and values; None for N.
        window: how many tokens to each side a token attends to; None for all.
        bias: what scores are added by distance, ``(N, 2*L - 1)`` for texts up to L tokens, float32; None for nothing.
        angles: cosines and sines as `turn` takes them, by which queries and keys are turned first, H at least 32; None
            where they know their places.
        wide: see `turn`.
        halves: see `turn`.
    """
    tokens, width = query.shape[0], query.shape[1] // heads
    out = torch.empty(tokens, heads * width, dtype=query.dtype, device=query.device)
    cos, sin = (query, query) if angles is None else angles
    met, stages = (MET, 3) if angles is None else (TURNED, 2)
    short_texts.mix[(triton.cdiv(tokens, TILE), heads)](
        query, key, value, places, ends, places, places if bias is None else bias, cos, sin, out, out, tokens,
        query.stride(0), key.stride(0), value.stride(0), cos.stride(0), width**-0.5, 0.0, 0, window or 0,
        0 if bias is None else bias.shape[1] // 2, heads, width, TILE, met, heads // (kv_heads or heads), False, False,
        window is not None, bias is not None, angles is not None, wide or cos.dtype == torch.float32, halves,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


class _Mixed(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, places: Tensor, ends: Tensor, seed: Tensor, heads: int, p: float, stream: int,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        tokens, width = qkv.shape[0], qkv.shape[1] // (3 * heads)
        out = torch.empty(tokens, heads * width, dtype=qkv.dtype, device=qkv.device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=qkv.device)
        strides = [qkv.stride(0)] * 3
        tile, met, warps, stages = FORWARD
        short_texts.mix[(triton.cdiv(tokens, tile), heads)](
            *qkv.chunk(3, 1), places, ends, seed, lse, qkv, qkv, out, lse, tokens, *strides, 0, width**-0.5, p, stream,
            window or 0, 0, heads, width, tile, met, 1, p > 0, True, window is not None, False, False, False, True,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        ctx.save_for_backward(qkv, places, ends, seed, out, lse)
        ctx.about = heads, p, stream, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        qkv, places, ends, seed, out, lse = ctx.saved_tensors
        heads, p, stream, window = ctx.about
        d_out = grads[0].contiguous()
        tokens, width = qkv.shape[0], qkv.shape[1] // (3 * heads)
        d_qkv = torch.empty_like(qkv)
        d_q, d_k, d_v = d_qkv.chunk(3, 1)
        given = (*qkv.chunk(3, 1), places, ends, seed, out, lse, d_out)
        tile, met, warps, stages = BACKWARD
        blocks = triton.cdiv(tokens, tile)
        numbers = (tokens, *[qkv.stride(0)] * 4, width**-0.5, p, stream, window or 0, heads, width)
        kinds = (p > 0, window is not None)
        about = {"num_warps": warps, "num_stages": stages}
        short_texts.mix_backward[(blocks, heads, 2)](*given, d_q, d_k, d_v, *numbers, tile, met, *kinds, **about)
        return d_qkv, None, None, None, None, None, None, None


def mixed(
    qkv: Tensor, places: Tensor, ends: Tensor, seed: Tensor, *, heads: int, p: float, stream: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return what attention within each text mixes, ``(T, N*H)``, with dropout and its gradient.

    Args:
        qkv: query, key and value side by side, ``(T, 3*N*H)``, contiguous, H one of 16, 32, 64, 128.
        places: each token's place in its text, ``(T,)``, integers.
        ends: index after the last token of each token's text, ``(T,)``, int32.
        seed: seed of dropout, ``(1,)``, int64, on the same device.
        heads: N.
        p: probability of dropping a weight.
        stream: number of the first stream of random numbers; each head has its own.
        window: how many tokens to each side a token attends to; None for all.
    """
    return _Mixed.apply(qkv, places, ends, seed, heads, p, stream, window)  # type: ignore[return-value]


def _turn(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int, wide: bool, halves: bool, *,
    back: bool = False,
) -> None:  # fmt: skip
    """Apply rotary embedding to the first heads of ``x`` into ``out``; copy the rest."""
    rest = 0 if out is x else x.shape[1] - heads * width
    wide = wide or cos.dtype == torch.float32
    pairs = triton.next_power_of_2(heads * width // 2)
    high = max(1, 2048 // pairs)
    rotary.turn[(triton.cdiv(x.shape[0], high),)](
        x, out, cos, sin, x.shape[0], x.stride(0), out.stride(0), cos.stride(0), heads, rest, width, high, pairs,
        triton.next_power_of_2(rest) if rest else 0, wide, back, halves, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, width: int, wide: bool, halves: bool = True
) -> None:  # fmt: skip
    """Turn queries and keys where they are, or values too; without gradients.

    Args:
        x: rows of one stride that begin with the heads to turn, side by side, ``(T, >= heads * width)``.
        cos: cosines of each token, ``(T, ..., >= width / 2)``, one for each pair of features and then anything;
            ``sin`` in the same form. Angles in float32 are applied in float32.
        sin: see ``cos``.
        heads: how many to turn, of queries and keys together.
        width: H, of a head.
        wide: whether states are turned in float32 and rounded once, rather than after each operation.
        halves: whether a pair is a feature of a head's first half and one of its second, rather than neighbours.
    """
    _turn(x, x, cos, sin, heads, width, wide, halves)


class _Turned(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int, wide: bool, halves: bool
    ) -> Tensor:
        out = torch.empty_like(x)
        _turn(x, out, cos, sin, heads, width, wide, halves)
        ctx.save_for_backward(cos, sin)
        ctx.about = heads, width, wide, halves
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        d_out = grads[0].contiguous()
        d_x = torch.empty_like(d_out)
        _turn(d_out, d_x, cos, sin, *ctx.about, back=True)
        return d_x, None, None, None, None, None, None


def turned(
    x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, width: int, wide: bool, halves: bool = True
) -> Tensor:  # fmt: skip
    """Return a contiguous copy of ``x`` with rotary embedding on its first heads; arguments as of `turn`."""
    return _Turned.apply(x, cos, sin, heads, width, wide, halves)  # type: ignore[return-value]


def _warps(block: int) -> int:
    return NORM_WARPS if block <= 1024 else 8


def norm_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, center: bool = True,
    pre: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``x + residual`` (with ``pre``; else the norm again) and its norm, ``(T, D)``; without gradients.

    Args:
        x: ``(T, D)``, contiguous, like ``residual``.
        residual: see ``x``.
        weight: the norm's gain, ``(D,)``.
        bias: its shift; None for none.
        eps: of the norm.
        center: subtract the mean (layer norm); else root mean square.
        pre: the sum is wanted too.
    """
    tokens, width = x.shape
    half = torch.empty_like(x)
    total = torch.empty_like(x) if pre else half
    block = triton.next_power_of_2(width)
    rows.norm[(tokens,)](
        x, residual, weight, weight if bias is None else bias, x, total, half, x, 0.0, eps, 0, width, block,
        False, bias is not None, center, pre, pre, False, num_warps=_warps(block),
    )  # fmt: skip
    return total, half


class _Normed(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, x_bias: Tensor | None,
        seed: Tensor, eps: float, p: float, stream: int, center: bool, pre: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tokens, width = x.shape
        out, half = torch.empty_like(residual), torch.empty_like(x)
        stats = torch.empty(tokens, 2, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        rows.norm[(tokens,)](
            x, residual, weight, weight if bias is None else bias, seed, out, half, stats, p, eps, stream, width, block,
            p > 0, bias is not None, center, pre, True, True, num_warps=_warps(block),
        )  # fmt: skip
        ctx.save_for_backward(x, residual, weight, stats, seed)
        ctx.about = p, stream, center, pre, bias is not None, x_bias is not None
        ctx.set_materialize_grads(False)
        return out, half

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, residual, weight, stats, seed = ctx.saved_tensors
        p, stream, center, pre, has_bias, has_x_bias = ctx.about
        full, half = (None if grad is None else grad.contiguous() for grad in grads)
        tokens, width = x.shape
        # Each program leaves a part of three sums, so with few rows there are few programs.
        warps, share = NORM_BACKWARD
        block = triton.next_power_of_2(width)
        programs = max(1, min(triton.cdiv(tokens, 4), _programs(x.device, share)))
        d_residual, d_x = torch.empty_like(residual), torch.empty_like(x)
        parts = torch.empty(programs, 3, width, dtype=torch.float32, device=x.device)
        rows.norm_backward[(programs,)](
            x if full is None else full, x if half is None else half, x, residual, weight, stats, seed, d_residual,
            d_x, parts, tokens, p, stream, width, block, p > 0, center, pre, full is not None, half is not None,
            num_warps=warps,
        )  # fmt: skip
        d_weight, d_bias, d_x_bias = _added(parts).unbind(0)
        found = d_x, d_residual, d_weight, d_bias if has_bias else None, d_x_bias if has_x_bias else None
        return *found, None, None, None, None, None, None


def added_and_normed(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, x_bias: Tensor | None, seed: Tensor, *,
    eps: float, p: float, stream: int, center: bool = True, pre: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of ``dropout(x) + residual``, ``(T, D)``, in float32 and once more in ``x``'s dtype.

    Args:
        x: ``(T, D)``, in half precision, with its bias already added.
        residual: ``(T, D)``, float32.
        weight: the norm's gain, ``(D,)``, float32.
        bias: its shift; None for none.
        x_bias: the bias that is in ``x``, if any; gets the gradient that is summed here anyway.
        seed: seed of dropout, ``(1,)``, int64.
        eps: of the norm.
        p: probability of dropping a value of ``x``.
        stream: number of the stream of random numbers.
        center: subtract the mean (layer norm); else root mean square.
        pre: the first result is the sum itself rather than its norm.
    """
    return _Normed.apply(x, residual, weight, bias, x_bias, seed, eps, p, stream, center, pre)  # type: ignore[return-value]


class _Activated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, x_bias: Tensor | None, tanh: bool) -> Tensor:
        out = torch.empty_like(x)
        block, warps = ACTIVATE
        rows.activate[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), block, tanh, num_warps=warps)
        ctx.save_for_backward(x)
        ctx.about = tanh, x_bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        tanh, has_bias = ctx.about
        d_x, sums = _sums(grads[0].contiguous(), x, tanh)
        return d_x, sums if has_bias else None, None


def activated(x: Tensor, x_bias: Tensor | None, *, tanh: bool) -> Tensor:
    """Return the GELU of ``x``, ``(T, F)``, in its dtype.

    Args:
        x: in half precision, with its bias already added.
        x_bias: the bias that is in ``x``, if any; gets the gradient that is summed here anyway.
        tanh: the approximation by tanh in the place of the error function.
    """
    return _Activated.apply(x, x_bias, tanh)  # type: ignore[return-value]


def gated(x: Tensor, *, activation: str, tanh: bool) -> Tensor:
    """Return ``activation(gate) * up``, ``(T, F)``, in their dtype; without gradients.

    Args:
        x: gate and up side by side, ``(T, 2*F)``, contiguous.
        activation: "gelu" or "silu".
        tanh: GELU's approximation by tanh in the place of the error function.
    """
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    high, wide = 16, 128
    rows.gate[(triton.cdiv(tokens, high), triton.cdiv(width, wide))](
        x, out, tokens, width, high, wide, activation == "silu", tanh, num_warps=4
    )
    return out
