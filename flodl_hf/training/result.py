"""The result of a run: summary line, JSON values, HTML for notebooks, and the metadata files that it writes.

The metadata files are the model card, the recipe that reproduces the run, and all metrics as JSON. They report only
values that the run measured. The card starts with metadata for the Hub: base model, licence, task, and metrics as
evaluation results. The licence and the base model of a local folder are copied from its own card.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.metadata import PackageNotFoundError, version
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.distributed.group import Summed
from flodl.errors import TrainError
from flodl.progress import clock, count
from flodl.train.events import Recorded
from flodl_hf.checkpoints.hub.request import front_matter, hub_name
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.training.options import SCHEDULES
from flodl_hf.training.report.figures import Tuned
from flodl_hf.training.start import cast_stored

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.training.job import Job

JSON = (str, int, float, type(None))
CURVE_STYLE = (
    ".flodl-run .line{fill:none;stroke:#4a90d9;stroke-width:1.5}.flodl-run .grid{stroke:#8884}"
    ".flodl-run .label{font:10px sans-serif;fill:#888}"
)
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
KINDS = {"mcc": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr", "eval_loss": "loss"}
"""Names that the Hub has for figures, where they are not ours."""
MASKED = ("masked_lm", "pretraining", "replaced_tokens")
MASKING = ("concatenate", "whole_words", "mask_probability", "generator")


def figures_in(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record of `flodl.train.events.Past.evaluations`."""
    return {name: value for name, value in evaluation.items() if name not in ("step", "epoch", "details")}


def described(value: Any) -> Any:
    """Return a value with texts in place of objects, such as losses, which JSON and YAML do not have."""
    if isinstance(value, Mapping):
        return {name: described(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(described, value))
    if isinstance(value, Number) and (item := getattr(value, "item", None)) is not None:  # of numpy
        return item()
    return value if isinstance(value, JSON) else str(value)


@dataclass(frozen=True)
class FinetuneResult:
    """A finished run.

    Attributes:
        folder: where it was written; None without ``out``.
        task: the head's name.
        metrics: metrics of the model on the evaluation data; empty without any.
        history: one record per evaluation: ``step``, ``epoch`` and metrics; ``details`` contains values of the user's
            metrics that are not numbers, such as a confusion matrix.
        losses: mean training loss of every optimiser step.
        steps: optimiser steps taken.
        best_step: the step that ``model`` is from.
        seconds: wall clock of the training.
        recipe: the options that reproduce the run, as written to ``recipe.yaml``.
        changes: settings that ``resume=[names]`` changed: ``step``, ``name``, ``was``,
            ``is``. Losses, history, steps and seconds are those of the whole run, including interruptions.
        tuned: the thresholds that ``tune_thresholds`` chose, on the first rank; None without.
        recorded: how many steps were replayed from captured graphs, and why others were not; None on a processor.
        summed: how ranks summed their gradients, and why no faster way was used; None if they sum none.
        generator: the masked language model that was trained jointly, written to ``generator`` in the folder;
            None without the option of that name.
        timing: seconds of each phase.
        policy: ``name`` of the policy by which ranks shared the work, and the ``reason`` why it was chosen.
    """

    _model: EncoderModel | None = field(repr=False)
    folder: Path | None
    task: str
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    losses: list[float] = field(repr=False)
    steps: int
    best_step: int
    seconds: float
    recipe: dict[str, Any] = field(repr=False)
    changes: list[Mapping[str, Any]] = field(default_factory=list, repr=False)
    tuned: Tuned | None = field(default=None, repr=False)
    recorded: Recorded | None = field(default=None, repr=False)
    summed: Summed | None = field(default=None, repr=False)
    generator: EncoderModel | None = field(default=None, repr=False)
    policy: Mapping[str, str] = field(default_factory=dict, repr=False)
    timing: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> EncoderModel:
        """The trained model, ready to predict.

        A half-precision base that was in shards is cast to float32 at the first access: an adapter is written without
        its base, which in float32 may be more than the first rank has memory for.

        Raises:
            TrainError: under torchrun with ``shard``, on other ranks than the first, which has the model.
        """
        if self._model is None:
            raise TrainError(
                "finetune: result.model: the weights were in shards and were combined on rank 0; expected access on "
                "rank 0. Check `result.holds_model` first, or load the folder that was written."
            )
        cast_stored(self._model)
        return self._model

    @property
    def holds_model(self) -> bool:
        """Whether the trained model is in this process."""
        return self._model is not None

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model as JSON types."""
        from flodl_hf.inference.results import plain

        same = ("task", "metrics", "history", "losses", "steps", "best_step", "seconds", "changes", "policy")
        further = {
            "folder": None if self.folder is None else str(self.folder),
            "recipe": described(self.recipe),
            "tuned": None if self.tuned is None else self.tuned.to_dict(),
            "recorded": None if self.recorded is None else asdict(self.recorded),
            "summed": None if self.summed is None else asdict(self.summed),
        }
        return plain({name: getattr(self, name) for name in same} | further)

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in list(self.metrics.items())[:4])
        loss = f", last loss {self.losses[-1]:.4g}" if self.losses else ""
        best = f", best at step {self.best_step:,}" if self.best_step != self.steps else ""
        where = f", in {self.folder}" if self.folder is not None else ""
        where = where if self.holds_model else f"{where}, the model on rank 0"
        told = f": {figures}" if figures else ""
        return f"FinetuneResult({self.task}, {self.steps:,} steps in {clock(self.seconds)}{loss}{best}{told}{where})"

    def _repr_html_(self) -> str:
        """Return a run as HTML: the loss of each step as a curve, and evaluations as rows."""
        from flodl_hf.inference.result_pages import table
        from flodl_hf.training.report.charts import line_chart

        names = list(dict.fromkeys(name for record in self.history for name in figures_in(record)))
        rows = [
            [count(record.get("step", 0)), *(_shown(record.get(name, "")) for name in names)]
            for record in self.history[-20:]
        ]
        losses = {"training loss": [(step, value) for step, value in enumerate(self.losses, 1)]}
        curve = line_chart(losses, title="training loss", across="step", up="loss")
        curve = f'<div class="flodl-run"><style>{CURVE_STYLE}</style>{curve}</div>' if curve else ""
        return f"<div>{escape(repr(self))}</div>{curve}" + (table(rows, ["step", *map(escape, names)]) if rows else "")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else escape(str(value))


# ---- metadata files -------------------------------------------------------------------------------------


def metadata_files(job: Job, result: FinetuneResult) -> dict[str, bytes]:
    """Return the metadata files of a trained model, as a mapping of file names to contents."""
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
    return {
        "README.md": card(job, result).encode(),
        "recipe.yaml": recipe_text(result.recipe, result.changes, job.own.names).encode(),
        "training.json": (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode(),
    }


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
