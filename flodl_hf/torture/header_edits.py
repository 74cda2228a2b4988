"""Edits of a safetensors header: names, types, shapes, places and the text itself, each as somebody might write it.

An edit changes the header, an object, for one of its tensors; what it returns, if anything, stands there instead: an
object, or the very text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from flodl_hf.torture.damage import ESCAPES, RAW

__all__ = ["EDITS"]

Edit = Callable[[dict[str, Any], str, Random], Any]
EDITS: dict[str, Edit] = {}
"""The edits by name."""


def _edit(function: Edit) -> Edit:
    EDITS[function.__name__.removeprefix("_")] = function
    return function


@_edit
def _rename(header: dict[str, Any], name: str, random: Random) -> Any:
    new = random.choice(
        [name + "x", name[1:], name.upper(), "evil." + name, name.replace("weight", "bias"), "", "_", " "]
    )
    return {new if key == name else key: value for key, value in header.items()}


@_edit
def _name_escape(header: dict[str, Any], name: str, random: Random) -> Any:
    new = random.choice(ESCAPES)
    return {new if key == name else key: value for key, value in header.items()}


@_edit
def _name_long(header: dict[str, Any], name: str, random: Random) -> Any:
    new = "x" * random.choice((1025, 100_000))
    return {new if key == name else key: value for key, value in header.items()}


@_edit
def _missing(header: dict[str, Any], name: str, _random: Random) -> None:
    """Take a tensor out, its bytes too, so that the file is a good one of another model."""
    start, end = header[name]["data_offsets"]
    del header[name]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [at - (end - start) for at in entry["data_offsets"]]
    header["\0cut"] = [start, end]


@_edit
def _twice(header: dict[str, Any], name: str, random: Random) -> str:
    """The same name again, for the bytes of another tensor of its size."""
    entry = header[name]
    others = [k for k, v in header.items() if k not in ("__metadata__", name) and v["shape"] == entry["shape"]]
    again = header[random.choice(others)] if others else {**entry, "shape": entry["shape"][::-1]}
    text = json.dumps(header)
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(again)}}}"


@_edit
def _twice_inside(header: dict[str, Any], name: str, random: Random) -> str:
    field = random.choice(('"dtype": "I32"', '"shape": [1]', '"data_offsets": [0, 4]'))
    text = json.dumps(header)
    at = text.index("{", text.index(json.dumps(name))) + 1
    return f"{text[:at]}{field}, {text[at:]}"


@_edit
def _swapped(header: dict[str, Any], name: str, _random: Random) -> None:
    """Two tensors of one shape change places: a good file of another model."""
    for key, entry in header.items():
        if key not in ("__metadata__", name) and entry["shape"] == header[name]["shape"]:
            entry["data_offsets"], header[name]["data_offsets"] = header[name]["data_offsets"], entry["data_offsets"]
            return


@_edit
def _dtype(header: dict[str, Any], name: str, random: Random) -> None:
    header[name]["dtype"] = random.choice(
        (
            "F16",
            "BF16",
            "F64",
            "I64",
            "I32",
            "U8",
            "BOOL",
            "F8_E4M3",
            "C64",
            "f32",
            "F33",
            "",
            None,
            32,
            ["F32"],
            "float",
        )
    )


@_edit
def _dtype_of_same_size(header: dict[str, Any], name: str, random: Random) -> None:
    header[name]["dtype"] = random.choice(("I32", "U32"))


@_edit
def _shape(header: dict[str, Any], name: str, random: Random) -> None:
    shape = header[name]["shape"]
    header[name]["shape"] = random.choice(
        [shape[::-1], [*shape, 1], [1, *shape], [-n for n in shape], [n + 1 for n in shape], [0, *shape], [], None, "x",
         [2**63, 0], [2**62, 4], [2**32, 2**32], [1.0 * n for n in shape], [True], [[n] for n in shape], [1] * 9,
         [1] * 9999, ["8"], {"0": 8}, [10**30], [RAW + "1e400"]]
    )  # fmt: skip


@_edit
def _offsets(header: dict[str, Any], name: str, random: Random) -> None:
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = random.choice(
        [[end, start], [start - 4, end - 4], [start + 4, end + 4], [0, 0], [0, end], [-start, -end], [start, end + 4],
         [start, end - 4], [start], [start, end, end], None, "x", [float(start), float(end)], [str(start), str(end)],
         [2**63, 2**63 + end - start], [0, 2**64], [True, False], [[start], [end]], {"begin": start, "end": end},
         [10**30, 10**30 + 1]]
    )  # fmt: skip


@_edit
def _entry(header: dict[str, Any], name: str, random: Random) -> None:
    entry = header[name]
    header[name] = random.choice(
        [None, [], "x", 1, {}, [entry], {**entry, "extra": 1}, {**entry, "dtypes": "F32"},
         {k: v for k, v in entry.items() if k != random.choice(list(entry))}, {k.upper(): v for k, v in entry.items()}]
    )  # fmt: skip


@_edit
def _added(header: dict[str, Any], name: str, random: Random) -> None:
    """A tensor that no model takes."""
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    new = random.choice(("evil", "bert.encoder.layer.7.output.dense.weight", "classifier.out.weight", name + ".extra"))
    header[new] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


@_edit
def _empty_tensors(header: dict[str, Any], _name: str, random: Random) -> None:
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    for number in range(random.choice((10, 1_000, 99_999, 150_000))):
        header[f"t{number}"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


@_edit
def _metadata(header: dict[str, Any], _name: str, random: Random) -> None:
    header["__metadata__"] = random.choice(
        [None, [], "pt", 1, {"format": 1}, {"format": None}, {"format": ["pt"]}, {"format": {"a": "b"}}, "",
         {"format": "\ud800"}, {"a": RAW + "NaN"}]
    )  # fmt: skip


@_edit
def _metadata_harmless(header: dict[str, Any], _name: str, random: Random) -> None:
    header["__metadata__"] = random.choice([{}, {"format": "pt", "evil": "x" * 5000}, {"format": "pt", "\x1b[2J": "a"}])


@_edit
def _text(header: dict[str, Any], _name: str, random: Random) -> Any:
    text = json.dumps(header)
    return random.choice(
        ["", "{}", "[]", "null", "1", '"x"', "[" * 100_000, '{"a":' * 100_000, text + "x", text + " {}", " " + text,
         text[1:], text[:-1], text.replace('"', "'"), "\ufeff" + text, text + "\0", text.encode("utf-16"),
         text + "\n" * 9, text.replace("F32", "F\\u00332", 1), text.replace(":", ": NaN, ", 1),
         b"\xff\xfe" + text.encode()]
    )  # fmt: skip
