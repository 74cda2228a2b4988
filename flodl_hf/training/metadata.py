"""The head of a model card, as the Hub reads it: base model, licence, task, and figures as evaluation results.

Nothing is made up: the licence and the base model of a local folder are those that its own card states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl_hf.families.schema.tasks import task_named

if TYPE_CHECKING:
    from flodl_hf.training.job import Job
    from flodl_hf.training.result import FinetuneResult

__all__ = ["front_matter", "head_of_card", "hub_name"]

KINDS = {"mcc": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr", "eval_loss": "loss"}
"""Names that the Hub has for figures, where they are not ours."""
LONGEST = 1000
MOST_READ = 1 << 20  # a card is text; what is larger is not read for it


def hub_name(name: str) -> str | None:
    """Return the repository that a model was named by, without its revision; None for a folder or a model in memory."""
    if name.count("/") != 1 or Path(name).exists() or name.startswith((".", "/", "~")):
        return None
    return name.partition("@")[0]


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
    if job.model.active_adapter is not None:  # not the result's, whose base would be cast
        kind = type(job.model.adapters[job.model.active_adapter]).__name__
        library, tags = "peft", [*tags, kind.lower()]
    head |= {"pipeline_tag": task_named(result.task).hub_tag, "library_name": library, "tags": tags}
    kept = ("license", "license_name", "license_link", "language")
    head |= {name: before[name] for name in kept if isinstance(before.get(name), (str, list))}
    results = _results(job, result)
    if results:
        head["metrics"] = sorted({metric["type"] for part in results for metric in part["metrics"]})
        head["model-index"] = [{"name": job_name(job), "results": results}]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=110)}---\n"


def job_name(job: Job) -> str:
    """Return what a model is called that was trained from another."""
    return f"{hub_name(job.name) or Path(job.name).name}, fine-tuned"


def _results(job: Job, result: FinetuneResult) -> list[dict[str, Any]]:
    """Return the figures as the Hub's evaluation results, one entry for each set of held-out data."""
    kind = task_named(result.task).hub_tag
    sets: dict[str, dict[str, float]] = {}
    for name, value in result.metrics.items():
        at, _, figure = name.partition("/") if "" not in job.tables.evals else ("", "", name)
        if math.isfinite(value) and "/" not in figure:  # not those of single labels
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


def front_matter(folder: Path) -> Mapping[str, Any]:
    """Return what the card in a folder states at its top; nothing where there is no card, or it cannot be read."""
    import yaml

    path = Path(folder) / "README.md"
    try:
        if not path.is_file() or path.stat().st_size > MOST_READ:
            return {}
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    first, _, rest = text.partition("\n")
    head, found, _ = rest.partition("\n---")
    if first.strip() != "---" or not found:
        return {}
    try:
        stated = yaml.safe_load(head)
    except yaml.YAMLError:
        return {}
    clean = {k: v for k, v in stated.items() if isinstance(k, str)} if isinstance(stated, Mapping) else {}
    return {name: value for name, value in clean.items() if len(str(value)) <= LONGEST}
