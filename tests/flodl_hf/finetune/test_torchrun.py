"""`finetune` called by every rank of a launcher's job, any number of times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import labelled

from flodl_hf.training import finetune

sys.path.insert(0, str(Path(__file__).parents[2] / "flodl" / "distributed"))
from test_runs_in_one_job import job

ROWS = labelled(48)
SWAPPED = {"complaint": "praise", "praise": "complaint"}
HELD_OUT = [{**row, "label": SWAPPED[row["label"]]} for row in ROWS[40:]]  # the more is learned, the worse
OPTIONS: dict[str, Any] = {
    "epochs": 4, "batch_size": 8, "lr": 5e-3, "max_length": 24, "metric": "eval_loss", "devices": "cpu", "dropout": 0.0,
    "schedule": "constant",
}  # fmt: skip


def told(result: Any) -> tuple[Any, ...]:
    weights = torch.cat([p.detach().flatten() for p in result.model.graph.parameters()]).numpy()
    return result.losses, result.history, result.best_step, result.metrics, weights, result.folder


def test_three_fine_tunes_in_one_job(base: Path, tmp_path: Path) -> None:
    def runs(rank: int) -> list[Any]:
        torch.set_num_threads(1)
        places = (tmp_path / "a", None, tmp_path / "b")
        return [told(finetune(base, train=ROWS[:40], eval=HELD_OUT, out=out, **OPTIONS)) for out in places]

    torch.set_num_threads(1)
    alone = told(finetune(base, train=ROWS[:40], eval=HELD_OUT, **OPTIONS))
    first, second = job(runs)
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a[0][:4] == pytest.approx(alone[0][:4], rel=1e-3)
        assert a[:2] == b[:2] == first[0][:2]
        best = min(a[1], key=lambda row: (row["eval_loss"], row["step"]))
        assert (a[2], a[3]["eval_loss"]) == (best["step"], best["eval_loss"])
        assert (a[4] == first[0][4]).all()
        if k == 1:  # without a folder every rank has the best model
            assert b[2:4] == a[2:4]
            assert (a[4] == b[4]).all()
    assert first[2][5] == tmp_path / "b"
    assert first[0][2] < first[0][1][-1]["step"], "the best should not be the last, or nothing is shown"
