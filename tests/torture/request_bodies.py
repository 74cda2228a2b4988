"""Invalid request bodies: fields, options, bytes of JSON, texts.

The expected response of each is computed from the route's table of fields and from Python's JSON parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.torture.case import Verdict, right, silent, stated
from tests.torture.damage import damaged_bytes, spelled
from tests.torture.replies import refused
from tests.torture.served import BODIES, CLOSE, Server, same, spoken
from tests.torture.wire import Answer, post

__all__ = ["WHOLE", "asked"]


class _NoJsonError(ValueError):
    pass


def asked(server: Server, kind: str, what: Mapping[str, Any]) -> Verdict:
    """Send a body and judge what comes back.

    Args:
        server: the server.
        kind: of the case.
        what: its damage.
    """
    return _KINDS[kind](server, what)


def _sent(server: Server, path: str, data: bytes) -> Answer | None:
    with server.wire(60.0) as wire:
        wire.send(post(path, data))
        return wire.answer()


def _field(server: Server, what: Mapping[str, Any]) -> Verdict:
    from flodl_hf.serving.responses import RefusedError
    from flodl_hf.serving.routes.route import ROUTES, checked

    path, name = what["path"], what["field"]
    field = next(field for route in ROUTES if route.path == path for field in route.fields if field.name == name)
    data = spelled({**BODIES[path], name: what["value"]}).encode()
    answer = _sent(server, path, data)
    try:
        value = _parsed(data)[name]
    except _NoJsonError:
        return refused(answer)
    if value is None:
        return refused(answer, key=name) if field.required or name == "model" else _right(server, path, answer)
    try:
        checked(field.kind, value, name)
    except RefusedError:
        return refused(answer, key=name)
    return _either(server, path, answer)


def _option(server: Server, what: Mapping[str, Any]) -> Verdict:
    data = spelled(what["body"]).encode()
    answer = _sent(server, what["path"], data)
    try:
        _parsed(data)
    except _NoJsonError:
        return refused(answer)
    return stated() if answer is not None and answer.status == 200 else refused(answer)


def _missing(server: Server, what: Mapping[str, Any]) -> Verdict:
    from flodl_hf.serving.routes.route import ROUTES

    path, name = what["path"], what["field"]
    body = dict(BODIES[path])
    value = body.pop(name)
    if what["way"] == "null":
        body[name] = None
    elif what["way"] == "other case":
        body[name.upper()] = value
    answer = _sent(server, path, json.dumps(body).encode())
    if what["way"] == "other case":
        return refused(answer)
    (route,) = (route for route in ROUTES if route.path == path)
    needed = {field.name for field in route.fields if field.required}
    # Without the name of a model the only model with such a head answers; of several models one has to be named.
    return refused(answer, key=name) if name in needed else _either(server, path, answer)


def _unknown(server: Server, what: Mapping[str, Any]) -> Verdict:
    path, name = what["path"], what["field"]
    return refused(_sent(server, path, json.dumps({**BODIES[path], name: 1}).encode()), key=name)


def _json(server: Server, what: Mapping[str, Any]) -> Verdict:
    path = what["path"]
    clean = json.dumps(BODIES[path]).encode()
    place = {**what, "at": what.get("at", 0) % (8 * len(clean) if what["how"] == "flip" else len(clean))}
    return _read(server, path, damaged_bytes(clean, place))


def _whole(server: Server, what: Mapping[str, Any]) -> Verdict:
    path = what["path"]
    return _read(server, path, WHOLE[what["way"]](dict(BODIES[path])))


def _read(server: Server, path: str, data: bytes) -> Verdict:
    answer = _sent(server, path, data)
    try:
        found = _parsed(data)
    except _NoJsonError:
        return refused(answer)
    return _right(server, path, answer) if found == BODIES[path] else _either(server, path, answer)


def _right(server: Server, path: str, answer: Answer | None) -> Verdict:
    if answer is None or answer.status != 200:
        found = refused(answer)
        return silent(f"refused, though nothing is wrong: {found.text}") if found.good else found
    return right() if spoken(answer) == server.right[path] else silent("another answer")


def _either(server: Server, path: str, answer: Answer | None) -> Verdict:
    if answer is not None and answer.status == 200:
        return right() if spoken(answer) == server.right[path] else stated()
    return refused(answer)


def _parsed(data: bytes) -> Any:
    """Return the value of JSON as its standard has it.

    Raises:
        _NoJsonError: it is none.
    """

    def none(word: str) -> Any:
        raise _NoJsonError(word)

    try:
        found = json.loads(data.decode("utf-8"), parse_constant=none, parse_int=_finite)
        # Half a pair is no text, and a number beyond what a double holds is none that can be meant.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError) as fault:
        raise _NoJsonError(str(fault)) from None
    return found


def _finite(digits: str) -> int | float:
    return int(digits) if len(digits) < 300 else float(digits)


def _with(body: dict[str, Any], value: str) -> bytes:
    """Return a body whose texts are something else, as it stands."""
    name = _of_texts(body)
    rest = {key: held for key, held in body.items() if key != name}
    return (json.dumps(rest)[:-1] + (", " if rest else "") + f"{json.dumps(name)}: {value}}}").encode()


def _of_texts(body: dict[str, Any]) -> str:
    return next(name for name in ("inputs", "input", "texts", "documents", "text_2", "ids") if name in body)


WHOLE: Mapping[str, Callable[[dict[str, Any]], bytes]] = {
    "deep lists": lambda body: b"[" * 100_000,
    "deep objects": lambda body: b'{"inputs":' * 50_000 + b"1" + b"}" * 50_000,
    "deep in a field": lambda body: _with(body, "[" * 900 + "]" * 900),
    "utf-16": lambda body: json.dumps(body).encode("utf-16"),
    "utf-32": lambda body: json.dumps(body).encode("utf-32"),
    "mark": lambda body: b"\xef\xbb\xbf" + json.dumps(body).encode(),
    "latin": lambda body: _with(body, '"caf\u00e9"').decode().encode("latin-1"),
    "half a pair": lambda body: _with(body, '["a \\ud800 b"]'),
    "nul": lambda body: _with(body, '["the \\u0000 cat"]'),
    "twice": lambda body: b"{" + json.dumps(body).encode()[1:-1] + b", " + json.dumps(body).encode()[1:],
    "infinity": lambda body: _with(body, "[Infinity, NaN]"),
    "large number": lambda body: _with(body, "[" + "9" * 5_000 + "]"),
    "comment": lambda body: b"// a request\n" + json.dumps(body).encode(),
    "single quotes": lambda body: json.dumps(body).replace('"', "'").encode(),
    "many keys": lambda body: json.dumps({**{f"k{i}": i for i in range(50_000)}, **body}).encode(),
    "long key": lambda body: json.dumps({"k" * 500_000: 1, **body}).encode(),
    "spaces": lambda body: b" " * 1_000_000 + json.dumps(body).encode() + b"\n" * 100_000,
    "two values": lambda body: json.dumps(body).encode() * 2,
    "empty": lambda body: b"",
    "null": lambda body: b"null",
    "a text": lambda body: b'"inputs"',
    "a list": lambda body: json.dumps([body]).encode(),
    "million nulls": lambda body: _with(body, "[" + "null," * 700_000 + "null]"),
    "million numbers": lambda body: _with(body, "[" + "1," * 1_000_000 + "1]"),
    "many texts": lambda body: _with(body, "[" + '"a",' * 5_000 + '"a"]'),
    "long text": lambda body: _with(body, '["' + "a " * 1_000_000 + '"]'),
    "empty lists": lambda body: _with(body, "[" + "[]," * 100_000 + "[]]"),
    "overlong": lambda body: _with(body, '["a b"]').replace(b"a b", b"a\xc0\xafb"),
    "beyond unicode": lambda body: _with(body, '["a b"]').replace(b"a b", b"a\xf5\x80\x80\x80b"),
}  # fmt: skip
"""Bodies as a whole, made of a door's own."""


def _texts(server: Server, what: Mapping[str, Any]) -> Verdict:
    path, text = what["path"], what["text"]
    name = BODIES[path]["model"]
    answer = _sent(server, path, json.dumps({"model": name, "inputs": [text]}).encode())
    try:
        text.encode()
    except UnicodeEncodeError:
        return refused(answer)
    if answer is None or answer.status != 200:
        return refused(answer)
    model, found = server.models[name], answer.json
    if path == "/tokenize":
        expected: Any = [list(model.tokenizer(text)["input_ids"])]
        found = [[one["id"] for one in row] for row in found]
    elif path == "/embed":
        expected = model.embed([text]).tolist()
    else:
        expected = [one.to_rows() for one in model.predict([text])]
        found = [row["labels" if path == "/v1/classify" else "entities"] for row in found["results"]]
    return right() if same(found, expected, CLOSE) else silent("another answer than the model's own")


_KINDS: Mapping[str, Callable[[Server, Mapping[str, Any]], Verdict]] = {
    "field": _field, "option": _option, "missing": _missing, "unknown": _unknown, "json": _json, "whole": _whole,
    "texts": _texts,
}  # fmt: skip
