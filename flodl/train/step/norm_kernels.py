"""Triton kernels of the gradient's norm and the decision on a step.

Gradients are in the memory that autograd chose, so the first kernel reads a table of addresses; many programs read one
stretch of one gradient each. The second kernel is one program: it adds up, decides, and writes the figures of the step.
The order of sums depends on shapes only, so a step repeats to the bit. `flodl.train.step.decide` launches the kernels;
importing this file needs Triton.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["span"])
def square_sums(table, sizes, which, starts, sums, span, kind: tl.constexpr, block: tl.constexpr):
    """Write the sum of squares of each stretch of the tensors whose addresses are in ``table``.

    Args:
        table: addresses, int64 ``(tensors,)``.
        sizes: their numbers of elements, int64 ``(tensors,)``.
        which: the tensor of each program, int32.
        starts: the begin of the program's stretch in it, int64.
        sums: float32, one for each program.
        span: elements of a stretch.
        kind: dtype of the tensors.
        block: elements read in one operation.
    """
    program = tl.program_id(0)
    tensor = tl.load(which + program)
    size = tl.load(sizes + tensor)
    address = tl.load(table + tensor)
    start = tl.load(starts + program)
    places = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    if (start + span <= size) & (address % 16 == 0):
        # Most stretches are complete and aligned to 16 bytes, which the compiler must know for wide loads.
        whole = tl.multiple_of(address.to(tl.pointer_type(kind)), 16) + tl.multiple_of(start, 16)
        for offset in range(0, span, block):
            x = tl.load(whole + tl.multiple_of(offset, 16) + places).to(tl.float32)
            total += x * x
    else:
        values = address.to(tl.pointer_type(kind)) + start
        for offset in range(0, span, block):
            x = tl.load(values + offset + places, mask=start + offset + places < size, other=0.0).to(tl.float32)
            total += x * x
    tl.store(sums + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["number", "further"])
def decide(
    sums, number, loss, count, state, skip, scale, row, rest, further, max_norm,
    counts: tl.constexpr, sticky: tl.constexpr, clips: tl.constexpr, summed: tl.constexpr, room: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Decide whether a step counts, and write its figures.

    Args:
        sums: results of `square_sums`.
        number: their number.
        loss: one number.
        count: items counted, one number, where ``counts``.
        state: float32, 1 after a fault; of earlier steps if ``sticky``.
        skip: float32, set to 1 if this step is left out; ``state`` itself unless ``counts``.
        scale: float32, set to the divisor of gradients if ``clips`` or ``summed``.
        row: float64, set to loss, norm, the count if ``counts``, and the ``rest``.
        rest: float64, further figures of the step, unless ``room`` is 0.
        further: their number.
        max_norm: clip to this.
        summed: gradients are not divided by the count yet.
        room: a power of two that is at least ``further``; 0 for no further figures.
    """
    total = tl.zeros([block], tl.float32)
    places = tl.arange(0, block)
    for offset in range(0, number, block):
        total += tl.load(sums + places + offset, mask=places + offset < number, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total, 0))
    divisor = 1.0
    if summed:
        number_of_items = tl.load(count).to(tl.float32)
        divisor = tl.where(number_of_items == 0.0, 1.0, number_of_items)
        norm = norm / divisor
    # Comparisons with NaN are false.
    sound = (tl.abs(tl.load(loss).to(tl.float32)) < float("inf")) & (norm < float("inf"))
    fault = tl.where(sound, 0.0, 1.0)
    held = 0.0
    if sticky:
        held = tl.load(state)
    tl.store(row, tl.load(loss).to(tl.float64))
    tl.store(row + 1, norm.to(tl.float64))
    if counts:
        items = tl.load(count).to(tl.float64)
        tl.store(row + 2, items)
        # The mean of nothing is NaN but no fault; the step is left out nevertheless.
        empty = tl.where(items == 0.0, 1.0, 0.0)
        held = tl.maximum(held, fault * (1.0 - empty))
        tl.store(skip, tl.maximum(held, empty))
    else:
        held = tl.maximum(held, fault)
    if room:
        slots = tl.arange(0, room)
        numbers = tl.load(rest + slots, mask=slots < further, other=0.0)
        tl.store(row + slots + 2 + counts, numbers, mask=slots < further)
    tl.store(state, held)
    if clips:
        factor = tl.maximum((norm + 1e-6) / max_norm, 1.0)
        tl.store(scale, factor * divisor)
    elif summed:
        tl.store(scale, divisor)
