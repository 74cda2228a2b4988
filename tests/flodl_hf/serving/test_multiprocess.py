"""Several processes that answer HTTP: connections shared out, one queue, limits and figures of all, and what dies.

Tests of `test_operation` that are imported run here with two processes.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_operation import (  # noqa: F401
    guarded_by,
    stopped,
    test_a_reload_loses_no_request,
    test_a_worker_that_dies_fails_what_it_had_and_the_next_is_answered,
    test_keys,
    test_time_that_is_over_and_clients_that_go,
    test_too_many_are_refused_at_once_and_the_rest_answered,
)

from flodl_hf.serving.admission import Admission, SharedCounters, shared_memory
from flodl_hf.serving.metrics import Metrics, merged
from flodl_hf.serving.responses import RefusedError
from flodl_hf.serving.running import running
from flodl_hf.serving.settings import Served, Settings, served
from flodl_hf.workers.messages import HEAD, Stream, pack_message, receive_socket, send_socket, unpack_message

ASKED = json.dumps({"inputs": "the cat sat on the mat"})
HEADERS = {"authorization": "Bearer first-key", "content-type": "application/json"}


def until(done: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what is true, as soon as it is."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


# ---- the parts -----------------------------------------------------------------------------------------


def test_limits_count_what_all_processes_have() -> None:
    memory = shared_memory(2, 2)
    settings = Settings(models=served(["m"]), max_concurrent=3, max_key_concurrent=2, max_key_tokens=600)
    one, other = (Admission(settings, SharedCounters("ab", 2, number, memory)) for number in range(2))
    one.counters.calm[0] = time.monotonic()
    with one.admit("a", 10):
        assert (other.counters.inside, other.counters.tokens, other.counters.tokens_of_key("a")) == (1, 10, 10)
        with other.admit("a", 20), pytest.raises(RefusedError, match="2 concurrent requests of this key"):
            one.admit("a", 1)
        with other.admit("b", 30), one.admit("b", 40):
            assert sorted(one.counters.tokens_of_others("a")) == [70]
            with pytest.raises(RefusedError, match="3 concurrent requests"):
                other.admit("a", 1)
            other.rate = 10.0
            # Who asks for much waits for no more of others than it has itself.
            assert other.wait_of("a", 5) == pytest.approx((10 + 15) / 10)
    assert (one.counters.inside, one.counters.tokens) == (0, 0)
    other.rate = 0.0
    with one.admit("b", 500), pytest.raises(RefusedError, match="used its 600 tokens"):
        other.admit("b", 100)


def test_requests_that_come_at_the_same_instant_are_no_more_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = shared_memory(1, 2)
    settings = Settings(models=served(["m"]), max_concurrent=1, max_key_tokens=100)
    one, other = (Admission(settings, SharedCounters([""], 2, number, memory)) for number in range(2))
    let_in: list[str] = []

    def come(admission: Admission, who: str) -> None:
        with suppress(RefusedError):
            admission.admit("", 60)
            let_in.append(who)

    # Whenever the one looks at what is inside, the other's request comes: the first time, or the second, ...
    looks = 0
    for turn in range(4):
        looked, inside = count(), SharedCounters.inside.fget

        def here(counters: SharedCounters, turn: int = turn, looked: Any = looked, inside: Any = inside) -> int:
            found: int = inside(counters)
            if counters is one.counters and next(looked) == turn:
                come(other, "other")
            return found

        with monkeypatch.context() as patched:
            patched.setattr(SharedCounters, "inside", property(here))
            come(one, "one")
        looks = max(looks, next(looked))
        assert one.counters.inside == len(let_in) <= 1
        let_in.clear()
        for admission in (one, other):
            admission.counters.clear(0)
            admission.counters.clear(1)
            admission.counters.full_at[0] = 0.0
    assert looks >= 2

    # What a key had is changed by one at a time.
    locks: list[int] = []
    monkeypatch.setattr("fcntl.lockf", lambda descriptor, how: locks.append(how))
    come(other, "other")
    assert (let_in, locks) == (["other"], [fcntl.LOCK_EX, fcntl.LOCK_UN])


def test_what_a_process_had_that_is_no_more_is_struck_out() -> None:
    memory = shared_memory(1, 3)
    ledgers = [SharedCounters([""], 3, number, memory) for number in range(3)]
    for counters in ledgers:
        counters.count("", 2, 50)
        counters.close()
    assert (ledgers[0].inside, ledgers[0].tokens, ledgers[0].closed[1]) == (6, 150, 1)
    ledgers[2].clear(1)
    assert (ledgers[0].inside, ledgers[0].tokens_of_key(""), ledgers[0].closed[1]) == (4, 100, 0)


def test_what_processes_counted_adds_up_and_gauges_are_the_last_that_was_heard() -> None:
    each = [Metrics() for _ in range(3)]
    for number, metrics in enumerate(each):
        metrics.add("te_request_count", number + 1, method="/embed")
        metrics.metric("te_request_duration", method="/embed").add(0.02 * 10**number)
        metrics.metric("flodl_queue_tokens").value = 100.0 * number
        metrics.last_batch = [2.0, 3.0, 1.0][number]
    text = merged(json.loads(json.dumps([metrics.dump() for metrics in each]))).text()
    assert 'te_request_count{method="/embed"} 6' in text
    assert 'te_request_duration_bucket{method="/embed",le="0.025"} 1' in text
    assert 'te_request_duration_count{method="/embed"} 3' in text
    assert 'te_request_duration_sum{method="/embed"} 2.22' in text
    assert "flodl_queue_tokens 100\n" in text


def test_sockets_are_handed_over_with_their_numbers() -> None:
    here, there = socket.socketpair()
    one, other = socket.socketpair()
    with here, there, one:
        with other:
            send_socket(here, 7, other)
            send_socket(here, 8, other)
        for number in (7, 8):
            found = receive_socket(there)
            assert found is not None
            told, held = found
            assert told == number
            assert held is not None
            with held:
                held.sendall(b"%d" % number)
                assert one.recv(1) == b"%d" % number
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            receive_socket(there)
        here.close()
        assert receive_socket(there) is None


def test_requests_of_all_links_share_batches_and_go_with_their_link(folders: dict[str, Path]) -> None:
    from flodl_hf.serving.worker import Worker, _Requests

    worker = Worker(Settings(models=(Served("m", str(folders["embed"])),)).for_worker("cpu"))
    requests, batcher = _Requests(worker, 4), worker.batcher
    ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    threads = [Thread(target=requests.answer_all, args=(Stream(held),), daemon=True) for held in theirs]
    for thread in threads:
        thread.start()
    asked = {
        "id": 0,
        "task": "embed",
        "model": "m",
        "options": {},
        "key": "",
        "left_s": 60.0,
        "priority": 0,
        "characters": 9,
    }

    def send(links: Any, items: list[str], tokens: int) -> None:
        """Send a request by each link, all with the same number; none of them runs before all wait."""
        until(lambda: not batcher._starting)
        with batcher._changed:
            batcher._starting = True
        for number, held in enumerate(links):  # each with its key, so that they are not answered together
            held.sendall(b"".join(pack_message({**asked, "items": items, "key": str(number)})))
        until(lambda: batcher.queued_tokens == tokens)

    send(ours, ["the cat"], 12)
    ours[2].close()
    until(lambda: not threads[2].is_alive())
    ours[1].sendall(b"".join(pack_message({"cancel": 0})))
    until(lambda: len(requests._requests) == 1)
    batcher._started()
    told = [_read(ours[0]), _read(ours[1])]
    assert "data" in told[0][0]
    assert told[0][1][0].shape[0] == 1
    assert told[1][0]["fault"]["kind"] == "given_up"
    assert [rows for rows, _, _ in told[0][0]["ran"]] == [1]
    send(ours[:2], ["the cat sat", "a dog"], 18)
    batcher._started()
    ran = [rows for held in ours[:2] for rows, _, _ in _read(held)[0]["ran"]]
    assert ran == [4]
    for held in ours:
        held.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


TEXTS = ["the cat", "a dog sat", "the mat", "a cat and a dog", "no"]


@pytest.mark.parametrize(
    ("name", "task", "items"),
    [
        ("embed", "embed", [[text] for text in TEXTS]),
        ("embed", "embed", [TEXTS[:2], TEXTS[2:], ["a"]]),
        ("classes", "classify", [[text] for text in TEXTS]),
        ("ner", "entities", [[text] for text in TEXTS]),
        ("qa", "answer", [[["what sat?", text]] for text in TEXTS]),
        ("mlm", "fill_mask", [[f"{text} [MASK]"] for text in TEXTS]),
        ("mlm", "fill_mask", [["[MASK] sat [MASK]"], ["the [MASK]"]]),
    ],
)
def test_requests_that_are_answered_together_have_their_own_results(
    folders: dict[str, Path], name: str, task: str, items: list[list[Any]]
) -> None:
    from flodl_hf.serving.request import WorkerRequest
    from flodl_hf.serving.worker import Worker, _join_key, _Requests

    worker = Worker(Settings(models=(Served("m", str(folders[name])),)).for_worker("cpu"))
    requests, asked = (
        _Requests(worker, 4),
        {"task": task, "model": "m", "options": {}, "key": "", "priority": 0, "characters": 9},
    )
    messages = [{**asked, "items": part, "id": number} for number, part in enumerate(items)]
    assert len({_join_key(message) for message in messages}) == 1
    alone = [WorkerRequest() for _ in messages]
    expected = [requests._answer(message, request) for message, request in zip(messages, alone, strict=True)]
    worker.batcher.drained()
    group: Any = [(None, message, WorkerRequest()) for message in messages]
    found = requests._answers(group)
    assert [rows for rows, _, _ in worker.batcher.drained()] == [sum(map(len, items))]
    for (reply, arrays), (other, others), (*_, one), two in zip(found, expected, group, alone, strict=True):
        _alike(reply["data"], other["data"])
        for mine, theirs in zip(arrays, others, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
        assert (one.tokens, one.rows) == (two.tokens, two.rows)
    # One that fails, and one that was cancelled, do not concern the others.
    if task == "embed":
        bad = [(None, {**messages[0], "items": ["cat " * 200]}, WorkerRequest()), (None, messages[1], WorkerRequest())]
        bad[1][2].give_up()
        (reply, _), *rest, (gone, _) = requests._answers([bad[0], *group, bad[1]])
        assert (reply["fault"]["kind"], gone["fault"]["kind"]) == ("long", "given_up")
        assert all("data" in reply for reply, _ in rest)


def _alike(found: Any, expected: Any) -> None:
    """Compare values whose numbers differ by rounding."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _alike(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            _alike(*pair)
    else:
        assert found == expected


