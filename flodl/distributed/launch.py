"""Start of ranks on this host, detection of failures, and an error that names the rank, its phase and the cause.

The launcher owns the rendezvous store, so the store outlives every rank. A rank that dies is detected by the end of its
process, a frozen rank by its pulse. The launcher then stops the others and raises one error with the rank, its phase,
its step and its traceback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flodl.distributed.board import Board
from flodl.distributed.group import FROZEN_S, join_ranks
from flodl.errors import TrainError
from flodl.fork_server import is_prepared
from flodl.signals import handled_by, stop_by
from flodl.system import die_with_parent, hard_stop, is_stopped, loopback

STARTING = ("spawn", "rendezvous", "model build", "first broadcast")
"""Phases of a rank before the first step."""
SILENT_S = 120.0
"""How long a running rank may write no pulse: some libraries block the interpreter for minutes."""
PAUSED_S = 5.0
LOOK_S = 0.25


class RankError(TrainError):
    """A rank failed; the attributes are ``rank``, ``pid``, ``phase``, ``step``, ``reason`` and ``trace``."""


@dataclass
class _Member:
    process: Any
    pipe: Connection
    ended: bool = False


class Crew:
    """Processes on this host that call ``fn(ranks, *args)``; they end when the thread that created them ends.

    ``poll`` reads their messages, ``wait`` returns their results, ``stop`` ends them. `launch` is another name.

    Args:
        fn: its first argument is the `Ranks` of the rank. New processes must be able to import it, unless
            ``start="fork"``.
        args: its further arguments.
        ranks: number of processes.
        device: one device for all, or one for each; None gives each rank its own CUDA device, or the CPU.
        start: ``"spawn"``, or ``"fork"`` for CPU ranks of a process in which torch uses one thread.
        timeout_s: how long a collective waits for a rank that is alive.
        frozen_after_s: a stopped rank is lost after this time without a pulse; a running one after 15 times as long,
            but at least two minutes.
        max_restarts: how often all ranks are restarted after a failure.
        on_message: called in this process with ``(rank, message)`` for each message that a rank sends through
            ``ranks.pipe``; a result other than None is sent back to that rank. The message of a failed rank is
            ``("failed", (error, True if all ranks are restarted))``.

    Attributes:
        attempt: number of restarts after failures.

    Raises:
        TrainError: ``fn`` cannot be sent to a new process.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        ranks: int,
        device: str | Sequence[str] | None = None,
        start: str = "spawn",
        timeout_s: float = 600.0,
        frozen_after_s: float = FROZEN_S,
        max_restarts: int = 0,
        on_message: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self.fn, self.args, self.world, self.start = fn, args, ranks, start
        devices = [device] * ranks if device is None or isinstance(device, str) else list(device)
        if len(devices) != ranks:
            raise TrainError(
                f"launch: found {len(devices)} devices for {ranks} ranks; give one for each.",
                devices=devices,
                ranks=ranks,
            )
        self.devices, self.timeout_s, self.frozen_after_s = devices, timeout_s, frozen_after_s
        self.max_restarts, self.on_message = max_restarts, on_message
        self.attempt = 0
        self.failures: list[RankError] = []
        self._passed = 0  # the signal that was forwarded to the ranks
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(
            "forkserver" if self.start == "spawn" and is_prepared() else self.start
        )
        self.board = Board.shared(self.world, context)
        self._store = None  # closes the store of the failed attempt, with its threads
        self.results: dict[int, Any] = {}
        self._looked = self._since = time.monotonic()
        self._members: list[_Member] = []
        # Ranks end with this object and with the interpreter, which would otherwise wait forever for ranks that wait
        # for an answer.
        Finalize(self, _end, args=(self._members,), exitpriority=10)
        try:
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                place = {
                    "rank": rank,
                    "world": self.world,
                    "local_rank": rank,
                    "device": self.devices[rank],
                    "attempt": self.attempt,
                    "parent": os.getpid(),
                    "timeout_s": self.timeout_s,
                }
                process = context.Process(
                    target=_rank_main,
                    args=(self.fn, self.args, place, self.board, theirs, dict(os.environ)),
                    daemon=True,
                )
                with warnings.catch_warnings():
                    # Python warns of fork in a process with threads; `launch` documents this.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                self._members.append(_Member(process, ours))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.stop()
            raise TrainError(
                f"launch: the function or one of its arguments cannot be sent to a new process ({error}). "
                "Expected functions defined at the top of a module, and no lambda. "
                "Move them there, start with start='fork' (CPU only), or run the script under torchrun.",
                cause=str(error),
            ) from error
        # Created last: a process that is forked while the store's threads run may inherit one of their locks.
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
        )
        for rank in range(self.world):
            self.send(rank, self._store.port)

    @property
    def alive(self) -> list[int]:
        """Ranks with a running process."""
        return [rank for rank, member in enumerate(self._members) if member.process.is_alive()]

    @property
    def pids(self) -> list[int]:
        """Process number of each rank."""
        return [member.process.pid for member in self._members]

    def send(self, rank: int, message: Any) -> None:
        """Send ``message`` to a rank; does nothing if the rank ended."""
        with contextlib.suppress(OSError):
            self._members[rank].pipe.send(message)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Process messages and ends of ranks; return True if all are done.

        Raises:
            RankError: a rank failed and no restart is left.
            KeyboardInterrupt: every rank saved and left on SIGINT.
            SystemExit: every rank saved and left on SIGTERM.
        """
        pending = [m for m in self._members if not m.ended]
        if not pending:
            return True
        ready = wait([m.pipe for m in pending], timeout_s)
        for rank, member in enumerate(self._members):
            if not member.ended and member.pipe in ready:
                self._read(rank, member)
        self._look_for_frozen()
        if all(member.ended for member in self._members):
            for member in self._members:
                member.process.join()
            self._store = self.on_message = None  # a method of the owner would keep it, and its descriptors, alive
            codes = {member.process.exitcode for member in self._members}
            if codes <= {128 + signal.SIGTERM, 128 + signal.SIGINT}:
                stop_by(max(codes) - 128)
            return True
        return False

    def _read(self, rank: int, member: _Member) -> None:
        try:
            kind, body = member.pipe.recv()
        except (EOFError, ConnectionError, OSError):
            self._ended(rank, member)
            return
        if kind == "result":
            self.results[rank] = body
        elif kind == "failure":
            self._failed(rank, reason=body["reason"], trace=body["trace"])
        elif self.on_message is not None:
            answer = self.on_message(rank, (kind, body))
            if answer is not None:
                self.send(rank, answer)

    def _ended(self, rank: int, member: _Member) -> None:
        member.ended = True
        member.process.join(timeout=5)
        code = member.process.exitcode
        if rank in self.results or code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            return
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
            self._failed(rank, reason=f"killed by {name}{hint}")
        else:
            guard = 'if __name__ == "__main__":'
            unguarded = (
                f" (each rank imports the script; a script without `{guard}` needs it around the call)"
                if code == 1
                else ""
            )
            hint = unguarded if self.board.phase(rank) == "spawn" and self.start != "fork" else ""
            self._failed(rank, reason=f"left with exit code {code} before its work was done{hint}")

    def _look_for_frozen(self) -> None:
        now = time.monotonic()
        if now - self._looked > PAUSED_S:
            self._since = now  # this process was stopped itself, so the time of the ranks starts again
        self._looked = now
        for rank, member in enumerate(self._members):
            if member.ended:
                continue
            silent = min(self.board.silence_s(rank), now - self._since)
            stopped = is_stopped(member.process.pid)
            if silent > (self.frozen_after_s if stopped else max(SILENT_S, 15 * self.frozen_after_s)):
                self._failed(rank, reason=f"frozen: no pulse for {silent:.1f} s")
                return

    def _failed(self, rank: int, *, reason: str, trace: str = "") -> None:
        board, member = self.board, self._members[rank]
        codes = [one.process.exitcode for one in self._members]
        if self._passed and (board.phase(rank) in STARTING or -self._passed in codes):
            # Ranks without a handler yet end by the signal, and the others lose contact with them.
            self.stop()
            stop_by(self._passed)
        error = RankError(
            f"rank {rank} of {self.world} (pid {member.process.pid}) failed in phase '{board.phase(rank)}', "
            f"step {board.step(rank)}: {reason.rstrip('.')}. The other ranks were stopped. "
            "Start again with resume to continue from the last checkpoint."
            + (f"\nTraceback of rank {rank}:\n{trace}" if trace else ""),
            rank=rank,
            pid=member.process.pid,
            phase=board.phase(rank),
            step=board.step(rank),
            reason=reason,
            trace=trace,
        )
        self.stop()
        self.failures.append(error)
        is_over = self.attempt >= self.max_restarts or bool(self._passed)
        if self.on_message is not None:
            self.on_message(rank, ("failed", (error, not is_over)))
        if is_over:
            raise error
        self.attempt += 1
        self._start()

    def wait(self) -> list[Any]:
        """Return the results of ``fn``, by rank.

        SIGTERM and SIGINT are forwarded to the ranks, which save and leave.
        """
        try:
            with self.passing_signals():
                while not self.poll(timeout_s=LOOK_S):
                    pass
        except BaseException:
            self.stop()  # ranks that continue without this process would lock their folder
            raise
        return [self.results.get(rank) for rank in range(self.world)]

    @contextlib.contextmanager
    def passing_signals(self) -> Any:
        """Forward SIGTERM and SIGINT to the ranks inside the context; a second signal kills them."""
        seen = 0

        def forward(number: int, _frame: Any) -> None:
            nonlocal seen
            seen += 1
            self._passed = number
            for member in self._members:
                if member.process.is_alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member.process.pid, hard_stop() if seen > 1 else number)
            if seen > 1:
                stop_by(number)

        with handled_by(forward):
            yield

    def stop(self) -> None:
        """Kill every running rank."""
        _end(self._members)
        for member in self._members:
            member.process.join(timeout=5)
            member.ended = True
            member.pipe.close()
        self._store = None


def _end(members: list[_Member]) -> None:
    """Kill the running ranks."""
    for member in members:
        if member.process.is_alive():
            member.process.kill()


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank_args: dict[str, Any],
    board: Board,
    pipe: Connection,
    environment: dict[str, str],
) -> None:
    """Call ``fn`` in a new process; ``rank_args`` contains arguments of `join_ranks`."""
    os.environ.update(environment)
    if os.getppid() == rank_args["parent"]:  # not forked by another process
        die_with_parent(rank_args["parent"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    board.beat(rank_args["rank"])
    code = 1
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() // rank_args["world"]))
        if loopback() is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", str(loopback()))
        port = pipe.recv()
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=rank_args["timeout_s"]))
        ranks = join_ranks(**rank_args, board=board, store=PrefixStore(f"attempt{rank_args['attempt']}", store))
        ranks.pipe = pipe
        result = fn(ranks, *args)
        pipe.send(("result", result))
        code = 0
        with contextlib.suppress(Exception):  # of the transport; the work is done
            ranks.leave()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
        if code == 0:
            pipe.send(("result", None))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        # All other ranks lose the connection to a dead one; the launcher should receive the cause first.
        if isinstance(error, TrainError) and hasattr(error, "lost"):
            time.sleep(1.0)
        with contextlib.suppress(OSError):
            pipe.send(("failure", {"reason": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
    # The interpreter's shutdown may wait for native threads of a broken process group.
    os._exit(code)


launch = Crew
