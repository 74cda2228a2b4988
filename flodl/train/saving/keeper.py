"""Checkpoints on disk: written by a background worker into a stage folder, renamed when complete, checked, pruned.

A checkpoint is a folder ``step-00000120`` with safetensors and JSON files and a ``manifest.json``, written last, that
lists each file with its length and SHA-256. Each rank writes its files into the common stage; rank 0 waits for the
reports of all ranks, writes the manifest and renames the stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from flodl.background import BackgroundWorker
from flodl.distributed.group import Ranks
from flodl.errors import CheckpointError, TrainError
from flodl.files import make_folders, seal
from flodl.system import lock, sync_folder
from flodl.train.events import Event, Saved, SaveFailed, Warned
from flodl.train.saving.judged import judged, signed
from flodl.train.saving.reading import (
    FORMAT,
    Checkpoint,
    list_checkpoints,
    open_checkpoint,
    read_checkpoint,
)
from flodl.train.saving.tensor_stream import event_after, safetensors_chunks

Files = Mapping[str, Any]


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    size, digest = 0, hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _until(dropped: threading.Event, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the chunks until the checkpoint is dropped."""
    for chunk in chunks:
        if dropped.is_set():
            raise InterruptedError("the checkpoint was dropped")
        yield chunk


def _format(content: Any, ready: torch.cuda.Event | None = None) -> tuple[str, Iterable[bytes | memoryview]]:
    """Return the suffix and bytes of one file: tensors as safetensors, other values as JSON."""
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return ".safetensors", safetensors_chunks(content, ready)
    return ".json", [json.dumps(content, indent=1).encode()]