def test_requests_that_wait_at_the_same_time_are_one_call(folders: dict[str, Path]) -> None:
    from flodl_hf.serving.request import WorkerRequest
    from flodl_hf.serving.worker import Worker, _join_key, _Requests

    worker = Worker(Settings(models=(Served("m", str(folders["embed"])),)).for_worker("cpu"))
    requests = _Requests(worker, 8)
    ours, theirs = socket.socketpair()
    link = Stream(theirs)
    requests._requests[link, -1] = WorkerRequest()  # so that no request is alone
    asked = {"task": "embed", "model": "m", "options": {}, "key": "", "left_s": 60.0, "priority": 0, "characters": 9}
    messages: list[dict[str, Any]] = [{**asked, "id": number, "items": [text]} for number, text in enumerate(TEXTS)]
    key = _join_key(messages[0])
    turns = requests._turns_of(key)
    turns.__enter__()
    Thread(target=requests.answer_all, args=(link,), daemon=True).start()
    ours.settimeout(60)
    with ours:
        for message in messages:
            ours.sendall(b"".join(pack_message(message)))
        until(lambda: len(requests._groups.get(key, ())) == len(TEXTS))
        turns.__exit__()
        with ours.makefile("rb") as file:
            replies = []
            for _ in TEXTS:
                size, text = HEAD.unpack(file.read(HEAD.size))
                replies.append(unpack_message(text, file.read(size))[0])
    assert sorted(reply["id"] for reply in replies) == list(range(len(TEXTS)))
    assert [rows for reply in replies for rows, _, _ in reply["ran"]] == [len(TEXTS)]


