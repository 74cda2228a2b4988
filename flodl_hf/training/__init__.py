"""Fine-tuning: a checkpoint and a table of examples in, a trained Hugging Face folder out.

    from flodl_hf.training import finetune

    result = finetune("a folder or a Hub name", train="train.csv", eval="dev.csv", out="my-model")

The training itself is `flodl.train`'s; what is here is the glue: examples to tokens and labels, tasks to losses
and figures, and the papers of the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flodl_hf.training.options import Options

if TYPE_CHECKING:
    from flodl_hf.inference.results.evaluation import EvaluationResult
    from flodl_hf.training.evaluate_model import evaluate
    from flodl_hf.training.job import plan_job
    from flodl_hf.training.pre_run import DryRun, dry_run, find_lr
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
    "plan_job",
]


def __getattr__(name: str) -> Any:
    # The command line reads the table of options at each start, and must not pay for the trainer then.
    if name in __all__:
        from flodl_hf.inference.results import evaluation
        from flodl_hf.training import evaluate_model, job, pre_run, result, run

        return getattr(
            next(part for part in (run, result, job, pre_run, evaluate_model, evaluation) if name in part.__all__), name
        )
    raise AttributeError(f"module 'flodl_hf.training' has no attribute {name!r}")
