"""What dropout drops: a hash of a seed and of a position, the same forward and backward, and never a mask in memory."""

# pyright: reportMissingImports=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of(seed, stream):
    """Return two keys of 32 bits, independent for every seed and stream."""
    one, two, _, _ = tl.philox(seed, stream, 0, 0, 0)
    return one, two


@triton.jit
def kept(one, two, position, p):
    """Return True where a value stays: each bit of the hash depends on each bit of position and keys.

    Philox for each position would cost more than all else in a tile.
    """
    x = position.to(tl.uint32, bitcast=True) ^ one
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + two) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x9E3779B1
    x = x ^ (x >> 15)
    # Its first 24 bits as a fraction of one; integers are compared, which takes fewer instructions.
    return x >= tl.ceil(p * 16777216.0).to(tl.uint32) * 256
