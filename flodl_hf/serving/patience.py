"""Calls that are made after a while unless they are taken back, which most are: one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["Patience"]


class Patience:
    """Calls that are due the same time after they were asked for, so that those asked for first are due first.

    Args:
        seconds: after so long.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._held: dict[Any, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, who: Any, call: Callable[[], None]) -> None:
        """Have something called, for somebody who has not asked for another call."""
        loop = asyncio.get_running_loop()
        self._held[who] = (loop.time() + self.seconds, call)
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look)

    def end(self, who: Any) -> None:
        """Take it back, if it was not called yet."""
        self._held.pop(who, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        now = loop.time()
        for who, (at, call) in list(self._held.items()):
            if at > now:
                self._timer = loop.call_at(at, self._look)
                return
            del self._held[who]
            call()
