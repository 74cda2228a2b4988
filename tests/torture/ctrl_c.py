"""Ctrl-C at one place of a call: in any line of Python that it comes to, of this library, of others, of Python's own.

Decides where that can be. Python looks for signals after calls, where functions begin and where loops begin again; not
between a lock that ``with`` took and the block that it is for. A tracer could raise there too, and would be unjust.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
from types import FrameType
from typing import Any

__all__ = ["CtrlC"]

_HERE = os.path.dirname(os.path.abspath(__file__))
# Torch switches gradients in Python: an interrupt at the first line of that leaves them as they are, whoever asked.
_PASSED = (_HERE, os.path.join("torch", "autograd", "grad_mode.py"))
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")


class CtrlC:
    """While entered, sends SIGINT to this process behind a line that its thread comes to.

    Entered without a line, it counts them. Lines of the rig itself are passed over.

    Args:
        at: the number of the line, from 1; None for none.

    Attributes:
        lines: how many were come to.
        where: the line at which the signal was sent, or nothing.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0
        self.where = ""
        self._last = ""
        self._before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> CtrlC:
        self._before = (sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler))
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before[0])
        signal.signal(signal.SIGINT, self._before[1])

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        place = frame.f_code.co_filename
        if place.startswith(_PASSED[0]) or place.endswith(_PASSED[1]):
            return None
        frame.f_trace_opcodes = self._due
        self._last = "RESUME"
        return self._stepped

    @property
    def _due(self) -> bool:
        return self.at is not None and self.lines >= self.at and not self.where

    def _stepped(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self._last = ""  # what was done before was not looked at
            frame.f_trace_opcodes = self._due
        elif event == "exception":
            self._last = ""
        elif event == "return":
            self._last = "CALL"  # what called this looks next
        elif event == "opcode" and self._due:
            last, self._last = self._last, dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith(_LOOKS):
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)
        return self._stepped
