"""JSON log of a server; lines of many requests are written together."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from flodl_hf.workers.messages import as_json

# Delay of request lines, so that several are written together.
FLUSH_DELAY_S = 0.1
# Pipes write this many bytes atomically (at least 512 by POSIX, 4096 on Linux), so that lines of several processes that
# share a pipe stay whole.
ATOMIC_BYTES: int = getattr(select, "PIPE_BUF", 4096)


class Log(logging.Formatter):
    """Formatter with one JSON line for each record: time, level, message and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = {"at": round(record.created, 3), "level": record.levelname.lower(), "what": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["fault"] = self.formatException(record.exc_info)
        return _line(fields)


class Lines(logging.StreamHandler[TextIO]):
    """Stream handler that buffers lines of level INFO for a moment and writes them together."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write or buffer a record."""
        try:
            self._buffer(self.format(record), record.levelno > logging.INFO)
        except Exception:
            self.handleError(record)

    def add_line(self, what: str, fields: Mapping[str, Any]) -> None:
        """Buffer a line of level INFO without creating a log record, once for each request.

        Args:
            what: the message.
            fields: the fields.
        """
        self.acquire()
        try:
            self._buffer(_line({"at": round(time.time(), 3), "level": "info", "what": what, **fields}), False)
        finally:
            self.release()

    def _buffer(self, line: str, now: bool) -> None:
        self._held.append(line + self.terminator)
        if now:
            self.flush()
        elif len(self._held) == 1:
            try:
                asyncio.get_running_loop().call_later(FLUSH_DELAY_S, self.flush)
            except RuntimeError:  # outside of an event loop
                self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        self.acquire()
        try:
            lines, self._held = self._held, []
            for piece in _pieces(lines):
                self.stream.write(piece)
                self.stream.flush()
        finally:
            self.release()


def log_event(logger: logging.Logger, what: str, fields: Mapping[str, Any]) -> None:
    """Log an event of level INFO, without a log record if only this module's handler is installed.

    Args:
        logger: the logger.
        what: the message.
        fields: the fields.
    """
    if len(logger.handlers) == 1 and not (logger.propagate or logger.filters):
        handler = logger.handlers[0]
        if type(handler) is Lines and not handler.filters and type(handler.formatter) is Log:
            handler.add_line(what, fields)
            return
    logger.info(what, extra={"fields": fields})


def _line(fields: Mapping[str, Any]) -> str:
    try:
        return as_json(fields).decode()
    except TypeError:
        return json.dumps(fields, ensure_ascii=False, default=str)


def _pieces(lines: Sequence[str]) -> Iterator[str]:
    """Yield joined lines of at most ATOMIC_BYTES; a longer line separately."""
    held, size = list[str](), 0
    for line in lines:
        more = len(line) if line.isascii() else len(line.encode(errors="replace"))
        if held and size + more > ATOMIC_BYTES:
            yield "".join(held)
            held, size = [], 0
        held.append(line)
        size += more
    if held:
        yield "".join(held)
