"""A server of every head, in a process of its own on the loopback interface, and what it answers undisturbed.

Decides what is right at each door: the answer to a plain request before anything was damaged, which was compared then
with what the model itself gives.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.torture.checkpoints import TEXTS, checkpoint, encoded, tensors_in, write_files
from tests.torture.wire import Answer, Wire, post

__all__ = ["BODIES", "CLOSE", "LIMITS", "MODELS", "Server", "files_ready", "lacking", "same", "spoken"]

LIMITS: Mapping[str, Any] = {
    "max_body": 4 << 20, "header_s": 2.0, "body_s": 3.0, "write_s": 2.0, "timeout_s": 30.0, "idle_s": 5.0,
    "max_inputs": 512, "max_tokens": 100_000, "max_concurrent": 64, "batch_invariant": True, "devices": ("cpu",),
}  # fmt: skip
"""Of the server; short, so that what waits for them is soon over."""
CLOSE = 2e-5
GROWS_MB = {"doors": 150.0, "worker": 400.0}
"""What processes may take beyond what they had when all doors had answered once."""


def _ranker() -> Mapping[str, bytes]:
    files = dict(checkpoint("bert", "sequence_classification", 1, seed=3))
    config = {**json.loads(files["config.json"]), "id2label": {"0": "fits"}, "label2id": {"fits": 0}}
    tensors = [
        (name, tensor[:1].clone() if name.startswith("classifier.") else tensor)
        for name, tensor in tensors_in(files["model.safetensors"]).items()
    ]
    return {**files, "config.json": json.dumps(config).encode(), "model.safetensors": encoded(tensors)}


def _nli() -> Mapping[str, bytes]:
    files = dict(checkpoint("bert", "sequence_classification", 1, seed=4))
    names = ("contradiction", "neutral", "entailment")
    labels = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    return {**files, "config.json": json.dumps({**json.loads(files["config.json"]), **labels}).encode()}


def _late() -> Mapping[str, bytes]:
    parts = [("Transformer", ""), ("Pooling", "1_Pooling")]
    chain = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(parts)
    ]
    draw = torch.Generator().manual_seed(5)
    layers = {}
    for file, size in (("sparse_linear.pt", 1), ("colbert_linear.pt", 4)):
        held = io.BytesIO()
        torch.save({"weight": torch.randn(size, 8, generator=draw), "bias": torch.randn(size, generator=draw)}, held)
        layers[file] = held.getvalue()
    return {
        **checkpoint("bert", "base", 1, seed=5), **layers, "modules.json": json.dumps(chain).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
    }  # fmt: skip


MODELS: Mapping[str, Callable[[], Mapping[str, bytes]]] = {
    "embed": lambda: checkpoint("bert", "base", 2),
    "classes": lambda: checkpoint("bert", "sequence_classification", 2),
    "ner": lambda: checkpoint("roberta", "token_classification", 1, "bytes"),
    "qa": lambda: checkpoint("distilbert", "question_answering", 1),
    "mlm": lambda: checkpoint("bert", "masked_lm", 1),
    "ranker": _ranker,
    "nli": _nli,
    "late": _late,
}
"""By the name that clients call each by."""

_T = list(TEXTS)
_LONG = [*_T, "a very good film! " * 20]
BODIES: Mapping[str, dict[str, Any]] = {
    "/embed": {"model": "embed", "inputs": _LONG, "windows": True},
    "/embed_all": {"model": "embed", "inputs": _T},
    "/embed_sparse": {"model": "late", "inputs": _T},
    "/predict": {"model": "classes", "inputs": [[text] for text in _LONG]},
    "/rerank": {"model": "ranker", "query": "the cat", "texts": _T},
    "/similarity": {"model": "embed", "inputs": {"source_sentence": _T[0], "sentences": _T[1:]}},
    "/tokenize": {"model": "embed", "inputs": _T},
    "/decode": {"model": "embed", "ids": [[2, 5, 7, 8, 3]]},
    "/v1/embeddings": {"model": "embed", "input": _T},
    "/embeddings": {"model": "embed", "input": _T},
    "/v2/embed": {"model": "embed", "texts": _T, "input_type": "search_document"},
    "/invocations": {"model": "classes", "inputs": _T[0]},
    "/v1/score": {"model": "ranker", "text_1": ["the cat"], "text_2": _T},
    "/v1/rerank": {"model": "ranker", "query": "the cat", "documents": _T},
    "/v2/rerank": {"model": "ranker", "query": "the cat", "documents": _T},
    "/classify": {"model": "classes", "input": _LONG},
    "/score": {"model": "ranker", "text_1": ["the cat"], "text_2": _T},
    "/pooling": {"model": "embed", "input": _T},
    "/v1/classify": {"model": "classes", "inputs": [*_LONG, [_T[0], _T[1]]]},
    "/v1/entities": {"model": "ner", "inputs": _LONG},
    "/v1/answer": {"model": "qa", "inputs": [{"question": "who sat?", "context": text} for text in _LONG]},
    "/v1/fill-mask": {"model": "mlm", "inputs": ["the [MASK] sat on the mat."]},
    "/v1/zero-shot": {"model": "nli", "inputs": _T, "labels": ["good", "bad"]},
    "/v1/late-interaction": {"model": "late", "inputs": _T},
    "/": {"model": "classes", "inputs": _T[0]},
}
"""A request that is right, for each door."""


def _own(model: Mapping[str, Any], path: str) -> Any:
    """Return what the models themselves give for a door's request, in the door's form; None where they have no word."""
    body = BODIES[path]
    asked = model[body["model"]]
    if path in ("/embed", "/v1/embeddings"):
        return asked.embed(body.get("inputs") or body["input"], windows=body.get("windows", False)).tolist()
    if path == "/v1/classify":
        *texts, pair = body["inputs"]
        return [one.to_rows() for one in (*asked.predict(texts), *asked.predict([tuple(pair)]))]
    if path == "/predict":
        return [[_score(one) for one in row.to_rows()] for row in asked.predict([text for (text,) in body["inputs"]])]
    if path == "/":
        return [[_score(one) for one in asked.predict(body["inputs"]).to_rows()]]
    if path == "/v1/entities":
        return [one.to_rows() for one in asked.predict(body["inputs"])]
    if path == "/v1/answer":
        pairs = [(one["question"], one["context"]) for one in body["inputs"]]
        return [one.to_rows() for one in asked.answer_batch(pairs)]
    if path == "/v1/fill-mask":
        return [one.to_dict()["masks"] for one in asked.fill_mask(body["inputs"])]
    if path == "/v1/zero-shot":
        return [one.to_rows() for one in asked.zero_shot(body["inputs"], body["labels"])]
    if path == "/v1/late-interaction":
        return [one.float().tolist() for one in asked.embed_tokens(body["inputs"])]
    if path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = asked.rerank(body["query"], body.get("texts") or body["documents"])
        return [[one.index, one.score] for one in ranked]
    if path == "/tokenize":
        return [list(asked.tokenizer(text)["input_ids"]) for text in body["inputs"]]
    return None


def _score(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"score": one["score"], "label": one["label"]}


def _told(path: str, data: Any) -> Any:
    """Return of a door's answer what `_own` gives."""
    if path == "/v1/embeddings":
        return [row["embedding"] for row in data["data"]]
    if path == "/rerank":
        return [[one["index"], one["score"]] for one in data]
    if path in ("/v1/rerank", "/v2/rerank"):
        return [[one["index"], one["relevance_score"]] for one in data["results"]]
    if path == "/tokenize":
        return [[one["id"] for one in row] for row in data]
    if path.startswith("/v1/"):
        return [next(value for name, value in row.items() if name != "empty") for row in data["results"]]
    return data