def test_keys_and_priorities_do_not_wait_for_each_other() -> None:
    from flodl_hf.serving.worker import _Requests

    worker: Any = None
    requests = _Requests(worker, 8)
    callers = [(str(key), priority) for key in range(40) for priority in (-1, 0, 1)]
    assert len({id(requests._turns_of((str, "embed", "m", *caller, "{}"))) for caller in callers}) == len(callers)
    options = [(str, "embed", "m", "", 0, str(number)) for number in range(200)]
    assert 1 < len({id(requests._turns_of(key)) for key in options}) <= 16


@pytest.mark.parametrize(
    "change",
    [
        {"task": "rerank"}, {"traced": "x"}, {"characters": 2000}, {"items": [], "characters": 0}, {"items": ["a", [1]]},
        {"items": [[1, 2]]},
    ],
)  # fmt: skip
def test_other_requests_are_answered_alone(change: dict[str, Any]) -> None:
    from flodl_hf.serving.worker import _join_key

    assert _join_key({"task": "embed", "model": "m", "items": ["a"], "characters": 1} | change) is None


def test_an_answer_that_cannot_be_sent_is_a_fault_at_once() -> None:
    from flodl_hf.serving.worker import _Requests

    batcher = SimpleNamespace(queued_tokens=0, drained=list, pace=SimpleNamespace(now=1.0))
    worker: Any = SimpleNamespace(
        batcher=batcher, device=SimpleNamespace(type="cpu"), answer=lambda message, request: ({1j}, [])
    )
    ours, theirs = socket.socketpair()
    thread = Thread(target=_Requests(worker, 1).answer_all, args=(Stream(theirs),), daemon=True)
    thread.start()
    asked = {"task": "embed", "model": "m", "items": ["a"], "key": "", "left_s": 60.0, "priority": 0, "characters": 9}
    with ours:
        for number in range(2):
            ours.sendall(b"".join(pack_message({**asked, "id": number})))
            told, _ = _read(ours)
            assert (told["id"], told["fault"]["kind"]) == (number, "internal")
    thread.join(10)
    assert not thread.is_alive()


