"""Suite ``shards``: a checkpoint in several files, its index, and what else stands in the folder.

The index names any path, tensors stand in the wrong file or in two, layouts stand beside each other, and entries are
links, pipes and devices. Right is the whole checkpoint to the bit, and nothing of what lies outside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from flodl_hf.torture.case import Case, Fault, Kind, Verdict, dealt, silent, stated
from flodl_hf.torture.checkpoints import checkpoint, encoded, tensors_in, write_files
from flodl_hf.torture.comparing import Seen, same_as, seen, undamaged, unlike_file
from flodl_hf.torture.damage import BYTE_DAMAGE, ENTRIES, ESCAPES, VALUES, damaged_bytes, edited, put_entry, spelled
from flodl_hf.torture.judging import judge
from flodl_hf.torture.subjects import Subject

__all__ = ["NAME", "SUBJECTS", "cases", "prepare", "run"]

NAME = "shards"
SUBJECTS = ("ours", "transformers")
HEAD = "sequence_classification"
INDEX = "model.safetensors.index.json"
COUNT = 3


def shard(number: int) -> str:
    """Return the name of a shard."""
    return f"model-{number + 1:05d}-of-{COUNT:05d}.safetensors"


SHARDS = tuple(map(shard, range(COUNT)))
NAMED = (INDEX, *SHARDS)


@cache
def tensors() -> dict[str, Tensor]:
    """Return the checkpoint's tensors."""
    return tensors_in(checkpoint("bert", HEAD, 1)["model.safetensors"])


@cache
def files() -> Mapping[str, bytes]:
    """Return the folder: configuration, index, three shards."""
    names = list(tensors())
    parts = {SHARDS[place]: names[place::COUNT] for place in range(COUNT)}
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors().values())}, "weight_map": weight_map}
    made = {file: encoded([(name, tensors()[name]) for name in held]) for file, held in parts.items()}
    config = checkpoint("bert", HEAD, 1)["config.json"]
    return {"config.json": config, INDEX: json.dumps(index, indent=2).encode(), **made}


@cache
def index() -> dict[str, Any]:
    """Return the index as parsed."""
    return json.loads(files()[INDEX])


@cache
def others() -> dict[str, Tensor]:
    """Return a tensor other than the checkpoint's for each name: what must never be loaded."""
    return {name: tensor + 1 for name, tensor in tensors().items()}


# --- damage -----------------------------------------------------------------------------------------------------------

TARGETS = (
    "../outside/evil.safetensors", "/outside/evil.safetensors", "..\\outside\\evil.safetensors", "./" + SHARDS[0],
    "sub/" + SHARDS[0],
    "%2e%2e/outside/evil.safetensors", "\uff0e\uff0e/outside/evil.safetensors", "file:///outside/evil.safetensors",
    "http://127.0.0.1:9/evil.safetensors", "C:\\evil.safetensors", "\\\\host\\share\\evil.safetensors", "", ".",
    "..", "~/" + SHARDS[0],
    "$HOME/x.safetensors", "x" * 300, "x" * 5000 + ".safetensors", SHARDS[0] + "\0", "nowhere.safetensors",
    "config.json", INDEX, "evil.bin",
    SHARDS[0].upper(), " " + SHARDS[0], SHARDS[0] + " ", "-rf", "con.safetensors",
    *(f"{escape}.safetensors" for escape in ESCAPES),
)  # fmt: skip


def _undamaged(_random: Random, _number: int) -> Fault:
    return Fault()


def _target(random: Random, number: int) -> Fault:
    which = random.choice(("one", "all of one", "all"))
    return Fault(
        {"target": TARGETS[number % len(TARGETS)], "which": which, "name": random.choice(list(tensors()))}, NAMED
    )


def _value(random: Random, number: int) -> Fault:
    path = random.choice(
        ((), ("weight_map",), ("metadata",), ("weight_map", random.choice(list(tensors()))), ("metadata", "total_size"))
    )
    return Fault(
        {"path": list(path), "value": VALUES[number % len(VALUES)], "remove": bool(path) and random.random() < 0.2},
        (INDEX, "weights"),
    )


def _index_bytes(random: Random, number: int) -> Fault:
    way = ("flip", "put", "cut", "flip")[number % 4]
    return Fault({"file": INDEX, **BYTE_DAMAGE[way](random, number, len(files()[INDEX]))}, NAMED)


