"""Imported first by the process that forks ranks; its signals are set before the slow imports.

SIGINT ends the process without a traceback, and ranks inherit this until they set handlers. SIGTERM, which the launcher
forwards to the ranks, is ignored. Beside a GPU it imports what ranks import to compile kernels.
"""

import contextlib
import os
import signal
from importlib import import_module

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import_module("torch")
if os.path.exists("/dev/nvidiactl"):
    with contextlib.suppress(ImportError):
        import_module("triton")
