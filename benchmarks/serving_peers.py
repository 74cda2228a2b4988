"""Servers beside ours in `benchmarks.serving --only peers`: what is commonly written around a library.

Each is Starlette on uvicorn with one handler, which hands a request to a thread; there one request runs after another,
its texts sorted by length and filled up to the longest of a small batch. Nothing joins the texts of two requests.

    transformers            AutoModel with PyTorch's fused attention, mean of tokens, length 1
    sentence-transformers   its `encode`
    onnxruntime             ONNX Runtime with its optimiser for BERT, on a processor

`transformers serve` has no path for encoders (chat, completions, responses, transcriptions), so it is not among them.

    python benchmarks/serving_peers.py NAME FOLDER DEVICE PRECISION   serves until it is ended, at the address it prints
    python benchmarks/serving_peers.py empty PROCESSES   a route that reads a body and sends an empty response
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["PEERS", "missing"]

# name: what has to be installed, and whether it runs on a processor alone.
PEERS = {
    "transformers": (("transformers",), False),
    "sentence-transformers": (("sentence_transformers",), False),
    "onnxruntime": (("transformers", "onnx", "onnxscript", "onnxruntime"), True),
}
BATCH = 32


def missing(name: str, device: str) -> str | None:
    """Return why a peer cannot run, or None."""
    needs, processor = PEERS[name]
    absent = [library for library in needs if find_spec(library) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return "runs on a processor here" if processor and not device.startswith("cpu") else None


def transformers(folder: str, device: str, dtype: str) -> Callable[[list[str]], Any]:
    import torch
    from torch.nn import functional as F
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").to(device).eval()

    def embed(texts: list[str]) -> np.ndarray:
        encoded = tokenizer(texts, truncation=True, max_length=512)
        order = sorted(range(len(texts)), key=lambda i: -len(encoded["input_ids"][i]))
        parts = []
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                rows = {key: [encoded[key][i] for i in chosen] for key in encoded}
                inputs = tokenizer.pad(rows, return_tensors="pt").to(device)
                states = model(**inputs)[0].float()
                keep = inputs["attention_mask"][:, :, None]
                parts.append(F.normalize((states * keep).sum(1) / keep.sum(1), dim=-1))
            found = torch.cat(parts).cpu().numpy()
        return found[np.argsort(order)]

    return embed


def sentence_transformers(folder: str, device: str, dtype: str) -> Callable[[list[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    made = SentenceTransformer(folder, device=device, model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: np.asarray(
        made.encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False), np.float32
    )


def onnxruntime(folder: str, device: str, dtype: str) -> Callable[[list[str]], Any]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from peers import on_cpu

    room = Path(tempfile.mkdtemp())
    found = on_cpu.onnx_runtime("embeddings", folder, BATCH, torch.get_num_threads(), room)
    return lambda texts: np.asarray(found(texts), np.float32)


def application(embed: Callable[[list[str]], Any]) -> Any:
    """Return the plain handler around a library."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    turn = threading.Lock()

    def computed(texts: list[str]) -> bytes:
        with turn:
            vectors = np.ascontiguousarray(embed(texts), np.float32)
        file = io.BytesIO()
        np.save(file, vectors)
        return file.getvalue()

    async def handle(request: Request) -> Response:
        texts = (await request.json())["inputs"]
        found = await run_in_threadpool(computed, texts)
        tokens = sum(len(text.split()) + 2 for text in texts)
        return Response(found, media_type="application/x-npy", headers={"x-compute-tokens": str(tokens)})

    async def healthy(request: Request) -> Response:
        return JSONResponse({"ready": True})

    return Starlette(routes=[Route("/embed", handle, methods=["POST"]), Route("/health", healthy)])


def empty(processes: int) -> None:
    """Serve ``/embed`` with empty responses in several processes, which end with the first."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def handle(request: Request) -> Response:
        await request.body()
        return Response()

    # Each process has its own socket, among which the system distributes connections evenly.
    first = listener(0)
    port = first.getsockname()[1]
    ends, open_end = os.pipe()
    for _ in range(processes - 1):
        if os.fork() == 0:
            os.close(open_end)
            threading.Thread(target=lambda: (os.read(ends, 1), os._exit(0)), daemon=True).start()
            first = listener(port)
            break
    else:
        print(f"http://127.0.0.1:{port}", flush=True)
    application = Starlette(routes=[Route("/embed", handle, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(application, log_level="error", access_log=False)).run([first])


def listener(port: int) -> socket.socket:
    """Return a socket that listens on a port together with other processes."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", port))
    held.listen(2048)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve one library, or empty responses, until the process ends.")
    parser.add_argument("name", choices=(*PEERS, "empty"))
    parser.add_argument("values", nargs="+", metavar="VALUE", help="FOLDER DEVICE PRECISION; PROCESSES for empty")
    options = parser.parse_args()
    if options.name == "empty":
        empty(int(options.values[0]))
        return
    folder, device, dtype = options.values
    import uvicorn

    makers = {
        "transformers": transformers, "sentence-transformers": sentence_transformers, "onnxruntime": onnxruntime
    }  # fmt: skip
    embed = makers[options.name](folder, device, dtype)
    for _ in range(3):
        embed(["w1 w2 w3"] * 4 + ["w5 " * 300])
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{held.getsockname()[1]}", flush=True)
    config = uvicorn.Config(application(embed), log_level="error", access_log=False)
    uvicorn.Server(config).run([held])


if __name__ == "__main__":
    main()