def same(found: Any, expected: Any, bound: float = 0.0) -> bool:
    """Return whether two trees of JSON types are the same, numbers within a bound."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name], bound) for name in expected)
    if isinstance(found, list) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(same(a, b, bound) for a, b in zip(found, expected, strict=True))
    if isinstance(found, float) or isinstance(expected, float):
        return isinstance(found, (int, float)) and abs(found - expected) <= bound
    return found == expected


def spoken(answer: Answer) -> Any:
    """Return an answer's value without what differs from call to call: its id and its time."""
    data = answer.json
    return (
        {name: value for name, value in data.items() if name not in ("id", "created")}
        if isinstance(data, dict)
        else data
    )


def lacking() -> str | None:
    """Return what has to be installed before there can be a server, or None."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    return f"{' and '.join(missing)}, of the extra serve: pip install 'flodl-hf[serve]'" if missing else None


_PROGRAM = """
import os, resource, sys, threading
sys.path[:] = {path!r}
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
def ends():
    sys.stdin.buffer.read()
    os._exit(0)
threading.Thread(target=ends, daemon=True).start()
from flodl_hf.serving import Served, serve
models = [Served(name, source) for name, source in {models!r}]
serve(models, port=0, here=lambda url: print(url, flush=True), **{limits!r})
"""


class Server:
    """A server that runs, and what it answers undisturbed.

    Args:
        folder: for its models and its log.

    Attributes:
        right: what each door answers to its request of `BODIES`.
        models: the same models in this process.
    """

    def __init__(self, folder: Path) -> None:
        from flodl_hf import load

        for name, files in MODELS.items():
            if not (folder / name).exists():
                write_files(folder / name, files())
        self.log = folder / "log.txt"
        named = [(name, str(folder / name)) for name in MODELS]
        code = _PROGRAM.format(path=sys.path, models=named, limits=dict(LIMITS))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        assert self.process.stdout is not None
        url = self.process.stdout.readline().decode().strip()
        if not url:
            raise RuntimeError(f"the server did not start: {self.log.read_text('utf-8', 'replace')[-2000:]}")
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.address = (host, int(port))
        self.models: dict[str, Any] = {name: load(folder / name) for name in MODELS}
        self.right: dict[str, Any] = {}
        for path, body in BODIES.items():
            with self.wire() as wire:
                wire.send(post(path, json.dumps(body).encode()))
                answer = wire.answer()
            if answer is None or answer.status != 200:
                raise RuntimeError(f"{path} does not answer a plain request: {answer}")
            own = _own(self.models, path)
            if own is not None and not same(_told(path, answer.json), own, CLOSE):
                raise AssertionError(f"{path} answers otherwise than the model: {_told(path, answer.json)} {own}")
            self.right[path] = spoken(answer)
        self.taken = self.memory()

    def wire(self, patience: float = 20.0) -> Wire:
        """Return a new connection."""
        return Wire(self.address, patience)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    @property
    def worker(self) -> int:
        """The process that holds the models."""
        found = 0
        for line in self.log.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):
                said = json.loads(line)
                found = said["pid"] if said.get("what") == "worker ready" else found
        return found

    def memory(self) -> dict[str, float]:
        """Return the memory of both processes, in MB."""
        return {"doors": _resident(self.process.pid), "worker": _resident(self.worker)}

    def grown(self) -> str:
        """Return which process has taken too much, or nothing."""
        now = self.memory()
        over = [f"{name} had {self.taken[name]:.0f} MB and has {now[name]:.0f}" for name, most in GROWS_MB.items()
                if now[name] > self.taken[name] + most]  # fmt: skip
        return "; ".join(over)

    def close(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for held in (self.process.stdin, self.process.stdout):
            if held is not None:
                held.close()
        time.sleep(0)


def _resident(process: int) -> float:
    try:
        status = Path(f"/proc/{process}/status").read_text("ascii")
        return int(status.partition("VmRSS:")[2].split(maxsplit=1)[0]) / 1024
    except (OSError, IndexError, ValueError):
        return 0.0


@cache
def files_ready() -> None:
    """Make every checkpoint before workers are forked."""
    for files in MODELS.values():
        files()
