"""Imported first by the process that forks ranks: it ignores SIGTERM, which the launcher forwards to the ranks.

Beside a GPU it imports what ranks import to compile kernels.
"""

import contextlib
import os
import signal
from importlib import import_module

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists("/dev/nvidiactl"):
    with contextlib.suppress(ImportError):
        import_module("triton")
