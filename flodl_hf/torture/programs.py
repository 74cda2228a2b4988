"""Programs for the stack machine of Python's pickles, written instruction by instruction.

Those that name a function which would run code, in every place where a program may name one; and those that build a
table of tensors in which one tensor is not what it says.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from flodl_hf.torture.checkpoints import checkpoint, tensors_in
from flodl_hf.torture.watch import CANARY

__all__ = ["GADGETS", "HEAD", "LIES", "WAYS", "lying", "program", "weights", "written"]

HEAD = "sequence_classification"


@cache
def weights() -> dict[str, Tensor]:
    """Return the weights by stored name."""
    return tensors_in(checkpoint("bert", HEAD, 1)["model.safetensors"])


_TOUCH = f"__import__('pathlib').Path({CANARY!r}).touch()"
GADGETS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("os", "system", (f"touch {CANARY}",)), ("posix", "system", (f"touch {CANARY}",)), ("nt", "system", ("x",)),
    ("builtins", "eval", (_TOUCH,)), ("__builtin__", "eval", (_TOUCH,)), ("builtins", "exec", (_TOUCH,)),
    ("builtins", "compile", (_TOUCH, "x", "exec")), ("builtins", "__import__", ("antigravity",)),
    ("builtins", "getattr", ("x", "upper")), ("builtins", "open", (CANARY, "w")), ("io", "open", (CANARY, "w")),
    ("subprocess", "Popen", (["touch", CANARY],)), ("subprocess", "call", (["touch", CANARY],)),
    ("subprocess", "check_output", (["touch", CANARY],)), ("subprocess", "getoutput", (f"touch {CANARY}",)),
    ("os", "popen", (f"touch {CANARY}",)), ("os", "spawnlp", (0, "touch", "touch", CANARY)), ("os", "mkdir",
    (CANARY,)),
    ("pathlib", "Path.touch", ()), ("pty", "spawn", (["touch", CANARY],)), ("runpy", "run_path", ("evil.py",)),
    ("runpy", "_run_code", (_TOUCH, {})), ("code", "InteractiveInterpreter", ()), ("timeit", "timeit", (_TOUCH,)),
    ("importlib", "import_module", ("antigravity",)), ("importlib", "reload", ("os",)), ("shutil", "copyfile",
    ("a", "b")),
    ("torch", "load", ("evil",)), ("torch.hub", "load", ("a/b", "c")), ("torch.jit", "load", ("evil",)),
    ("torch.utils.cpp_extension", "load", ("x", ["x.cpp"])), ("torch._utils", "_rebuild_device_tensor_from_numpy",
    ()),
    ("numpy", "load", ("evil.npy",)), ("numpy.testing._private.utils", "runstring", (_TOUCH, {})),
    ("pip._internal", "main", (["--version"],)), ("webbrowser", "open", ("http://127.0.0.1:9/",)),
    ("ctypes", "CDLL", ("libc.so.6",)), ("operator", "attrgetter", ("__class__",)), ("functools", "partial", ("x",)),
    ("types", "FunctionType", ()), ("marshal", "loads", (b"x",)), ("pickle", "loads", (b"x",)), ("bdb", "Bdb", ()),
    ("asyncio.unix_events", "_UnixSubprocessTransport", ()), ("logging.config", "listen", ()), ("sys", "exit", (3,)),
    ("torch", "nonsense", ()), ("collections", "OrderedDict.__class__", ()), ("torch.storage", "_load_from_bytes",
    (b"x",)),
)  # fmt: skip
"""Functions that files name to run code, and some that are only near those that are allowed."""

WAYS = (
    "reduce",
    "obj",
    "inst",
    "newobj",
    "newobj_ex",
    "build",
    "stack-global",
    "as-value",
    "as-key",
    "as-name",
    "persistent",
)


def _text(word: str) -> bytes:
    raw = word.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _arguments(values: tuple[Any, ...]) -> bytes:
    # Python's own pickler writes these plain values; its frame and stop are taken off.
    return pickle.dumps(values, protocol=2)[2:-1]


def program(way: str, protocol: int, gadget: tuple[str, str, tuple[Any, ...]]) -> bytes:
    """Return a program that calls a function in one of `WAYS`."""
    module, name, values = gadget
    start = b"\x80" + bytes([protocol]) if protocol >= 2 else b""
    found = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    calls = {
        "reduce": found + _arguments(values) + b"R",
        "obj": b"(" + found + _arguments(values) + b"o",
        "inst": b"(i" + module.encode() + b"\n" + name.encode() + b"\n",
        "newobj": found + _arguments(values) + b"\x81",
        "newobj_ex": found + _arguments(values) + b"}\x92",
        "build": found + b")R" + b"}" + _text("x") + _arguments(values) + b"s" + b"b",
        "stack-global": _text(module) + _text(name) + b"\x93" + _arguments(values) + b"R",
        "as-value": b"}" + _text("w") + found + _arguments(values) + b"R" + b"s",
        "as-key": b"}" + found + _arguments(values) + b"R" + _text("w") + b"s",
        "as-name": b"}" + _text("w") + found + b"s",
        "persistent": found + _arguments(values) + b"R" + b"Q",
    }
    return start + calls[way] + b"."


LIES = (
    "shape", "stride", "offset", "count", "kind", "key", "device", "dims", "hooks", "extra", "expand", "negative",
    "swap", "cycle",
    "same", "name", "nested", "number", "list", "none", "parameter", "view", "big", "bool", "float",
)  # fmt: skip


class _Global:
    """A function or class by name, for `_Writer`."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Call:
    def __init__(self, function: _Global, values: tuple[Any, ...]) -> None:
        self.function, self.values = function, values


