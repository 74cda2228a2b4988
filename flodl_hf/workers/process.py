"""Start and end of a child process that is connected with this process by a socket."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from threading import Thread

from flodl.errors import FlodlError
from flodl_hf.checkpoints.system import make_cuda_context

END_S = 8.0
"""Time in which a process has to end when its connection is closed."""
REPORT_S = 1.5
"""The same for a process that closed its connection itself, so that its end is reported within two seconds."""
LOOK_S = 0.02
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from flodl_hf.workers.process import main
main({target!r}, {descriptors!r}, {cuda!r})
"""


class Process:
    """A child process. It ends when its connection is closed, so it never outlives this process.

    Args:
        target: see `flodl_hf.workers.process.main`.
        name: its name in messages.
        env: environment variables that are added to or replace the ones of this process.
        fd_channel: whether open sockets can be sent to it (`flodl_hf.workers.messages.send_socket`).
        descriptors: further file descriptors that it receives.
        cuda: index of its CUDA device, if any.

    Attributes:
        socket: the connection.
        fd_channel: socket over which open sockets are sent, or None.
        pid: the process id.
        poll: returns the exit status, or None if the process runs.
        kill: kills the process.
        reason: its last message before it ended; "" if there is none.
    """

    def __init__(
        self,
        target: str,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        fd_channel: bool = False,
        descriptors: Sequence[int] = (),
        cuda: int | None = None,
    ) -> None:
        self.name = name
        self.reason = ""
        pairs = [socket.socketpair() for _ in range(1 + fd_channel)]
        given = [*(theirs.fileno() for _, theirs in pairs), *descriptors]
        code = _PROGRAM.format(path=sys.path, target=target, descriptors=given, cuda=cuda)
        # Not multiprocessing, which would run the caller's program again up to the start of processes. A separate
        # process group, which Ctrl-C does not reach.
        self._popen = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=given, stdin=subprocess.DEVNULL, process_group=0,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.pid, self.poll, self.kill = self._popen.pid, self._popen.poll, self._popen.kill
        for _, theirs in pairs:
            theirs.close()
        self.socket = pairs[0][0]
        self.fd_channel = pairs[1][0] if fd_channel else None
        if self.fd_channel is not None:
            self.fd_channel.setblocking(False)

    def wait(self, within_s: float = END_S) -> int:
        """Wait for the end of the process and return its exit status; kill it after a timeout."""
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._popen.wait()

    async def reaped(self, within_s: float = END_S) -> int:
        """Return the result of `wait` without blocking the event loop."""
        import asyncio  # a child process starts its device before it imports this

        if self.fd_channel is not None:
            self.fd_channel.close()
        until = asyncio.get_running_loop().time() + within_s
        while (status := self.poll()) is None:
            if asyncio.get_running_loop().time() > until:
                self.kill()
            await asyncio.sleep(LOOK_S)
        return status

    def end(self) -> str:
        """Return how the process ended, for messages: exit status or signal, and its last message."""
        status = self.wait(REPORT_S)
        if status >= 0:
            how = f"ended with status {status}"
        else:
            name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
            how = f"ended by {name}" + (", as when memory is exhausted" if status == -signal.SIGKILL else "")
        return f"{how}: {self.reason}" if self.reason else how


EARLY: list[Process] = []
"""Ranks 1, 2, ... of a file job that were started before the job."""


def start_early(target: str, devices: Sequence[str]) -> None:
    """Start a process for each CUDA device but the first, before this process imports torch.

    A process that still runs when this one exits is killed: it notices its closed connection only after its imports.

    Args:
        target: see `flodl_hf.workers.process.main`; it waits for its job.
        devices: the devices, such as ``cuda:0``.
    """
    for rank, device in enumerate(devices[1:], 1):
        EARLY.append(rank_process(target, rank, len(devices), cuda=int(device[5:])))
        atexit.register(EARLY[-1].kill)


def rank_process(
    target: str, rank: int, world: int, *, env: Mapping[str, str] | None = None, cuda: int | None = None
) -> Process:
    """Start a rank of a file job; it gets its number by the variables of torchrun."""
    numbers = {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return Process(target, f"rank {rank}", env={**(env or {}), **numbers}, cuda=cuda)


def main(target: str, descriptors: Sequence[int], cuda: int | None) -> None:
    """Run a function and end the process.

    Args:
        target: ``"module:function"``; the function receives a `flodl_hf.workers.messages.Stream`, and further file
            descriptors.
        descriptors: file descriptors of the connection with the parent, and of everything else that it passes.
        cuda: index of a CUDA device; its context is created while modules are imported.
    """
    # Terminals and service managers signal all processes; the parent decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    if cuda is not None:
        Thread(target=make_cuda_context, args=(cuda,), daemon=True).start()
    from flodl_hf.workers.messages import Stream

    stream = Stream(socket.socket(fileno=descriptors[0]))
    code, reason = 0, ""
    try:
        module, name = target.split(":")
        getattr(import_module(module), name)(stream, *descriptors[1:])
    except SystemExit as end:
        code, reason = (end.code, "") if isinstance(end.code, int) else (int(end.code is not None), end.code or "")
    except BaseException as fault:
        code, reason = 1, f"{type(fault).__name__}: {fault}"
        if not isinstance(fault, FlodlError):
            traceback.print_exc()
    if reason:
        with suppress(OSError):
            stream.write({"end": reason})
    sys.stdout.flush()
    sys.stderr.flush()
    # Other threads may still compute; their results are not needed.
    os._exit(code)