def _read(held: socket.socket) -> tuple[dict[str, Any], list[np.ndarray]]:
    with held.makefile("rb") as file:
        size, text = HEAD.unpack(file.read(HEAD.size))
        return unpack_message(text, file.read(size))


# ---- the server ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    """The address of a server of two processes, and their parent."""
    with running(guarded_by(folders, 2)) as found:
        yield found


@pytest.fixture
def limited_protocol(several: tuple[str, Any]) -> Iterator[tuple[Any, Any]]:
    """A client of it, and the parent: for the tests of one process."""
    import httpx

    with httpx.Client(base_url=several[0], timeout=60) as client:
        yield client, several[1]


@pytest.fixture
def quiet(several: tuple[str, Any]) -> tuple[str, Any]:
    """The same when nobody is connected."""
    _, parent = several
    until(lambda: not any(map(parent._open, parent._children)))
    return several


@contextmanager
def connected(url: str, count: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Give connections that stay open; one after another, so that each process has every second."""
    made = [http.client.HTTPConnection(url.removeprefix("http://"), timeout=60) for _ in range(count)]
    try:
        for one in made:
            assert ask(one, "GET", "/live")[0] == 200
        yield made
    finally:
        for one in made:
            one.close()


def ask(way: http.client.HTTPConnection, method: str = "POST", path: str = "/embed") -> tuple[int, str]:
    way.request(method, path, ASKED if method == "POST" else None, HEADERS)
    answer = way.getresponse()
    return answer.status, answer.read().decode()


def number_of(text: str, name: str) -> float:
    return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


def test_connections_are_shared_out_and_any_of_them_tells_the_figures_of_all(
    quiet: tuple[str, Any], local: dict[str, Any]
) -> None:
    url, parent = quiet
    expected = local["embed"].embed(["the cat sat on the mat"]).numpy()
    with connected(url, 4) as ways:
        until(lambda: [parent._open(one) for one in parent._children] == [2, 2])
        time.sleep(0.6)  # two reports
        before = counted(ways[0])
        for way in ways * 2:
            status, answer = ask(way)
            assert status == 200
            assert np.abs(np.array(json.loads(answer)) - expected).max() < 2e-6
        until(lambda: [counted(way) - before for way in ways] == [8] * 4)
        told = ask(ways[3], "GET", "/metrics")[1]
        assert number_of(told, "flodl_http_processes") == 2
        assert number_of(told, "flodl_workers") == 1
        assert number_of(told, "te_batch_next_size_sum") >= 8
        for way in ways:
            assert ask(way, "GET", "/health")[0] == 200
            assert list(json.loads(ask(way, "GET", "/v1/models")[1])["data"][0]["tasks"])
    until(lambda: not any(map(parent._open, parent._children)))


def test_limits_hold_for_all_processes_together(quiet: tuple[str, Any]) -> None:
    url, parent = quiet
    with connected(url, 25) as ways, ThreadPoolExecutor(24) as pool:
        with stopped(parent.processes.here[0].child.pid):
            inside = [pool.submit(ask, way) for way in ways[:24]]
            until(lambda: parent.counters.inside == 24)
            status, answer = ask(ways[24])
            assert (status, "24 concurrent requests" in answer) == (429, True)
            assert number_of(ask(ways[24], "GET", "/metrics")[1], "te_queue_size") == 24
        assert [one.result()[0] for one in inside] == [200] * 24
    assert (parent.counters.inside, parent.counters.tokens) == (0, 0)


def test_one_that_is_killed_fails_its_requests_and_the_others_go_on(quiet: tuple[str, Any]) -> None:
    url, parent = quiet
    with connected(url, 2) as ways, ThreadPoolExecutor(2) as pool:
        assert [ask(way)[0] for way in ways * 2] == [200] * 4
        before = counted(ways[0])
        killed = parent._children[0].child.pid
        with stopped(parent.processes.here[0].child.pid):
            asked = [pool.submit(ask, way) for way in ways]
            until(lambda: parent.counters.inside == 2)
            os.kill(killed, signal.SIGKILL)
            until(lambda: parent.counters.inside == 1)
        faults = [one.exception() for one in asked]
        assert sorted(fault is None for fault in faults) == [False, True]
        assert isinstance(next(fault for fault in faults if fault), (ConnectionError, http.client.HTTPException))
        assert next(one for one in asked if not one.exception()).result()[0] == 200
    # New connections are answered while another process is started.
    with connected(url, 2) as ways:
        assert [ask(way)[0] for way in ways] == [200, 200]
    until(lambda: len(parent.pids) == 2)
    assert killed not in parent.pids
    until(lambda: not any(map(parent._open, parent._children)))  # those above are seen to have ended
    with connected(url, 2) as ways:
        until(lambda: [parent._open(one) for one in parent._children] == [1, 1])
        assert [ask(way)[0] for way in ways] == [200, 200]
        until(lambda: counted(ways[0]) >= before + 5)
        assert number_of(ask(ways[1], "GET", "/metrics")[1], "flodl_http_process_restarts_total") == 1


def test_one_that_is_told_to_stop_answers_first_and_is_replaced(quiet: tuple[str, Any]) -> None:
    url, parent = quiet
    with connected(url, 1) as ways, ThreadPoolExecutor(1) as pool:
        until(lambda: any(parent._open(one) for one in parent._children))  # counted a moment after its answer
        (one,) = [one for one in parent._children if parent._open(one)]
        restarts = parent.restarts
        with stopped(parent.processes.here[0].child.pid):
            asked = pool.submit(ask, ways[0])
            until(lambda: parent.counters.inside == 1)
            os.kill(one.child.pid, signal.SIGTERM)
            until(lambda: one.leaving)
            with connected(url, 1):
                assert parent._open(one) == 1
        assert asked.result()[0] == 200
    until(lambda: parent.restarts == restarts + 1)
    assert one.child.poll() == 0


def counted(way: http.client.HTTPConnection) -> float:
    return number_of(ask(way, "GET", "/metrics")[1], 'te_request_count{method="/embed"}')


@pytest.mark.slow
def test_nothing_is_left_when_the_parent_is_killed(folders: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "flodl_hf", "serve", f"e={folders['embed']}", "--port", "0", "--device", "cpu"]
    with subprocess.Popen([*command, "--http-processes", "2"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if line.startswith("ready: ")).split()[1]
        with connected(url, 1) as ways:
            assert number_of(ask(ways[0], "GET", "/metrics")[1], "flodl_http_processes") == 2
            process.kill()
            process.stderr.read()  # ends when all have ended that may write to it
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                ask(ways[0])
