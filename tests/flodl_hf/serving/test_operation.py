"""Keys, limits, workers that die, reloads and stops: a server of one model, through what happens to servers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flodl.errors import ConfigError, DeviceError
from flodl_hf.serving import serve, served
from flodl_hf.serving.admission import Admission, SharedCounters, key_id
from flodl_hf.serving.metrics import Log
from flodl_hf.serving.responses import RefusedError
from flodl_hf.serving.running import running
from flodl_hf.serving.settings import Served, Settings
from flodl_hf.serving.workers import Processes, WorkersError


def held(app: Any) -> tuple[SharedCounters, Processes]:
    """Return what is inside a server, and its workers' processes, whether one process answers HTTP or several."""
    if hasattr(app, "counters"):
        return app.counters, app.processes
    return app.state.server.admission.counters, app.state.processes


def guarded_by(folders: dict[str, Path], processes: int) -> Settings:
    """Return settings of a server with keys, where so many processes answer HTTP."""
    return Settings(
        models=(Served("embed", str(folders["embed"])),), devices=("cpu",), api_keys=("first-key", "second-key"),
        max_concurrent=24, max_inputs=600, http_processes=processes,
        timeout_s=300.0,  # a worker takes a minute to start where the machine is busy, and requests wait for it
    )  # fmt: skip


@pytest.fixture(scope="module")
def limited_protocol(folders: dict[str, Path]) -> Iterator[tuple[Any, Any]]:
    """A client without a key, of a server that needs one; and its application."""
    import httpx

    with running(guarded_by(folders, 1)) as (url, app), httpx.Client(base_url=url, timeout=60) as client:
        yield client, app


