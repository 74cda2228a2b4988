"""Imported first by the process that forks ranks: it ignores SIGTERM, which the launcher forwards to the ranks.

Beside a GPU it imports what ranks import to sum gradients and to compile kernels.
"""

import contextlib
import os
import signal
from importlib import import_module

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists("/dev/nvidiactl"):
    for name in ("torch.distributed._symmetric_memory", "torch.fx.experimental.symbolic_shapes", "triton"):
        with contextlib.suppress(ImportError):
            import_module(name)
