"""Subscribers that keep the figures of a run elsewhere: CSV, JSON lines, TensorBoard, Weights & Biases, MLflow.

Named in ``Settings.trackers`` (``trackers=["tensorboard"]``), or made and given to ``subscribe``. Each turns events
into the calls of its package, which is imported when the run begins and has to be installed. Figures are
``train/loss``, ``train/lr``, ``train/grad_norm``, ``train/<metric>`` and ``watched/<name>`` of steps,
``epoch/<figure>`` of epochs and ``eval/<figure>`` of evaluations, at the number of the optimiser step.

A run that goes on is gone on with in place: files lose what was written after the checkpoint and are added to, services
get the same run of theirs, whose name stands in ``trackers.json``.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from flodl.errors import TrainError, nearest
from flodl.files import read_regular, write_atomically
from flodl.train.events import (
    Decided,
    EpochMetrics,
    EvalDone,
    Observed,
    RunDone,
    RunStarted,
    StepDone,
    Subscriber,
    Warned,
)

__all__ = [
    "TRACKERS",
    "CsvTracker",
    "JsonLinesTracker",
    "MlflowTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "make_tracker",
    "make_trackers",
]

NAMES = "trackers.json"
"""Holds the names that services gave to a run, beside what the other trackers write."""


class Tracker:
    """What all of them do: figures of events by name, given to `write`. Your own may override what it needs.

    Args:
        folder: where files go.
        config: settings of the run, shown beside its figures.
    """

    package: str = ""
    """What has to be installed."""

    def __init__(self, folder: str | os.PathLike[str] = "runs", config: Mapping[str, Any] | None = None) -> None:
        self.folder, self.config = Path(folder), dict(config or {})

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
        if self.package:
            self.need(self.package)

    def begin(self, event: RunStarted) -> None:
        """Open what figures go to; with ``event.resumed_from`` the run goes on after step ``event.step``."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step."""

    def note(self, step: int, kind: str, text: str) -> None:
        """Keep what was said at a step: a decision, or a warning."""

    def end(self) -> None:
        """Close what was opened; once more does nothing."""

    def __call__(self, event: Any) -> None:
        """Take in an event."""
        if isinstance(event, RunStarted):
            self.end()  # comes again where ranks were started again
            self.begin(event)
        elif isinstance(event, RunDone):
            self.end()
        elif isinstance(event, Decided):
            self.note(event.step, "decision", f"{event.rule} ({event.reason})")
        elif isinstance(event, Warned):
            self.note(event.step, "warning", event.message)
        else:
            figures = figures_of(event)
            if figures:
                self.write(event.step, figures)


def figures_of(event: Any) -> dict[str, float]:
    """Return the figures of an event by the names that trackers give them."""
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


# ---- files -----------------------------------------------------------------------------------------------


class CsvTracker(Tracker):
    """Writes ``<folder>/figures.csv`` with the columns step, figure and value, line by line."""

    _file: TextIO | None = None
    _header = ("step", "figure", "value")

    def begin(self, event: RunStarted) -> None:
        """Open the file."""
        lines = io.StringIO()
        rows = csv.writer(lines)
        rows.writerow(self._header)
        path = self.folder / "figures.csv"
        if event.resumed_from is not None:
            rows.writerows(row for row in _csv_rows(path) if int(row[0]) <= event.step)
        self._file = _begun(path, lines.getvalue())
        self._rows = csv.writer(self._file)

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


class JsonLinesTracker(Tracker):
    """Writes every event to ``<folder>/events.jsonl``, one JSON object a line, numbers that are not finite as null."""

    _file: TextIO | None = None

    def begin(self, event: RunStarted) -> None:
        """Open the file."""
        path = self.folder / "events.jsonl"
        kept = "" if event.resumed_from is None else "".join(_json_lines(path, event.step))
        self._file = _begun(path, kept)
        self._tell({**event.to_dict(), "config": self.config})

    def __call__(self, event: Any) -> None:
        """Write an event."""
        if isinstance(event, (RunStarted, RunDone)):
            if isinstance(event, RunDone):
                self._tell(event.to_dict())
            super().__call__(event)
        else:
            self._tell(event.to_dict())

    def _tell(self, told: dict[str, Any]) -> None:
        if self._file is not None:
            told.pop("past", None)  # stands in the file already
            self._file.write(json.dumps(_json(told), allow_nan=False) + "\n")
            self._file.flush()

    def end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _begun(path: Path, text: str) -> TextIO:
    """Return a file that begins with ``text``, to be added to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [text.encode()])
    return open(path, "a", newline="", encoding="utf-8")


def _csv_rows(path: Path) -> Iterator[list[str]]:
    """Yield the whole rows of a file of figures; the last may have been cut off."""
    if path.is_file():
        text = read_regular(path, 1 << 32).decode("utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        yield from (row for row in csv.reader(io.StringIO(whole)) if len(row) == 3 and row[0].isdecimal())


def _json_lines(path: Path, last: int) -> Iterator[str]:
    """Yield the lines of a file of events up to those of a step."""
    if path.is_file():
        for line in read_regular(path, 1 << 32).decode("utf-8", errors="replace").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("event") != "RunDone" and found.get("step", 0) <= last:
                yield line + "\n"


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# ---- packages --------------------------------------------------------------------------------------------


class TensorBoardTracker(Tracker):
    """Writes event files for TensorBoard into ``folder``, by ``torch.utils.tensorboard``."""

    package = "tensorboard"
    _writer: Any = None

    def begin(self, event: RunStarted) -> None:
        """Open the writer; steps after the checkpoint are shown once, as they were done again."""
        goes_on = event.resumed_from is not None
        self._writer = self.need("torch.utils.tensorboard").SummaryWriter(
            str(self.folder), purge_step=event.step + 1 if goes_on else None
        )
        if self.config and not goes_on:
            lines = "\n".join(f"    {name}: {value}" for name, value in self.config.items())
            self._writer.add_text("settings", lines, event.step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add scalars."""
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def note(self, step: int, kind: str, text: str) -> None:
        """Add a text."""
        if self._writer is not None:
            self._writer.add_text(kind, text, step)

    def end(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class _Service(Tracker):
    """One that gives a run a name of its own, by which it is found again."""

    def known(self, event: RunStarted) -> str | None:
        """Return the name that the service gave to the run that goes on; None for a new run."""
        path = self.folder / NAMES
        if event.resumed_from is None or not path.is_file():
            return None
        try:
            found = json.loads(read_regular(path, 1 << 20)).get(self.package)
        except (ValueError, AttributeError):
            return None
        return found if isinstance(found, str) else None

    def remember(self, name: str) -> None:
        """Keep the name of the run."""
        path = self.folder / NAMES
        names: dict[str, Any] = {}
        if path.is_file():
            try:
                names = dict(json.loads(read_regular(path, 1 << 20)))
            except (ValueError, TypeError):
                names = {}
        if names.get(self.package) != name:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [json.dumps({**names, self.package: name}, indent=1).encode()])


