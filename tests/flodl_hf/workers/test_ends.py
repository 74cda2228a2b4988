"""Any end of a worker process is reported with its signal or status and its last message."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.errors import PredictError
from flodl_hf.workers.pool import Worker
from flodl_hf.workers.process import Process

Start = Callable[[str], Worker]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a worker, which answers its first message and then runs some code."""
    monkeypatch.syspath_prepend(tmp_path)
    first = "import os, signal, sys, time\ndef serve(stream):\n    stream.write({'id': stream.read()[0]['id']})\n"

    def started(code: str) -> Worker:
        (tmp_path / "worker_target.py").write_text(f"{first}    stream.read()\n    {code}\n")
        return Worker(Process("worker_target:serve", "cpu"))

    return started


ENDS: dict[str, tuple[str, str]] = {
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL, as when memory is exhausted"),
    "abort": ("os.abort()", "ended by SIGABRT"),
    "status": ("os._exit(3)", "ended with status 3"),
    "exit": ("sys.exit('no room')", "ended with status 1: no room"),
    "exit code": ("sys.exit(4)", "ended with status 4"),
    "exception": ("raise ValueError('wrong')", "ended with status 1: ValueError: wrong"),
    "memory": ("raise MemoryError('nothing left')", "ended with status 1: MemoryError: nothing left"),
    "return": ("return", "ended with status 0"),
    "closed connection": ("stream.shut(); time.sleep(600)", "ended by SIGKILL, as when memory is exhausted"),
}


@pytest.mark.parametrize("end", list(ENDS))
def test_an_end_fails_the_requests(end: str, start: Start) -> None:
    code, words = ENDS[end]
    worker = start(code)
    assert worker.ask({}).result(60) is None
    late = worker.ask({}, size=5)
    with pytest.raises(PredictError, match=f"the worker process of cpu {words};"):
        late.result(60)
    assert (worker.end, worker.sound, worker.load) == (words, False, 0)
    with pytest.raises(PredictError):
        worker.ask({}).result(60)
    worker.close()


def test_a_missing_module_is_reported() -> None:
    worker = Worker(Process("no_such_module:serve", "cpu"))
    with pytest.raises(PredictError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        worker.ask({}).result(60)
    worker.close()


def test_a_worker_ends_with_its_connection_and_not_by_signals_of_the_group(start: Start) -> None:
    worker = start("return")
    assert worker.ask({}).result(60) is None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    pending: Any = worker.ask({})
    wait([pending], 60)
    assert worker.end == "ended with status 0"
    worker.close()
    worker = start("return")
    assert worker.ask({}).result(60) is None
    worker.close()
    assert worker.process.poll() is not None
