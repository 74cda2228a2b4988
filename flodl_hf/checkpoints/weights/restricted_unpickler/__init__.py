"""Reading ``pytorch_model.bin`` without executing it.

Such files contain a program for a small stack machine (a pickle) and the bytes of the tensors. The program may
call any function of any module, which malicious files exploit. This package does not run it with Python's own
machine, but interprets the two dozen instructions needed to save a table of tensors and the four functions that it may
name. Everything else is refused with its name.

    program  the stack machine, and the meaning of names: records of tensors, not calls
    shard    `BinShard`: the zip archive of today's files with its checksums, and the container before torch 1.6
"""
