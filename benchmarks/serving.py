"""A server of one BERT-base under load over HTTP: tokens a second, latencies, what is refused, and what HTTP costs.

Random weights, random words of a small vocabulary of whole words (a token a word), so nothing is read from elsewhere.
Clients are processes with plain sockets; the server is `flodl_hf.serving`. Four measurements:

    throughput  requests of many texts, as many at a time as keep the device busy; beside `embed` in this process,
                before and after, which is the most that serving can give
    latency     one short text at a time over HTTP, beside the same call in this process, in turns
    mixed       many clients, each with one text of 8 to 400 tokens, at a share of the capacity that throughput found
    overload    twice that capacity: latency of what is accepted, how quickly the rest is refused, memory

    python -m benchmarks.serving [--device cuda --precision bf16] [--seconds 20] [--clients 200] [--size base|tiny]
        [--only throughput,latency,mixed,overload] [--processes 8] [--json FILE]

Needs starlette and uvicorn (with anyio, idna, click, h11, typing_extensions); httptools, uvloop and orjson where they
are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(2000)]
SIZES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}


def write_model(folder: Path, size: str) -> Path:
    """Write a random encoder whose tokens are words."""
    import torch
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers, processors

    from flodl_hf.auto import head_named
    from flodl_hf.config import ModelConfig
    from flodl_hf.tokenizer import Tokenizer

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*specials, *WORDS])}
    inner = Inner(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(specials)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings = json.dumps(dict(zip(names, specials, strict=True)))
    torch.manual_seed(0)
    config = ModelConfig.for_model(
        "bert", vocab_size=len(vocabulary), max_position_embeddings=512, type_vocab_size=2, **SIZES[size]
    )
    model = head_named("base").model.from_config(config)
    model.mark_untrained(())
    model.tokenizer = Tokenizer.from_files(
        {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": settings.encode()}, folder="made here"
    )
    return model.save_pretrained(folder / "model")


def text_of(draw: random.Random, least: int, most: int) -> str:
    """Return some words; short ones are as many as long ones on a scale of ratios."""
    count = round(least * (most / least) ** draw.random())
    return " ".join(draw.choices(WORDS, k=count))


# ---- clients -------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What one process of clients does."""

    host: str
    port: int
    clients: int
    seconds: float
    texts: int
    least: int
    most: int
    rate: float | None
    seed: int


@dataclass
class Found:
    """What it saw."""

    tokens: int = 0
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def request_of(texts: list[str]) -> bytes:
    body = json.dumps({"inputs": texts}).encode()
    head = "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\naccept: application/x-npy\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, int]:
    """Return the status, and how many tokens were computed."""
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
    await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), int(headers.get("x-compute-tokens", 0))


async def client(load: Load, number: int, found: Found, until: float) -> None:
    draw = random.Random(load.seed * 10_007 + number)
    requests = [request_of([text_of(draw, load.least, load.most) for _ in range(load.texts)]) for _ in range(8)]
    reader, writer = await asyncio.open_connection(load.host, load.port)
    if load.rate:
        await asyncio.sleep(draw.random() * load.clients / load.rate)
    place = 0
    try:
        while (now := time.perf_counter()) < until:
            status, tokens = await ask(reader, writer, requests[place % len(requests)])
            took = time.perf_counter() - now
            place += 1
            if status == 200:
                found.answered.append(took)
                found.tokens += tokens
            elif status == 429:
                found.refused.append(took)
            else:
                found.faults.append(str(status))
            if load.rate:
                # Each client asks at its own times, whatever the others wait for.
                await asyncio.sleep(max(0.0, draw.expovariate(load.rate / load.clients) - took))
    except (OSError, asyncio.IncompleteReadError) as fault:
        found.faults.append(type(fault).__name__)
    finally:
        writer.close()


async def clients(load: Load) -> Found:
    found = Found()
    until = time.perf_counter() + load.seconds
    await asyncio.gather(*(client(load, number, found, until) for number in range(load.clients)))
    return found


def run_clients(load: Load) -> Found:
    return asyncio.run(clients(load))


