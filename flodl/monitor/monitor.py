"""The monitor of runs: receives events or epochs, shows a page, keeps a record and writes files.

It subscribes to the events of a run. The training thread only appends events to a queue; a thread of the monitor
processes them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from time import monotonic
from typing import Any, TextIO

from torch import nn

from flodl.errors import TrainError
from flodl.files import write_atomically
from flodl.monitor.architecture import facts_of, picture_of, tree_of
from flodl.monitor.export import console_line, csv_of_record, csv_of_rows, duration_text, metric_text
from flodl.monitor.journal import LiveRun
from flodl.monitor.profiler import Profiler
from flodl.monitor.record import RunRecord, as_text
from flodl.monitor.resources import usage_text
from flodl.monitor.server import PageServer
from flodl.monitor.store import RunStore

COMMANDS = ("evaluate", "save", "stop")
"""Requests to a run that the page can send."""


class Monitor:
    """Watches runs: subscribed to their events, or called with each epoch by `log`.

    ::

        Trainer.builder(model, optimizer, step).dataset(data).set(monitor=True).run()

        monitor = Monitor(folder="runs/first")
        builder.subscribe(monitor)
        print(monitor.serve())

    A monitor may watch several runs, one after the other; its page shows them side by side.

    Args:
        total_epochs: number of planned epochs, for `log`.
        name: name of the run.
        folder: folder of the record on disk (``run.jsonl``); None keeps it in memory only.
        stream: stream of console lines; standard output if None.
        quiet: print nothing.
        interval_s: seconds between two updates.
        resources_s: seconds between two readings of the machine; 0 for none.

    Attributes:
        name, folder: may be changed until the run begins.
        throughput: how speed and time left are measured: ``tokens``, ``flops``, ``peak`` and ``total_steps`` of
            `flodl.monitor.recorder.Throughput`; may be changed until the run begins.
        pages: files requested by `save_html`.
    """

    def __init__(
        self,
        total_epochs: int | None = None,
        *,
        name: str = "Training",
        folder: str | PathLike[str] | None = None,
        stream: TextIO | None = None,
        quiet: bool = False,
        interval_s: float = 0.25,
        resources_s: float = 1.0,
    ) -> None:
        self.total_epochs, self.interval_s, self.resources_s = total_epochs, interval_s, resources_s
        self.store = RunStore()
        self.name, self.folder = name, folder
        self.throughput: dict[str, Any] = {}
        self._stream, self._quiet = stream, quiet
        self._epochs: list[dict[str, float]] = []
        self._began = self._last_epoch = monotonic()
        self._pace_s = 0.0
        self.pages: list[str] = []
        self._facts: dict[str, dict[str, Any]] = {}
        self._commands: tuple[list[str], Callable[[str], Any]] | None = None
        self._live: LiveRun | None = None
        self._server: PageServer | None = None
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_closed = False

    # ---- input ---------------------------------------------------------------------------------------

    def __call__(self, event: Any) -> None:
        """Add an event of a run to the queue."""
        kind = type(event).__name__
        if kind == "RunStarted" and self._live is not None and self._live.is_over:
            self._new_run()
        run = self._run()
        run.put(event)
        if kind in ("RunDone", "RunFailed"):
            self._flush()
            if run.is_over:
                self._write_pages()

    def describe(self, **facts: Mapping[str, Any]) -> Monitor:
        """Add constants of the run by section: ``recipe``, ``data``, ``model``, ``run``. Returns the monitor."""
        for section, values in facts.items():
            self._facts.setdefault(section, {}).update(values)
        self._run().update(facts={section: dict(values) for section, values in facts.items()})
        return self

    def watch(self, model: nn.Module, profile: Profiler | None = None) -> Monitor:
        """Show the architecture of a model. Returns the monitor.

        Args:
            model: a graph or any other module.
            profile: result of `flodl.monitor.look_at`; colours the architecture by time, memory and gradients.
        """
        self.describe(model=facts_of(model))
        self._run().update(model=tree_of(model), picture=picture_of(model))
        if profile is not None:
            heats = (profile.time, profile.gradient, profile.memory)
            self._run().update(heat={heat.kind: {"of": dict(heat.values)} for heat in heats if heat.values})
        return self

    def note(self, text: str, level: str = "info") -> None:
        """Add a line to the log of the run; levels are ``info``, ``warning`` and ``error``."""
        self._run().put(lambda run: run.recorder.note(text, level))

    def log(self, epoch: Any, duration_s: float | None = None, metrics: Any = None) -> None:
        """Record and print one epoch of a loop without events.

        Args:
            epoch: its number, the first being 0; or an `flodl.train.EpochMetrics` instead of all arguments.
            duration_s: seconds it took.
            metrics: a mapping (of mappings too, which become ``outer/inner``), ``(name, value)`` pairs,
                `flodl.train.EpochMetrics`, or a graph, of which the latest metrics are read without a flush.

        Raises:
            TrainError: the epoch or the duration is negative or not a number.
        """
        if hasattr(epoch, "epoch_ms"):
            epoch, duration_s, metrics = epoch.epoch, epoch.epoch_ms / 1e3, epoch
        if epoch < 0 or duration_s is None or not duration_s >= 0:
            raise TrainError(f"monitor: epoch {epoch} of {duration_s} s, expected an epoch and seconds from 0")
        now, run, values = monotonic(), self._run(), _flat_metrics(metrics)
        if self._epochs:
            # Time between epochs (evaluation, saving) counts; time before the first epoch is set-up.
            self._pace_s = (self._pace_s + max(duration_s, now - self._last_epoch)) / 2
        else:
            self._pace_s = duration_s
            run.put(lambda run: run.open(is_resumed=epoch > 0))
        self._last_epoch = now
        self._epochs.append({"epoch": epoch + 1, "duration_s": duration_s, **values})
        left, total = self.eta(), self.total_epochs
        run.put(lambda run: run.recorder.add_epoch(epoch + 1, duration_s, values, total, left))
        if self.resources_s and not self._quiet:
            run.put(LiveRun.read_machine)
            self._flush()
        self._print(console_line(epoch, total or epoch + 1, values, duration_s, left, usage_text(run.usage)))

    def finish(self) -> None:
        """Print the last line, and write the page requested by `save_html`."""
        metrics = list(self._epochs[-1].items())[2:] if self._epochs else []
        listed = ", ".join(f"{name}: {metric_text(value)}" for name, value in metrics)
        took = duration_text(monotonic() - self._began)
        self._print(f"training complete in {took}" + (f"  | {listed}" if listed else ""))
        self._end({"status": "finished", "left_s": None})

    def failed(self, reason: str) -> None:
        """Record that the run ended by an error, if no event reports it."""
        if not self._run().is_over:
            self.note(reason, "error")
            self._end({"status": "failed", "reason": reason[:500], "left_s": None})

    def _end(self, state: dict[str, Any]) -> None:
        run = self._run()
        run.update(state=state)
        self._flush()
        run.is_over = True
        self._write_pages()

    # ---- output --------------------------------------------------------------------------------------

    @property
    def record(self) -> RunRecord:
        """The record of the run, up to date."""
        self._flush()
        return self._run().record

    def history(self) -> list[dict[str, float]]:
        """Return the epochs passed to `log`: ``epoch`` from 1, ``duration_s``, and metrics."""
        return list(self._epochs)

    def eta(self) -> float | None:
        """Return the seconds left at the recent speed; None if unknown, and at the end."""
        if self._epochs and self.total_epochs is not None:
            return max(0, self.total_epochs - self._epochs[-1]["epoch"]) * self._pace_s or None
        return None if self._live is None else self.record.state.get("left_s")

    def save_html(self, path: str | PathLike[str]) -> None:
        """Write the page as one file that opens offline, when the run ends or if it has ended."""
        self.pages.append(fspath(path))
        if self._live is not None and self._live.is_over:
            self._write_pages()

    def page(self) -> str:
        """Return the page as one file, up to date."""
        self._flush()
        return self.store.page(self.name)

    def export_csv(self, path: str | PathLike[str]) -> None:
        """Write a table: one row for each epoch passed to `log`, otherwise one for each point of a curve.

        Missing values and values that are not finite are blank. Without any value no file is written.
        """
        if self._epochs:
            rows = [{**row, "duration_s": f"{row['duration_s']:.3f}"} for row in self._epochs]
            write_atomically(path, [csv_of_rows(rows)])
        elif self._live is not None and self.record.series:
            write_atomically(path, [csv_of_record(self.record)])

    def export_json(self, path: str | PathLike[str]) -> None:
        """Write the whole record as JSON."""
        write_atomically(path, [as_text(self.record.snapshot()).encode()])

    # ---- the page ------------------------------------------------------------------------------------

    def serve(self, port: int | None = None, *, control: bool = False, names: Iterable[str] = ()) -> str:
        """Serve the page on this machine and return its address.

        Args:
            port: None for the first free port from 6060, 0 for any free port.
            control: let the page request an evaluation, a save or a stop; the address then ends in a token.
            names: further accepted values of ``Host``, such as ``localhost:16060`` behind a forwarded port.

        Raises:
            TrainError: the port is taken, or the page is served already.
        """
        if self._server is not None:
            raise TrainError(f"monitor: the page is already served at {self._server.url}. Call close() first.")
        routes = {
            "/history.json": ("application/json", lambda: as_text(self._run().record.epochs)),
            "/graph.svg": ("image/svg+xml", lambda: self._run().record.picture),
        }
        self._server = PageServer(
            self.store, port=port, control=control, names=names, on_command=self._on_command, routes=routes
        )
        if "status" not in self.record.state:
            self._run().update(state={"status": "waiting"})
        self._flush()
        _open_monitors.add(self)
        return self._server.url

    @property
    def url(self) -> str | None:
        """Address of the page; None if it is not served."""
        return None if self._server is None else self._server.url

    def enable_control(self, commands: Iterable[str], call: Callable[[str], Any]) -> None:
        """Call ``call(command)`` when the page sends one of these commands (of `COMMANDS`)."""
        allowed = [word for word in COMMANDS if word in set(commands)]
        self._commands = (allowed, call)
        self._run().update(state={"orders": allowed})

    def close(self) -> None:
        """Send the last messages, and close the server and the record."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with self._lock:
            if self._live is not None:
                self._live.close()
        if self._server is not None:
            self._server.close()
        _open_monitors.discard(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: Any, fault: BaseException | None, trace: Any) -> None:
        if fault is not None:
            self.failed(f"{type(fault).__name__}: {fault}")
        self.close()

    # ---- internals -----------------------------------------------------------------------------------

    def _run(self) -> LiveRun:
        return self._live if self._live is not None else self._new_run()

    def _new_run(self) -> LiveRun:
        with self._lock:
            if self._live is not None:
                self._live.close()
            self._live = run = LiveRun(self)
            if self._facts:
                run.update(facts={section: dict(values) for section, values in self._facts.items()})
            if self._commands is not None:
                run.update(state={"orders": self._commands[0]})
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=_pump, args=(weakref.ref(self),), name="flodl-monitor", daemon=True)
            self._thread.start()
        return run

    def _flush(self) -> None:
        with self._lock:
            if self._live is not None:
                self._live.pump()

    def _write_pages(self) -> None:
        for path in self.pages:
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                write_atomically(path, [self.page().encode()])
            except OSError as fault:  # a monitor must not end a run
                self.note(f"page {path} was not written: {fault}", "warning")

    def _on_command(self, word: str) -> tuple[int, str]:
        """Return the HTTP status and the answer to a command of the page."""
        if word not in COMMANDS:
            return 400, f"expected one of {', '.join(COMMANDS)}"
        if self._commands is None or self._live is None or self._live.is_over:
            return 409, "no run is active"
        allowed, call = self._commands
        if word not in allowed:
            return 409, f"this run does not accept {word}"
        call(word)
        self.note(f"requested by the page: {word}")
        return 202, f"requested: {word} at the next step"

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(line, file=self._stream or sys.stdout, flush=True)


_open_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for monitor in list(_open_monitors):
        monitor.close()


def _pump(reference: weakref.ref[Monitor]) -> None:
    """Process events until the monitor is closed or deleted."""
    while (monitor := reference()) is not None and not monitor._is_closed:
        wake, interval = monitor._wake, monitor.interval_s
        try:
            monitor._flush()
        except Exception as fault:  # a monitor must not end a run
            monitor.note(f"the monitor failed: {type(fault).__name__}: {fault}", "warning")
        del monitor
        wake.wait(interval)


def _flat_metrics(metrics: Any) -> dict[str, float]:
    """Return names and values of metrics as numbers."""
    if hasattr(metrics, "latest_metrics"):
        metrics = metrics.latest_metrics()
    elif hasattr(metrics, "epoch_ms"):
        metrics = {"loss": metrics.loss, **metrics.metrics, **metrics.eval}
    found: dict[str, float] = {}
    for name, value in dict(metrics).items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in _flat_metrics(value).items()}
        else:
            found[str(name)] = float(value)
    return found
