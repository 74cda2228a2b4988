"""A server of one BERT-base under load over HTTP: tokens a second, latencies, what is refused, and what HTTP costs.

Random weights, random words of a small vocabulary of whole words (a token a word), so nothing is read from elsewhere.
Clients are processes with plain sockets (`serving_clients`); the server is `flodl_hf.serving`. Six measurements:

    throughput  requests of many texts, as many at a time as keep the device busy; beside `embed` in this process,
                before and after, which is the most that serving can give
    latency     one short text at a time over HTTP, beside the same call in this process, in turns: by asyncio's
                streams, whose own time counts too, and by a plain socket
    small       requests of one short text (or of `--texts`), each client asking again when it has its answer: what
                HTTP can bear, and what a request takes of the processes that answer it and of the workers; beside an
                empty route of starlette (`empty`), with the same clients and as many HTTP processes
    mixed       many clients, texts of 8 to 400 tokens, at two thirds of the capacity that throughput found; every
                vector is compared with that of `embed`, and has to be nearest to its own text's
    overload    twice that capacity: latency of what is accepted, how quickly the rest is refused, memory
    peers       what is commonly written around other libraries (`serving_peers`), in turns with ours, under one load

    python -m benchmarks.serving [--device cuda --precision bf16] [--seconds 20] [--clients 200]
        [--size base|small|tiny] [--only throughput,latency,small,mixed,overload,peers] [--processes 8] [--workers 2]
        [--http-processes N] [--texts N] [--json FILE]

`mixed` and `overload` measure the capacity first, in a few seconds where `throughput` is not asked for.

Needs starlette and uvicorn (with anyio, idna, click, h11, typing_extensions); httptools, uvloop and orjson where they
are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.serving_clients import Asked, ask, loaded, percentiles, request_of, told
from benchmarks.serving_peers import PEERS, missing

HTTP_PROCESS = re.compile(rb"serving\.http_process|serving_peers\.py\0empty")
"""Command lines of processes that answer HTTP, of several."""
WORDS = [f"w{number}" for number in range(2000)]
SIZES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}


def write_model(folder: Path, size: str) -> Path:
    """Write a random encoder whose tokens are words."""
    import torch
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers, processors

    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.auto import head_named
    from flodl_hf.tokenization.tokenizer import Tokenizer

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*specials, *WORDS])}
    inner = Inner(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.add_special_tokens(specials)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    settings |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}  # what other libraries ask for
    settings |= dict(zip(names, specials, strict=True))
    torch.manual_seed(0)
    config = ModelConfig.for_model(
        "bert", vocab_size=len(vocabulary), max_position_embeddings=512, type_vocab_size=2, **SIZES[size]
    )
    model = head_named("base").model.from_config(config)
    model._mark_untrained(())
    model.tokenizer = Tokenizer.from_files(
        {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()},
        folder="made here",
    )
    return model.save_pretrained(folder / "model")


def text_of(draw: random.Random, least: int, most: int) -> str:
    """Return some words; short ones are as many as long ones on a scale of ratios."""
    count = round(least * (most / least) ** draw.random())
    return " ".join(draw.choices(WORDS, k=count))


# ---- measurements --------------------------------------------------------------------------------------


PROGRAM = """
import json, sys
from flodl_hf.serving import serve
folder, given = json.loads(sys.argv[1])
serve(f"model={folder}", here=lambda url: print(url, flush=True), **given)
"""


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own, which prints its address; give that and the process."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read()[-4000:]}")
            yield url, process.pid
        finally:
            process.terminate()


@contextmanager
def server(folder: Path, given: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Run ours; give its address and its processes."""
    with running([sys.executable, "-c", PROGRAM, json.dumps([str(folder), given])]) as (url, pid):
        yield url, below(pid)


def below(pid: int) -> list[int]:
    """Return a process and its children, where the system says so."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *(map(int, children.read_text().split()) if children.exists() else ())]


def memory(pids: list[int]) -> float:
    """Return the MiB that processes hold, where the system says so."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        except OSError:
            return 0.0
    return round(total / 2**20, 1)


@contextmanager
def memory_seen(pids: list[int], every_s: float) -> Iterator[list[float]]:
    """Give what processes hold now, and after each so many seconds for as long as this holds."""
    seen, done = [memory(pids)], Event()

    def look() -> None:
        while not done.wait(every_s):
            seen.append(memory(pids))

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def processor_s(pid: int) -> float:
    """Return the seconds that a process had of processors, where the system says so."""
    try:
        figures = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(figures[11]) + int(figures[12])) / os.sysconf("SC_CLK_TCK")


def answering(pids: list[int]) -> list[int]:
    """Return those of a server's processes that answer HTTP: the first, or several of its children."""
    found = []
    for pid in pids:
        try:
            if HTTP_PROCESS.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
                found.append(pid)
        except OSError:
            continue
    return found or pids[:1]


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


