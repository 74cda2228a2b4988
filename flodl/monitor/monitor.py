"""The monitor of a run: told of events or of epochs, it shows a page, keeps a record and writes files.

It is one subscriber of a run's events like any other. What the training does is put an event in a queue; everything
else is done by threads of the monitor.
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
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from flodl.errors import TrainError
from flodl.files import write_atomically
from flodl.monitor.access import Doors
from flodl.monitor.archive import archive_page, csv_of_epochs, csv_of_record, json_of
from flodl.monitor.console import EpochRecord, console_line, eta_s, eta_text
from flodl.monitor.formatting import metric_text
from flodl.monitor.live import Begin, LiveRun, Runs
from flodl.monitor.record import RunRecord

if TYPE_CHECKING:
    from flodl.monitor.module_costs import Look

__all__ = ["ORDERS", "Monitor"]

ORDERS = ("evaluate", "save", "stop")
"""What a run can be asked for."""


class Measured(Protocol):
    """Anything with metrics of its latest epoch, such as a graph."""

    def latest_metrics(self) -> Iterable[tuple[str, float]]:
        """Return names and values in order."""
        ...


Metrics = Mapping[str, float] | Iterable[tuple[str, float]] | Measured


class Monitor:
    """Watches runs: subscribed to a run's events, or told of each epoch with `log`.

    ::

        Trainer.builder(model, optimizer, step).dataset(data).set(monitor=True).run().join()

        monitor = Monitor(folder="runs/first")
        builder.subscribe(monitor)
        print(monitor.serve())

    Several runs, one after the other, may be told to one monitor; its page shows them side by side.

    Args:
        total_epochs: how many epochs are planned, where epochs are told with `log`.
        name: of the run, on its page.
        folder: where the record of the run is kept as it grows (``run.jsonl``); None keeps it in memory.
        stream: where lines go; standard output when None.
        quiet: print nothing.
        interval_s: seconds between two looks at what happened.
        resources_s: seconds between two looks at the machine; 0 looks at none.
        recorder: ``tokens``, ``flops``, ``peak`` and ``total_steps`` of `flodl.monitor.recorder.Recorder`.
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
        recorder: Mapping[str, Any] | None = None,
    ) -> None:
        self.total_epochs = total_epochs
        self._name, self._folder = name, folder
        self.interval_s, self.resources_s = interval_s, resources_s
        self.runs = Runs()
        self._recorder = dict(recorder or {})
        self._stream, self._quiet = stream, quiet
        self._epochs: list[EpochRecord] = []
        self._lines: list[str] = []
        self._began = self._seen = monotonic()
        self._pages: list[str] = []
        self._live: LiveRun | None = None
        self._facts: dict[str, dict[str, Any]] = {}
        self._order: tuple[list[str], Callable[[str], Any]] | None = None
        self._doors: Doors | None = None
        self._pumping = threading.RLock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False

    # ---- what it is ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the run that is shown, or of the next one."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        if self._live is not None and not self._live.is_over:
            self._live.put(lambda recorder: recorder.say(name=name))

    @property
    def folder(self) -> str | PathLike[str] | None:
        """Where the record is kept from the beginning of a run on."""
        return self._folder

    @folder.setter
    def folder(self, folder: str | PathLike[str] | None) -> None:
        self._folder = folder
        if self._live is not None and self._live.journal is None:
            self._live.folder = folder

    # ---- what is told --------------------------------------------------------------------------------

    def __call__(self, event: Any) -> None:
        """Take in an event of a run; costs the caller next to nothing."""
        kind = type(event).__name__
        if kind == "RunStarted" and self._live is not None and self._live.is_over:
            self._new_run()
            if self._order is not None:
                self.take_orders(*self._order)
        self._run().put(event)
        if kind in ("RunDone", "RunFailed"):
            self._flush()
            if self._run().is_over:
                self._write_pages()

    def describe(self, **facts: Mapping[str, Any]) -> Monitor:
        """Say what does not change, by section: ``recipe``, ``data``, ``model``, ``run``."""
        for section, values in facts.items():
            self._facts.setdefault(section, {}).update(values)
        told = {section: dict(values) for section, values in facts.items()}
        self._run().put(lambda recorder: recorder.say(facts=told))
        return self

    def reckon(self, **options: Any) -> Monitor:
        """Say what speeds and the time left are reckoned by: ``tokens``, ``flops``, ``peak``, ``total_steps``.

        They are those of `flodl.monitor.recorder.Recorder`, for the run that comes next.
        """
        self._recorder = options
        if self._live is not None and not self._live.is_over:
            self._live.reckon(options)
        return self

    def set_metadata(self, metadata: Mapping[str, Any]) -> Monitor:
        """Say how the run is configured, for the page."""
        return self.describe(recipe=metadata)

    def watch(self, model: Any, look: Look | None = None) -> Monitor:
        """Show the architecture of a model, and how many parameters of it learn; returns itself.

        Args:
            model: a graph or any other module.
            look: what `flodl.monitor.look_at` saw of a pass; colours the architecture by time, memory and gradients.
        """
        from flodl.monitor.architecture import facts_of, tree_of

        tree, facts = tree_of(model), facts_of(model)
        if look is not None:
            seen = (look.time, look.gradient, look.memory)
            heat = {one.kind: {"of": dict(one.values)} for one in seen if one.values}
            self._run().put(lambda recorder: recorder.say(heat=heat))
        self._facts.setdefault("model", {}).update(facts)
        self._run().put(lambda recorder: recorder.say(model=tree, facts={"model": dict(facts)}))
        return self

    def note(self, text: str, level: str = "info") -> None:
        """Add a line to the log of the run; levels are ``info``, ``warning`` and ``error``."""
        self._run().put(lambda recorder: recorder.note(text, level, step=recorder.step))

    def log(self, epoch: int, duration_s: float, metrics: Metrics) -> EpochRecord:
        """Record and print one epoch of a loop that tells no events, and return its record.

        Args:
            epoch: its number, the first being 0.
            duration_s: seconds it took.
            metrics: a dictionary, ``(name, value)`` pairs, or a graph, whose latest metrics are taken;
                the graph is not flushed.

        Raises:
            TrainError: the epoch is negative or the duration is no number of seconds.
        """
        if epoch < 0 or not duration_s >= 0:
            raise TrainError(
                f"monitor: epoch {epoch} of {duration_s} s, expected an epoch from 0 and seconds from 0",
                epoch=epoch,
                duration_s=duration_s,
            )
        now = monotonic()
        # Time between epochs (evaluation, saving) belongs to the pace; what came before the first is set-up.
        pace = max(duration_s, now - self._seen) if self._epochs else duration_s
        self._seen = now
        record = EpochRecord(epoch, duration_s, _named(metrics), pace)
        self._epochs.append(record)
        left, total = self.eta(), self.total_epochs
        if len(self._epochs) == 1:
            self._run().put(Begin(goes_on=epoch > 0))
        self._say(console_line(record, total or epoch + 1, left))
        self._run().put(lambda recorder: recorder.epoch(epoch, duration_s, record.metrics, total, left))
        return record

    def finish(self) -> None:
        """Print the closing line, and write the page that ``save_html`` asked for."""
        metrics = self._epochs[-1].metrics if self._epochs else {}
        listed = ", ".join(f"{name}: {metric_text(value)}" for name, value in metrics.items())
        took = eta_text(monotonic() - self._began)
        self._say(f"training complete in {took}" + (f"  | {listed}" if listed else ""))
        live = self._run()
        live.put(lambda recorder: recorder.say(state={"status": "finished", "left_s": None}))
        self._flush()
        live.is_over = True
        self._write_pages()

    def failed(self, reason: str) -> None:
        """Say that the run ended by an error, where no event says so."""
        live = self._run()
        if live.is_over:
            return
        live.put(lambda recorder: recorder.note(reason, "error", step=recorder.step))
        live.put(lambda recorder: recorder.say(state={"status": "failed", "reason": reason[:500], "left_s": None}))
        self._flush()
        live.is_over = True
        self._write_pages()

    # ---- what is known -------------------------------------------------------------------------------

    @property
    def record(self) -> RunRecord:
        """The record of the run, as it is now."""
        self._flush()
        return self._run().record

    def history(self) -> list[EpochRecord]:
        """Return every epoch told with `log`, in the order of the calls."""
        return list(self._epochs)

    def eta(self) -> float | None:
        """Return the seconds left, what was done of late weighing more; None before there is any, and at the end."""
        if self._epochs and self.total_epochs is not None:
            return eta_s(self._epochs, self.total_epochs)
        return None if self._live is None else self.record.state.get("left_s")

    @property
    def has_pages(self) -> bool:
        """Whether `save_html` was called."""
        return bool(self._pages)

    # ---- files ---------------------------------------------------------------------------------------

    def save_html(self, path: str | PathLike[str]) -> None:
        """Have one file written that opens offline and shows all that the page shows, when the run ends or ended."""
        self._pages.append(fspath(path))
        if self._live is not None and self._live.is_over:
            self._write_pages()

    def page(self) -> str:
        """Return that file as it is now."""
        self._flush()
        with self.runs.ring.lock:
            return archive_page("".join(self.runs.everything()), self.name)

    def write_log(self, path: str | PathLike[str]) -> None:
        """Write the lines printed so far, with a heading."""
        planned = f"training log, {self.total_epochs} epochs planned" if self.total_epochs else "training log"
        write_atomically(path, ["\n".join([planned, *self._lines, ""]).encode()])

    def export_csv(self, path: str | PathLike[str]) -> None:
        """Write a table: one row an epoch where epochs were told with `log`, else one row for each value of a curve.

        A metric that an epoch lacks, or whose value is not finite, is left blank. Nothing told, no file.
        """
        if self._epochs:
            write_atomically(path, [csv_of_epochs(self._epochs)])
        elif self._live is not None and self.record.series:
            write_atomically(path, [csv_of_record(self.record)])

    def export_json(self, path: str | PathLike[str]) -> None:
        """Write everything that is known of the run as JSON."""
        write_atomically(path, [json_of(self.record)])

    # ---- the page ------------------------------------------------------------------------------------

    def serve(
        self,
        port: int | None = None,
        *,
        host: str = "127.0.0.1",
        control: bool = False,
        token: str | None = None,
        names: Iterable[str] = (),
    ) -> str:
        """Show the page at an address of this machine and return that address.

        Args:
            port: None takes the first free one from 6060 on, 0 any.
            host: another address than this machine's own needs ``token``, which is then asked for to look on.
            control: let the page ask the run to evaluate, save or stop, for those who have the token.
            token: made at random where it is needed and None, unless ``host`` is not this machine's own.
            names: further values of ``Host`` that are ours, such as ``localhost:16060`` behind a forwarded port.

        Raises:
            TrainError: the port is taken, or a token is missing; or the page is shown already.
        """
        if self._doors is not None:
            raise TrainError(f"monitor: the page is shown at {self._doors.url} already; close() the monitor first.")
        self._doors = Doors(
            self.runs, host=host, port=port, control=control, token=token, names=names, on_order=self._ask
        )
        if "status" not in self.record.state:
            self._run().put(lambda recorder: recorder.say(state={"status": "waiting"}))
        self._flush()
        _open_monitors.add(self)
        return self._doors.url

    @property
    def url(self) -> str | None:
        """Where the page is; None where it is not shown."""
        return None if self._doors is None else self._doors.url

    @property
    def readers(self) -> int:
        """How many pages are looking on."""
        return 0 if self._doors is None else self._doors.readers

    def take_orders(self, words: Iterable[str], call: Callable[[str], Any]) -> None:
        """Have ``call`` told which of these words (of `ORDERS`) the page asks of the run, where control is on."""
        allowed = [word for word in ORDERS if word in set(words)]
        self._order = (allowed, call)
        self._run().put(lambda recorder: recorder.say(state={"orders": allowed}))

    def close(self) -> None:
        """Send what is left to readers, let go of the address and the record."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with self._pumping:
            if self._live is not None:
                self._live.close()
        if self._doors is not None:
            self._doors.close()
        _open_monitors.discard(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: Any, fault: BaseException | None, trace: Any) -> None:
        if fault is not None:
            self.failed(f"{type(fault).__name__}: {fault}")
        self.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _run(self) -> LiveRun:
        return self._live if self._live is not None else self._new_run()

    def _new_run(self) -> LiveRun:
        with self._pumping:
            if self._live is not None:
                self._live.close()
            self._live = live = LiveRun(
                self.runs, self.name, self.folder, recorder=self._recorder, resources_s=self.resources_s
            )
            if self._facts:
                facts = {section: dict(values) for section, values in self._facts.items()}
                live.put(lambda recorder: recorder.say(facts=facts))
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=_pump, args=(weakref.ref(self),), name="flodl-monitor", daemon=True)
            self._thread.start()
        return live

    def _flush(self) -> None:
        with self._pumping:
            if self._live is not None:
                self._live.pump()

    def _write_pages(self) -> None:
        for path in self._pages:
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                write_atomically(path, [self.page().encode()])
            except OSError as fault:  # a monitor must not end a run
                self.note(f"the page {path} could not be written: {fault}", "warning")

    def _ask(self, what: str) -> tuple[int, str]:
        """Answer an order of the page: a status of HTTP and a sentence."""
        if what not in ORDERS:
            return 400, f"expected one of {', '.join(ORDERS)}"
        live, order = self._live, self._order
        if order is None or live is None or live.is_over:
            return 409, "no run is going on that could be asked"
        allowed, call = order
        if what not in allowed:
            return 409, f"this run cannot be asked to {what}"
        call(what)
        self.note(f"asked from the page: {what}", "info")
        return 202, f"the run was asked to {what}; it does so at its next step"

    def _say(self, line: str) -> None:
        self._lines.append(line)
        if not self._quiet:
            print(line, file=self._stream or sys.stdout, flush=True)


_open_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for monitor in list(_open_monitors):
        monitor.close()


def _pump(held: weakref.ref[Monitor]) -> None:
    """Look again and again at what came, until the monitor is closed or nobody has it any more."""
    while (monitor := held()) is not None:
        wake, interval = monitor._wake, monitor.interval_s
        if monitor._closed:
            return
        try:
            monitor._flush()
        except Exception as fault:  # a monitor must not end, nor must it end a run
            monitor.note(f"the monitor stumbled: {type(fault).__name__}: {fault}", "warning")
        del monitor
        wake.wait(interval)


def _named(metrics: Metrics) -> dict[str, float]:
    if isinstance(metrics, Mapping):
        pairs = metrics.items()
    elif hasattr(metrics, "latest_metrics"):
        pairs = metrics.latest_metrics()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        pairs = metrics
    return {name: float(value) for name, value in pairs}  # pyright: ignore[reportGeneralTypeIssues]
