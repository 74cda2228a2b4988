"""Triton kernels over whole tensors: the gradient's norm and what follows from it, sums of what is watched.

Gradients lie wherever autograd left them, so the first kernel goes by a table of addresses; many programs read them,
each a stretch of one gradient. The second is one program: it adds up, decides, and writes the step's figures. Sums are
in an order that depends on shapes alone, so a step repeats to the bit. What is launched when is in
`flodl.train.step.decide` and `flodl.train.step.tensor_sums`; importing this file needs Triton.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decide", "finish_sums", "one_sum", "square_sums"]


@triton.jit(do_not_specialize=["span"])
def square_sums(table, sizes, which, starts, sums, span, kind: tl.constexpr, block: tl.constexpr):
    """Write the sum of squares of each stretch of the tensors that ``table`` has the addresses of.

    Args:
        table: addresses, int64 ``(tensors,)``.
        sizes: their numbers of elements, int64 ``(tensors,)``.
        which: the tensor of each program, int32.
        starts: where in it the program's stretch begins, int64.
        sums: float32, one for each program.
        span: elements of a stretch.
        kind: what the tensors are of.
        block: elements read at once.
    """
    program = tl.program_id(0)
    tensor = tl.load(which + program)
    size = tl.load(sizes + tensor)
    address = tl.load(table + tensor)
    start = tl.load(starts + program)
    places = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    if (start + span <= size) & (address % 16 == 0):
        # Nearly all stretches: whole, and so placed that 16 bytes can be read at once, which has to be said here.
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


@triton.jit
def one_sum(values, sums, size, span, squared: tl.constexpr, block: tl.constexpr):
    """Write the sum of each stretch of one tensor, or of its squares.

    Args:
        values: the tensor.
        sums: float32, one for each program.
        size: its number of elements; specialised, since loads are wide where 16 divides it.
        span: elements of a stretch, likewise.
        squared: whether squares are added up.
        block: elements read at once.
    """
    program = tl.program_id(0).to(tl.int64)
    places = program * span + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for offset in range(0, span, block):
        x = tl.load(values + places + offset, mask=places + offset < size, other=0.0).to(tl.float32)
        if squared:
            total += x * x
        else:
            total += x
    tl.store(sums + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["norms"])
def finish_sums(sums, found, norms, block: tl.constexpr):
    """Add up what `one_sum` left of each tensor, one program for each.

    Args:
        sums: float32 ``(tensors, block)``.
        found: float64, one for each tensor.
        norms: a bit for each tensor, 1 where the result is the square root.
        block: programs that added up each tensor.
    """
    tensor = tl.program_id(0)
    total = tl.sum(tl.load(sums + tensor * block + tl.arange(0, block)).to(tl.float64), 0)
    if ((norms >> tensor) & 1) != 0:
        total = tl.sqrt(total)
    tl.store(found + tensor, total)


@triton.jit(do_not_specialize=["number", "further"])
def decide(
    sums,
    number,
    loss,
    count,
    state,
    found,
    scale,
    row,
    ring,
    turn,
    rest,
    further,
    max_norm,
    counts: tl.constexpr,
    sticky: tl.constexpr,
    clips: tl.constexpr,
    summed: tl.constexpr,
    rows: tl.constexpr,
    room: tl.constexpr,
    block: tl.constexpr,
):
    """Decide whether a step counts, and write its figures.

    Args:
        sums: what `square_sums` wrote.
        number: how many.
        loss: one number.
        count: items counted, one number, where ``counts``.
        state: float32, 1 after a fault; from earlier steps where ``sticky``.
        found: float32, is set to 1 where this step is to be left out; ``state`` itself unless ``counts``.
        scale: float32, is set to what gradients are divided by, where ``clips`` or ``summed``.
        row: float64, is set to loss, norm, the count where ``counts``, and the ``rest``.
        ring: float64 ``(rows, 3 + further)``, gets the same at the place that ``turn`` says.
        turn: int64, how many rows went there; is counted up.
        rest: float64, what else the step tells, where there is ``room`` for it.
        further: how many numbers those are.
        max_norm: clip to this.
        summed: gradients are still to be divided by the count.
        room: numbers of the rest that are copied at once, at least all; 0 for none.
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
    # No comparison holds for what is not a number.
    sound = (tl.abs(tl.load(loss).to(tl.float32)) < float("inf")) & (norm < float("inf"))
    fault = tl.where(sound, 0.0, 1.0)
    held = 0.0
    if sticky:
        held = tl.load(state)
    turns = tl.load(turn)
    place = ring + (turns % rows) * (3 + further)
    tl.store(turn, turns + 1)
    value = tl.load(loss).to(tl.float64)
    tl.store(row, value)
    tl.store(place, value)
    tl.store(row + 1, norm.to(tl.float64))
    tl.store(place + 1, norm.to(tl.float64))
    if counts:
        items = tl.load(count).to(tl.float64)
        tl.store(row + 2, items)
        tl.store(place + 2, items)
        # The mean of nothing is no fault, though it is not a number; it is left out all the same.
        empty = tl.where(items == 0.0, 1.0, 0.0)
        held = tl.maximum(held, fault * (1.0 - empty))
        tl.store(found, tl.maximum(held, empty))
    else:
        held = tl.maximum(held, fault)
    if room:
        slots = tl.arange(0, room)
        told = tl.load(rest + slots, mask=slots < further, other=0.0)
        tl.store(row + slots + 2 + counts, told, mask=slots < further)
        tl.store(place + slots + 2 + counts, told, mask=slots < further)
    tl.store(state, held)
    if clips:
        factor = tl.maximum((norm + 1e-6) / max_norm, 1.0)
        tl.store(scale, factor * divisor)
    elif summed:
        tl.store(scale, divisor)
