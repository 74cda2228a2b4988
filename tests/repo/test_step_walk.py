"""The way of one optimiser step through the framework's files, counted; features that are off may not add to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import flodl
from flodl.data import TensorRows
from flodl.train import Callback, Loss, Trainer, adamw

ROOT = str(Path(flodl.__file__).parent)
MAX_CALLS, MAX_FILES, MAX_MOVES = 40, 10, 20
"""Lower these numbers when the step becomes shorter."""


class Walk(Callback):
    """Records the functions of flodl that run from the start of the eighth step to the start of the ninth."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.number = 0

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        self.number += 1
        if self.number == 8:
            sys.setprofile(self.note)
        elif self.number == 9:
            sys.setprofile(None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.files.append(frame.f_code.co_filename)


def step(model: nn.Module, batch: Any) -> Loss:
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def test_one_step_on_a_cpu_takes_a_short_way() -> None:
    walk, before = Walk(), sys.getprofile()
    x = torch.randn(640, 8)
    try:
        trainer = Trainer(nn.Linear(8, 2), adamw(1e-2), step, batch_size=32, progress=False, callbacks=[walk])
        trainer.fit(TensorRows({"x": x, "y": (x.sum(1) > 0).long()}))
    finally:
        sys.setprofile(before)
    moves = sum(a != b for a, b in zip(walk.files, walk.files[1:], strict=False))
    assert 20 < len(walk.files) <= MAX_CALLS
    assert len(set(walk.files)) <= MAX_FILES
    assert moves <= MAX_MOVES
