"""Open sockets handed from one process to another, each with a number that says what it is."""

from __future__ import annotations

import socket

__all__ = ["hand", "handed"]

_NUMBER = 8


def hand(way: socket.socket, number: int, held: socket.socket) -> None:
    """Hand an open socket over, with a number that says what it is.

    Args:
        way: to the process.
        number: what it is.
        held: the socket, which stays open here.

    Raises:
        OSError: the process is gone, or takes nothing more now.
    """
    socket.send_fds(way, [number.to_bytes(_NUMBER, "little")], [held.fileno()])


def handed(way: socket.socket) -> tuple[int, socket.socket | None] | None:
    """Return the next socket that was handed over with its number, None at the end.

    The socket itself is None where this process may open no more.

    Raises:
        BlockingIOError: there is none yet, and the way does not wait.
    """
    data, descriptors, _, _ = socket.recv_fds(way, _NUMBER, 1)
    if not data:
        return None
    return int.from_bytes(data, "little"), socket.socket(fileno=descriptors[0]) if descriptors else None
