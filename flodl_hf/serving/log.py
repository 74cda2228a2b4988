"""The log of a server: a line of JSON for each record, and lines of many requests written together."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from flodl_hf.serving.frames import as_json

__all__ = ["Lines", "Log", "told"]

# So long lines of requests may wait for others.
LATE_S = 0.1
# So many bytes are written to a pipe in one piece (POSIX asks for 512, Linux has 4096): lines of several processes that
# share it stay whole.
WHOLE: int = getattr(select, "PIPE_BUF", 4096)


class Log(logging.Formatter):
    """A line of JSON for each record: when, how grave, what, and what is said of it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        said = {"at": round(record.created, 3), "level": record.levelname.lower(), "what": record.getMessage()}
        said |= getattr(record, "said", {})
        if record.exc_info:
            said["fault"] = self.formatException(record.exc_info)
        return _line(said)


class Lines(logging.StreamHandler[TextIO]):
    """Writes lines to a stream; what is no more than information waits a moment for others, which costs one write."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it for a moment."""
        try:
            self._keep(self.format(record), record.levelno > logging.INFO)
        except Exception:
            self.handleError(record)

    def say(self, what: str, said: Mapping[str, Any]) -> None:
        """Keep a line of information for a moment, without a record: a server writes one for each request.

        Args:
            what: as of a record.
            said: likewise.
        """
        self.acquire()
        try:
            self._keep(_line({"at": round(time.time(), 3), "level": "info", "what": what, **said}), False)
        finally:
            self.release()

    def _keep(self, line: str, now: bool) -> None:
        self._held.append(line + self.terminator)
        if now:
            self.flush()
        elif len(self._held) == 1:
            try:
                asyncio.get_running_loop().call_later(LATE_S, self.flush)
            except RuntimeError:  # no loop runs here
                self.flush()

    def flush(self) -> None:
        """Write what was kept."""
        self.acquire()
        try:
            lines, self._held = self._held, []
            for piece in _pieces(lines):
                self.stream.write(piece)
                self.stream.flush()
        finally:
            self.release()


def told(logger: logging.Logger, what: str, said: Mapping[str, Any]) -> None:
    """Log some information; where the log is ours alone, no record is made.

    Args:
        logger: whose log.
        what: as of a record.
        said: what is said of it.
    """
    if len(logger.handlers) == 1 and not (logger.propagate or logger.filters):
        handler = logger.handlers[0]
        if type(handler) is Lines and not handler.filters and type(handler.formatter) is Log:
            handler.say(what, said)
            return
    logger.info(what, extra={"said": said})


def _line(said: Mapping[str, Any]) -> str:
    try:
        return as_json(said).decode()
    except TypeError:
        return json.dumps(said, ensure_ascii=False, default=str)


def _pieces(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines put together, up to what is written in one piece; a longer one alone."""
    held, size = list[str](), 0
    for line in lines:
        more = len(line) if line.isascii() else len(line.encode(errors="replace"))
        if held and size + more > WHOLE:
            yield "".join(held)
            held, size = [], 0
        held.append(line)
        size += more
    if held:
        yield "".join(held)
