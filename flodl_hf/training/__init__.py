"""Fine-tuning: train a checkpoint on a table of examples and write a Hugging Face folder.

    from flodl_hf.training import finetune

    result = finetune("a folder or a Hub name", train="train.csv", eval="dev.csv", out="my-model")

`flodl.train` runs the training loop. This package converts examples to tokens and labels, defines losses and metrics,
and writes the model card and the other metadata files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flodl_hf.training.options import Options

if TYPE_CHECKING:
    from flodl_hf.inference.evaluation_result import EvaluationResult
    from flodl_hf.training.dry_runs import DryRun, dry_run, find_lr
    from flodl_hf.training.evaluate_model import evaluate
    from flodl_hf.training.result import FinetuneResult
    from flodl_hf.training.run import finetune

__all__ = [
    "DryRun",
    "EvaluationResult",
    "FinetuneResult",
    "Options",
    "dry_run",
    "evaluate",
    "find_lr",
    "finetune",
]


_MODULES = {
    "DryRun": "training.dry_runs",
    "EvaluationResult": "inference.evaluation_result",
    "FinetuneResult": "training.result",
    "dry_run": "training.dry_runs",
    "evaluate": "training.evaluate_model",
    "find_lr": "training.dry_runs",
    "finetune": "training.run",
}


def __getattr__(name: str) -> Any:
    # The command line reads the options at each start and must not import the trainer for that.
    if name in _MODULES:
        return getattr(import_module(f"flodl_hf.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'flodl_hf.training' has no attribute {name!r}")
