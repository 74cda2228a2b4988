"""Resources of a call: CPU time, and memory in addition to that of its process."""

from __future__ import annotations

import resource
import time
from pathlib import Path

__all__ = ["Meter"]


class Meter:
    """Measures from its creation; ``read`` returns the resources used since."""

    def __init__(self) -> None:
        self._before = _peak_memory(reset=True)
        self._started = time.process_time()

    def read(self) -> tuple[float, float]:
        """Return seconds on the processor, of all threads, and the most MB beyond those at the beginning."""
        return time.process_time() - self._started, max(0.0, _peak_memory() - self._before)


def _peak_memory(*, reset: bool = False) -> float:
    """Return the most memory that this process has had in use since it was last reset, in MB."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text("ascii")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) / 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
