"""The papers of a run: the model card, the recipe that reproduces it, and every figure as JSON.

Says what happened and with what; claims nothing that was not measured in the run.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl_hf.families.schema.tasks import task_named
from flodl_hf.training.metadata import head_of_card, hub_name

if TYPE_CHECKING:
    from flodl_hf.training.eval_predictions import EvalPredictions
    from flodl_hf.training.job import Job
    from flodl_hf.training.result import FinetuneResult
    from flodl_hf.training.thresholds import Tuned

__all__ = ["papers"]

SHOWN = (
    *("epochs", "max_steps", "batch_size", "accumulate", "tokens_per_batch", "layout", "max_length", "optimizer"),
    *("lr", "schedule", "schedule_options", "warmup", "weight_decay", "max_grad_norm", "layerwise_decay", "freeze"),
    *("lora", "lora_alpha", "lora_dropout", "lora_targets", "lora_kinds", "ia3"),
    *("prompt_tokens", "prompt_text", "prompt_encoder", "prompt_encoder_kind"),
    *("prefix_tokens", "prefix_encoder"),
    *("class_weights", "label_smoothing", "dropout", "neftune", "ema", "precision", "seed"),
    *("concatenate", "whole_words", "mask_probability", "generator", "discriminator_weight"),
    *("vector_loss", "loss_options", "matryoshka", "adaptive_layers", "guide", "pooling", "normalize", "prompts"),
    *("cache_tokens",),
    "projection",
)
MASKED = ("masked_lm", "pretraining", "replaced_tokens")
MASKING = ("concatenate", "whole_words", "mask_probability", "mask_padding", "generator", "discriminator_weight")


def papers(job: Job, result: FinetuneResult, judged: EvalPredictions | None = None) -> dict[str, bytes]:
    """Return the files that go beside the weights, by name.

    Args:
        job: what was asked for.
        result: what came of it.
        judged: what the model says of held-out data, for the report.
    """
    facts = {
        "task": result.task,
        "model": job.name,
        "data": job.tables.facts,
        "metrics": result.metrics,
        "metric": job.metric,
        "best_step": result.best_step,
        "steps": result.steps,
        "batch_size": job.options.batch_size,
        "seconds": round(result.seconds, 3),
        "history": result.history,
        "losses": result.losses,
        "changes": result.changes,
        "notes": job.notes,
        "policy": result.policy,
        "recorded": None if result.recorded is None else asdict(result.recorded),
        "summed": None if result.summed is None else asdict(result.summed),
        "tuned": None if result.tuned is None else result.tuned.to_dict(),
        "versions": versions(),
    }
    files = {
        "README.md": card(job, result).encode(),
        "recipe.yaml": recipe_text(result.recipe, result.changes, job.own.names).encode(),
        "training.json": (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    return files | ({"report.html": report(job, result, judged).encode()} if job.options.report else {})


def report(job: Job, result: FinetuneResult, judged: EvalPredictions | None) -> str:
    """Return the page with curves, and what the model says of the held-out data."""
    from flodl_hf.training.report import Run, report_page

    return report_page(
        Run(
            title=f"{hub_name(job.name) or Path(job.name).name}, fine-tuned",
            task=result.task,
            kind=job.task.kind,
            labels=getattr(job.task, "names", None) or job.task.labels or (),
            metrics=result.metrics,
            best_step=result.best_step,
            losses=result.losses,
            history=result.history,
            lengths=job.rows.lengths,
            most=job.options.max_length or job.model.max_tokens,
            data=job.tables.facts,
            notes=job.notes,
            predictions=None if judged is None else judged.predictions,
            truth=None if judged is None else judged.truth,
            held_out="" if judged is None else judged.name,
            thresholds=None if result.tuned is None else result.tuned.thresholds,
        )
    )


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"python": platform.python_version()}
    for name in ("flodl-hf", "torch", "tokenizers", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def recipe_text(
    recipe: dict[str, Any], changes: Sequence[Mapping[str, Any]] = (), functions: Sequence[str] = ()
) -> str:
    """Return the recipe as YAML."""
    import yaml

    head = "# The recipe of this model. Run it again with: flodl-hf finetune --recipe recipe.yaml --out DIR\n"
    given = {name: value for name, value in recipe.items() if value is not None}
    absent = [*(name for name in ("model", "train") if name not in given), *functions]
    if absent:
        head += f"# {' and '.join(absent)} was given in memory and has to be given again.\n"
    for change in changes:
        was = json.dumps(change["was"], ensure_ascii=False)
        head += f"# Until step {change['step']} the run had {change['name']}: {was}\n"
    return head + yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=110)


def card(job: Job, result: FinetuneResult) -> str:
    """Return the model card in Markdown."""
    shown = hub_name(job.name) or Path(job.name).name
    lines = [head_of_card(job, result)]
    lines += [
        f"# {shown}, fine-tuned",
        "",
        f"A model for {task_named(result.task).hub_tag.replace('-', ' ')}, trained from `{shown}`.",
        "",
    ]
    if job.task.labels and job.task.kind != "regression":
        names = ", ".join(f"`{name}`" for name in job.task.labels[:50])
        lines += [f"Labels: {names}{' ...' if len(job.task.labels) > 50 else ''}.", ""]
    lines += ["## Data", "", "| part | data | rows | SHA-256 |", "|---|---|---:|---|"]
    for part, facts in job.tables.facts.items():
        lines.append(f"| {part} | {_cell(facts['name'])} | {facts['rows']:,} | {facts.get('sha256', '')[:16]} |")
    lines += ["", "## Evaluation", ""]
    if result.metrics:
        lines += [f"On the held-out data, after step {result.best_step}:", "", "| figure | value |", "|---|---:|"]
        lines += [f"| {_cell(name)} | {value:.4f} |" for name, value in result.metrics.items()]
    else:
        lines.append("There was no held-out data, so nothing is claimed.")
    if result.tuned is not None:
        lines += _thresholds(result.tuned)
    if job.options.report:
        lines += ["", "Curves, confusions, calibration and lengths: [report](report.html)."]
    if job.own.names:
        lines += ["", f"Given as functions, and no part of the recipe: {', '.join(job.own.names)}."]
    lines += ["", "## Recipe", "", f"{result.steps:,} optimiser steps, {_duration(result.seconds)}.", ""]
    lines += ["| choice | value |", "|---|---|"]
    for name in SHOWN:
        value = result.recipe.get(name)
        if value not in (None, [], (), {}, 0) and (result.task in MASKED or name not in MASKING):
            lines.append(f"| {name} | {_cell(value)} |")
    lines += ["", "All choices stand in `recipe.yaml`:", "", "```", "flodl-hf finetune --recipe recipe.yaml --out DIR"]
    lines += ["```", "", "## Versions", ""]
    lines += [", ".join(f"{name} {number}" for name, number in versions().items()) + ".", ""]
    return "\n".join(lines)


def _thresholds(tuned: Tuned) -> list[str]:
    """Return which score each label holds from, and what that is worth on the examples it was chosen on."""
    where = f" of {tuned.where}" if tuned.where else ""
    lines = [
        "",
        f"Thresholds, chosen for the best F1 on the {tuned.examples:,} held-out examples{where}; on others they",
    ]
    lines[-1] += ' may do less well. `predict(threshold="tuned")` uses them.'
    lines += ["", "| label | threshold | F1 at 0.5 | F1 there |", "|---|---:|---:|---:|"]
    for name, value in tuned.thresholds.items():
        f1 = [f"{table[name]:.4f}" if name in table else "" for table in (tuned.usual, tuned.tuned)]
        lines.append(f"| {_cell(name)} | {value:.4f} | {f1[0]} | {f1[1]} |")
    return lines


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
