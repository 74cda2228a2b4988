"""Subscribers that keep the figures of a run elsewhere: a CSV file, TensorBoard, Weights & Biases, MLflow.

Each is given to ``subscribe`` (or to ``finetune(report_to=...)``) and turns events into the calls of its package,
which is imported when the run begins and has to be installed. Figures are ``train/loss``, ``train/lr``,
``train/grad_norm``, ``train/<metric>`` of steps and ``eval/<figure>`` of evaluations, at the number of the
optimiser step.
"""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from flodl.errors import TrainError
from flodl.train.events import EvalDone, RunDone, RunStarted, StepDone

__all__ = ["LOGGERS", "CsvLog", "Log", "MlflowLog", "TensorBoardLog", "WandbLog", "make_log"]


class Log:
    """What all of them do: figures of events by name, given to ``write``.

    Args:
        folder: where files go.
        settings: of the run, shown beside its figures.
    """

    package: str | None = None
    """What has to be installed."""

    def __init__(self, folder: str | os.PathLike[str] = "runs", settings: Mapping[str, Any] | None = None) -> None:
        self.folder, self.settings = Path(folder), dict(settings or {})

    def need(self, module: str) -> Any:
        """Return a module.

        Raises:
            TrainError: it is not installed.
        """
        try:
            return importlib.import_module(module)
        except ImportError as fault:
            raise TrainError(
                f"{type(self).__name__}: {module} cannot be imported ({fault}); expected the package {self.package}. "
                f"Install it: pip install {self.package}",
                package=self.package,
            ) from None

    def check(self) -> None:
        """Refuse a package that is not installed, before anything is trained."""

    def begin(self, event: RunStarted) -> None:
        """Open what figures go to."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step."""

    def end(self) -> None:
        """Close what was opened."""

    def __call__(self, event: Any) -> None:
        """Take in an event."""
        if isinstance(event, RunStarted):
            self.begin(event)
        elif isinstance(event, StepDone):
            own = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, "epoch": float(event.epoch)}
            self.write(event.step, {f"train/{name}": value for name, value in {**own, **event.metrics}.items()})
        elif isinstance(event, EvalDone):
            self.write(event.step, {f"eval/{name.removeprefix('eval_')}": v for name, v in event.metrics.items()})
        elif isinstance(event, RunDone):
            self.end()


class CsvLog(Log):
    """Writes ``<folder>/figures.csv`` with the columns step, figure and value, line by line.

    A run that goes on adds to it.
    """

    _file: TextIO | None = None

    def begin(self, event: RunStarted) -> None:
        """Open the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "figures.csv"
        goes_on = event.resumed_from is not None and path.is_file()
        self._file = open(path, "a" if goes_on else "w", newline="", encoding="utf-8")  # noqa: SIM115
        self._rows = csv.writer(self._file)
        if not goes_on:
            self._rows.writerow(["step", "figure", "value"])

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one line for each figure."""
        if self._file is not None:
            self._rows.writerows([step, name, repr(float(value))] for name, value in figures.items())
            self._file.flush()

    def end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


class TensorBoardLog(Log):
    """Writes event files for TensorBoard into ``folder``, by ``torch.utils.tensorboard``."""

    package = "tensorboard"
    _writer: Any = None

    def check(self) -> None:
        """Refuse a package that is not installed."""
        self.need("tensorboard")

    def begin(self, event: RunStarted) -> None:
        """Open the writer."""
        self._writer = self.need("torch.utils.tensorboard").SummaryWriter(
            str(self.folder), purge_step=event.step or None
        )
        if self.settings:
            lines = "\n".join(f"    {name}: {value}" for name, value in self.settings.items())
            self._writer.add_text("settings", lines, event.step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class WandbLog(Log):
    """Logs to Weights & Biases, by its package; project and mode are those of its environment (``WANDB_...``)."""

    package = "wandb"
    _run: Any = None

    def check(self) -> None:
        """Refuse a package that is not installed."""
        self.need("wandb")

    def begin(self, event: RunStarted) -> None:
        """Begin a run of theirs, or go on with the one that the process has."""
        wandb = self.need("wandb")
        self._own = wandb.run is None
        self._run = wandb.run or wandb.init(config=self.settings)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures, with the step as one of them, since theirs may only rise."""
        self._run.log({**figures, "step": step})

    def end(self) -> None:
        """End their run, if it was begun here."""
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None


class MlflowLog(Log):
    """Logs to MLflow, by its package; server and experiment are those of its environment (``MLFLOW_...``)."""

    package = "mlflow"
    _client: Any = None

    def check(self) -> None:
        """Refuse a package that is not installed."""
        self.need("mlflow")

    def begin(self, event: RunStarted) -> None:
        """Begin a run of theirs, or go on with the active one."""
        self._client = self.need("mlflow")
        self._own = self._client.active_run() is None
        if self._own:
            self._client.start_run()
        for name, value in self.settings.items():
            self._client.log_param(name, str(value)[:500])  # the length that it takes

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log metrics."""
        self._client.log_metrics({name: float(value) for name, value in figures.items()}, step=step)

    def end(self) -> None:
        """End their run, if it was begun here."""
        if self._client is not None and self._own:
            self._client.end_run()
        self._client = None


LOGGERS: dict[str, Callable[..., Log]] = {
    "csv": CsvLog,
    "mlflow": MlflowLog,
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
}


def make_log(name: str, folder: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Log:
    """Return the log of this name, its package found.

    Raises:
        TrainError: there is no such log, or its package is not installed.
    """
    if name not in LOGGERS:
        raise TrainError(f"report_to: found {name!r}; expected one of {', '.join(LOGGERS)}.", found=name)
    log = LOGGERS[name](folder, settings)
    log.check()
    return log
