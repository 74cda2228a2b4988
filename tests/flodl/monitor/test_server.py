"""The server answers a browser on this machine, refuses everyone else, and waits for nobody."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time

import pytest
from torch import nn

from flodl.errors import TrainError
from flodl.graph import FlowBuilder
from flodl.monitor import Monitor
from flodl.monitor.server import MAX_STREAMS


@pytest.fixture
def monitor():
    with Monitor(name="watched", quiet=True, resources_s=0, interval_s=0.02) as made:
        made.serve(0)
        yield made


def address(monitor: Monitor) -> tuple[str, int]:
    assert monitor.url is not None
    return "127.0.0.1", int(monitor.url.split(":")[2].split("/")[0])


def connect(monitor: Monitor) -> socket.socket:
    return socket.create_connection(address(monitor), timeout=30)


def raw(monitor: Monitor, data: bytes, limit: int = 1 << 22) -> bytes:
    """Return what comes back until the server closes."""
    with connect(monitor) as sock:
        try:
            sock.sendall(data)
            got = b""
            while len(got) < limit and (part := sock.recv(65536)):
                got += part
        except (ConnectionResetError, BrokenPipeError):
            return b""
    return got


def ask(monitor: Monitor, path: str = "/", method: str = "GET", body: bytes = b"", **headers: str | None) -> bytes:
    named = {"Host": f"127.0.0.1:{address(monitor)[1]}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"{name}: {value}" for name, value in named.items() if value is not None]
    return raw(monitor, "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def read_stream(sock: socket.socket, until: bytes, timeout: float = 30.0) -> bytes:
    got, end = b"", time.monotonic() + timeout
    while until not in got and time.monotonic() < end:
        sock.settimeout(max(0.01, end - time.monotonic()))
        try:
            part = sock.recv(65536)
        except TimeoutError:
            break
        if not part:
            break
        got += part
    return got


def stream(monitor: Monitor) -> socket.socket:
    sock = connect(monitor)
    sock.sendall(f"GET /events HTTP/1.1\r\nHost: localhost:{address(monitor)[1]}\r\n\r\n".encode())
    return sock


# ---- what a browser gets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/", "/monitor.js", "/monitor.css", "/icon.svg", "/api/runs", "/archive.html", "/history.json", "/graph.svg"],
)
def test_every_answer_has_the_headers_that_protect_it(monitor, path):
    for answer in (ask(monitor, path), ask(monitor, path, "HEAD"), ask(monitor, path + "x")):
        head = answer.partition(b"\r\n\r\n")[0].decode().lower()
        assert "x-content-type-options: nosniff" in head
        assert "content-security-policy: default-src 'none'" in head
        assert "frame-ancestors 'none'" in head
        assert "referrer-policy: no-referrer" in head
        assert "cross-origin-resource-policy: same-origin" in head
        assert "cache-control: no-store" in head
        assert "\r\nserver:" not in head
        assert "access-control" not in head
    assert body_of(ask(monitor, path, "HEAD")) == b""


def test_the_page_asks_for_nothing_from_elsewhere(monitor):
    for path in ("/", "/monitor.js", "/monitor.css"):
        text = body_of(ask(monitor, path)).decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text
    assert b"<script>" not in body_of(ask(monitor))


def test_a_late_reader_gets_all_that_was_and_then_what_comes(monitor):
    for epoch in range(3):
        monitor.log(epoch, 1.0, {"loss": 1.0 / (epoch + 1)})
    monitor.record  # noqa: B018
    with stream(monitor) as sock:
        got = read_stream(sock, b"\n\nevent: ") + read_stream(sock, b"\n\n", 0.5)
        first = json.loads(got.partition(b"event: all\ndata: ")[2].partition(b"\n")[0])
        [run] = first["runs"]
        assert [point[3] for point in run["p"]["train/loss"]] == [1.0, 0.5, 0.333333]
        monitor.log(3, 1.0, {"loss": 0.125})
        monitor.finish()
        got = read_stream(sock, b'"status":"finished"')
        assert b"0.125" in got
    with stream(monitor) as sock:  # after the end
        got = read_stream(sock, b'"status":"finished"')
        assert b"event: all" in got


def test_history_and_architecture_can_be_fetched(monitor):
    monitor.watch(FlowBuilder(nn.Linear(2, 2)).tag("first").build())
    for epoch in range(2):
        monitor.log(epoch, 1.0, {"loss": 1.0 / (epoch + 1)})
    monitor.record  # noqa: B018
    rows = json.loads(body_of(ask(monitor, "/history.json")))
    assert [(row["epoch"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5)]
    answer = ask(monitor, "/graph.svg")
    assert b"Content-Type: image/svg+xml" in answer
    assert body_of(answer).startswith(b"<svg")
    assert b"first" in body_of(answer)


# ---- who is refused ----------------------------------------------------------------------------------------

HOSTS = [
    "", "evil.com", "127.0.0.1", "localhost", "127.0.0.1.evil.com:{port}", "localhost.:{port}", "[::1]:{port}",
    "0x7f.1:{port}", "user@127.0.0.1:{port}", "127.0.0.1:{port}.", "127.0.0.1:1{port}",
    "127.1:{port}", "127.0.0.1:0{port}", "127.0.0.1:{port}, 127.0.0.1:{port}", "localhost:{port}/", "a" * 7000,
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/", "/events", "/api/runs"])
def test_other_names_get_nothing(monitor, host, path):
    text = host.format(port=address(monitor)[1])
    answer = ask(monitor, path, Host=text)
    assert status(answer) == 421
    assert b"watched" not in answer


def test_no_name_or_two_get_nothing(monitor):
    assert status(ask(monitor, Host=None)) == 421
    port = address(monitor)[1]
    twice = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    assert status(raw(monitor, twice.encode())) == 421
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert status(ask(monitor, Host=host)) == 200


@pytest.mark.parametrize("path", ["/", "/events", "/api/runs", "/archive.html"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.com"}, {"Origin": "null"}, {"Origin": "https://127.0.0.1"}, {"Origin": ""},
        {"Origin": "http://127.0.0.1"}, {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"},
    ],
)  # fmt: skip
def test_other_sites_get_nothing(monitor, path, headers):
    answer = ask(monitor, path, **headers)
    assert status(answer) == 403
    assert b"watched" not in answer


@pytest.mark.parametrize("path", ["/", "/events", "/control", "/nothing"])
@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "FOO", "get", "GETT"]
)
def test_other_methods_are_refused(monitor, path, method):
    assert status(ask(monitor, path, method)) in (400, 405)


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/monitor.js/..", "/./", "/monitor.js%00",
        "/page.py", "/run.jsonl", "/" + "a" * 2000, "/\\..\\x", "/icon.svg/", "/MONITOR.JS", "/?x/../..",
    ],
)  # fmt: skip
def test_paths_lead_nowhere(monitor, path):
    assert status(ask(monitor, path)) == (200 if path == "/?x/../.." else 404)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: %s\r\n" + b"X: " + b"a" * (1 << 17) + b"\r\n\r\n", {431, 0}),
        (b"GET / HTTP/1.1\r\nHost: %s\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(200)) + b"\r\n", {431, 0}),
        (b"GET /" + b"a" * (1 << 17) + b" HTTP/1.1\r\nHost: %s\r\n\r\n", {414, 0}),
        (b"GET / HTTP/2.0\r\nHost: %s\r\n\r\n", {505}),
        (b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: %s\r\n\r\n", {200}),
        (b"GET / HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
        (b"GET / HTTP/1.1\r\nHost: %s\r\nContent-Length: 5\r\n\r\nhello", {400, 0}),
        (b"POST /control HTTP/1.1\r\nHost: %s\r\nContent-Length: -1\r\n\r\n", {405}),
        (b"GET /?" + b"&".join(b"a%d=1" % i for i in range(20)) + b" HTTP/1.1\r\nHost: %s\r\n\r\n", {200, 400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400, 0}),
        (b"\0\0\0\0\r\n\r\n", {400}),
    ],
)
def test_odd_requests_are_refused_and_the_server_goes_on(monitor, data, expected):
    host = b"127.0.0.1:%d" % address(monitor)[1]
    assert status(raw(monitor, data.replace(b"%s", host))) in expected
    assert status(ask(monitor)) == 200


def test_random_bytes_do_no_harm(monitor):
    rng = random.Random(7)
    pieces = [b"GET ", b"/", b" HTTP/1.1", b"\r\n", b"Host: ", b"\n", b":", b"\0", b"\xff", b"a" * 50, b"\r\n\r\n"]
    for _ in range(150):
        data = b"".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12))) + b"\r\n\r\n"
        answer = raw(monitor, data)
        assert status(answer) in (0, 400, 404, 405, 421, 431, 505)
    assert status(ask(monitor)) == 200


# ---- who waits for nobody ----------------------------------------------------------------------------------


def test_half_open_connections_are_closed(monitor, monkeypatch):
    monkeypatch.setattr("flodl.monitor.server._Handler.timeout", 0.3)
    held = [connect(monitor) for _ in range(96)]
    for sock in held[::2]:
        with contextlib.suppress(ConnectionError):
            sock.send(b"GET / HT")
    end = time.monotonic() + 60
    while status(ask(monitor)) != 200:
        assert time.monotonic() < end
        time.sleep(0.05)
    for sock in held:
        sock.close()


def test_readers_that_never_read_slow_nobody(monitor, monkeypatch):
    """Reporting costs as little with readers that take nothing, and they are disconnected."""
    monkeypatch.setattr("flodl.monitor.server.STREAM_TIMEOUT_S", 0.5)
    readers = []
    for _ in range(MAX_STREAMS):
        sock = connect(monitor)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.sendall(f"GET /events HTTP/1.1\r\nHost: localhost:{address(monitor)[1]}\r\n\r\n".encode())
        readers.append(sock)
    end = time.monotonic() + 600
    while monitor.store.num_readers < MAX_STREAMS and time.monotonic() < end:
        time.sleep(0.01)
    assert status(ask(monitor, "/events")) == 503
    text = "x" * 3000
    began = time.monotonic()
    for i in range(3000):
        monitor.note(f"{i} {text}")
    assert time.monotonic() - began < 15
    end = time.monotonic() + 600
    while monitor.store.num_readers and time.monotonic() < end:
        monitor.note(text)
        monitor.record  # noqa: B018
        time.sleep(0.01)
    assert monitor.store.num_readers == 0
    assert status(ask(monitor)) == 200
    for sock in readers:
        sock.close()


def test_vanished_readers_are_forgotten(monitor, monkeypatch):
    monkeypatch.setattr("flodl.monitor.server.HEARTBEAT_S", 0.1)
    readers = [stream(monitor) for _ in range(5)]
    for sock in readers:
        read_stream(sock, b"event: all")
    assert monitor.store.num_readers == 5
    for sock in readers:
        sock.close()
    end = time.monotonic() + 600
    while monitor.store.num_readers and time.monotonic() < end:
        time.sleep(0.05)
    assert monitor.store.num_readers == 0


# ---- addresses and orders ----------------------------------------------------------------------------------


def test_a_taken_port_is_said(monitor):
    port = address(monitor)[1]
    with Monitor(quiet=True) as other, pytest.raises(TrainError) as fault:
        other.serve(port)
    assert fault.value.port == port
    with pytest.raises(TrainError):
        monitor.serve(0)


def test_the_name_of_a_forwarded_port_is_accepted():
    with Monitor(quiet=True, name="watched") as monitor:
        monitor.serve(0, names=["localhost:16060"])
        assert status(ask(monitor, Host="localhost:16060")) == 200
        assert status(ask(monitor, Host="localhost:16061")) == 421


def order(monitor: Monitor, what: str = '{"do": "save"}', **headers: str | None) -> bytes:
    port = address(monitor)[1]
    sent: dict[str, str | None] = {
        "Origin": f"http://127.0.0.1:{port}",
        "Content_Type": "application/json",
        "X_Monitor_Token": monitor.url.rpartition("=")[2],
        "Content_Length": str(len(what)),
    }
    return ask(monitor, "/control", "POST", what.encode(), **{**sent, **headers})


def test_orders_come_from_our_page_with_our_token_only():
    with Monitor(quiet=True, resources_s=0) as monitor:
        url = monitor.serve(0, control=True)
        token = url.rpartition("=")[2]
        assert url.endswith("#token=" + token)
        assert len(token) == 32
        got: list[str] = []
        assert status(order(monitor)) == 409  # nobody runs
        monitor.enable_control(["save", "stop"], got.append)
        monitor.log(0, 1.0, {"loss": 1.0})
        assert status(order(monitor)) == 202
        assert status(order(monitor, '{"do": "stop"}')) == 202
        assert got == ["save", "stop"]
        assert status(order(monitor, '{"do": "evaluate"}')) == 409  # there is nothing to judge by
        port = address(monitor)[1]
        for wrong in (
            {"X_Monitor_Token": None}, {"X_Monitor_Token": ""}, {"X_Monitor_Token": token[:-1]},
            {"X_Monitor_Token": token + "0"}, {"Origin": None}, {"Origin": "http://evil.com"},
            {"Origin": f"http://127.0.0.1:{port + 1}"}, {"Sec_Fetch_Site": "cross-site"},
        ):  # fmt: skip
            assert status(order(monitor, **wrong)) == 403, wrong
        assert status(order(monitor, Content_Type="text/plain")) == 415
        for body in ("", "{", "[]", '{"do": 3}', '{"do": "delete"}', "[" * 1000):
            assert status(order(monitor, body)) == 400, body
        assert status(order(monitor, "x" * 2000)) == 413
        assert status(ask(monitor, "/control")) == 404
        assert got == ["save", "stop"]
        monitor.finish()
        assert status(order(monitor)) == 409
        assert token.encode() not in ask(monitor, "/api/runs")


def test_without_control_there_is_no_order(monitor):
    monitor.enable_control(["stop"], lambda what: pytest.fail("asked"))
    port = address(monitor)[1]
    answer = ask(
        monitor, "/control", "POST", b'{"do":"stop"}', Origin=f"http://127.0.0.1:{port}",
        Content_Type="application/json", Content_Length="13", X_Monitor_Token="",
    )  # fmt: skip
    assert status(answer) == 405


def test_closing_lets_go_of_the_port():
    monitor = Monitor(quiet=True, resources_s=0)
    monitor.serve(0)
    place = address(monitor)
    with stream(monitor) as sock:
        read_stream(sock, b"event: all")
        monitor.log(0, 1.0, {"loss": 3.5})
        monitor.close()
        assert b"3.5" in read_stream(sock, b"3.5")  # what was left was sent
    with socket.socket() as sock:
        assert sock.connect_ex(place) != 0
