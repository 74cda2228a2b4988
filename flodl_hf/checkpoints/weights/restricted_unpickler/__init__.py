"""Reading ``pytorch_model.bin`` without executing it.

Such files contain a program for a small stack machine (a pickle) and the bytes of the tensors. The program may
call any function of any module, which malicious files exploit. This package does not run it with Python's own
machine: `opcodes` interprets the two dozen instructions needed to save a table of tensors, `tensors` defines
the four functions that it may name, and everything else is refused with its name.

    opcodes   the stack machine
    tensors   meaning of the names in the program: records of tensors, not calls
    archive   the zip container of today's files
    checksums comparison of its bytes with their checksums
    shard     `BinShard`: both containers, current and before torch 1.6; `read_bin`
"""
