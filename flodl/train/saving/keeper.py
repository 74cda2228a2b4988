"""Checkpoints of a run: when they are saved, how they are written, and from which one the run resumes.

A checkpoint is a folder ``step-00000120`` with safetensors and JSON files and a ``manifest.json``, written last, that
lists each file with its length and SHA-256. A background worker writes it into a stage folder, which is renamed when
complete. Each rank writes its files into the common stage; rank 0 waits for the reports of all ranks, writes the
manifest and renames the stage. `flodl.train.saving.resume` defines the contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from flodl.background import BackgroundWorker
from flodl.distributed.board import SAVE
from flodl.distributed.policy import Sync
from flodl.errors import CheckpointError, TrainError
from flodl.files import make_folders, seal
from flodl.system import lock, sync_folder
from flodl.train.events import Event, Saved, SaveFailed
from flodl.train.saving import resume
from flodl.train.saving.reading import FORMAT, Checkpoint, list_checkpoints, open_checkpoint, ranked, signed
from flodl.train.saving.state import event_after, safetensors_chunks


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


def lock_folder(folder: Path, timeout_s: float = 10.0) -> int:
    """Lock the folder and return the descriptor of the lock, which the kernel releases when this process ends.

    Raises:
        TrainError: another run has locked it.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + timeout_s
    while not lock(descriptor):
        if time.monotonic() > until:
            os.close(descriptor)
            raise TrainError(
                f"checkpoints: another run is writing to {folder}. Wait for it, or use another folder.",
                folder=str(folder),
            )
        time.sleep(0.1)
    return descriptor