class _Persistent:
    def __init__(self, value: Any) -> None:
        self.value = value


def written(value: Any) -> bytes:
    """Return the instructions that build a value of plain parts, `_Call`, `_Global` and `_Persistent`."""
    if isinstance(value, _Global):
        return b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
    if isinstance(value, _Call):
        return written(value.function) + written(value.values) + b"R"
    if isinstance(value, _Persistent):
        return written(value.value) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(written, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(written, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(written(part) for pair in value.items() for part in pair) + b"u"
    if isinstance(value, str):
        return _text(value)
    return pickle.dumps(value, protocol=2)[2:-1]


def lying(what: Mapping[str, Any]) -> tuple[bytes, dict[str, bytes]]:
    """Return a program and the storages of an archive whose one tensor is not what it says."""
    random, storages = Random(what["draw"]), {}
    table: dict[Any, Any] = {}
    for key, (name, tensor) in enumerate(weights().items()):
        storages[str(key)] = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b""
        table[name] = {
            "kind": "FloatStorage", "key": str(key), "device": "cpu", "count": tensor.numel(), "offset": 0,
            "shape": tuple(tensor.shape), "stride": tuple(tensor.stride()), "more": (False,
            _Call(_Global("collections", "OrderedDict"), ())),
        }  # fmt: skip
    name, how = what["name"], what["lie"]
    entry = table[name]
    many = random.choice((2**31, 2**62, 2**63, 2**64, 10**30))
    changes: dict[str, dict[str, Any]] = {
        "shape": {"shape": random.choice(((*entry["shape"], 2), (many,), entry["shape"][::-1], (0,), (1,), "x",
        None))},
        "stride": {"stride": random.choice(((many,) * len(entry["shape"]), (1,) * len(entry["shape"]), (), None))},
        "offset": {"offset": random.choice((1, many, -1, entry["count"], 0.5, "x"))},
        "count": {"count": random.choice((entry["count"] + 1, entry["count"] - 1, many, 0, -1, 1.5, "x", None,
        True))},
        "kind": {"kind": random.choice(("DoubleStorage", "HalfStorage", "LongStorage", "BoolStorage",
        "IntStorage", "EvilStorage", "Tensor"))},
        "key": {"key": random.choice(("999", "../x", "", 0, None, "0", "\x1b[2J", "x" * 10_000))},
        "device": {"device": random.choice(("cuda:0", "meta", "evil", None, 3))},
        "dims": {"shape": (1,) * random.choice((9, 65, 10_000)), "stride": (1,) * random.choice((9, 65, 10_000))},
        "hooks": {"more": (False, [1, 2])}, "extra": {"more": (True, {}, {"meta": 1}, 5)},
        "expand": {"shape": (10**6, 10**6), "stride": (0, 0)},
        "negative": {"shape": tuple(-n for n in entry["shape"])},
        "big": {"count": 2**40}, "bool": {"offset": True}, "float": {"shape": tuple(map(float, entry["shape"]))},
    }  # fmt: skip
    entry.update(changes.get(how, {}))

    def tensor_of(e: Mapping[str, Any]) -> Any:
        storage = ("storage", _Global("torch", e["kind"]), e["key"], e["device"], e["count"])
        storage = (*storage, ("0", 0, 1)) if how == "view" and e is entry else storage
        return _Call(
            _Global("torch._utils", "_rebuild_tensor_v2"),
            (_Persistent(storage), e["offset"], e["shape"], e["stride"], *e["more"]),
        )

    built: dict[Any, Any] = {key: tensor_of(e) for key, e in table.items()}
    if how == "swap":
        other = random.choice([key for key in built if key != name])
        built[name], built[other] = built[other], built[name]
    elif how == "same":
        built[name] = built[random.choice(list(built))]
    elif how == "name":
        built[random.choice((5, "", "\x1b[2J", "x" * 5000, ("a",), None))] = built.pop(name)
    elif how in ("nested", "number", "list", "none"):
        built[name] = {"nested": {"a": built[name]}, "number": 3, "list": [built[name]], "none": None}[how]
    elif how == "parameter":
        built[name] = _Call(
            _Global("torch._utils", "_rebuild_parameter"),
            (built[name], random.choice((True, 3, "x")), random.choice(({}, [1]))),
        )
    raw = b"\x80\x02" + written(built)
    if how == "cycle":
        raw = b"\x80\x02}q\x00" + _text("w") + b"h\x00s"
    return raw + b".", storages