def loaded(
    url: str, args: argparse.Namespace, clients: int, texts: int, span: tuple[int, int], rate: float | None
) -> Found:
    """Return what all processes of clients saw."""
    host, port = url.removeprefix("http://").split(":")
    count = min(args.processes, clients)
    each = None if rate is None else rate / count
    loads = [Load(host, int(port), clients // count, args.seconds, texts, *span, each, seed) for seed in range(count)]
    whole = Found()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for part in pool.map(run_clients, loads):
            whole.tokens += part.tokens
            whole.answered += part.answered
            whole.refused += part.refused
            whole.faults += part.faults
    return whole


def told(found: Found, seconds: float) -> dict[str, Any]:
    return {
        "tokens_per_s": round(found.tokens / seconds),
        "answered": len(found.answered),
        "refused": len(found.refused),
        "faults": len(found.faults),
        "kinds_of_faults": sorted(set(found.faults)),
        **{f"answered_{name}": value for name, value in percentiles(found.answered).items()},
        **({f"refused_{name}": value for name, value in percentiles(found.refused).items()} if found.refused else {}),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {
        f"p{share}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] * 1000, 2)
        for share in (50, 90, 99)
    }


# ---- measurements --------------------------------------------------------------------------------------


PROGRAM = """
import json, sys
from flodl_hf.serving import serve
folder, given = json.loads(sys.argv[1])
serve(f"model={folder}", here=lambda url: print(url, flush=True), **given)
"""


@contextmanager
def server(folder: Path, given: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Run a server in a process of its own; give its address and its processes."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([str(folder), given])]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            log.seek(0)
            raise SystemExit(f"the server did not start:\n{log.read()[-4000:]}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pids = [process.pid, *(map(int, children.read_text().split()) if children.exists() else ())]
        try:
            yield url, pids
        finally:
            process.terminate()


def memory(pids: list[int]) -> float:
    """Return the MiB that processes hold, where the system says so."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        except OSError:
            return 0.0
    return round(total / 2**20, 1)


def local_rate(model: Any, span: tuple[int, int], seconds: float) -> float:
    """Return tokens a second of ``embed`` in this process."""
    draw = random.Random(1)
    count = 64
    while True:
        texts = [text_of(draw, *span) for _ in range(count)]
        tokens = sum(len(text.split()) + 2 for text in texts)
        begin = time.perf_counter()
        model.embed(texts)
        took = time.perf_counter() - begin
        # The first ones also make what is made once.
        if (took > seconds / 4 and count > 64) or count >= 16_384:
            return tokens / took
        count *= 4


def throughput(url: str, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    span = (16, 480)
    before = local_rate(model, span, args.seconds)
    texts = 64 if args.size == "base" and args.device != "cpu" else 8
    found = loaded(url, args, 4 * args.processes, texts, span, None)
    after = local_rate(model, span, args.seconds)
    best = max(before, after)
    result = told(found, args.seconds)
    return {**result, "embed_tokens_per_s": round(best), "share": round(result["tokens_per_s"] / best, 3)}


def latency(url: str, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One text of 30 words at a time, in turns with the same call here."""
    text = " ".join(WORDS[:30])
    request = request_of([text])
    host, port = url.removeprefix("http://").split(":")

    async def measure() -> tuple[list[float], list[float]]:
        reader, writer = await asyncio.open_connection(host, int(port))
        over, here = [], []
        for turn in range(args.calls + 50):
            begin = time.perf_counter()
            await ask(reader, writer, request)
            middle = time.perf_counter()
            model.embed(text)
            end = time.perf_counter()
            if turn >= 50:
                over.append(middle - begin)
                here.append(end - middle)
        writer.close()
        return over, here

    over, here = asyncio.run(measure())
    added = [(a - b) * 1000 for a, b in zip(over, here, strict=True)]
    return {
        **{f"http_{name}": value for name, value in percentiles(over).items()},
        **{f"embed_{name}": value for name, value in percentiles(here).items()},
        "added_median_ms": round(statistics.median(added), 3),
    }


def mixed(url: str, capacity: float, args: argparse.Namespace, share: float, pids: list[int]) -> dict[str, Any]:
    span = (8, 400)
    draw = random.Random(3)
    mean = statistics.mean(len(text_of(draw, *span).split()) + 2 for _ in range(2000))
    # Many small requests, and no more of them than one process of doors can read.
    texts = max(1, math.ceil(capacity * share / mean / 1000))
    rate = capacity * share / mean / texts
    # A client waits for its answer; so many of them ask at this rate however long answers take.
    clients = args.clients if share < 1 else min(4000, max(args.clients, round(rate * 2)))
    before = memory(pids)
    found = loaded(url, args, clients, texts, span, rate)
    result = told(found, args.seconds)
    result |= {
        "clients": clients,
        "texts_of_a_request": texts,
        "asked_per_s": round(rate, 1),
        "memory_before_mib": before,
        "memory_after_mib": memory(pids),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--only", default="throughput,latency,mixed,overload")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import torch

    from flodl.devices import described, find_device
    from flodl_hf.auto import load

    device = find_device(args.device)
    args.device = str(device)
    wanted = args.only.split(",")
    results: dict[str, Any] = {
        "device": described(device), "torch": torch.__version__, "python": platform.python_version(),
        "precision": args.precision, "size": args.size, "seconds": args.seconds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place), args.size)
        given = {
            "devices": [str(device)], "precision": args.precision, "max_batch_tokens": args.max_batch_tokens,
            "max_queue_s": 1.0 if "overload" in wanted else 30.0, "port": 0,
        }  # fmt: skip
        model: Any = load(folder, device=str(device)).runtime(precision=args.precision, progress=False)
        with server(folder, given) as (url, pids):
            capacity = 0.0
            if "throughput" in wanted:
                results["throughput"] = throughput(url, model, args)
                capacity = results["throughput"]["tokens_per_s"]
                print("throughput", json.dumps(results["throughput"]), flush=True)
            if "latency" in wanted:
                results["latency"] = latency(url, model, args)
                print("latency", json.dumps(results["latency"]), flush=True)
            if "mixed" in wanted or "overload" in wanted:
                if not capacity:
                    capacity = throughput(url, model, args)["tokens_per_s"]
                for name, share in (("mixed", 0.66), ("overload", 2.0)):
                    if name in wanted:
                        results[name] = mixed(url, capacity, args, share, pids)
                        print(name, json.dumps(results[name]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))
    print(json.dumps({name: results[name] for name in ("device", "torch", "python", "precision", "size")}))


if __name__ == "__main__":
    main()
