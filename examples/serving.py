"""Serve a model with the standard library alone; requests that arrive together run as one batch.

    python examples/serving.py [MODEL] [PORT]

    curl -d '{"texts": ["I love it."]}' http://127.0.0.1:8000/predict

Without arguments the program trains a small model, sends requests from several threads and ends. In production use
`flodl-hf serve`, which limits and authenticates requests.
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flodl.errors import FlodlError
from flodl_hf import load
from flodl_hf.training.demo import write_demo

MAX_BODY, MAX_TEXTS, WAIT_S = 1_000_000, 1_000, 0.002


class Batcher:
    """Runs the texts of many threads together: texts within two milliseconds are one call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0
        self._waiting: queue.Queue[tuple[list[str], Future[list[Any]]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, texts: list[str]) -> list[Any]:
        """Return the results of texts, in their order."""
        answers: Future[list[Any]] = Future()
        self._waiting.put((texts, answers))
        return answers.result(timeout=60)

    def _work(self) -> None:
        while True:
            asked = [self._waiting.get()]
            try:
                while sum(len(texts) for texts, _ in asked) < MAX_TEXTS:
                    asked.append(self._waiting.get(timeout=WAIT_S))
            except queue.Empty:
                pass
            try:
                self.calls += 1
                found = [answer.to_dict() for answer in self.model.predict([t for texts, _ in asked for t in texts])]
            except Exception as error:
                for _, answers in asked:
                    answers.set_exception(error)
                continue
            for texts, answers in asked:
                answers.set_result(found[: len(texts)])
                found = found[len(texts) :]


def make_handler(batcher: Batcher) -> type[BaseHTTPRequestHandler]:
    """Return a handler of ``POST /predict`` with ``{"texts": [...]}``."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", "0"))
                if self.path != "/predict" or not 0 < length <= MAX_BODY:
                    return self.answer(404 if self.path != "/predict" else 413, {"error": "POST /predict, up to 1 MB"})
                texts = json.loads(self.rfile.read(length))["texts"]
                if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts) or len(texts) > MAX_TEXTS:
                    return self.answer(422, {"error": f"texts: a list of at most {MAX_TEXTS} texts"})
                return self.answer(200, {"answers": batcher.ask(texts) if texts else []})
            except (ValueError, KeyError, TypeError):
                return self.answer(400, {"error": 'expected {"texts": ["...", ...]}'})
            except FlodlError as error:
                return self.answer(422, {"error": str(error)})

        def answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because texts are private."""

    return Handler


class Server(ThreadingHTTPServer):
    """One thread per connection, and a long queue of new connections."""

    daemon_threads = True
    request_queue_size = 128


def ask(port: int, content: Any) -> tuple[int, Any]:
    """Send one request and return status and content."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/predict", json.dumps(content))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def main(model: str | None = None, port: int | None = None) -> None:
    """Serve until interrupted; without a model, send requests and end."""
    with tempfile.TemporaryDirectory() as place:
        batcher = Batcher(load(model or write_demo(Path(place) / "demo")))
    batcher.ask(["The first text makes the model ready."])
    port = port if port is not None else 8000 if model else 0  # 0: any that is free
    with Server(("127.0.0.1", port), make_handler(batcher)) as server:
        if model is not None:
            print(f"http://127.0.0.1:{server.server_port}/predict")
            server.serve_forever()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        texts = ["I love it.", "It was rude.", "The pizza was cold.", "What a lovely evening."] * 10
        with ThreadPoolExecutor(20) as clients:
            found = list(clients.map(lambda text: ask(server.server_port, {"texts": [text]}), texts))
        assert {status for status, _ in found} == {200}
        for text, (_, content) in zip(texts[:4], found, strict=False):
            print(f"{content['answers'][0]['labels'][0]['label']:10} {text}")
        print(f"{len(texts)} requests of 20 clients in {batcher.calls - 1} calls of the model")
        print("an invalid request:", *ask(server.server_port, {"text": 3}))
        server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