class Keeper:
    """Saves and finds the checkpoints of one run in one folder.

    Args:
        folder: shared by all ranks; created if needed.
        ranks: the ranks of the run.
        keep_last: how many of the newest checkpoints are kept.
        best: name of a metric; its best checkpoint is kept in addition; a leading ``-`` where less is better.
    """

    def __init__(
        self, folder: str | os.PathLike[str], ranks: Ranks, *, keep_last: int = 2, best: str | None = None
    ) -> None:
        self.folder, self.ranks = Path(folder), ranks
        self.keep_last, self.best = max(1, keep_last), best
        self._worker, self._saving = BackgroundWorker("flodl-save"), Future[None]()
        self._saving.set_result(None)
        self._events: list[Event] = []
        self._serial = 0
        self._lock: int | None = None
        self._given_up, self._dropped = threading.Event(), threading.Event()
        self._covered = time.monotonic()
        self._best: dict[str, Any] | None = None  # signed value, step and metric of the best that was saved
        self._best_path: Path | None = None  # on rank 0; None while it is being written, and where it could not be
        self._damaged: set[Path] = set()
        if ranks.rank == 0:
            try:
                make_folders(self.folder)
                self._hold_folder()
            except OSError as error:
                raise TrainError(
                    f"checkpoints: {self.folder} cannot be written ({error.strerror or error}"
                    f"{_space(self.folder.parent, error)}). Free some space, check the permissions, or use another "
                    "folder.",
                    folder=str(self.folder),
                    errno=error.errno,
                ) from error
            for left in [*self.folder.glob(".stage-*"), *self.folder.glob(".gone-*")]:
                shutil.rmtree(left, ignore_errors=True)
        ranks.barrier()

    def _hold_folder(self, patience_s: float = 10.0) -> None:
        """Lock the folder; the kernel releases the lock when this process ends."""
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        until = time.monotonic() + patience_s
        while True:
            if lock(self._lock):
                return
            if time.monotonic() > until:
                raise TrainError(
                    f"checkpoints: another run is writing to {self.folder}. Wait for it, or use another folder.",
                    folder=str(self.folder),
                )
            time.sleep(0.1)

    # ---- writing -------------------------------------------------------------------------------------

    def save(self, files: Files, *, step: int, metrics: Mapping[str, float], wait: bool = False) -> None:
        """Start to write ``files`` (the part of this rank) as the checkpoint of ``step``; every rank calls this.

        Contents must not change afterwards. An earlier save is finished first.
        """
        self.join()
        self._serial += 1
        ready = event_after(value for content in files.values() for value in content.values())
        about = step, dict(metrics), self._serial, ready, time.monotonic()
        self._saving = self._worker.submit(self._save, dict(files), *about)
        if wait:
            self.join()

    def drop(self) -> None:
        """Abandon the save in progress and remove its files; all ranks call this, and save no more."""
        self._dropped.set()

    @property
    def uncovered_s(self) -> float:
        """Seconds since the start of the newest complete save, on rank 0."""
        return time.monotonic() - self._covered

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress."""
        return not self._saving.done()

    def is_best(self, metrics: Mapping[str, float], step: int) -> bool:
        """Return whether weights of ``step`` with these figures are the best so far; all ranks call this."""
        value = signed(self.best or "", metrics)
        if value is None or self._is_better(value):
            return value is not None
        if self._best is None or self._best["step"] == step:
            return False
        self.settle_best()  # the better one may not have been written
        return self._is_better(value)

    def _is_better(self, value: float) -> bool:
        return self._best is None or value > self._best["value"]

    def note_best(self, metrics: Mapping[str, float], step: int) -> None:
        """Note the figures of the checkpoint that is saved next; all ranks call this."""
        if self.is_best(metrics, step):
            self._best = {"value": signed(self.best or "", metrics), "step": step, "metric": self.best}
            self._best_path = None

    def settle_best(self) -> None:
        """Fall back to the best checkpoint on disk if the best was not written or is missing; all ranks call this."""
        if self._best is None:
            return
        found = self._best
        if self.ranks.rank == 0:
            if self._best_path is None:
                self.join()
            if self._best_path is None or not self._best_path.exists():
                found, _ = self._whole_best()
        self._best = self.ranks.tell(found)

    def best_record(self) -> dict[str, Any] | None:
        """Return value, step and metric of the best as JSON values for `resume_best`."""
        return self._best

    def resume_best(self, record: Mapping[str, Any] | None) -> list[str]:
        """Load a record of the best, and return warnings if that checkpoint is damaged or missing.

        The best remaining checkpoint replaces it. All ranks call this.
        """
        if self.best is None:
            return []
        found, messages = None, []
        if self.ranks.rank == 0:
            found, messages = self._whole_best()
        found, messages = self.ranks.tell([found, messages])
        self._best = found
        if record is not None and record.get("metric", self.best) != self.best:
            record = None  # of another metric
        if record is not None and (found is None or found["value"] < record["value"]):
            left = "no checkpoint with figures is left" if found is None else f"the best left is step {found['step']}"
            messages = [
                f"the best checkpoint, step {record['step']} ({self.best.lstrip('-')} {abs(record['value']):.6g}), is "
                f"damaged or missing; {left}. Its weights are lost.",
                *messages,
            ]
        return messages

    def _whole_best(self) -> tuple[dict[str, Any] | None, list[str]]:
        messages = []
        for value, step, path in self.judged():
            try:
                open_checkpoint(path)
                self._best_path = path
                return {"value": value, "step": step, "metric": self.best}, messages
            except CheckpointError as error:
                self._damaged.add(path)
                messages.append(error.message)
        return None, messages

    def judged(self) -> list[tuple[float, int, Path]]:
        """Return value, step and path of the undamaged checkpoints with figures, the best first."""
        return [entry for entry in judged(self.folder, self.best or "") if entry[2] not in self._damaged]

    def join(self) -> None:
        """Wait for the save in progress."""
        self._saving.result()

    def news(self) -> list[Event]:
        """Return the events of the background since the last call."""
        events, self._events = self._events, []
        return events

    def close(self, *, give_up: bool = False) -> None:
        """Finish writing and release the folder.

        Args:
            give_up: do not wait for the parts of other ranks, because one of them is lost.
        """
        if give_up and not self.ranks.solo:
            self._given_up.set()
        self._worker.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _save(
        self,
        files: dict[str, Any],
        step: int,
        metrics: dict[str, float],
        serial: int,
        ready: torch.cuda.Event | None,
        begin: float,
    ) -> None:
        stage = self.folder / f".stage-{step:08d}-{self.ranks.attempt}-{serial}"
        report: dict[str, Any] = {"files": {}}
        try:
            stage.mkdir(parents=True, exist_ok=True)
            for stem, content in files.items():
                suffix, chunks = _format(content, ready)
                report["files"][stem + suffix] = _write(stage / (stem + suffix), _until(self._dropped, chunks))
        except Exception as error:
            report["error"] = f"rank {self.ranks.rank}: {type(error).__name__}: {error}{_space(self.folder, error)}"
        key = f"save/{self.ranks.attempt}/{serial}"
        if self.ranks.rank != 0:
            with contextlib.suppress(Exception):  # the next collective reports that rank 0 is lost
                self.ranks.store.set(f"{key}/{self.ranks.rank}", json.dumps(report))
            return
        try:
            reports = [report, *self._others(key)]
            faults = [r["error"] for r in reports if "error" in r]
            if faults:
                raise OSError("; ".join(faults))
            listed = {name: entry for r in reports for name, entry in r["files"].items()}
            absent = [name for name in listed if not (stage / name).is_file()]
            if absent:
                raise OSError(f"{', '.join(absent)} missing; all ranks must share this folder")
            manifest = {"format": FORMAT, "step": step, "world": self.ranks.world, "metrics": metrics, "files": listed}
            _write(stage / "manifest.json", [seal(manifest)])
            sync_folder(stage)
            target = self._free_name(step)
            os.rename(stage, target)
            sync_folder(self.folder)
            self._covered = begin
            if self._is_noted(step):
                self._best_path = target
            size = sum(entry["bytes"] for entry in listed.values())
            self._events.append(
                Saved(step=step, path=str(target), bytes=size, wall_ms=(time.monotonic() - begin) * 1e3)
            )
            self._prune()
        except Exception as error:
            shutil.rmtree(stage, ignore_errors=True)
            if self._dropped.is_set():
                return
            lost = f"; it would have been the best ({self.best}) and does not count as that" * self._is_noted(step)
            self._events.append(SaveFailed(step=step, path=str(self.folder), reason=f"{error}{lost}"))

    def _is_noted(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` is the best."""
        return self._best is not None and self._best["step"] == step

    def _others(self, key: str, patience_s: float = 300.0) -> list[dict[str, Any]]:
        reports, until = [], time.monotonic() + patience_s
        for rank in range(1, self.ranks.world):
            # Polled, because a blocking request would keep the training thread from using the store.
            while not self.ranks.store.check([f"{key}/{rank}"]):
                if time.monotonic() > until or self._dropped.is_set() or self._given_up.wait(0.01):
                    raise OSError(f"rank {rank} did not write its part")
            reports.append(json.loads(self.ranks.store.get(f"{key}/{rank}")))
        return reports

    def _free_name(self, step: int) -> Path:
        name, turn = self.folder / f"step-{step:08d}", 0
        while name.exists():
            turn += 1
            name = self.folder / f"step-{step:08d}.{turn}"
        return name

    def _prune(self) -> None:
        found = self.names()
        keep = set(found[-self.keep_last :])
        best = self.best_path()
        for path in found:
            if path in keep or path == best:
                continue
            gone = self.folder / f".gone-{path.name}"
            with contextlib.suppress(OSError):
                os.rename(path, gone)  # no reader may find a part of it, not even after a power loss
                sync_folder(self.folder)
                shutil.rmtree(gone)

    # ---- reading -------------------------------------------------------------------------------------

    def names(self) -> list[Path]:
        """Return the checkpoints in the folder, oldest first."""
        return list_checkpoints(self.folder)

    def best_path(self) -> Path | None:
        """Return the checkpoint with the best value of the metric, the earliest on ties."""
        judged = self.judged() if self.best is not None else []
        return judged[0][2] if judged else None

    def latest(self, tell: Callable[[Event], None], *, parted: bool = False) -> Checkpoint | None:
        """Return the newest complete checkpoint; None if there is no checkpoint.

        Args:
            tell: receives a warning for each damaged checkpoint.
            parted: open it, so that each rank reads its part; all ranks call this and share the checks of files.

        Raises:
            CheckpointError: there are checkpoints and none is complete.
            TrainError: ranks find different checkpoints.
        """
        faults = []
        for path in reversed(self._names_of_all() if parted else self.names()):
            try:
                return self._open(path) if parted else read_checkpoint(path)
            except CheckpointError as error:
                faults.append(error)
                tell(Warned(step=0, message=f"{error.message} The one before it is used."))
        if faults:
            raise CheckpointError(
                f"resume: none of the {len(faults)} checkpoints in {self.folder} is complete; the newest: "
                f"{faults[0].message} Start in another folder to train from the beginning.",
                problems=[error.message for error in faults],
            )
        return None

    def _open(self, path: Path) -> Checkpoint:
        """Return a checkpoint in which no rank has found a fault.

        Raises:
            CheckpointError: a rank has.
        """
        found, fault = None, None
        try:
            found = open_checkpoint(path, self.ranks.rank, self.ranks.world)
        except CheckpointError as error:
            fault = [error.message, error.problems]
        first = next(filter(None, self.ranks.gather(fault)), None)
        if first is None and found is not None:
            return found
        message, problems = first or fault or ["", []]
        raise CheckpointError(message, path=str(path), problems=problems)

    def _names_of_all(self) -> list[Path]:
        """Return the checkpoints in the folder, which all ranks must find.

        Raises:
            TrainError: they find different ones.
        """
        names = self.names()
        seen = self.ranks.gather([path.name for path in names])
        if any(one != seen[0] for one in seen):
            raise TrainError(
                f"resume: ranks found different checkpoints ({seen}); they must share the folder.", paths=seen
            )
        return names


def _space(folder: Path, error: Exception) -> str:
    if not isinstance(error, OSError):
        return ""
    with contextlib.suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 1e6:.1f} MB free at {folder})"
    return ""