class WandbTracker(_Service):
    """Logs to Weights & Biases, by its package; project and mode are those of its environment (``WANDB_...``).

    Figures come with ``step``, which is their axis, since counts of theirs may only rise. Figures of steps that were
    taken after the checkpoint of a run that goes on stay there beside those that replace them. A process of theirs
    writes offline files, and may be some milliseconds behind; ``wandb.teardown()``, as the end of this process, waits.
    """

    package = "wandb"
    _run: Any = None

    def begin(self, event: RunStarted) -> None:
        """Begin a run of theirs, or go on with its own, or with the one that the process has."""
        wandb = self.need("wandb")
        self._own = wandb.run is None
        if not self._own:
            self._run = wandb.run
            return
        again, self._run = self.known(event), None
        self.folder.mkdir(parents=True, exist_ok=True)
        more = {"id": again, "resume": "allow"} if again is not None else {}
        self._run = wandb.init(config=self.config, dir=str(self.folder), **more)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.remember(str(self._run.id))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures."""
        if self._run is not None:
            self._run.log({**figures, "step": step})

    def note(self, step: int, kind: str, text: str) -> None:
        """Log a text."""
        if self._run is not None:
            self._run.log({f"{kind}s": text, "step": step})

    def end(self) -> None:
        """End their run, if it was begun here."""
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None


class MlflowTracker(_Service):
    """Logs to MLflow, by its package; server and experiment are those of its environment (``MLFLOW_...``).

    A step that is done again by a run that goes on has both values there, the newer one last.
    """

    package = "mlflow"
    _client: Any = None

    def begin(self, event: RunStarted) -> None:
        """Begin a run of theirs, or go on with its own, or with the active one."""
        self._client = self.need("mlflow")
        self._own = self._client.active_run() is None
        again = self.known(event)
        if self._own:
            self._client.start_run(run_id=again) if again is not None else self._client.start_run()
            self.remember(self._client.active_run().info.run_id)
        for name, value in self.config.items() if again is None else ():
            self._client.log_param(name, str(value)[:500])  # the length that it takes

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log metrics."""
        if self._client is not None:
            self._client.log_metrics({name: float(value) for name, value in figures.items()}, step=step)

    def note(self, step: int, kind: str, text: str) -> None:
        """Set a tag, named by the step."""
        if self._client is not None:
            self._client.set_tag(f"{kind}.{step}", text[:5000])

    def end(self) -> None:
        """End their run, if it was begun here."""
        if self._client is not None and self._own:
            self._client.end_run()
        self._client = None


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "csv": CsvTracker,
    "jsonl": JsonLinesTracker,
    "mlflow": MlflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def make_tracker(name: str, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Tracker:
    """Return the tracker of this name, its package found.

    Raises:
        TrainError: there is no such tracker, or its package is not installed.
    """
    if name not in TRACKERS:
        raise TrainError(
            f"trackers: found {name!r}{nearest(str(name), TRACKERS)}; expected one of {', '.join(TRACKERS)}, or "
            "something that can be called with events.",
            found=name,
        )
    made = TRACKERS[name](folder, config)
    made.check()
    return made


def make_trackers(
    wanted: Sequence[str | Subscriber], folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None
) -> list[Subscriber]:
    """Return trackers by their names, and others as they are.

    Raises:
        TrainError: as of `make_tracker`.
    """
    return [one if callable(one) else make_tracker(one, folder, config) for one in wanted]
