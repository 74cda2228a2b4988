"""Training on several ranks: six ways against one rank, unequal ranks, equal curves, scaling.

    torchrun --nproc-per-node 2 -m benchmarks.ddp modes unequal equal scaling --data DIR --out runs/ddp
    python -m benchmarks.ddp modes --ranks 2 --device cpu --quick

Everything runs in one process group, one thing after another.
"""