def _shard_bytes(random: Random, number: int) -> Fault:
    file = SHARDS[number % COUNT]
    way = ("flip", "cut", "put", "more")[number // COUNT % 4]
    return Fault({"file": file, **BYTE_DAMAGE[way](random, random.randrange(10**6), len(files()[file]))}, NAMED)


TALES = (
    "tensor-in-two", "tensor-in-two-same", "wrong-shard", "ghost", "not-listed", "shard-gone", "shards-exchanged",
    "shard-of-another",
    "single-too", "single-old-too", "single-and-no-shards", "index-twice", "key-twice", "many-shards", "bin-too",
    "bin-index-too", "all-in-one",
    "index-of-one", "empty-shard", "extra-shard", "dtypes", "index-is-list", "case",
)  # fmt: skip


def _tale(random: Random, number: int) -> Fault:
    return Fault(
        {"tale": TALES[number % len(TALES)], "name": random.choice(list(tensors()))},
        (*NAMED, "model.safetensors", "bin"),
    )


def _entry(_random: Random, number: int) -> Fault:
    names = (INDEX, SHARDS[0], SHARDS[2], "config.json")
    return Fault(
        {"entry": [names[number // len(ENTRIES) % len(names)], ENTRIES[number % len(ENTRIES)]]}, (*NAMED, "config.json")
    )


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("shard-name", 20, _target),
    Kind("index-value", 20, _value),
    Kind("index-bytes", 20, _index_bytes),
    Kind("shard-bytes", 16, _shard_bytes),
    Kind("tale", 14, _tale),
    Kind("entry", 6, _entry, {"wall_s": 20.0}),
)

cases = partial(dealt, NAME, KINDS)


def prepare(_subject: Subject) -> None:
    """Make the checkpoint before workers are forked."""
    files()


# --- what is written --------------------------------------------------------------------------------------------------


def made(what: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a case."""
    found = dict(files())
    if "how" in what:
        found[what["file"]] = damaged_bytes(found[what["file"]], what)
    elif "target" in what:
        weight_map = dict(index()["weight_map"])
        home = weight_map[what["name"]]
        for name, file in weight_map.items():
            if what["which"] == "all" or name == what["name"] or (what["which"] == "all of one" and file == home):
                weight_map[name] = what["target"]
        found[INDEX] = spelled({**index(), "weight_map": weight_map}).encode("utf-8", "surrogatepass")
    elif "path" in what:
        changed = edited(index(), tuple(what["path"]), what["value"], remove=what["remove"])
        found[INDEX] = spelled(changed).encode("utf-8", "surrogatepass")
    elif "tale" in what:
        _told(found, what["tale"], what["name"])
    return found


def _told(found: dict[str, bytes], tale: str, name: str) -> None:
    held = {file: dict(tensors_in(found[file])) for file in SHARDS}
    weight_map = dict(index()["weight_map"])
    home = weight_map[name]
    away = next(file for file in SHARDS if file != home)
    single = checkpoint("bert", HEAD, 1)["model.safetensors"]
    if tale.startswith("tensor-in-two"):
        held[away][name] = held[home][name] if tale.endswith("same") else others()[name]
    elif tale == "wrong-shard":
        weight_map[name] = away
    elif tale == "ghost":
        weight_map["bert.ghost.weight"] = home
    elif tale == "not-listed":
        del weight_map[name]
    elif tale == "shards-exchanged":
        held[home], held[away] = held[away], held[home]
    elif tale == "shard-of-another":
        held[home] = {key: others()[key] for key in held[home]}
    elif tale == "empty-shard":
        held[away] |= held[home]
        held[home] = {}
    elif tale == "dtypes":
        held[home] = {key: tensor.half() for key, tensor in held[home].items()}
    elif tale == "many-shards":
        weight_map = {f"t{number}": f"model-{number:05d}-of-99999.safetensors" for number in range(20_000)}
    elif tale == "all-in-one":
        weight_map = dict.fromkeys(weight_map, SHARDS[0])
    elif tale == "case":
        weight_map[name] = home.upper()
    found |= {file: encoded(list(parts.items())) for file, parts in held.items()}
    text = json.dumps({**index(), "weight_map": weight_map})
    if tale == "index-twice":
        text = text[:-1] + ', "weight_map": {}}'
    elif tale == "key-twice":
        text = text.replace('"weight_map": {', f'"weight_map": {{{json.dumps(name)}: {json.dumps(away)}, ')
    found[INDEX] = text.encode() if tale != "index-is-list" else json.dumps(list(weight_map)).encode()
    if tale == "shard-gone":
        del found[home]
    elif tale == "extra-shard":
        found["model-00004-of-00003.safetensors"] = encoded(list(others().items())[:3])
    elif tale in ("single-too", "single-and-no-shards"):
        found["model.safetensors"] = single
    elif tale == "single-old-too":
        found["model.safetensors"] = encoded(list(others().items()))
    elif tale in ("bin-too", "bin-index-too"):
        found["pytorch_model.bin" + (".index.json" if "index" in tale else "")] = b"{}"
    elif tale == "index-of-one":
        found |= {"model.safetensors": single, INDEX: text.replace(SHARDS[0], "model.safetensors").encode()}
    if tale == "single-and-no-shards":
        for file in SHARDS:
            del found[file]


# --- what is right ----------------------------------------------------------------------------------------------------


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Load what the case made, and compare with what is right."""
    clean = undamaged(subject, folder.parent, NAME, files(), HEAD)
    found = made(case.what)
    write_files(folder, found)
    (folder.parent / "outside" / "evil.safetensors").write_bytes(encoded(list(others().items())))
    if "entry" in case.what:
        put_entry(folder, *case.what["entry"])
    return judge(case, subject, lambda: seen(subject, folder, HEAD), lambda it: _right(case, it, clean, found))


def _right(case: Case, it: Seen, clean: Seen, found: Mapping[str, bytes]) -> Verdict:
    what = case.what
    same = same_as(it, clean)
    if same is not None:
        return same
    if case.kind == "shard-bytes" or what.get("tale") in ("shard-of-another", "dtypes"):
        try:
            said = {name: tensor for file in SHARDS for name, tensor in tensors_in(found[file]).items()}
        except Exception as fault:
            return silent(f"loaded, and a shard cannot be read: {fault!r}")
        wrong = unlike_file(it.tensors, said)
        return (
            stated("the files' own numbers")
            if wrong is None and said.keys() == tensors().keys()
            else silent(str(wrong))
        )
    if what.get("tale") == "single-old-too" and unlike_file(it.tensors, others()) is None:
        return stated("the single file's numbers, which transformers reads before an index")
    wrong = unlike_file(it.tensors, tensors())
    evil = [name for name, tensor in others().items() if name in it.tensors and torch.equal(it.tensors[name], tensor)]
    return silent(
        f"loaded, and {wrong or 'the scores are others'}" + (f"; {evil[0]} is from elsewhere" if evil else "")
    )
