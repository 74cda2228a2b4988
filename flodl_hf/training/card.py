"""Metadata files of a run: the model card, the recipe that reproduces it, and all metrics as JSON.

They report only values that the run measured. The card starts with metadata for the Hub: base model, licence, task, and
metrics as evaluation results. The licence and the base model of a local folder are copied from its own card.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flodl_hf.checkpoints.hub.request import front_matter, hub_name
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.training.evaluation import EvalPredictions
from flodl_hf.training.job import Job
from flodl_hf.training.option_checks import SCHEDULES
from flodl_hf.training.report.figures import Tuned
from flodl_hf.training.result import FinetuneResult, described

SHOWN = (
    *("epochs", "max_steps", "batch_size", "accumulate", "tokens_per_batch", "layout", "max_length", "optimizer"),
    *("lr", "schedule", "schedule_options", "warmup", "weight_decay", "max_grad_norm", "layerwise_decay", "freeze"),
    *("lora", "adapter"),
    *("class_weights", "label_smoothing", "dropout", "neftune", "ema", "precision", "seed"),
    *("concatenate", "whole_words", "mask_probability", "generator"),
    *("vector_loss", "loss_options", "matryoshka", "guide", "pooling", "normalize", "prompts"),
    *("cache_tokens",),
    "projection",
)
FACTS = (
    *("task", "model", "data", "metrics", "metric", "best_step", "steps", "batch_size", "seconds", "history", "losses"),
    *("changes", "notes", "policy", "recorded", "summed", "tuned", "versions"),
)
"""Values of ``training.json``, in order."""
MASKED = ("masked_lm", "pretraining", "replaced_tokens")
MASKING = ("concatenate", "whole_words", "mask_probability", "generator")


def metadata_files(job: Job, result: FinetuneResult, predictions: EvalPredictions | None = None) -> dict[str, bytes]:
    """Return the metadata files of a trained model, as a mapping of file names to contents.

    Args:
        job: the planned run.
        result: the result of the run.
        predictions: predictions for the evaluation data, for the report.
    """
    own = {
        "model": job.name,
        "data": job.tables.facts,
        "metric": job.metric,
        "batch_size": job.options.batch_size,
        "seconds": round(result.seconds, 3),
        "notes": job.notes,
        "versions": versions(),
    }
    whole = {**result.to_dict(), **own}
    facts = {name: whole[name] for name in FACTS}
    files = {
        "README.md": card(job, result).encode(),
        "recipe.yaml": recipe_text(result.recipe, result.changes, job.own.names).encode(),
        "training.json": (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    if not job.options.report:
        return files
    from flodl_hf.training.report.page import report_page

    return files | {"report.html": report_page(job_name(job), job, result, predictions).encode()}


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
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
    given = {name: described(value) for name, value in recipe.items() if value is not None}
    absent = [*(name for name in ("model", "train") if name not in given), *functions]
    if absent:
        head += f"# {' and '.join(absent)} was given in memory and has to be given again.\n"
    objects = [name for name in given if given[name] != recipe[name]]
    objects += [] if given.get("schedule", "linear") in SCHEDULES else ["schedule"]
    if objects:
        head += (
            f"# {' and '.join(objects)}: given as an object, here as text, which no run accepts.\n"
            "# Replace the text by the name of a loss or schedule, or pass the object again in Python.\n"
        )
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
        lines += [f"On the evaluation data, after step {result.best_step}:", "", "| metric | value |", "|---|---:|"]
        lines += [f"| {_cell(name)} | {value:.4f} |" for name, value in result.metrics.items()]
    else:
        lines.append("There was no evaluation data.")
    if result.tuned is not None:
        lines += _thresholds(result.tuned)
    if job.options.report:
        lines += ["", "Curves, confusions, calibration and lengths: [report](report.html)."]
    if job.own.names:
        lines += ["", f"Given as functions, and no part of the recipe: {', '.join(job.own.names)}."]
    minutes, rest = divmod(round(result.seconds), 60)
    duration = f"{minutes} min {rest} s" if minutes else f"{rest} s"
    lines += ["", "## Recipe", "", f"{result.steps:,} optimiser steps, {duration}.", ""]
    lines += ["| choice | value |", "|---|---|"]
    for name in SHOWN:
        value = result.recipe.get(name)
        if value not in (None, [], (), {}, 0) and (result.task in MASKED or name not in MASKING):
            lines.append(f"| {name} | {_cell(value)} |")
    lines += ["", "All options are in `recipe.yaml`:", "", "```", "flodl-hf finetune --recipe recipe.yaml --out DIR"]
    lines += ["```", "", "## Versions", ""]
    lines += [", ".join(f"{name} {number}" for name, number in versions().items()) + ".", ""]
    return "\n".join(lines)


def _thresholds(tuned: Tuned) -> list[str]:
    """Return the thresholds of labels, and their F1 on the examples they were chosen on."""
    where = f" of {tuned.where}" if tuned.where else ""
    note = f"Thresholds, chosen for the best F1 on the {tuned.examples:,} evaluation examples{where}; on others they"
    lines = ["", f'{note} may do less well. `predict(threshold="tuned")` uses them.']
    lines += ["", "| label | threshold | F1 at 0.5 | F1 there |", "|---|---:|---:|---:|"]
    for name, value in tuned.thresholds.items():
        f1 = [f"{table[name]:.4f}" if name in table else "" for table in (tuned.usual, tuned.tuned)]
        lines.append(f"| {_cell(name)} | {value:.4f} | {f1[0]} | {f1[1]} |")
    return lines


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


KINDS = {"mcc": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr", "eval_loss": "loss"}
"""Names that the Hub has for figures, where they are not ours."""


def head_of_card(job: Job, result: FinetuneResult) -> str:
    """Return the lines between and with the ``---`` at the top of the card."""
    import yaml

    source = getattr(job.model, "source", None)
    before = front_matter(source.folder) if source is not None else {}
    base = hub_name(job.name) or before.get("base_model")
    head: dict[str, Any] = {"base_model": base} if isinstance(base, (str, list)) else {}
    further = {
        "sparse": ["sentence-transformers", "sparse-encoder", "sparse", "splade"],
        "multivector": ["sentence-transformers", "multi-vector", "ColBERT", "PyLate", "feature-extraction"],
        "embedding": ["sentence-transformers", "sentence-similarity", "feature-extraction"],
        "rank": ["sentence-transformers", "cross-encoder", "reranker"],
    }
    library = "sentence-transformers" if result.task in further else "transformers"
    tags = [*further.get(result.task, []), "flodl-hf"]
    if job.model.active_adapter is not None:  # reading the result's model would cast its base
        kind = type(job.model.adapters[job.model.active_adapter]).__name__
        library, tags = "peft", [*tags, kind.lower()]
    head |= {"pipeline_tag": task_named(result.task).hub_tag, "library_name": library, "tags": tags}
    kept = ("license", "license_name", "license_link", "language")
    head |= {name: before[name] for name in kept if isinstance(before.get(name), (str, list))}
    results = _hub_results(job, result)
    if results:
        head["metrics"] = sorted({metric["type"] for part in results for metric in part["metrics"]})
        head["model-index"] = [{"name": job_name(job), "results": results}]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=110)}---\n"


def job_name(job: Job) -> str:
    """Return the name of a model that was trained from another one."""
    return f"{hub_name(job.name) or Path(job.name).name}, fine-tuned"


def _hub_results(job: Job, result: FinetuneResult) -> list[dict[str, Any]]:
    """Return the metrics as evaluation results of the Hub, one entry per evaluation set."""
    kind = task_named(result.task).hub_tag
    sets: dict[str, dict[str, float]] = {}
    for name, value in result.metrics.items():
        at, _, figure = name.partition("/") if "" not in job.tables.evals else ("", "", name)
        if math.isfinite(value) and "/" not in figure:  # without metrics of single labels
            sets.setdefault(at, {})[figure] = value
    entries = []
    for at, figures in sets.items():
        data = job.tables.facts.get(f"eval {at}".strip(), {})
        metrics = [
            {"type": KINDS.get(figure, figure), "value": round(v, 6), "name": figure} for figure, v in figures.items()
        ]
        about = {"name": data.get("name", "held-out data"), "type": at or "held-out"}
        entries.append({"task": {"type": kind}, "dataset": about, "metrics": metrics})
    return entries
