"""Processes of the workers: start, replacement, reload and shutdown.

The current workers and their results are reported to `flodl_hf.serving.workers.Workers` of this process, or to the
parent of several HTTP processes, which has the same methods.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flodl.errors import ConfigError, FlodlError, capped, nearest
from flodl_hf.checkpoints.folders import ADAPTER_CONFIG
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.workers import Worker
from flodl_hf.workers.ipc import connect_link
from flodl_hf.workers.process import Process as Child

LOG = logging.getLogger("flodl_hf.serving")
# A worker is not restarted after this many ends without a result in between.
MAX_RESTARTS = 5


class WorkersError(FlodlError):
    """Workers cannot be started."""


def start_task(made: Awaitable[Any], held: set[asyncio.Task[Any]]) -> None:
    """Run a coroutine, and keep its task in a set until it ends; the event loop would not keep it."""
    task = asyncio.ensure_future(made)
    held.add(task)
    task.add_done_callback(held.discard)


@dataclass(eq=False, kw_only=True)
class Process(Worker):
    """A worker whose process was started here.

    Attributes:
        device: its device.
        child: the process.
    """

    device: str
    child: Child
    leaving: bool = False
    listening: asyncio.Task[None] | None = None


class Processes:
    """The worker processes of a server.

    Args:
        settings: the server's settings.
        listener: receives changes and results by ``use``, ``answered``, ``ended`` and ``left``, methods of `Workers`.
        fd_channel: whether connections to further HTTP processes are sent to the workers.
    """

    def __init__(self, settings: Settings, listener: Any, *, fd_channel: bool = False) -> None:
        self.settings = settings
        self.restarts = 0
        """Number of workers that were replaced."""
        self.here: list[Process] = []
        """The active workers."""
        self._listener = listener
        self._fd_channel = fd_channel
        self._adapters: list[dict[str, str]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._replacing: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._deaths = 0
        self._reloads = 0

    async def start(self) -> None:
        """Start the workers of each device and return when all models are warm.

        Raises:
            WorkersError: a model cannot be served; the message has the reason.
            ConfigError: a directory of adapters is invalid.
        """
        found = await self._started()
        if self._closing:
            await asyncio.gather(*(self._let_go(process) for process in found))
            return
        self._use(found)

    def alive(self) -> None:
        """Reset the count of ended workers: results arrive."""
        self._deaths = 0

    def _use(self, here: list[Process]) -> None:
        self.here = here
        self._listener.use(here, self.restarts)
        for process in here:
            # The end of each process is observed from now on, also of one that ended while others were started.
            if process.listening is None:
                process.listening = asyncio.ensure_future(self._listen(process))

    async def _started(self) -> list[Process]:
        adapters = find_adapters(self.settings)
        devices = self.settings.devices * (self.settings.workers or 1)
        done = await self._all(devices, adapters)
        if self.settings.workers is None and all(isinstance(one, Process) for one in done):
            roomy = [one.device for one in done if isinstance(one, Process) and one.info["room"]]
            second = await self._all(roomy, adapters)
            for device, one in zip(roomy, second, strict=True):
                if isinstance(one, BaseException):
                    LOG.warning("one worker", extra={"fields": {"device": device, "fault": str(one)}})
            done += [one for one in second if isinstance(one, Process)]
        found = [process for process in done if isinstance(process, Process)]
        faults = [fault for fault in done if isinstance(fault, BaseException)]
        if faults:
            for process in found:
                await self._let_go(process)
            raise faults[0]
        self._adapters = adapters
        return found

    async def _all(self, devices: Sequence[str], adapters: list[dict[str, str]]) -> list[Process | BaseException]:
        made = [asyncio.ensure_future(self._one(device, adapters)) for device in devices]
        return await asyncio.gather(*made, return_exceptions=True)

    async def _one(self, device: str, adapters: list[dict[str, str]]) -> Process:
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def on_message(message: dict[str, Any], arrays: list[np.ndarray]) -> None:
            if "end" in message:
                child.reason = message["end"]
            elif "warned" in message:
                LOG.warning(message["warned"], extra={"fields": {"device": device}})
            elif first.done():
                self._deaths = 0
                self._listener.answered(found, message, arrays)
            else:
                first.set_result(message)

        child = Child("flodl_hf.serving.worker:serve", device, fd_channel=self._fd_channel)
        found = Process(await connect_link(child.socket, on_message), device=device, child=child)
        found.link.send(self.settings.for_worker(device, adapters))
        try:
            await asyncio.wait((first, found.link.closed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            found.link.close()
            await child.reaped(0.0)
            raise
        if not first.done():
            await self._let_go(found)
            raise WorkersError(f"serve: the worker of {device} {child.end()}", device=device)
        message = first.result()
        found.info, found.rate = message, float(message["rate"])
        LOG.info("worker ready", extra={"fields": {"device": message["device"], "pid": message["pid"]}})
        return found

    # ---- ends --------------------------------------------------------------------------------------

    async def _listen(self, process: Process) -> None:
        """Replace a worker that ends unexpectedly."""
        await process.link.closed
        self._listener.ended(process)
        process.link.close()
        expected = process.leaving or self._closing or process not in self.here
        if not expected:
            self.here.remove(process)
        await process.child.reaped()
        if not expected:
            LOG.error("worker ended", extra={"fields": {"device": process.device, "fault": process.child.end()}})
            start_task(self._replace(process.device), self._replacing)

    async def _replace(self, device: str) -> None:
        """Start a replacement, unless all models are reloaded meanwhile."""
        reloads = self._reloads
        while reloads == self._reloads and not self._closing:
            self._deaths += 1
            if self._deaths > MAX_RESTARTS:
                LOG.error("worker given up", extra={"fields": {"device": device}})
                return
            try:
                again = await self._one(device, self._adapters)
            except WorkersError as fault:
                LOG.error("worker not started", extra={"fields": {"device": device, "fault": str(fault)}})
                await asyncio.sleep(min(30.0, 2.0**self._deaths))
                continue
            if reloads != self._reloads or self._closing:
                start_task(self._let_go(again), self._tasks)
                return
            self.restarts += 1
            self._use([*self.here, again])
            return

    async def reload(self) -> None:
        """Reload all models in new workers; the old workers finish their current requests.

        Raises:
            WorkersError: a model cannot be loaded; the old workers remain active.
            ConfigError: a directory of adapters is invalid; the old workers remain active.
        """
        new = await self._started()
        if self._closing:
            await asyncio.gather(*(self._let_go(process) for process in new))
            return
        self._reloads += 1
        self._deaths = 0
        before = self.here
        self._use(new)
        for process in before:
            start_task(self._let_go(process), self._tasks)

    async def close(self) -> None:
        """Let all workers finish their current requests, and end them."""
        self._closing = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        here = self.here
        self._use([])
        await asyncio.gather(*(self._let_go(process) for process in here), *self._tasks)

    async def _let_go(self, process: Process) -> None:
        process.leaving = True
        await self._listener.left(process)
        process.link.close()
        await process.child.reaped()
        if process.listening is not None:
            await process.listening


# ---- adapters ----------------------------------------------------------------------------------------


def find_adapters(settings: Settings) -> list[dict[str, str]]:
    """Return name, folder and base of each adapter in the configured directories.

    Each folder is one adapter under the folder's name; files and folders with a leading dot are ignored. Only the
    configuration file is read here; workers load the adapters (`flodl_hf.serving.adapter_models`).

    Raises:
        ConfigError: a directory cannot be listed, a folder is not an adapter, a name is not unique, or a base is not
            served.
    """
    found: list[dict[str, str]] = []
    problems: list[str] = []
    taken = {model.name: f"the model {model.name}" for model in settings.models}
    for given in settings.adapters:
        where, base = _directory(settings, given)
        try:
            names = sorted(entry.name for entry in os.scandir(where) if entry.is_dir() and entry.name[0] != ".")
        except OSError as fault:
            problems.append(f"{where} cannot be listed ({fault.strerror}), expected a directory of adapters")
            continue
        for name in names:
            folder = where / name
            if not (folder / ADAPTER_CONFIG).is_file():
                problems.append(f"{folder} is not an adapter: it contains no {ADAPTER_CONFIG}")
            elif name in taken:
                problems.append(f"{folder}: the name {name!r} is already used by {taken[name]}")
            else:
                taken[name] = str(folder)
                try:
                    found.append({"name": name, "folder": str(folder), "base": base or _base_of(settings, folder)})
                except FlodlError as fault:
                    problems.append(str(fault))
    if problems:
        raise ConfigError(
            f"serve: adapters:\n{capped(problems)}\nexpected directories with one folder for each adapter. Remove "
            "other folders, and select the base with NAME=DIR if several models are served.",
            problems=problems,
        )
    return found


def _directory(settings: Settings, value: str) -> tuple[Path, str | None]:
    """Return a directory and its base: the model of ``NAME=DIR``, or the only served model, or None."""
    names = [model.name for model in settings.models]
    name, equal, where = value.partition("=")
    if equal and name in names:
        return Path(where).expanduser(), name
    if equal and not os.path.isdir(value):
        raise ConfigError(
            f"serve: adapters {value!r}: no model {name!r} is served{nearest(name, names)}; expected DIR, or NAME=DIR "
            f"with one of {', '.join(names)}",
            problems=[value],
        )
    return Path(value).expanduser(), names[0] if len(names) == 1 else None


def _base_of(settings: Settings, folder: Path) -> str:
    """Return the name of the served model that an adapter's configuration names as its base."""
    from flodl_hf.checkpoints.config.file import MAX_CONFIG_BYTES, read_json
    from flodl_hf.checkpoints.folders import read_member

    text = read_member(folder, ADAPTER_CONFIG, MAX_CONFIG_BYTES, ConfigError)
    named = str(read_json(text, str(folder / ADAPTER_CONFIG)).get("base_model_name_or_path") or "")
    path = os.path.realpath(named)
    able = [
        model.name
        for model in settings.models
        if named and (model.source == named or os.path.realpath(os.path.expanduser(model.source)) == path)
    ]
    if len(able) != 1:
        raise ConfigError(
            f"{folder}: its base is {named!r}, which {len(able) or 'none'} of the served models "
            f"{'are' if able else 'is'} read from"
        )
    return able[0]
