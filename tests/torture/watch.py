"""What a case does besides answering: files it writes, what it starts, runs and reaches for.

Decides what counts as outside. An audit hook sees Python's own events; a canary file, which the code in hostile
inputs would make, and a picture of the folders before and after see the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["CANARY", "SECRET", "Watch", "picture"]

CANARY = "canary-was-here"
"""The file that hostile code makes where it runs; it lies beside the case's folder."""
SECRET = "a-secret-of-the-machine"
"""What stands in files outside of a case's folder: no message may show it."""

_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile", "webbrowser.open")
_REACHES = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_HOME_ADDRESSES = ("127.0.0.1", "localhost", "::1")


def picture(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return every entry below a folder with its kind, size and time of change."""
    found: dict[str, tuple[int, int, int]] = {}
    pending = [os.fspath(folder)]
    start = len(pending[0]) + 1
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    is_folder = entry.is_dir(follow_symlinks=False)
                    size, when = (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
                    found[entry.path[start:]] = (status.st_mode, size, when)
                    if is_folder:
                        pending.append(entry.path)
        except FileNotFoundError:
            continue
    return found


class Watch:
    """What happens while a case acts.

    Args:
        root: the folder of the worker: cases, what lies outside of them, and the canary.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = os.path.realpath(root)
        self.outside = os.path.join(self.home, "outside")
        self._events: list[str] | None = None
        self._writes: tuple[str, ...] = ()
        self._network = False
        sys.addaudithook(self._seen)

    @contextmanager
    def __call__(self, writes: tuple[Path, ...] = (), *, network: bool = False) -> Iterator[list[str]]:
        """Collect what is done in the block that a case has no right to.

        Args:
            writes: folders in which the case may write.
            network: it may connect to this machine.
        """
        before = picture(self.root)
        found: list[str] = []
        self._writes = tuple(os.path.realpath(place) for place in writes)
        self._network = network
        self._events = found
        try:
            yield found
        finally:
            self._events = None
            if os.path.exists(os.path.join(self.home, CANARY)):
                found.append("ran: the canary of the input's code is there")
                os.unlink(os.path.join(self.home, CANARY))
            after = picture(self.root)
            allowed = tuple(os.path.relpath(place, self.home) for place in self._writes)
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name) and not (allowed and name.startswith(allowed)):
                    verb = "made" if name not in before else "removed" if name not in after else "changed"
                    found.append(f"{verb}: {name!r}")

    def _seen(self, event: str, given: tuple[Any, ...]) -> None:
        events = self._events
        if events is None or not given:
            return
        first, second = (*given, None)[:2]
        if event == "open":
            self._opened(given, events)
        elif event in _STARTS:
            events.append(f"started: {str(given)[:200]}")
        elif event in _REACHES:
            address = second if event in ("socket.connect", "socket.sendto") else first
            host = address[0] if isinstance(address, tuple) and address else address
            if not (self._network and str(host) in _HOME_ADDRESSES):
                events.append(f"reached: {event} {str(address)[:200]}")
        elif event == "import" and isinstance(second, str) and second.startswith(self.home):
            events.append(f"ran: import of {second}")
        elif event == "exec" and getattr(first, "co_filename", "").startswith(self.home):
            events.append(f"ran: {getattr(first, 'co_filename', '')}")

    def _opened(self, given: tuple[Any, ...], events: list[str]) -> None:
        path, flags = given[0], given[2]
        if not isinstance(path, (str, bytes)):
            return
        writing = isinstance(flags, int) and bool(flags & _WRITING)
        if not writing and not isinstance(path, str):
            return
        place = os.fsdecode(path)
        if writing and not place.startswith("/dev/"):
            # Only names: asking the file system of each open would cost more than the case.
            full = os.path.abspath(place)
            compiled = "__pycache__" in full and not full.startswith(self.home)
            if not compiled and not full.startswith((*(self._writes or ("\0",)), *_scratch())):
                events.append(f"written: {place[:200]}")
        elif "/outside/" in place and os.path.realpath(place).startswith(self.outside):
            events.append(f"reached: {place[:200]}")


def _scratch() -> tuple[str, ...]:
    # Compiled Python and caches of libraries are no effect of the input.
    return (sys.pycache_prefix or "\0", os.path.expanduser("~/.cache"), os.path.dirname(os.__file__), sys.prefix)
