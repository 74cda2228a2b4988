"""The result of a run: summary line, JSON values and HTML for notebooks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from numbers import Number
from pathlib import Path
from typing import Any

from flodl.distributed.group import Summed
from flodl.errors import TrainError
from flodl.progress import clock, count
from flodl.train.events import Recorded
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.training.report.figures import Tuned
from flodl_hf.training.start import cast_stored

JSON = (str, int, float, type(None))


class Timing(dict[str, float]):
    """Seconds by phase: read, load, tokenise, first step, train, evaluate, save."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to a phase."""
        now = time.perf_counter()
        self[phase] = self.get(phase, 0.0) + now - self._last
        self._last = now


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


class _WhenAsked:
    """The trained model; a half-precision base that was in shards is cast to float32 at the first access.

    An adapter is written without its base, which in float32 may be more than the first rank has memory for.
    """

    def __get__(self, run: FinetuneResult | None, owner: type) -> Any:
        if run is None:
            return self
        model: EncoderModel = vars(run)["model"]
        if run.holds_model:
            cast_stored(model)
        return model

    def __set__(self, run: FinetuneResult, model: EncoderModel) -> None:
        vars(run)["model"] = model


@dataclass(frozen=True)
class FinetuneResult:
    """A finished run.

    Attributes:
        model: the trained model, ready to predict. Under torchrun with ``shard`` only the first rank has it; on others,
            access raises an error.
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
        holds_model: whether the trained model is in this process.
        generator: the masked language model that was trained jointly, written to ``generator`` in the folder;
            None without the option of that name.
        timing: seconds of each phase.
        policy: ``name`` of the policy by which ranks shared the work, and the ``reason`` why it was chosen.
    """

    model: EncoderModel
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
    holds_model: bool = True
    generator: EncoderModel | None = field(default=None, repr=False)
    policy: Mapping[str, str] = field(default_factory=dict, repr=False)
    timing: dict[str, float] = field(default_factory=dict, repr=False)

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
            [count(record.get("step", 0)), *(_cell(record.get(name)) for name in names)]
            for record in self.history[-20:]
        ]
        losses = {"training loss": [(step, value) for step, value in enumerate(self.losses, 1)]}
        curve = line_chart(losses, title="training loss", across="step", up="loss")
        curve = f'<div class="flodl-run"><style>{CURVE_STYLE}</style>{curve}</div>' if curve else ""
        return f"<div>{escape(repr(self))}</div>{curve}" + (table(rows, ["step", *map(escape, names)]) if rows else "")


FinetuneResult.model = _WhenAsked()  # type: ignore[assignment]


class OnFirstRank:
    """Placeholder for the trained model on a rank that has only a part of it; access raises an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TrainError(
            f"finetune: result.model.{name}: the weights were in shards and were combined on rank 0; "
            "expected access on rank 0. Check `result.holds_model` first, or load the folder that was written."
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Refuse."""
        return self.__getattr__("forward")

    def __repr__(self) -> str:
        return "OnFirstRank(the trained model is on rank 0)"


CURVE_STYLE = (
    ".flodl-run .line{fill:none;stroke:#4a90d9;stroke-width:1.5}.flodl-run .grid{stroke:#8884}"
    ".flodl-run .label{font:10px sans-serif;fill:#888}"
)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else escape(str(value)) if value is not None else ""
