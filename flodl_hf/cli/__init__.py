"""The command line, ``flodl-hf``: one file a command, results on stdout, progress on stderr.

Exit status: 0 done or passed, 1 failed, 2 wrong usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import os
import re
import sys
import time
from itertools import pairwise, takewhile

STARTED = time.perf_counter()


def main() -> None:
    """Run the command line."""
    if "RANK" not in os.environ:
        _start_ranks(sys.argv[1:])
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as missing:
        sys.stderr.write(f"flodl-hf needs {missing.name} for its command line: pip install 'flodl-hf[cli]'\n")
        raise SystemExit(2) from None
    from flodl_hf.cli.shared import NO_ROOM, lost, opened

    opened()
    try:
        from flodl_hf.cli.app import app_for

        app_for(sys.argv[1:])()
    except SystemExit as fault:
        if not isinstance(fault.__context__, BrokenPipeError):
            raise
        # Typer and rich end help and the version with 1 where the reader has seen enough (`--help | head`).
        raise SystemExit(0) from None
    except OSError as fault:  # of help and the version, which are no command's
        if fault.errno not in NO_ROOM:
            raise
        lost()
        sys.stderr.write(f"OSError: standard output: {fault.strerror}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # before a command has begun, which would have said so itself
        raise SystemExit(130) from None


def _start_ranks(words: list[str]) -> None:
    """Start the other processes of a command that names several devices, which import modules meanwhile."""
    flags = [part for word in words for part in word.split("=", 1)]
    values = [value for flag, value in pairwise(flags) if flag in ("--devices", "--device")]
    named = values[-1] if values else ""
    number = int(named[:6]) if named.isdecimal() else named.count(",") + 1
    if number < 2 or {"-h", "--help", "--help-all"} & set(words):
        return
    if words[:1] == ["finetune"]:
        from flodl.fork_server import prepare_ranks

        prepare_ranks("flodl_hf.training.run")
    elif words[:1] in (["predict"], ["encode"]) and {"--in", "-i"} & set(flags):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = os.listdir("/dev") if os.path.isdir("/dev") else []  # absent on Windows
        files = [name for name in names if re.fullmatch("nvidia[0-9]+", name)]
        # CUDA reads the variable up to the first number that is no device.
        seen = files if visible is None else list(takewhile(lambda one: one.strip() != "-1", visible.split(",")))
        here = [f"cuda:{one}" for one in range(len(seen))]
        names = here[:number] if named.isdecimal() else named.split(",")
        if len(names) == number and set(names) <= set(here):
            from flodl_hf.workers.process import start_early

            start_early("flodl_hf.jobs.file:serve", names)
