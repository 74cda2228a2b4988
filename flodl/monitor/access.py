"""How a page is reached: which address, under which names, with which token, and what can be had there."""

from __future__ import annotations

import json
import secrets
import socket
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from flodl.errors import TrainError
from flodl.monitor.archive import archive_page, asset, served_page
from flodl.monitor.http import Rules
from flodl.monitor.live import Runs
from flodl.monitor.server import Server

__all__ = ["FIRST_PORT", "Doors"]

FIRST_PORT = 6060
PORTS = 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Doors:
    """Serves the page of some runs.

    Arguments are those of `flodl.monitor.Monitor.serve`; ``on_order`` is told a word and gives a status and a sentence.

    Attributes:
        url: where a browser finds the page; the token, where there is one, is part of it.

    Raises:
        TrainError: no port is free, or a token is missing.
    """

    def __init__(
        self,
        runs: Runs,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        control: bool = False,
        token: str | None = None,
        names: Iterable[str] = (),
        on_order: Callable[[str], tuple[int, str]] | None = None,
    ) -> None:
        outside = host not in LOOPBACK
        if outside and not token:
            raise TrainError(
                f"monitor: {host} can be reached from other machines; expected token=, without which nobody may look "
                "on. Or leave host out and forward the port: ssh -L 6060:127.0.0.1:6060",
                host=host,
            )
        if token is not None and (len(token) < 16 or not token.isascii() or not token.isalnum()):
            raise TrainError(
                "monitor: token= has to be at least 16 ASCII letters and digits, such as secrets.token_hex(16) gives"
            )
        self.token = token or (secrets.token_hex(16) if control else "")
        if outside:
            warnings.warn(
                f"monitor: listening on {host}; whoever has the token and can reach this machine sees the run, and "
                "what is sent is not encrypted",
                RuntimeWarning,
            )
        runs.control = control
        self._order = on_order
        taken = tuple(names)

        def rules(address: str, number: int) -> Rules:
            known = _names_of(address, number) | {name.lower() for name in taken}
            return Rules(frozenset(known), self.token, control, outside, f"flodl_monitor_{number}")

        files: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", served_page),
            "/monitor.css": ("text/css; charset=utf-8", lambda: asset("monitor.css").encode()),
            "/monitor.js": ("text/javascript; charset=utf-8", lambda: asset("monitor.js").encode()),
            "/icon.svg": ("image/svg+xml", lambda: asset("icon.svg").encode()),
            "/archive.html": (
                "text/html; charset=utf-8",
                lambda: archive_page(_everything(runs).decode(), "flodl").encode(),
            ),
            "/api/runs": ("application/json", lambda: _everything(runs)),
        }
        self._server = _first_free(
            port, lambda number: Server(runs.ring, files, rules, host=host, port=number, on_order=self._on_order)
        )
        runs.on_news = self._server.wake
        shown = "127.0.0.1" if host in ("0.0.0.0", "localhost", "") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.address[1]}/"
        if outside:
            self.url += f"?token={self.token}"
        if control:
            self.url += f"#token={self.token}"  # what follows # is not sent, so no log has it

    @property
    def readers(self) -> int:
        """How many pages are looking on."""
        return self._server.readers

    def close(self) -> None:
        """Send what is left, and let go of the address."""
        self._server.close()

    def _on_order(self, body: str) -> tuple[int, dict[str, Any]]:
        try:
            wanted = json.loads(body)["do"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return 400, {"said": 'expected {"do": "save"}'}
        if self._order is None or not isinstance(wanted, str):
            return 400, {"said": "expected a word"}
        status, said = self._order(wanted)
        return status, {"said": said}


def _everything(runs: Runs) -> bytes:
    with runs.ring.lock:
        return "".join(runs.everything()).encode()


def _names_of(host: str, port: int) -> set[str]:
    """Return the values of ``Host`` that a browser sends which was given our address."""
    if host in LOOPBACK:
        names = {"127.0.0.1", "localhost"} | ({"[::1]"} if host == "::1" else set())
    elif host in ("", "0.0.0.0", "::"):
        own = socket.gethostname().lower()
        names = {"127.0.0.1", "localhost", own, *_addresses(own)}
    else:
        names = {f"[{host}]" if ":" in host else host.lower()}
    return {f"{name}:{port}" for name in names}


def _addresses(name: str) -> list[str]:
    try:
        return list(socket.gethostbyname_ex(name)[2])
    except OSError:
        return []


def _first_free(port: int | None, make: Callable[[int], Server]) -> Server:
    if port is not None:
        return make(port)
    for number in range(FIRST_PORT, FIRST_PORT + PORTS):
        try:
            return make(number)
        except TrainError:
            continue
    return make(0)
