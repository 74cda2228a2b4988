"""``python -m flodl_hf.jobs.worker JOB``: one rank of a job that another process started."""

from __future__ import annotations

import json
import os
import sys

from flodl.errors import FlodlError
from flodl.signals import StopSignals
from flodl_hf.jobs.file import predict_file

__all__: list[str] = []


def main() -> None:
    """Predict this rank's parts of the job on the command line."""
    job = json.loads(sys.argv[1])
    with StopSignals() as signals:
        try:
            predict_file(
                job.pop("model"),
                job.pop("source"),
                job.pop("target"),
                should_stop=lambda: signals.number != 0,
                parent=os.getppid(),
                **job,
            )
        except FlodlError as fault:
            # Rank 0 reports it.
            sys.stderr.write(f"{type(fault).__name__}: {fault}\n")
            raise SystemExit(1) from None
    raise SystemExit(128 + signals.number if signals.number else 0)


if __name__ == "__main__":
    main()
