"""Reading ``pytorch_model.bin`` without executing it.

Such files hold a program for a small stack machine (a pickle) and the bytes of the tensors. The program may
call any function of any module, which is how files attack. This package runs none of it through Python's own
machine: `opcodes` interprets the two dozen instructions that saving a table of tensors takes, `tensors` gives
a meaning to the four functions it may name, and everything else is refused by name.

    opcodes   the stack machine
    tensors   what the names in the program mean: records of tensors, not calls
    archive   the zip container of today's files
    checksums what it says of its bytes, compared with them
    shard     `BinShard`: both containers, today's and the one before torch 1.6; `read_bin`
"""

from .shard import BinShard, read_bin

__all__ = ["BinShard", "read_bin"]
