"""Subscribers that write the metrics of a run elsewhere: CSV, JSON lines, TensorBoard, Weights & Biases, MLflow.

Named in ``Settings.trackers`` (``trackers=["tensorboard"]``), or created and passed to ``subscribe``. The package of a
tracker is imported when the run begins and must be installed. Values are ``train/loss``, ``train/lr``,
``train/grad_norm``, ``train/<metric>`` and ``watched/<name>`` of steps, ``epoch/<metric>`` of epochs and
``eval/<metric>`` of evaluations, at the number of the optimiser step.

A resumed run continues in place: files lose the values after the checkpoint, and services continue their run; its id
is stored in ``trackers.json``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from flodl.errors import TrainError, nearest
from flodl.files import read_regular, write_atomically
from flodl.monitor.record import as_text
from flodl.train.events import EpochMetrics, EvalDone, Observed, RunDone, RunStarted, StepDone


class Tracker:
    """Base class: passes the values of events to `write`. Override what you need.

    Args:
        folder: folder for files.
        config: settings of the run.

    Attributes:
        package: the package that must be installed.
    """

    package: str = ""
    # Open file, writer or run, and its method that ends it.
    _target: Any = None
    _ends = "close"
    # Whether a run of a service was started here, so that it is ended here.
    _is_own = True

    def __init__(self, folder: str | os.PathLike[str] = "runs", config: Mapping[str, Any] | None = None) -> None:
        self.folder, self.config = Path(folder), dict(config or {})

    def need(self, module: str) -> Any:
        """Import a module.

        Raises:
            TrainError: it is not installed.
        """
        try:
            return importlib.import_module(module)
        except ImportError as fault:
            raise TrainError(
                f"{type(self).__name__}: {module} cannot be imported ({fault}). Install it: pip install {self.package}",
                package=self.package,
            ) from None

    def begin(self, event: RunStarted) -> None:
        """Open the target; if ``event.resumed_from`` is set, the run continues after step ``event.step``."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the values of a step."""

    def end(self) -> None:
        """Close the target; may be called twice."""
        if self._target is not None and self._is_own:
            getattr(self._target, self._ends)()
        self._target = None

    def __call__(self, event: Any) -> None:
        """Receive an event."""
        if isinstance(event, RunStarted):
            self.end()  # restarted ranks send it again
            self.begin(event)
        elif isinstance(event, RunDone):
            self.end()
        elif figures := figures_of(event):
            self.write(event.step, figures)


def figures_of(event: Any) -> dict[str, float]:
    """Return names and values of an event."""
    if isinstance(event, StepDone):
        own = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, "epoch": float(event.epoch)}
        return {f"train/{name}": value for name, value in {**own, **event.metrics}.items()}
    if isinstance(event, Observed) and event.scope == "step":
        return {f"watched/{name}": value for name, value in event.values.items()}
    if isinstance(event, EpochMetrics):
        seconds = event.epoch_ms / 1e3
        own = {"loss": event.loss, "seconds": seconds, "samples_per_s": event.samples / seconds if seconds else 0.0}
        return {f"epoch/{name}": value for name, value in {**own, **event.metrics}.items()}
    if isinstance(event, EvalDone):
        return {f"eval/{name.removeprefix('eval_')}": value for name, value in event.metrics.items()}
    return {}


class CsvTracker(Tracker):
    """Writes ``<folder>/figures.csv`` with the columns step, figure and value."""

    def begin(self, event: RunStarted) -> None:
        """Open the file."""
        path, text = self.folder / "figures.csv", io.StringIO()
        rows = csv.reader(_complete_lines(path) if event.resumed_from is not None else ())
        kept = [row for row in rows if len(row) == 3 and row[0].isdecimal() and int(row[0]) <= event.step]
        csv.writer(text).writerows([("step", "figure", "value"), *kept])
        self._target = _started(path, text.getvalue())

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write one line for each value."""
        csv.writer(self._target).writerows([step, name, repr(float(value))] for name, value in figures.items())
        self._target.flush()


class JsonLinesTracker(Tracker):
    """Writes every event to ``<folder>/events.jsonl``, one JSON object a line, null for numbers that are not finite."""

    def begin(self, event: RunStarted) -> None:
        """Open the file."""
        path, kept = self.folder / "events.jsonl", []
        for line in _complete_lines(path) if event.resumed_from is not None else ():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("event") != "RunDone" and found.get("step", 0) <= event.step:
                kept.append(line)
        self._target = _started(path, "".join(kept))

    def __call__(self, event: Any) -> None:
        """Write an event."""
        config = {}
        if isinstance(event, RunStarted):
            super().__call__(event)
            config = {"config": self.config}
        if self._target is not None:
            fields = {**event.to_dict(), **config}
            fields.pop("past", None)  # part of the file already
            self._target.write(as_text(fields) + "\n")
            self._target.flush()
        if isinstance(event, RunDone):
            self.end()


def _started(path: Path, text: str) -> TextIO:
    """Return a file that contains ``text``, open for appending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [text.encode()])
    return open(path, "a", newline="", encoding="utf-8")