class Keeper:
    """Saves and finds the checkpoints of one run in its folder.

    Args:
        trainer: its settings name the folder, which all ranks share and which is created if needed.

    Attributes:
        at_step: the step of the last checkpoint.
        resumed_from: the checkpoint from which the run resumed.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.settings, self.ranks = trainer, trainer.settings, trainer.ranks
        self.folder, self.metric = Path(self.settings.folder or "."), self.settings.keep_best
        self.at_step = 0
        self.resumed_from: str | None = None
        self._worker, self._saving = BackgroundWorker("flodl-save"), Future[None]()
        self._saving.set_result(None)
        self._events: list[Event] = []
        self._serial = 0
        self._lock: int | None = None
        self._given_up, self._dropped = threading.Event(), threading.Event()
        self._covered = time.monotonic()  # when the newest complete save began, on rank 0
        self._best: dict[str, Any] | None = None  # signed value, step and metric of the best that was saved
        self._settled = -math.inf  # value of the best whose checkpoint is known to exist
        self._best_path: Path | None = None  # on rank 0; None while it is being written, and where it could not be
        self._damaged: dict[Path, str] = {}
        # Then no step waits for the checkpoint of the best, and the end of the run does not need it.
        self._best_in_memory = any(callback.keeps_best for callback in self.settings.callbacks)
        if self.ranks.rank == 0:
            try:
                make_folders(self.folder)
                self._lock = lock_folder(self.folder)
            except OSError as error:
                raise TrainError(
                    f"checkpoints: {self.folder} cannot be written ({error.strerror or error}). Check space and "
                    "permissions, or use another folder.",
                    folder=str(self.folder),
                    errno=error.errno,
                ) from error
            for left in [*self.folder.glob(".stage-*"), *self.folder.glob(".gone-*")]:
                shutil.rmtree(left, ignore_errors=True)
        self.ranks.barrier()

    # ---- when ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step of a checkpoint that is written now."""
        return self.trainer.policy.steps

    @property
    def due(self) -> bool:
        """Whether ``save_every`` steps were taken since the last checkpoint."""
        every = self.settings.save_every
        return bool(every and self.step // every > self.at_step // every)

    @property
    def skips_end(self) -> bool:
        """Whether the final save would be skipped; rank 0 decides."""
        wanted = self.settings.save_end
        return wanted is not True and (wanted is False or time.monotonic() - self._covered < wanted)

    @property
    def skips_epoch(self) -> bool:
        """Whether the end of this epoch is not saved; with ``"idle"`` during another save."""
        wanted = self.settings.save_epochs
        return not wanted or (wanted == "idle" and not self._saving.done())

    def between_steps(self, flags: Sequence[float]) -> None:
        """Save if it is due or requested, where all ranks are equal."""
        if any(flags[:3]):
            self.save(wait=True)
        elif self.due or self.is_best() or any(flags[SAVE:]):
            policy, feed = self.trainer.policy, self.trainer.feed
            saves_epoch = isinstance(policy, Sync) and self.settings.save_epochs is True
            if not saves_epoch or policy.position < feed.turns(self.trainer.epoch_number):
                self.save()  # otherwise the save after the epoch follows
        self.report()

    def end(self) -> None:
        """Save the end of the run unless ``save_end`` skips it; all ranks call this."""
        skipped = self.ranks.tell(self.skips_end)
        if not (skipped and (self._best_in_memory or self.is_best())):
            self.settle_best()
        if skipped:
            if self.settings.save_epochs == "idle":  # otherwise the save in progress was requested
                self._dropped.set()  # it is not the best, or the present model is better
        elif self.at_step != self.step or self.is_best():
            self.save()

    # ---- the best ------------------------------------------------------------------------------------

    def is_best(self) -> bool:
        """Return whether the model was evaluated at this step and is the best so far; all ranks call this."""
        value = signed(self.metric or "", self.trainer.evaluator.of_step(self.step))
        if value is None:
            return False
        if self._best is not None and value <= self._best["value"] and self._best["step"] != self.step:
            if self._best_in_memory or value <= self._settled:
                return False  # even if the better one fails
            self.settle_best()
        return self._best is None or value > self._best["value"]

    def settle_best(self) -> None:
        """Use the best checkpoint on disk if the best was not written or is missing; all ranks call this."""
        if self._best is None:
            return
        found = self._best
        if self.ranks.rank == 0:
            if self._best_path is None:
                self.join()
            if self._best_path is None or not self._best_path.exists():
                found = self._best_on_disk()
        self._best = self.ranks.tell(found)
        self._settled = -math.inf if self._best is None else self._best["value"]

    def resume_best(self, record: Mapping[str, Any] | None) -> None:
        """Find the best checkpoint, and warn if the recorded one is damaged or missing; all ranks call this."""
        if self.metric is None:
            return
        found = self._best = self.ranks.tell(self._best_on_disk() if self.ranks.rank == 0 else None)
        if record is not None and record.get("metric", self.metric) != self.metric:
            record = None  # of another metric
        if record is not None and (found is None or found["value"] < record["value"]):
            left = "no checkpoint with figures is left" if found is None else f"the best left is step {found['step']}"
            self.trainer.warn(
                f"the best checkpoint, step {record['step']} ({self.metric.lstrip('-')} {abs(record['value']):.6g}), "
                f"is damaged or missing; {left}. Its weights are lost. {' '.join(self._damaged.values())}".rstrip()
            )

    def _best_on_disk(self) -> dict[str, Any] | None:
        """Return the record of the best undamaged checkpoint; None without one."""
        for value, step, path in ranked(self.folder, self.metric or ""):
            if path not in self._damaged:
                try:
                    open_checkpoint(path)
                    self._best_path = path
                    return {"value": value, "step": step, "metric": self.metric}
                except CheckpointError as error:
                    self._damaged[path] = error.message
        return None

    # ---- writing -------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; all ranks must call this at the same step."""
        trainer = self.trainer
        trainer.log.settle(trainer.tally)
        trainer.ranks.phase("checkpoint")
        self.join()  # before the copies, so that there is one set of copies at a time
        self.settle_best()
        metrics = trainer.evaluator.of_step(self.step)
        if self.is_best():
            self._best = {"value": signed(self.metric or "", metrics), "step": self.step, "metric": self.metric}
            self._best_path = None
        self.at_step = self.step
        self._serial += 1
        files = resume.snapshot(trainer, self._best)
        ready = event_after(value for content in files.values() for value in content.values())
        self._saving = self._worker.submit(self._save, files, self.step, dict(metrics), ready, time.monotonic())
        if wait:
            self.join()

    def join(self) -> None:
        """Wait for the save in progress."""
        self._saving.result()

    def report(self) -> None:
        """Emit the events of the background."""
        events, self._events = self._events, []
        for event in events:
            self.trainer.events.emit(event)

    def close(self, *, give_up: bool = False) -> None:
        """Finish writing and release the folder.

        Args:
            give_up: do not wait for the parts of other ranks, because one of them is lost.
        """
        if give_up and not self.ranks.solo:
            self._given_up.set()
        self._worker.close()
        if not give_up:
            self.report()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _save(self, files: dict[str, Any], step: int, metrics: dict[str, float], ready: Any, begin: float) -> None:
        """Write the files of this rank; on rank 0 complete the checkpoint."""
        ranks, number = self.ranks, f"{self.ranks.attempt}/{self._serial}"
        stage = self.folder / f".stage-{step:08d}-{number.replace('/', '-')}"
        report: dict[str, Any] = {"files": {}}
        try:
            stage.mkdir(parents=True, exist_ok=True)
            for stem, content in files.items():
                suffix, chunks = _format(content, ready)
                report["files"][stem + suffix] = _write(stage / (stem + suffix), self._unless_dropped(chunks))
        except Exception as error:
            report["error"] = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        if ranks.rank != 0:
            with contextlib.suppress(Exception):  # the next collective reports that rank 0 is lost
                ranks.store.set(f"save/{number}/{ranks.rank}", json.dumps(report))
            return
        is_best = self._best is not None and self._best["step"] == step
        try:
            reports = [report, *(self._report_of(rank, f"save/{number}/{rank}") for rank in range(1, ranks.world))]
            faults = [r["error"] for r in reports if "error" in r]
            if faults:
                raise OSError("; ".join(faults))
            listed = {name: entry for r in reports for name, entry in r["files"].items()}
            absent = [name for name in listed if not (stage / name).is_file()]
            if absent:
                raise OSError(f"{', '.join(absent)} missing; all ranks must share this folder")
            manifest = {"format": FORMAT, "step": step, "world": ranks.world, "metrics": metrics, "files": listed}
            _write(stage / "manifest.json", [seal(manifest)])
            sync_folder(stage)
            names = (f"step-{step:08d}{f'.{number}' if number else ''}" for number in itertools.count())
            target = next(path for name in names if not (path := self.folder / name).exists())
            os.rename(stage, target)
            sync_folder(self.folder)
            self._covered = begin
            if is_best:
                self._best_path = target
            size, ms = sum(entry["bytes"] for entry in listed.values()), (time.monotonic() - begin) * 1e3
            self._events.append(Saved(step=step, path=str(target), bytes=size, wall_ms=ms))
            self._prune()
        except Exception as error:
            shutil.rmtree(stage, ignore_errors=True)
            if not self._dropped.is_set():
                lost = f"; it would have been the best ({self.metric}) and does not count as that" * is_best
                self._events.append(SaveFailed(step=step, path=str(self.folder), reason=f"{error}{lost}"))

    def _unless_dropped(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            if self._dropped.is_set():
                raise InterruptedError("the checkpoint was dropped")
            yield chunk

    def _report_of(self, rank: int, key: str) -> dict[str, Any]:
        """Wait for the report of another rank and return it."""
        until = time.monotonic() + 300.0
        # Polled, because a blocking request would keep the training thread from using the store.
        while not self.ranks.store.check([key]):
            if time.monotonic() > until or self._dropped.is_set() or self._given_up.wait(0.01):
                raise OSError(f"rank {rank} did not write its part")
        return json.loads(self.ranks.store.get(key))

    def _prune(self) -> None:
        """Remove all checkpoints but the newest and the best."""
        found = list_checkpoints(self.folder)
        order = ranked(self.folder, self.metric) if self.metric is not None else []
        best = next((path for _, _, path in order if path not in self._damaged), None)
        for path in found[: -self.settings.keep_last]:
            if path != best:
                gone = self.folder / f".gone-{path.name}"
                with contextlib.suppress(OSError):
                    os.rename(path, gone)  # no reader may find a part of it, not even after a power loss
                    sync_folder(self.folder)
                    shutil.rmtree(gone)

    # ---- resuming ------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Resume from the newest complete checkpoint if there is one; all ranks call this.

        Raises:
            CheckpointError: the checkpoints are damaged, or do not fit the model or optimiser.
            TrainError: settings differ from the checkpoint's.
        """
        found = self._latest()
        if found is not None:
            resume.restore(self.trainer, found)
            self.resume_best(found.values["run"].get("best"))
            self.at_step, self.resumed_from = self.step, str(found.path)

    def _latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; None if there is no checkpoint."""
        paths = list_checkpoints(self.folder)
        names = self.ranks.gather([path.name for path in paths])
        if any(one != names[0] for one in names):
            raise TrainError(
                f"resume: ranks found different checkpoints ({names}); they must share the folder.", paths=names
            )
        messages = []
        for path in reversed(paths):
            found, fault = None, None
            try:
                found = open_checkpoint(path, self.ranks.rank, self.ranks.world)
            except CheckpointError as error:
                fault = error.message
            faults = [message for message in self.ranks.gather(fault) if message is not None]
            if not faults:
                return found
            messages.append(faults[0])
            self.trainer.warn(f"{faults[0]} The one before it is used.")
        if messages:
            raise CheckpointError(
                f"resume: none of the {len(messages)} checkpoints in {self.folder} is complete; the newest: "
                f"{messages[0]} Start in another folder to train from the beginning.",
                problems=messages,
            )
        return None


def _format(content: Any, ready: torch.cuda.Event | None) -> tuple[str, Iterable[bytes | memoryview]]:
    """Return the suffix and bytes of one file: tensors as safetensors, other values as JSON."""
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return ".safetensors", safetensors_chunks(content, ready)
    return ".json", [json.dumps(content, indent=1).encode()]
