"""Clients of `benchmarks.serving`: processes with plain sockets, what each asks, and what they see.

Requests come from a file, where their right answers may stand too: those are compared with what comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Asked", "Found", "Load", "ask", "loaded", "percentiles", "request_of", "told"]

# A server gives a request up after a minute; a client that has no answer by then has lost it, and says so.
ANSWER_S = 90.0


@dataclass(frozen=True)
class Asked:
    """Requests of as many texts each, in a file, and the vectors that are right for them.

    Args:
        texts: of each request.
        place: a folder for the file.
        vectors: ``(requests * texts, features)``, or None where answers are not compared.
    """

    texts: Sequence[Sequence[str]]
    place: Path
    vectors: np.ndarray | None = None

    def written(self) -> str:
        """Write the file and return its path."""
        path = self.place / f"asked-{len(self.texts)}-{len(self.texts[0])}.npz"
        held: dict[str, Any] = {"texts": np.frombuffer(json.dumps(self.texts).encode(), np.uint8)}
        if self.vectors is not None:
            held["vectors"] = self.vectors.reshape(len(self.texts), -1, self.vectors.shape[-1])
        np.savez(path, **held)
        return str(path)

    @property
    def mean(self) -> float:
        """Tokens of a request: words, and two specials a text."""
        return sum(len(text.split()) + 2 for row in self.texts for text in row) / len(self.texts)


@dataclass
class Load:
    """What one process of clients does."""

    host: str
    port: int
    clients: int
    seconds: float
    asked: str
    rate: float | None
    seed: int


@dataclass
class Found:
    """What it saw."""

    tokens: int = 0
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    compared: int = 0
    largest: float = 0.0
    misplaced: int = 0
    comparing_s: float = 0.0


def request_of(texts: Sequence[str]) -> bytes:
    """Return a request that asks for vectors as an array."""
    body = json.dumps({"inputs": texts}).encode()
    head = "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\naccept: application/x-npy\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, int, bytes]:
    """Return the status, how many tokens were computed, and the answer."""
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), int(headers.get("x-compute-tokens", 0)), body


def compare(found: Found, body: bytes, right: np.ndarray) -> None:
    """Note how far an answer is from the right one, and whether each of its vectors is nearest to its own text's."""
    began = time.perf_counter()
    begin = 10 + int.from_bytes(body[8:10], "little")  # behind the head of a .npy file
    vectors = np.frombuffer(body, np.float32, offset=begin).reshape(right.shape)
    found.compared += len(right)
    found.largest = max(found.largest, float(np.abs(vectors - right).max()))
    found.misplaced += int(((vectors @ right.T).argmax(1) != np.arange(len(right))).sum())
    found.comparing_s += time.perf_counter() - began


async def client(
    load: Load, draw: random.Random, requests: list[bytes], right: Any, found: Found, until: float
) -> None:
    reader, writer = await asyncio.open_connection(load.host, load.port)
    if load.rate:
        await asyncio.sleep(draw.random() * load.clients / load.rate)
    try:
        while (now := time.perf_counter()) < until:
            place = draw.randrange(len(requests))
            if reader.at_eof():
                # A server closes a connection that asks nothing for a while; a client opens another.
                writer.close()
                reader, writer = await asyncio.open_connection(load.host, load.port)
            async with asyncio.timeout(ANSWER_S):
                status, tokens, body = await ask(reader, writer, requests[place])
            took = time.perf_counter() - now
            if status == 200:
                found.answered.append(took)
                found.tokens += tokens
                if right is not None:
                    compare(found, body, right[place])
            elif status == 429:
                found.refused.append(took)
                if not load.rate:
                    await asyncio.sleep(1.0)  # what `Retry-After` says at least
            else:
                found.faults.append(str(status))
            if load.rate:
                # Each client asks at its own times, whatever the others wait for.
                next_s = now + max(took, draw.expovariate(load.rate / load.clients))
                await asyncio.sleep(min(next_s, until) - time.perf_counter())
    except (OSError, asyncio.IncompleteReadError) as fault:
        found.faults.append(type(fault).__name__)
    finally:
        writer.close()


async def clients(load: Load) -> Found:
    found = Found()
    held = np.load(load.asked)
    requests = [request_of(texts) for texts in json.loads(held["texts"].tobytes())]
    right = held.get("vectors", None)
    draws = [random.Random(load.seed * 10_007 + number) for number in range(load.clients)]
    until = time.perf_counter() + load.seconds
    await asyncio.gather(*(client(load, draw, requests, right, found, until) for draw in draws))
    return found


def run_clients(load: Load) -> Found:
    return asyncio.run(clients(load))


def loaded(url: str, args: argparse.Namespace, clients: int, asked: Asked, rate: float | None, seconds: float) -> Found:
    """Return what all processes of clients saw.

    Args:
        url: the server.
        args: how many processes there are.
        clients: how many clients they are together.
        asked: what they ask.
        rate: requests a second of all; None asks as soon as there is an answer.
        seconds: for how long.
    """
    host, port = url.removeprefix("http://").split(":")
    count = min(args.processes, clients)
    each = None if rate is None else rate / count
    path = asked.written()
    shares = [clients // count + (number < clients % count) for number in range(count)]
    loads = [Load(host, int(port), share, seconds, path, each, seed) for seed, share in enumerate(shares)]
    whole = Found()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for part in pool.map(run_clients, loads):
            whole.tokens += part.tokens
            whole.answered += part.answered
            whole.refused += part.refused
            whole.faults += part.faults
            whole.compared += part.compared
            whole.largest = max(whole.largest, part.largest)
            whole.misplaced += part.misplaced
            whole.comparing_s += part.comparing_s
    return whole


def told(found: Found, seconds: float) -> dict[str, Any]:
    """Return what was seen as figures."""
    said: dict[str, Any] = {
        "tokens_per_s": round(found.tokens / seconds),
        "requests_per_s": round(len(found.answered) / seconds, 1),
        "answered": len(found.answered),
        "refused": len(found.refused),
        "faults": len(found.faults),
        "kinds_of_faults": sorted(set(found.faults)),
        **{f"answered_{name}": value for name, value in percentiles(found.answered).items()},
    }
    if found.refused:
        said |= {f"refused_{name}": value for name, value in percentiles(found.refused).items()}
    if found.compared:
        said |= {
            "vectors_compared": found.compared,
            "largest_difference": round(found.largest, 8),
            "nearest_to_another_text": found.misplaced,
            "comparing_us_of_a_request": round(found.comparing_s * 1e6 / max(1, len(found.answered)), 1),
        }
    return said


def percentiles(values: list[float]) -> dict[str, float]:
    """Return median and others, in milliseconds."""
    ordered = sorted(values) or [0.0]
    return {
        f"p{share}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] * 1000, 2)
        for share in (50, 90, 99)
    }
