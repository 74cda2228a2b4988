"""Triton kernels of Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019) over all parameters together.

They do the operations of torch's fused kernels in the same order, so that parameters and averages are the same to the
bit; loads and stores are sixteen bytes wide, and divided gradients are not written back. `flodl.train.step.update`
launches them; importing this file needs Triton.

Torch's kernels let the compiler decide when a product and a sum become one operation with one rounding; here it is
explicit. CUDA 13.0 for compute capability 9.0 fuses them for each of the four elements of a thread, with an exception:
if decay acts through a gradient that is not divided, the product of the first element is computed before a branch and
rounded there (``APART``). Powers of the betas use torch's operation, because Triton's library computes other bits.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["number"])
def count_steps(steps, number, skip, counted, block: tl.constexpr):
    """Count a step of each parameter unless it is left out, and write the counts with it side by side.

    Args:
        steps: addresses of the counts, float32, int64 ``(parameters,)``.
        number: how many.
        skip: float32, 1 where the step is left out.
        counted: float32 ``(parameters,)``.
    """
    places = tl.program_id(0) * block + tl.arange(0, block)
    there = places < number
    count = tl.load(steps + places, mask=there, other=0).to(tl.pointer_type(tl.float32))
    now = tl.load(count, mask=there, other=0.0) + 1.0
    tl.store(counted + places, now, mask=there)
    if tl.load(skip) != 1.0:
        tl.store(count, now, mask=there)


@triton.jit
def _moved(
    param, grad, first, second, at, mask, alone, rate, settings, by, one, two,
    DIVIDED: tl.constexpr, DECAYS: tl.constexpr, DECOUPLED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    p = tl.load(param + at, mask=mask, other=0.0)
    g = tl.load(grad + at, mask=mask, other=0.0)
    m = tl.load(first + at, mask=mask, other=0.0)
    v = tl.load(second + at, mask=mask, other=0.0)
    beta_1, beta_2 = tl.load(settings).to(tl.float32), tl.load(settings + 1).to(tl.float32)
    eps, decay = tl.load(settings + 2).to(tl.float32), tl.load(settings + 3).to(tl.float32)
    if DIVIDED:
        g = tl.div_rn(g, by)
    if DECAYS:
        if DECOUPLED:
            p = tl.fma(-(rate * decay), p, p)
        else:
            joined = tl.fma(p, decay, g)
            # Adding 0 makes a product that the compiler does not fuse with the following sum.
            g = tl.where(alone, tl.fma(p, decay, 0.0) + g, joined) if APART else joined
    m = tl.fma(beta_1, m, tl.fma(-beta_1, g, g))
    square = g * g
    v = tl.fma(beta_2, v, tl.fma(-beta_2, square, square))
    size = tl.div_rn(rate, one)
    below = tl.div_rn(tl.sqrt_rn(v), two) + eps
    p = p - tl.div_rn(size * m, below)
    tl.store(param + at, p, mask=mask)
    tl.store(first + at, m, mask=mask)
    tl.store(second + at, v, mask=mask)


@triton.jit(do_not_specialize=["number", "span"])
def move(
    base, table, number, sizes, which, starts, powers, settings, rate, skip, by, span,
    DIVIDED: tl.constexpr, DECAYS: tl.constexpr, DECOUPLED: tl.constexpr, APART: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Move each parameter, and the averages of its gradient and of its square, unless the step is left out.

    Args:
        base: a float32 tensor, one that begins at sixteen bytes if any is even; positions are relative to it.
        table: how many elements after ``base`` parameters, gradients, averages and averages of squares begin, and 1
            where all four begin at sixteen bytes and have a whole number of these, int64 ``(5, parameters)``.
        number: how many parameters.
        sizes: their numbers of elements, int64.
        which: the parameter of each program, int32.
        starts: where in it the program's stretch begins, int64, a multiple of ``block``.
        powers: of both betas by each parameter's count, float32 ``(2, parameters)``.
        settings: betas, epsilon and decay, float64.
        rate: float32, one number.
        skip: float32, 1 where the step is left out.
        by: float32, what gradients are divided by, where ``DIVIDED``.
        span: elements of a stretch, a multiple of ``block``.
        APART: the product of decay and the first element of a thread of torch's is rounded before it is added. Threads
            have four neighbours each where tensors are even, else one of each 512 elements of 2,048.
    """
    if tl.load(skip) != 1.0:
        program = tl.program_id(0)
        tensor = tl.load(which + program)
        size = tl.load(sizes + tensor)
        start = tl.multiple_of(tl.load(starts + program), 16)
        one = 1.0 - tl.load(powers + tensor)
        two = tl.sqrt_rn(1.0 - tl.load(powers + number + tensor))
        speed, divisor = tl.load(rate), tl.load(by)
        at_p, at_g = tl.load(table + tensor), tl.load(table + number + tensor)
        at_m, at_v = tl.load(table + 2 * number + tensor), tl.load(table + 3 * number + tensor)
        if tl.load(table + 4 * number + tensor) == 1:
            # New variables, because tl.multiple_of would also apply in the other branch.
            even = size // 4 * 4
            param, grad = base + at_p // 4 * 4, base + at_g // 4 * 4
            first, second = base + at_m // 4 * 4, base + at_v // 4 * 4
            for offset in range(0, span, block):
                at = start + offset + tl.arange(0, block)
                _moved(
                    param, grad, first, second, at, at < even, at % 4 == 0, speed, settings, divisor, one, two,
                    DIVIDED, DECAYS, DECOUPLED, APART,
                )  # fmt: skip
        else:
            for offset in range(0, span, block):
                at = start + offset + tl.arange(0, block)
                _moved(
                    base + at_p, base + at_g, base + at_m, base + at_v, at, at < size, at % 2048 < 512, speed, settings,
                    divisor, one, two, DIVIDED, DECAYS, DECOUPLED, APART,
                )  # fmt: skip