def _complete_lines(path: Path) -> Iterable[str]:
    """Return the lines of a file, without a last line that was cut off."""
    text = read_regular(path, 1 << 32).decode("utf-8", errors="replace") if path.is_file() else ""
    return io.StringIO(text[: text.rfind("\n") + 1], newline="")


class TensorBoardTracker(Tracker):
    """Writes event files for TensorBoard into ``folder``, by ``torch.utils.tensorboard``."""

    package = "tensorboard"

    def begin(self, event: RunStarted) -> None:
        """Open the writer; repeated steps are shown once."""
        purge = None if event.resumed_from is None else event.step + 1
        self._target = self.need("torch.utils.tensorboard").SummaryWriter(str(self.folder), purge_step=purge)
        if self.config and purge is None:
            lines = "\n".join(f"    {name}: {value}" for name, value in self.config.items())
            self._target.add_text("settings", lines, event.step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in figures.items():
            self._target.add_scalar(name, value, step)


class _Service(Tracker):
    """A service that gives each run an id, by which a resumed run is continued."""

    def _ids(self) -> dict[str, Any]:
        path = self.folder / "trackers.json"
        with contextlib.suppress(ValueError, TypeError):
            return dict(json.loads(read_regular(path, 1 << 20))) if path.is_file() else {}
        return {}

    def known_id(self, event: RunStarted) -> str | None:
        """Return the id of a resumed run; None for a new run."""
        found = None if event.resumed_from is None else self._ids().get(self.package)
        return found if isinstance(found, str) else None

    def store_id(self, name: str) -> None:
        """Store the id of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self._ids(), self.package: name}, indent=1)
        write_atomically(self.folder / "trackers.json", [text.encode()])


class WandbTracker(_Service):
    """Logs to Weights & Biases; ``WANDB_...`` environment variables set project, mode and folder.

    ``step`` is the axis of all values. Both values of a step that a resumed run repeats are kept.
    """

    package, _ends = "wandb", "finish"

    def begin(self, event: RunStarted) -> None:
        """Start or continue a run, or use the active one."""
        wandb = self.need("wandb")
        self._is_own = wandb.run is None
        if not self._is_own:
            self._target = wandb.run
            return
        known = self.known_id(event)
        self.folder.mkdir(parents=True, exist_ok=True)
        more = {"id": known, "resume": "allow"} if known is not None else {}
        folder = os.environ.get("WANDB_DIR") or str(self.folder)
        self._target = wandb.init(config=self.config, dir=folder, **more)
        self._target.define_metric("step")
        self._target.define_metric("*", step_metric="step")
        self.store_id(str(self._target.id))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log values."""
        self._target.log({**figures, "step": step})


class MlflowTracker(_Service):
    """Logs to MLflow; ``MLFLOW_...`` environment variables set server and experiment.

    A step that a resumed run repeats has both values, the newer one last.
    """

    package, _ends = "mlflow", "end_run"

    def begin(self, event: RunStarted) -> None:
        """Start or continue a run, or use the active one."""
        self._target = self.need("mlflow")
        self._is_own = self._target.active_run() is None
        known = self.known_id(event)
        if self._is_own:
            self._target.start_run(**({"run_id": known} if known is not None else {}))
            self.store_id(self._target.active_run().info.run_id)
        for name, value in self.config.items() if known is None else ():
            self._target.log_param(name, str(value)[:500])  # the longest value that it accepts

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log metrics."""
        self._target.log_metrics({name: float(value) for name, value in figures.items()}, step=step)


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "csv": CsvTracker,
    "jsonl": JsonLinesTracker,
    "mlflow": MlflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def make_tracker(name: str, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Tracker:
    """Return the tracker with this name.

    Raises:
        TrainError: there is none, or its package is not installed.
    """
    if name not in TRACKERS:
        raise TrainError(
            f"trackers: found {name!r}{nearest(str(name), TRACKERS)}, expected one of {', '.join(TRACKERS)}.",
            found=name,
        )
    tracker = TRACKERS[name](folder, config)
    if tracker.package:
        tracker.need(tracker.package)
    return tracker
