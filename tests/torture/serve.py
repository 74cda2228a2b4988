"""Suite ``serve``: request bodies with wrong fields, wrong values, damaged JSON and unusual texts.

A server of every head runs in a process of its own. Good is the right answer, or a clear one of the client's own fault
(4xx, with words that say what was expected), within bounded time and memory; or, where there is no request to answer,
that the connection is closed. After every case a plain request at another door has to be answered as before, to the
bit, which is what the model itself gives.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.torture.case import Case, Fault, Grade, Kind, Verdict, dealt, silent
from tests.torture.damage import BYTE_DAMAGE, NUMBERS, RAW, VALUES
from tests.torture.request_bodies import WHOLE, asked
from tests.torture.served import BODIES, Server, files_ready, lacking, spoken
from tests.torture.texts import PIECES
from tests.torture.wire import post

__all__ = ["KINDS", "NAME", "ROUNDS", "cases", "lacking", "prepare", "run"]

NAME = "serve"
ROUNDS = 1  # of blocks for each worker: every one of them starts a server
PATHS = tuple(BODIES)
WRONG: tuple[Any, ...] = (
    *VALUES, *(RAW + number for number in NUMBERS), ["x", 1], [["x", "y", "z"]], [None], [[1, -1]], [[2**31]], [1.5],
    [True], {"question": 1}, {"source_sentence": "x"}, {"source_sentence": 1, "sentences": ["x"]}, [""], " ", "nul\0",
    ["x"] * 600, [[1] * 60], "mean", {"x": 1e308}, 1e-320, [[]], [{}], {"": ""}, "{}", "a" * 200_000, [["x"] * 2] * 300,
)  # fmt: skip
"""What a field is given: JSON types, in all sizes, of which most are none of the field's."""


def _door(number: int) -> str:
    return PATHS[number % len(PATHS)]


def _field(random: Random, number: int) -> Fault:
    """Another value in one field of one door; fields are those of the doors' table."""
    places = [(path, name) for path in PATHS for name in _fields(path)]
    path, name = places[number % len(places)]
    value = random.choice(WRONG)
    return Fault({"path": path, "field": name, "value": value}, (), (name,))


def _fields(path: str) -> list[str]:
    from flodl_hf.serving.routes.route import ROUTES

    return [field.name for route in ROUTES if route.path == path for field in route.fields]


def _option(random: Random, number: int) -> Fault:
    """Options within a field: those of the Hub's interface and of likenesses."""
    names = (
        "top_k", "function_to_apply", "candidate_labels", "hypothesis_template", "multi_label", "aggregation_strategy",
        "ignore_labels", "max_answer_len", "handle_impossible_answer", "targets", "truncate", "normalize", "unknown",
    )  # fmt: skip
    model, inputs = (
        ("classes", "the cat"), ("nli", "the cat"), ("ner", "the cat"), ("mlm", "the [MASK]"), ("embed", "the cat"),
        ("qa", {"question": "who?", "context": "the cat sat."}),
    )[random.randrange(6)]  # fmt: skip
    given = {names[number % len(names)]: random.choice(WRONG)}
    if model == "nli":
        given = {"candidate_labels": ["good", "bad"], **given}
    return Fault({"path": "/", "body": {"model": model, "inputs": inputs, "parameters": given}})


def _missing(_random: Random, number: int) -> Fault:
    path = _door(number)
    name = list(BODIES[path])[number // len(PATHS) % len(BODIES[path])]
    return Fault({"path": path, "field": name, "way": ("none", "null", "other case")[number % 3]})


def _unknown(random: Random, number: int) -> Fault:
    name = random.choice(("input_texts", "", "\x1b[2J", "a" * 5000, "modle", "__class__", "inputs ", "\u202e"))
    return Fault({"path": _door(number), "field": name})


def _json(random: Random, number: int) -> Fault:
    """Bytes of the body that were flipped, cut or put in."""
    path = _door(number)
    size = len(json.dumps(BODIES[path]))
    way = ("flip", "cut", "put", "more", "put")[number // len(PATHS) % 5]
    return Fault({"path": path, **BYTE_DAMAGE[way](random, random.randrange(10**6), size)})


def _whole(random: Random, number: int) -> Fault:
    return Fault({"path": random.choice(PATHS), "way": tuple(WHOLE)[number % len(WHOLE)]})


def _texts(random: Random, number: int) -> Fault:
    pieces = [random.choice(PIECES) for _ in range(random.choice((1, 1, 2, 3)))]
    text = random.choice(("", " ")).join(pieces)[:30_000]
    return Fault({"path": ("/v1/classify", "/embed", "/v1/entities", "/tokenize")[number % 4], "text": text})


_LIMITS = {"cpu_s": 30.0, "wall_s": 300.0, "memory_mb": 600}
KINDS = (
    Kind("field", 24, _field, _LIMITS),
    Kind("option", 6, _option, _LIMITS),
    Kind("missing", 3, _missing, _LIMITS),
    Kind("unknown", 2, _unknown, _LIMITS),
    Kind("json", 14, _json, _LIMITS),
    Kind("whole", 6, _whole, _LIMITS),
    Kind("texts", 10, _texts, _LIMITS),
)

cases = partial(dealt, NAME, KINDS)


def prepare() -> None:
    """Make the checkpoints before workers are forked."""
    files_ready()


# --- judging ----------------------------------------------------------------------------------------------------------

_kept: dict[str, Server] = {}


def _server(root: Path) -> Server:
    """Return this process's server."""
    if "server" not in _kept:
        _kept["server"] = Server(root / "served")
    return _kept["server"]


def run(case: Case, folder: Path) -> Verdict:
    """Do what the case says to the server, and ask it something plain."""
    server = _server(folder.parent)
    started, before = time.process_time(), server.memory()
    try:
        verdict = asked(server, case.kind, case.what)
    except TimeoutError:
        verdict = Verdict(Grade.HANG, "no answer, and the connection stays open")
    if verdict.good:
        verdict = _afterwards(server, case.number) or verdict
    if not verdict.good and verdict.grade not in (Grade.BARE, Grade.UNNAMED, Grade.SILENT):
        server.close()
        del _kept["server"]
        return verdict.measured(time.process_time() - started, 0.0)
    now = server.memory()
    return verdict.measured(time.process_time() - started, max(now[name] - before[name] for name in now))


def _afterwards(server: Server, number: int) -> Verdict | None:
    """Return what is wrong with the server after a case, or None."""
    path = _door(number)
    try:
        with server.wire() as wire:
            wire.send(post(path, json.dumps(BODIES[path]).encode()))
            answer = wire.answer()
    except TimeoutError:
        return Verdict(Grade.HANG, f"a plain request at {path} is not answered afterwards")
    except OSError as fault:
        return Verdict(Grade.CRASH, f"no connection afterwards: {fault}")
    if not server.alive:
        return Verdict(Grade.CRASH, "the server ended")
    if answer is None or answer.status != 200:
        return Verdict(Grade.PARTIAL, f"a plain request at {path} gets {answer} afterwards")
    if spoken(answer) != server.right[path]:
        return silent(f"a plain request at {path} gets another answer afterwards")
    grown = server.grown()
    return Verdict(Grade.MEMORY, grown) if grown else None
