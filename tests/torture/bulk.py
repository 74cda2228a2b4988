"""Suite ``bulk``: files of texts answered in parts, while parts, states and inputs are damaged, and runs are killed.

Right is the file that an undisturbed run writes, byte for byte. Of a damaged input it is the answers to what its lines
plainly hold; what is refused is refused with the file, and no output is there then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from tests.torture import library
from tests.torture.case import Case, Fault, Kind, Verdict, dealt, right, silent, stated
from tests.torture.checkpoints import checkpoint, write_files
from tests.torture.damage import BYTE_DAMAGE, ENTRIES, damaged_bytes, put_entry
from tests.torture.judging import judge
from tests.torture.vocabularies import WORDS

__all__ = ["NAME", "cases", "prepare", "run"]

NAME = "bulk"
HEAD = "sequence_classification"
ROWS, PART = 20, 5
FORMATS = ("jsonl", "csv", "tsv")
LEFT = ("part-00000000", "part-00000001", "part-00000000.json", "part-00000001.json", "manifest.json")


@cache
def source() -> bytes:
    """Return the input: lines of JSON."""
    random = Random(0)
    rows = [{"id": n, "text": " ".join(random.choice(WORDS) for _ in range(1 + n % 7))} for n in range(ROWS)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _part(random: Random, number: int) -> Fault:
    suffix, name = FORMATS[number % 3], LEFT[number // 3 % len(LEFT)]
    way = ("flip", "put", "cut", "more", "flip")[number % 5]
    name = name if name.endswith(".json") else f"{name}.{suffix}"
    # The size is not known before the run; what is beyond the end is folded back.
    return Fault({"format": suffix, "left": name, **BYTE_DAMAGE[way](random, random.randrange(10**6), 90)})


def _entry(_random: Random, number: int) -> Fault:
    name = LEFT[number // len(ENTRIES) % len(LEFT)]
    name = name if name.endswith(".json") else f"{name}.jsonl"
    return Fault({"format": "jsonl", "left": name, "entry": ENTRIES[number % len(ENTRIES)]})


def _input(random: Random, number: int) -> Fault:
    way = ("flip", "put", "cut", "flip")[number % 4]
    damage = BYTE_DAMAGE[way](random, random.randrange(10**6), len(source()))
    return Fault({"format": FORMATS[number % 3], "input": True, **damage}, ("in.jsonl",))


def _input_entry(_random: Random, number: int) -> Fault:
    return Fault({"format": "jsonl", "input": True, "entry": ENTRIES[number % len(ENTRIES)]}, ("in.jsonl",))


def _killed(random: Random, number: int) -> Fault:
    return Fault({"format": FORMATS[number % 3], "kill": 1 + random.randrange(60)})


KINDS = (
    Kind("part", 12, _part),
    Kind("entry", 3, _entry, {"wall_s": 20.0}),
    Kind("input", 12, _input),
    Kind("input-entry", 1, _input_entry, {"wall_s": 20.0}),
    Kind("killed", 6, _killed, {"wall_s": 60.0}),
)

cases = partial(dealt, NAME, KINDS)


def prepare() -> None:
    """Make the checkpoint before workers are forked."""
    checkpoint("bert", HEAD, 1)


# --- runs -------------------------------------------------------------------------------------------------------------

_kept: dict[str, Any] = {}


def _model(root: Path) -> Any:
    if "model" not in _kept:
        write_files(root / "bulk-model", checkpoint("bert", HEAD, 1))
        _kept["model"] = library.load(root / "bulk-model", HEAD)
    return _kept["model"]


def _answer(model: Any, place: Path, suffix: str, **options: Any) -> Any:
    from flodl_hf import predict_file

    return predict_file(
        model, place / "in.jsonl", place / f"out.{suffix}", text_column="text", part_rows=PART, **options
    )


def _undisturbed(model: Any, root: Path, suffix: str) -> tuple[bytes, Mapping[str, bytes]]:
    """Return what a run writes, and what one that is ended after two parts leaves; done once."""
    if suffix not in _kept:
        place = root / f"undisturbed-{suffix}"
        write_files(place, {"in.jsonl": source()})
        os.utime(place / "in.jsonl", (1e9, 1e9))
        asked = iter([False, False, True])
        _answer(model, place, suffix, should_stop=lambda: next(asked))
        left = {path.name: path.read_bytes() for path in (place / f"out.{suffix}.parts").iterdir() if path.is_file()}
        _answer(model, place, suffix)
        _kept[suffix] = (place / f"out.{suffix}").read_bytes(), left
        shutil.rmtree(place)
    return _kept[suffix]


def run(case: Case, folder: Path) -> Verdict:
    """Damage, kill, and go on."""
    what, suffix = case.what, case.what["format"]
    model = _model(folder.parent)
    wanted, left = _undisturbed(model, folder.parent, suffix)
    (folder / "in.jsonl").write_bytes(source())
    os.utime(folder / "in.jsonl", (1e9, 1e9))  # a run goes on with the very file that it was begun with
    parts, out = folder / f"out.{suffix}.parts", folder / f"out.{suffix}"
    if "kill" in what:
        _kill(model, folder, suffix, what["kill"])
        if out.exists():
            return right() if out.read_bytes() == wanted else silent("the output of a killed run is not whole")
    elif "left" in what:
        write_files(parts, left)
        if "entry" in what:
            put_entry(folder, f"{parts.name}/{what['left']}", what["entry"])
        else:
            data = left[what["left"]]
            place = {**what, "at": what.get("at", 0) % (8 * len(data) if what["how"] == "flip" else len(data))}
            (parts / what["left"]).write_bytes(damaged_bytes(data, place))
    elif "entry" in what:
        put_entry(folder, "in.jsonl", what["entry"])
    else:
        (folder / "in.jsonl").write_bytes(damaged_bytes(source(), what))

    def check(_found: Any) -> Verdict:
        found = out.read_bytes()
        if found == wanted:
            return right()
        if "input" not in what:
            return silent("other answers than those of an undisturbed run")
        return _as_the_lines_say(model, (folder / "in.jsonl").read_bytes(), found, suffix)

    verdict = judge(case, lambda: _answer(model, folder, suffix), check, writes=(folder,))
    if verdict.good and verdict.error and out.exists():
        return silent(f"refused, and there is an output: {verdict.text}")
    return verdict


def _as_the_lines_say(model: Any, given: bytes, found: bytes, suffix: str) -> Verdict:
    """Compare with answers to the texts that the lines hold, as Python's own JSON reads them."""
    try:
        rows = [json.loads(line) for line in given.decode("utf-8-sig").split("\n") if line.strip()]
        texts = [row["text"] for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        return silent(f"answered an input whose lines cannot be read: {fault}")
    if not all(isinstance(text, str) for text in texts):
        return silent("answered what is no text")
    if suffix != "jsonl":
        return (
            stated("as many rows as the lines hold") if len(rows) <= found.count(b"\n") else silent("rows are missing")
        )
    told = [json.loads(line) for line in found.decode().splitlines()]
    expected = [row[0].label if row else None for row in model.predict(texts)]
    same = len(told) == len(rows) and all(_label(one) == label for one, label in zip(told, expected, strict=True))
    return stated("as the lines say") if same else silent("other answers than those of the lines")


def _label(row: Mapping[str, Any]) -> Any:
    return row.get("label")


def _kill(model: Any, place: Path, suffix: str, at: int) -> None:
    """Answer in a process of its own, which is killed at one of its steps on the disk."""
    process = os.fork()
    if process == 0:
        _until_killed(model, place, suffix, at)
    os.waitpid(process, 0)


def _until_killed(model: Any, place: Path, suffix: str, at: int) -> NoReturn:
    steps = [0]

    def seen(event: str, given: tuple[Any, ...]) -> None:
        writes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes:
            steps[0] += 1
            if steps[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(seen)
        _answer(model, place, suffix)
    finally:
        os._exit(0)
