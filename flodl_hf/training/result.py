"""A finished run: what came of it, and how people look at it: in a line, as JSON types, drawn in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import TrainError
from flodl.progress import clock, count
from flodl.train.events import figures_in
from flodl_hf.training.curve import curve_svg
from flodl_hf.training.factory import cast_stored

if TYPE_CHECKING:
    from flodl.distributed.group import Summed
    from flodl.train.recorded import Recorded
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.training.thresholds import Tuned

__all__ = ["FinetuneResult", "OnFirstRank"]


class _WhenAsked:
    """The trained model; a base in half precision that was in shards becomes float32 when somebody asks for it.

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
        model: the trained model, ready to predict. Under torchrun with ``shard``, on the first rank alone: what is
            asked of it elsewhere is refused.
        folder: where it was written; None without ``out``.
        task: the head's name.
        metrics: figures of the model on the held-out data; empty without any.
        history: one record for each evaluation: ``step``, ``epoch`` and its figures; in ``details`` what the user's
            metrics returned that is not a number, such as a confusion matrix.
        losses: mean training loss of every optimiser step.
        steps: optimiser steps taken.
        best_step: the step that ``model`` is from.
        seconds: wall clock of the training.
        recipe: the options that reproduce the run, as written to ``recipe.yaml``.
        changes: what was changed with ``allow_change`` when the run was taken up again: ``step``, ``name``, ``was``,
            ``is``. Losses, history, steps and seconds are those of the whole run, however often it was ended.
        tuned: the thresholds that ``tune_thresholds`` chose, on the first rank; None without.
        recorded: how many steps were replayed from captured graphs, and why others were not; None on a processor.
        summed: by what ranks summed their gradients, and why not by what would be faster; None where they sum none.
        holds_model: whether the trained model is in this process.
        generator: the model of masked words that was trained besides, written to ``generator`` inside of the folder;
            None without the option of that name.
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

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model as JSON types."""
        return _run_dict(self)

    def __repr__(self) -> str:
        return _run_line(self)

    def _repr_html_(self) -> str:
        return _run_page(self)


FinetuneResult.model = _WhenAsked()  # type: ignore[assignment]


class OnFirstRank:
    """Stands for the trained model on a rank that held a part of it alone; whatever is asked of it is refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TrainError(
            f"finetune: result.model.{name}: the weights were in shards and have been put together on rank 0 alone; "
            "expected this to be asked there. Ask `result.holds_model` first, or load the folder that was written."
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Refuse."""
        return self.__getattr__("forward")

    def __repr__(self) -> str:
        return "OnFirstRank(the trained model is on rank 0)"


def _run_line(run: FinetuneResult) -> str:
    """Return what came of a run in one line."""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in list(run.metrics.items())[:4])
    loss = f", last loss {run.losses[-1]:.4g}" if run.losses else ""
    best = f", best at step {run.best_step:,}" if run.best_step != run.steps else ""
    where = f", in {run.folder}" if run.folder is not None else ""
    where = where if run.holds_model else f"{where}, the model on rank 0"
    told = f": {figures}" if figures else ""
    return f"FinetuneResult({run.task}, {run.steps:,} steps in {clock(run.seconds)}{loss}{best}{told}{where})"


def _run_dict(run: FinetuneResult) -> dict[str, Any]:
    """Return a run as JSON types, its model left out."""
    from flodl_hf.inference.results.lists import plain

    return plain(
        {
            "task": run.task,
            "folder": None if run.folder is None else str(run.folder),
            "metrics": run.metrics,
            "history": run.history,
            "losses": run.losses,
            "steps": run.steps,
            "best_step": run.best_step,
            "seconds": run.seconds,
            "recipe": {name: value if _is_json(value) else str(value) for name, value in run.recipe.items()},
            "changes": run.changes,
            "tuned": None if run.tuned is None else run.tuned.to_dict(),
            "recorded": None if run.recorded is None else asdict(run.recorded),
            "summed": None if run.summed is None else asdict(run.summed),
            "policy": run.policy,
        }
    )


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, list, tuple, dict))


def _run_page(run: FinetuneResult) -> str:
    """Return a run as HTML: the loss of each step as a curve, evaluations as lines in it and rows below."""
    from flodl_hf.inference.results.pages import table

    names = list(dict.fromkeys(name for record in run.history for name in figures_in(record)))
    rows = [
        [count(record.get("step", 0)), *(_cell(record.get(name)) for name in names)] for record in run.history[-20:]
    ]
    marks = {
        int(record["step"]): ", ".join(f"{name} {_cell(record[name])}" for name in names if name in record)
        for record in run.history
        if record.get("step")
    }
    curve = curve_svg(run.losses, marks=marks, title="training loss")
    return f"<div>{escape(_run_line(run))}</div>{curve}" + (table(rows, ["step", *map(escape, names)]) if rows else "")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else escape(str(value)) if value is not None else ""