def stop(pid: int) -> None:
    """Let a child of this process stand still, and return when it does: on a busy machine it may run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process stand still."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


FIRST = {"authorization": "Bearer first-key"}


def test_keys(limited_protocol: tuple[Any, Any]) -> None:
    client, _ = limited_protocol
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first-key"}, {"x-api-key": ""}):
        refused = client.post("/embed", json={"inputs": "a"}, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    assert client.post("/v1/embeddings", json={"input": "a"}).json()["error"]["code"] == "invalid_api_key"
    for headers in (FIRST, {"authorization": "bearer second-key"}, {"x-api-key": "second-key"}):
        assert client.post("/embed", json={"inputs": "a"}, headers=headers).status_code == 200
    assert client.get("/info").status_code == 401
    # What is open says nothing of what was asked.
    for path in ("/health", "/metrics", "/", "/openapi.json"):
        assert client.get(path).status_code == 200


def test_priorities_are_a_header(limited_protocol: tuple[Any, Any]) -> None:
    client, _ = limited_protocol
    for word in ("high", "Normal", "low"):
        assert client.post("/embed", json={"inputs": "a"}, headers={**FIRST, "x-priority": word}).status_code == 200
    refused = client.post("/embed", json={"inputs": "a"}, headers={**FIRST, "x-priority": "9"})
    assert refused.status_code == 422
    assert "high, normal, low" in refused.json()["error"]


def test_too_many_are_refused_at_once_and_the_rest_answered(limited_protocol: tuple[Any, Any]) -> None:
    client, app = limited_protocol
    inside, processes = held(app)
    body = {"inputs": ["the cat sat on the mat and the dog ran"] * 200}
    with ThreadPoolExecutor(60) as pool:
        with stopped(processes.here[0].child.pid):
            asked = [pool.submit(client.post, "/embed", json=body, headers=FIRST) for _ in range(60)]
            refused = next(as_completed(asked, timeout=60)).result()
        answers = [one.result() for one in asked]
    assert refused.status_code == 429
    assert {answer.status_code for answer in answers} == {200, 429}
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error_type"] == "Overloaded"
    vectors = np.array([answer.json() for answer in answers if answer.status_code == 200])
    assert np.abs(vectors - vectors[0, 0]).max() < 2e-5
    assert (inside.inside, inside.tokens) == (0, 0)


def test_time_that_is_over_and_clients_that_go(limited_protocol: tuple[Any, Any]) -> None:
    client, app = limited_protocol
    body = {"inputs": ["the cat sat on the mat " * 30] * 500, "windows": True}
    late = client.post("/embed", json=body, headers={**FIRST, "x-timeout-s": "0.02"})
    assert late.status_code == 504
    assert client.post("/embed", json=body, headers={**FIRST, "x-timeout-s": "soon"}).status_code == 422
    address = str(client.base_url).removeprefix("http://").strip("/").split(":")
    data = json.dumps(body).encode()
    head = f"POST /embed HTTP/1.1\r\nhost: a\r\nauthorization: Bearer first-key\r\ncontent-length: {len(data)}\r\n\r\n"
    inside, processes = held(app)
    until = time.monotonic() + 120
    with stopped(processes.here[0].child.pid):  # it answers only after the client has gone
        with socket.create_connection((address[0], int(address[1]))) as wire:
            wire.sendall(head.encode() + data)
            while not inside.inside and time.monotonic() < until:
                time.sleep(0.001)
        while inside.inside and time.monotonic() < until:
            time.sleep(0.01)
    assert inside.inside == 0
    while "gone" not in client.get("/metrics").text:  # of another process after its next report
        assert time.monotonic() < until
        time.sleep(0.05)
    assert client.post("/embed", json={"inputs": "a"}, headers=FIRST).status_code == 200


def test_a_worker_that_dies_fails_what_it_had_and_the_next_is_answered(limited_protocol: tuple[Any, Any]) -> None:
    import httpx

    inside, processes = held(limited_protocol[1])
    (before,) = [process.child.pid for process in processes.here]
    # By one connection: another may be one of another process, which hears of the end a moment later.
    with (
        httpx.Client(
            base_url=limited_protocol[0].base_url, timeout=300, limits=httpx.Limits(max_connections=1)
        ) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.get("/health").status_code == 200
        stop(before)
        lost = pool.submit(client.post, "/embed", json={"inputs": "a"}, headers=FIRST)
        until = time.monotonic() + 600
        while not inside.inside and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(before, signal.SIGKILL)
        answer = lost.result()
        assert answer.status_code == 503
        assert "Retry" in answer.json()["error"]
        assert answer.headers["retry-after"] == "1"
        # Held until another worker is there.
        assert client.post("/embed", json={"inputs": "a"}, headers=FIRST).status_code == 200
    assert [process.child.pid for process in processes.here] != [before]
    assert processes.restarts == 1
    assert "flodl_worker_restarts_total 1" in limited_protocol[0].get("/metrics").text


@pytest.mark.slow
def test_a_reload_loses_no_request(limited_protocol: tuple[Any, Any]) -> None:
    client, app = limited_protocol
    _, processes = held(app)
    before, listening = [process.child.pid for process in processes.here], processes.here[0].listening
    assert listening is not None
    with ThreadPoolExecutor(4) as pool:
        done = asyncio.run_coroutine_threadsafe(processes.load(), listening.get_loop())
        statuses = []
        while not done.done():
            asked = [pool.submit(client.post, "/embed", json={"inputs": "a cat"}, headers=FIRST) for _ in range(4)]
            statuses += [one.result().status_code for one in asked]
        done.result()
    assert len(statuses) > 8
    assert set(statuses) == {200}
    assert not {process.child.pid for process in processes.here} & set(before)
    until = time.monotonic() + 10
    while time.monotonic() < until and any(_lives(pid) for pid in before):
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in before)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    found = [child.read_text().split() for child in tasks.glob("*/children")] if tasks.exists() else []
    return [int(child) for line in found for child in line]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_command_drains_and_ends(folders: dict[str, Path], processes: str) -> None:
    import httpx

    command = [sys.executable, "-m", "flodl_hf", "serve", f"e={folders['embed']}", "--port", "0", "--device", "cpu"]
    command += ["--http-processes", processes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert next(process.stderr).startswith("loading")
            while not children_of(process.pid):
                time.sleep(0.01)
            process.send_signal(signal.SIGHUP)  # a reload asked for too early is one afterwards, and no end
            url = next(line for line in process.stderr if line.startswith("ready: ")).split()[1]
            with httpx.Client(base_url=url, timeout=30) as client, ThreadPoolExecutor(1) as pool:
                client.post("/embed", json={"inputs": "a secret"})
                assert client.get("/health", headers={"connection": "close"}).status_code == 200
                asked = pool.submit(
                    client.post, "/embed", json={"inputs": ["the cat sat on the mat " * 20] * 800, "windows": True}
                )
                # Not before it is in: doors that are closed answer nobody.
                while "\nflodl_queue_seconds 0\n" in client.get("/metrics").text and not asked.done():
                    time.sleep(0.005)
                # All of them at once, as a service manager does.
                for pid in (process.pid, *children_of(process.pid)):
                    with suppress(ProcessLookupError):  # what has nothing left to do may have ended by then
                        os.kill(pid, signal.SIGTERM)
                assert asked.result().status_code == 200
            told = process.stderr.read()
            assert process.stdout.read() == "", "the log is on stderr"
            assert process.wait(60) == 0
        finally:
            process.kill()
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    first = next(line for line in lines if line["what"] == "request")
    assert {"at", "level", "route", "status", "ms", "model", "texts", "tokens"} <= set(first)
    assert "secret" not in told


def test_what_cannot_be_served_is_said_before_anybody_asks(tmp_path: Path, folders: dict[str, Path]) -> None:
    given = Settings(models=served([str(tmp_path / "nowhere")]), devices=("cpu",))
    with pytest.raises(WorkersError, match=r"serve: .*nowhere"), running(given):
        pass
    for processes in (1, 2):
        given = replace(given, http_processes=processes, adapters=(str(tmp_path / "none"),))
        with pytest.raises(ConfigError, match="none cannot be listed"), running(given):
            pass
        with pytest.raises(ConfigError, match="otlp_endpoint"), running(replace(given, otlp_endpoint="nowhere")):
            pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(DeviceError, match="--port"):
            serve(str(folders["embed"]), port=taken.getsockname()[1])
    for host in ("no host", f"{'a' * 80}.b", "192.0.2.1"):  # no name, no name either, of no machine
        with pytest.raises(DeviceError, match="Choose another --host"):
            serve(str(folders["embed"]), host=host, port=0)
    with pytest.raises(ConfigError, match="no model"):
        serve([])
    with pytest.raises(ConfigError, match="duplicate"):
        serve(["a", "a"])
    with pytest.raises(ConfigError, match="max_concurrent"):
        serve("a", max_concurrent=0)


def test_keys_are_compared_whole() -> None:
    assert key_id((), None) == ""
    words = {key_id(("a", "b"), given) for given in ("a", "b")}
    assert len(words) == 2
    assert None not in words
    assert [key_id(("a", "b"), given) for given in (None, "", "c", "aa")] == [None] * 4


def test_at_most_max_concurrent_requests_are_admitted() -> None:
    admission = Admission(Settings(models=served(["m"]), max_concurrent=2))
    with admission.admit("", 1), admission.admit("", 1):
        with pytest.raises(RefusedError) as refused:
            admission.admit("", 1)
        assert refused.value.after_s >= 1
        assert admission.counters.inside == 2
    with admission.admit("", 1):
        assert admission.counters.inside == 1


def test_what_a_key_may_have() -> None:
    bounds = Settings(models=served(["m"]), max_key_tokens=600, max_key_concurrent=2, max_queue_s=5.0)
    admission = Admission(bounds, SharedCounters("abc"))
    with admission.admit("a", 500):
        with pytest.raises(RefusedError) as caught, admission.admit("a", 200):
            pass
        assert 1 <= caught.value.after_s <= 11
        with (
            admission.admit("b", 200),
            admission.admit("a", 10),
            pytest.raises(RefusedError, match="of this key"),
            admission.admit("a", 10),
        ):
            pass
    assert (admission.counters.inside, admission.counters.tokens) == (0, 0)
    admission.rate = 100.0
    with (
        admission.admit("c", 590),
        pytest.raises(RefusedError, match=r"takes 5\.9 s"),
        admission.admit("c", 1),
    ):
        pass


def test_a_key_waits_for_no_more_of_others_than_it_has_itself() -> None:
    admission = Admission(Settings(models=served(["m"]), max_queue_s=5.0), SharedCounters("cde"))
    admission.rate = 100.0
    with admission.admit("c", 590):
        assert admission.wait_of("c", 1) == pytest.approx(5.9)
        assert admission.wait_of("d", 10) == pytest.approx(0.1)
        with admission.admit("d", 100):
            assert admission.wait_of("d", 10) == pytest.approx(1.0 + 1.1)
            assert admission.wait_of("e", 50) == pytest.approx(1.0)
            with pytest.raises(RefusedError, match=r"takes 2\.1 s"):
                admission.admit("d", 10, left_s=2.0)
            with admission.admit("d", 10, left_s=3.0):
                pass
    assert (admission.counters.inside, admission.counters.tokens) == (0, 0)


def test_a_queue_that_stays_is_kept_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("flodl_hf.serving.admission.time", SimpleNamespace(monotonic=lambda: clock))
    admission = Admission(Settings(models=served(["m"]), max_wait_s=0.5, max_queue_s=5.0))
    admission.rate = 1000.0
    entered = []

    def come(tokens: int = 50) -> bool:
        try:
            inside = admission.admit("", tokens)
        except RefusedError:
            return False
        inside.__enter__()
        entered.append(inside)
        return True

    # A burst may be as long as the queue may be, and what is beyond it is refused.
    assert [come() for _ in range(110)] == [True] * 101 + [False] * 9
    # A second later it still is there: nothing is let in until what waits takes no more than half a second.
    clock += 1.1
    response_format = []
    while entered and not response_format:
        entered.pop().__exit__()
        response_format = [one for one in [come()] if one]
    assert admission.counters.tokens == 550
    # So it stays short, for as long as more is asked for than is done.
    for _ in range(30):
        clock += 0.05
        entered.pop().__exit__()
        assert come()
        assert not come()
    # Few requests are no queue, however long they take.
    while entered:
        entered.pop().__exit__()
    clock += 10
    assert come(900)
    assert come(900)
    clock += 2
    assert come(900)
    assert [come(200) for _ in range(6)] == [True] * 5 + [False]
    while entered:
        entered.pop().__exit__()
    # Once it was empty there may be a burst again; and a slow device has some batches at least.
    assert [come() for _ in range(40)] == [True] * 40
    clock += 1.1
    assert not come()
    admission.full = 1000
    assert admission.longest_wait(clock) == 4.0
    assert come()


def test_a_line_of_the_log() -> None:
    record = logging.LogRecord("flodl_hf.serving", logging.INFO, "", 0, "request", (), None)
    record.fields = {"route": "/embed", "ms": 1.5}
    assert json.loads(Log().format(record)) == {
        "at": round(record.created, 3),
        "level": "info",
        "what": "request",
        "route": "/embed",
        "ms": 1.5,
    }


def test_what_is_said_of_the_server_needs_no_torch() -> None:
    code = (
        "import sys; from flodl_hf.serving.routes.route import ROUTES; from flodl_hf.serving.app import openapi; "
        "openapi(ROUTES, [], keys=True); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_several_processes_of_a_device(folders: dict[str, Path]) -> None:
    import httpx

    from flodl_hf.heads.auto import load

    settings = Settings(models=(Served("embed", str(folders["embed"])),), devices=("cpu",), workers=2)
    texts = [f"the cat sat on the mat {'and ran ' * i}" for i in range(40)]
    model: Any = load(folders["embed"])
    expected = model.embed(texts, windows=True).numpy()
    with running(settings) as (url, app), httpx.Client(base_url=url, timeout=60) as client:
        workers = app.state.server.workers
        first, second = (process.info["pid"] for process in workers.active)
        with ThreadPoolExecutor(8) as pool:
            bodies = [{"inputs": text, "windows": True} for text in texts]
            answers = list(pool.map(lambda body: client.post("/embed", json=body).json()[0], bodies))
        assert np.abs(np.array(answers) - expected).max() < 2e-6
        for pid in (first, second):
            used = Path(f"/proc/{pid}/stat")
            assert not used.exists() or int(used.read_text().rsplit(")", 1)[1].split()[11]) > 0
        assert workers.peak == max(process.info["peak"] for process in workers.active)
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + 120
        pids = {first}
        while (len(pids) < 2 or first in pids) and time.monotonic() < until:
            # The other answers meanwhile.
            assert client.post("/embed", json={"inputs": "a"}).status_code in (200, 503)
            time.sleep(0.2)
            pids = {process.info["pid"] for process in workers.active}
        assert second in pids
        assert len(pids) == 2
        assert client.post("/embed", json={"inputs": texts[3]}).json()[0] == pytest.approx(answers[3], abs=2e-6)
