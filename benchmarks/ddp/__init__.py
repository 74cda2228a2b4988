"""Training on several ranks: six ways against one rank, unequal ranks, equal curves, scaling.

    torchrun --nproc-per-node 2 -m benchmarks.ddp modes unequal equal scaling --data DIR --out runs/ddp
    python -m benchmarks.ddp modes --ranks 2 --device cpu --quick
    python -m benchmarks.ddp.fetch --data DIR     # MNIST, CIFAR-10 and Shakespeare, with checksums

Losses are held to ``baseline.json`` beside this file (``--baseline FILE``, ``--save-baseline``, ``--tolerance``).
Everything runs in one process group, one thing after another.
"""
