"""Callbacks that report a fine-tuning run to Optuna and Ray Tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flodl_hf import finetune

from .conftest import GOLDEN

ROWS = [{"text": text, "label": label} for text, label in (("hello", "a"), ("words", "b")) * 6]


def run(callback: Any, **options: Any) -> Any:
    return finetune(
        str(GOLDEN / "bert-base"), train=ROWS, eval=ROWS, task="text-classification", epochs=3, batch_size=4,
        progress=False, callbacks=[callback], **options,
    )  # fmt: skip


def test_optuna_prunes_a_run() -> None:
    optuna = pytest.importorskip("optuna")
    from flodl_hf.compat.tuning import OptunaPruning

    class After(optuna.pruners.BasePruner):
        """Prunes the second trial after its second evaluation."""

        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and trial.last_step == 1

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
        return run(OptunaPruning(trial, "accuracy"), lr=rate).metrics["accuracy"]

    study = optuna.create_study(direction="maximize", pruner=After())
    study.optimize(objective, n_trials=2)
    done, pruned = study.trials
    assert done.state.name == "COMPLETE"
    assert list(done.intermediate_values) == [0, 1, 2]
    assert pruned.state.name == "PRUNED"
    assert list(pruned.intermediate_values) == [0, 1]


def test_ray_tune_receives_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("ray.tune")
    from flodl_hf.compat.tuning import RayReport

    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(tune, "report", reported.append)
    run(RayReport())
    assert len(reported) == 3
    assert all(0 <= one["accuracy"] <= 1 for one in reported)
