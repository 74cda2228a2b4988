"""Worker process of one rank of a job that another process started."""

from __future__ import annotations

import os
from threading import Event, Thread

from flodl_hf.jobs.file import predict_file
from flodl_hf.workers.messages import Stream


def serve(stream: Stream) -> None:
    """Predict this rank's parts of a job; the connection's end is the end of rank 0.

    Args:
        stream: connection to rank 0, which sends the job, and then a message to stop after the current part.
    """
    received, stop = stream.read(), Event()
    if received is None:
        return

    def listen() -> None:
        if stream.read() is None:
            os._exit(1)
        stop.set()

    Thread(target=listen, name="flodl-hf-stop", daemon=True).start()
    job = received[0]
    predict_file(job.pop("model"), job.pop("source"), job.pop("target"), should_stop=stop.is_set, **job)
