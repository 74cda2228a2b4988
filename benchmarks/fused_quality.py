"""Fine-tuning in bfloat16 with fused layers beside the same run with torch's own operations: curves and quality.

Without dropout the losses of the first steps are compared one by one; with the model's own dropout, whose draws
differ, several seeds are judged on held-out rows.

    python -m benchmarks.fused_quality --model FOLDER --data FOLDER [--seeds 3] [--steps 60]

``--data`` has ``sst2/{train,dev}.tsv`` and ``wnut17/{train,dev}.conll``.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flodl_hf.training import finetune, training

TASKS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sst2": ("sst2/train.tsv", "sst2/dev.tsv", "accuracy", {"epochs": 3, "lr": 5e-5, "batch_size": 32}),
    "wnut17": ("wnut17/train.conll", "wnut17/dev.conll", "f1", {"epochs": 5, "lr": 1e-4, "batch_size": 16}),
}


def trained(fused: bool, *args: Any, **options: Any) -> Any:
    """Return the result of a fine-tune with or without fused kernels."""
    if fused:
        return finetune(*args, **options)
    with mock.patch.object(training, "_arrangement", return_value=None):
        return finetune(*args, **options)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=60)
    args = options.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for task, (train, dev, figure, recipe) in TASKS.items():
        fixed: dict[str, Any] = {**recipe, "warmup": 0.06, "weight_decay": 0.01, "precision": "bf16", "max_length": 128}
        curves = [
            trained(
                fused, args.model, train=args.data / train, seed=1, dropout=0.0, max_steps=args.steps, **fixed
            ).losses
            for fused in (True, False)
        ]
        apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(*curves, strict=True))
        ends = [f"{fused:.6f} / {plain:.6f}" for fused, plain in zip(*curves, strict=True)]
        print(
            f"{task}: {args.steps} losses without dropout, first {ends[0]}, last {ends[-1]}, "
            f"largest relative difference {apart:.1e}",
            flush=True,
        )
        for fused in (True, False):
            found = []
            for seed in range(1, args.seeds + 1):
                result = trained(
                    fused, args.model, train=args.data / train, eval=args.data / dev, seed=seed, keep_best=False,
                    **fixed,
                )  # fmt: skip
                found.append(result.metrics[figure])
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            name = "fused layers" if fused else "torch's operations"
            each = " ".join(f"{x:.4f}" for x in found)
            print(f"{task}: {name}: {figure} {each}, mean {statistics.mean(found):.4f} ± {spread:.4f}", flush=True)


if __name__ == "__main__":
    main()