def drawn(args: argparse.Namespace, count: int, texts: int, span: tuple[int, int], model: Any = None) -> Asked:
    """Return requests, with the right answers of a model where one is given."""
    draw = random.Random(5)
    rows = [[text_of(draw, *span) for _ in range(texts)] for _ in range(count)]
    vectors = None if model is None else model.embed([text for row in rows for text in row]).numpy()
    return Asked(rows, args.place, vectors)


def many(args: argparse.Namespace) -> int:
    """Return how many texts a request has that keeps a device busy."""
    return 64 if args.size == "base" and args.device != "cpu" else 8


def capacity(url: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return what the server does of requests that keep a device busy."""
    return told(loaded(url, args, 4 * args.processes, drawn(args, 64, many(args), (16, 480)), None, seconds), seconds)


def throughput(url: str, model: Any, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    span = (16, 480)
    before = local_rate(model, span, seconds)
    result = capacity(url, args, seconds)
    after = local_rate(model, span, seconds)
    best = max(before, after)
    return {**result, "embed_tokens_per_s": round(best), "share": round(result["tokens_per_s"] / best, 3)}


def peers(ours: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same clients at each server in turns, twice; answers of all are compared with ours in exact arithmetic."""
    from flodl_hf.heads.auto import load

    exact: Any = load(folder, device=args.device).runtime(precision="fp32", progress=False)
    asked = drawn(args, 64, many(args), (16, 480), exact)
    dtype = {None: "float32", "exact": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        urls = {"ours": ours}
        for name in PEERS:
            if (why := missing(name, args.device)) is not None:
                found[name] = {"left_out": why}
                continue
            program = str(Path(__file__).with_name("serving_peers.py"))
            command = [sys.executable, program, name, str(folder), args.device, dtype[args.precision]]
            try:
                urls[name], _ = stack.enter_context(running(command))
            except SystemExit as fault:
                found[name] = {"left_out": str(fault)[-300:]}
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
        for _ in range(2):
            for name, url in urls.items():
                seen = loaded(url, args, 4 * args.processes, asked, None, args.seconds)
                rounds[name].append(told(seen, args.seconds))
    for name, both in rounds.items():
        found[name] = max(both, key=lambda one: one["tokens_per_s"])
        found[name]["tokens_per_s_of_each_round"] = [one["tokens_per_s"] for one in both]
    for name in urls:
        found[name]["ours_times"] = round(found["ours"]["tokens_per_s"] / max(1, found[name]["tokens_per_s"]), 2)
    return found


def latency(url: str, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One text of 30 words at a time, in turns with the same call here: by asyncio's streams, and by a plain socket."""
    text = " ".join(WORDS[:30])
    request = request_of([text])
    host, port = url.removeprefix("http://").split(":")
    times: dict[str, list[float]] = {"http": [], "socket": [], "embed": []}

    def plain(held: socket.socket) -> None:
        held.sendall(request)
        answer = held.recv(1 << 16)
        while b"\r\n\r\n" not in answer:
            answer += held.recv(1 << 16)
        head, _, body = answer.partition(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) - len(body)
        while left > 0:
            left -= len(held.recv(left))

    async def measure() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        with socket.create_connection((host, int(port))) as held:
            held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for turn in range(args.calls + 50):
                began = time.perf_counter()
                await ask(reader, writer, request)
                asked = time.perf_counter()
                model.embed(text)
                here = time.perf_counter()
                plain(held)
                took = {"http": asked - began, "embed": here - asked, "socket": time.perf_counter() - here}
                if turn >= 50:
                    for name, seconds in took.items():
                        times[name].append(seconds)
        writer.close()

    asyncio.run(measure())

    def added(name: str) -> float:
        pairs = zip(times[name], times["embed"], strict=True)
        return round(statistics.median((over - here) * 1000 for over, here in pairs), 3)

    return {
        **{f"{name}_{share}": value for name, taken in times.items() for share, value in percentiles(taken).items()},
        "added_median_ms": added("http"),
        "added_socket_median_ms": added("socket"),
    }


def small(url: str, args: argparse.Namespace, pids: list[int]) -> dict[str, Any]:
    """Requests of one short text, as many as there can be, by at most 64 clients."""
    asked = drawn(args, 512, args.texts or 1, (8, 32))
    seconds, clients = min(args.seconds, 8.0), min(args.clients, 64)
    http = answering(pids)
    workers = [pid for pid in pids[1:] if pid not in http]
    loaded(url, args, clients, asked, None, 1.0)  # what is made once
    before = [sum(map(processor_s, some)) for some in (http, workers)]
    found = loaded(url, args, clients, asked, None, seconds)
    took = [sum(map(processor_s, some)) - start for some, start in zip((http, workers), before, strict=True)]
    requests = max(1, len(found.answered) + len(found.refused))
    return {
        **told(found, seconds),
        "clients": clients,
        "texts_of_a_request": args.texts or 1,
        "http_processes": len(http),
        "http_us_of_a_request": round(took[0] * 1e6 / requests, 1),
        "workers": len(workers),
        "workers_us_of_a_request": round(took[1] * 1e6 / requests, 1) if workers else 0.0,
    }


def beside_empty(url: str, args: argparse.Namespace, pids: list[int]) -> dict[str, Any]:
    """Requests of one short text at the server and at an empty route in turns, twice; the better round of each."""
    program = str(Path(__file__).with_name("serving_peers.py"))
    with running([sys.executable, program, "empty", str(len(answering(pids)))]) as (plain, pid):
        rounds = [(small(url, args, pids), small(plain, args, below(pid))) for _ in range(2)]
    ours, empty = (max(each, key=lambda one: one["requests_per_s"]) for each in zip(*rounds, strict=True))
    row = {
        name: empty[name] for name in ("requests_per_s", "answered_p50_ms", "http_processes", "http_us_of_a_request")
    }
    return {**ours, "empty": row, "share_of_empty": round(ours["requests_per_s"] / empty["requests_per_s"], 3)}


def mixed(url: str, model: Any, most: float, args: argparse.Namespace, share: float, pids: list[int]) -> dict[str, Any]:
    span = (8, 400)
    mean = drawn(args, 500, 4, span).mean / 4
    # Many small requests: by default so many texts in each that there are about a thousand a second.
    texts = args.texts or max(1, math.ceil(most * share / mean / 1000))
    asked = drawn(args, max(16, 2048 // texts), texts, span, model if share < 1 else None)
    rate = most * share / asked.mean
    # A client waits for its answer; so many of them ask at this rate however long answers take.
    clients = args.clients if share < 1 else min(4000, max(args.clients, round(rate * 2)))
    seconds = args.seconds if share < 1 else min(args.seconds, 20.0)
    http = answering(pids)
    took, began = sum(map(processor_s, http)), time.perf_counter()
    with memory_seen(pids, seconds / 8) as held:
        found = loaded(url, args, clients, asked, rate, seconds)
    took = sum(map(processor_s, http)) - took
    result = told(found, seconds)
    result |= {
        "seconds": seconds,
        "whole_s": round(time.perf_counter() - began, 1),
        "clients": clients,
        "texts_of_a_request": texts,
        "asked_per_s": round(rate, 1),
        "asked_tokens_per_s": round(most * share),
        "doors_us_of_a_request": round(took * 1e6 / max(1, len(found.answered) + len(found.refused)), 1),
        "memory_mib": [*held, memory(pids)],
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
    parser.add_argument("--workers", type=int, help="worker processes of the device")
    parser.add_argument("--http-processes", type=int, default=1, help="processes that answer HTTP")
    parser.add_argument("--texts", type=int, help="texts of a request in small, mixed and overload")
    parser.add_argument("--only", default="throughput,latency,mixed,overload")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import torch

    from flodl.devices import described, find_device
    from flodl_hf.heads.auto import load

    device = find_device(args.device)
    args.device = str(device)
    wanted = args.only.split(",")
    results: dict[str, Any] = {
        "device": described(device), "torch": torch.__version__, "python": platform.python_version(),
        "precision": args.precision, "size": args.size, "seconds": args.seconds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        args.place = Path(place)
        folder = write_model(args.place, args.size)
        given = {
            "devices": [str(device)], "precision": args.precision, "max_batch_tokens": args.max_batch_tokens,
            "workers": args.workers, "http_processes": args.http_processes, "port": 0,
        }  # fmt: skip
        model: Any = None
        if {"throughput", "latency", "mixed"} & set(wanted):
            model = load(folder, device=str(device)).runtime(precision=args.precision, progress=False)
        with server(folder, given) as (url, pids):

            def note(name: str, found: dict[str, Any]) -> None:
                results[name] = found
                print(name, json.dumps(found), flush=True)

            if "throughput" in wanted:
                note("throughput", throughput(url, model, args, min(args.seconds, 20.0)))
            elif {"mixed", "overload"} & set(wanted):
                note("throughput", capacity(url, args, min(args.seconds, 4.0)))
            if "latency" in wanted:
                note("latency", latency(url, model, args))
            if "small" in wanted:
                note("small", beside_empty(url, args, pids))
            for name, share in (("mixed", 2 / 3), ("overload", 2.0)):
                if name in wanted:
                    most = results["throughput"]["tokens_per_s"]
                    note(name, mixed(url, model, most, args, share, pids))
            if "peers" in wanted:
                note("peers", peers(url, folder, args))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))
    print(json.dumps({name: results[name] for name in ("device", "torch", "python", "precision", "size")}))


if __name__ == "__main__":
    main()
