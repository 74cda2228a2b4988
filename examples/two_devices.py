"""Fine-tune on two devices: GPUs where there are two, else CPU processes.

    python examples/two_devices.py

The batch belongs to both devices together, so the result equals a run on one device up to rounding.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flodl_hf import finetune
from flodl_hf.training.demo import LABELS, sentences, write_demo


def main() -> None:
    if not Path("demo-model").exists():
        write_demo("demo-model")
    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:64]]
    options = {"epochs": 1, "batch_size": 16, "progress": False}
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    one = finetune("demo-model", train=rows, device=device, **options)
    two = finetune("demo-model", train=rows, devices=2 if device == "cuda" else ["cpu", "cpu"], **options)
    print("losses on one device: ", [round(loss, 4) for loss in one.losses])
    print("losses on two devices:", [round(loss, 4) for loss in two.losses])
    assert max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True)) < 1e-2


# Each process imports this file, so the guard is needed.
if __name__ == "__main__":
    main()
