"""Suite ``sentence``: folders of sentence-transformers whose small files are damaged, exchanged or elsewhere.

Vectors are right where they are those of the undamaged folder to the bit. Where the small files validly say another
recipe, they have to be what `pooled` makes of the token states, to 1e-5.
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
from torch.nn.functional import normalize

from tests.torture import library
from tests.torture.case import Case, Fault, Kind, Verdict, dealt, right, silent, stated
from tests.torture.checkpoints import TEXTS, checkpoint, write_files
from tests.torture.damage import (
    BYTE_DAMAGE,
    ENTRIES,
    ESCAPES,
    NUMBERS,
    RAW,
    VALUES,
    damaged_bytes,
    put_entry,
    spelled,
)
from tests.torture.judging import judge

__all__ = ["NAME", "cases", "pooled", "prepare", "run"]

NAME = "sentence"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"
BOUNDS, NOTES = "sentence_bert_config.json", "config_sentence_transformers.json"
SMALL = (MODULES, POOLING, BOUNDS, NOTES)
PREFIX = "sentence_transformers.models."
MODES = (
    "pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken",
)  # fmt: skip


def _json(value: Any) -> bytes:
    return spelled(value).encode("utf-8", "surrogatepass")


@cache
def files() -> Mapping[str, bytes]:
    """Return the folder: an encoder, mean pooling, vectors of length one."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": PREFIX + "Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": PREFIX + "Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": PREFIX + "Normalize"},
    ]
    pooling = {"word_embedding_dimension": 8, **{mode: mode == MODES[1] for mode in MODES}}
    small = {
        MODULES: modules, POOLING: pooling, BOUNDS: {"max_seq_length": 32, "do_lower_case": False},
        NOTES: {"__version__": {"sentence_transformers": "5.0.0"}, "prompts": {}, "similarity_fn_name": "cosine"},
    }  # fmt: skip
    return {**checkpoint("bert", "base", 1), **{name: _json(value) for name, value in small.items()}}


# --- damage -----------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, _number: int) -> Fault:
    return Fault()


def _modes(random: Random, _number: int) -> Fault:
    """Other poolings, one or several."""
    chosen = random.sample(MODES, random.choice((0, 1, 1, 2, 3)))
    return Fault({"file": POOLING, "set": [[mode, mode in chosen] for mode in MODES]}, SMALL)


KEYS = {
    POOLING: (*MODES, "pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt", "new"),
    BOUNDS: ("max_seq_length", "do_lower_case", "model_args", "new", "transformer_task", "modality_config"),
    NOTES: ("similarity_fn_name", "prompts", "default_prompt_name", "__version__", "model_type", "new"),
}
POOLINGS = (
    "cls",
    "mean",
    "max",
    "lasttoken",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "evil",
    ["mean", "max"],
    ["mean", "evil"],
    [3],
)


def _value(random: Random, number: int) -> Fault:
    file = (POOLING, BOUNDS, NOTES)[number % 3]
    key = random.choice(KEYS[file])
    numbers = tuple(f"{RAW}{text}" for text in NUMBERS)
    value = random.choice((*VALUES, *numbers, *ESCAPES, *POOLINGS, 4, 8, 31, "dot", "euclidean", {"a": "b: "}))
    return Fault({"file": file, "set": [[key, value]]}, SMALL)


def _modules(random: Random, number: int) -> Fault:
    tales = (
        "no-pooling", "no-normalize", "dense", "two-poolings", "two-normalize", "reversed", "empty", "idx",
        "type-other", "type-escape",
        "type-missing", "path-parent", "path-absolute", "path-missing", "path-number", "path-gone", "path-escape",
        "type-code", "type-number",
        "one-object", "nested", "static", "weights-below", "weights-below-gone", "long", "normalize-first",
        "path-dot", "type-new-style",
    )  # fmt: skip
    return Fault({"tale": tales[number % len(tales)], "draw": random.randrange(2**32)}, (*SMALL, "config.json"))


def _bytes(random: Random, number: int) -> Fault:
    file = SMALL[number % len(SMALL)]
    way = ("flip", "put", "cut", "flip")[number // len(SMALL) % 4]
    return Fault({"file": file, **BYTE_DAMAGE[way](random, random.randrange(10**6), len(files()[file]))}, SMALL)


TEXTS_OF_FILES = (
    "",
    "[]",
    "{}",
    "null",
    "3",
    '"x"',
    "[[]]",
    "[1]",
    "[" * 50_000,
    "[{}]",
    '[{"type": null}]',
    "\ufeff[]",
    "\0",
    "1e400",
)


def _text(_random: Random, number: int) -> Fault:
    return Fault({"file": SMALL[number % len(SMALL)], "text": number // len(SMALL) % len(TEXTS_OF_FILES)}, SMALL)


def _entry(_random: Random, number: int) -> Fault:
    names = (*SMALL, "1_Pooling")
    name = names[number // len(ENTRIES) % len(names)]
    return Fault({"entry": [name, ENTRIES[number % len(ENTRIES)]]}, SMALL)


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("poolings", 10, _modes),
    Kind("value", 30, _value),
    Kind("modules", 14, _modules),
    Kind("bytes", 30, _bytes),
    Kind("text", 8, _text),
    Kind("entry", 6, _entry, {"wall_s": 20.0}),
)

cases = partial(dealt, NAME, KINDS)


def prepare() -> None:
    """Make the checkpoint before workers are forked."""
    files()


# --- what is written --------------------------------------------------------------------------------------------------


def made(what: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a case."""
    found = dict(files())
    if "how" in what:
        found[what["file"]] = damaged_bytes(found[what["file"]], what)
    elif "text" in what:
        found[what["file"]] = TEXTS_OF_FILES[what["text"]].encode()
    elif "set" in what:
        found[what["file"]] = _json({**json.loads(found[what["file"]]), **dict(map(tuple, what["set"]))})
    elif "tale" in what:
        _told(found, what["tale"], Random(what["draw"]))
    return found


def _told(found: dict[str, bytes], tale: str, random: Random) -> None:
    modules: list[Any] = json.loads(found[MODULES])
    transformer, pooling, scaled = modules
    which = random.choice(modules)
    if tale in ("no-pooling", "no-normalize"):
        modules.remove(pooling if tale == "no-pooling" else scaled)
    elif tale in ("dense", "static", "type-code", "type-new-style"):
        kind = {"dense": PREFIX + "Dense", "static": PREFIX + "StaticEmbedding", "type-code": "evil.Evil"}
        added = kind.get(tale, "sentence_transformers.base.modules.Dense")
        modules.insert(2, {"idx": 3, "name": "3", "path": "3_More", "type": added})
        found["3_More/config.json"] = b'{"in_features": 8, "out_features": 4}'
        found["evil.py"] = b"import os; os.mkdir('canary-was-here')"
    elif tale in ("two-poolings", "two-normalize"):
        modules.append(dict(pooling if tale == "two-poolings" else scaled))
    elif tale == "reversed":
        modules.reverse()
    elif tale == "normalize-first":
        modules = [transformer, scaled, pooling]
    elif tale == "empty":
        modules = []
    elif tale == "idx":
        which["idx"] = random.choice((None, "x", -1, 10**30))
    elif tale.startswith("type-"):
        which["type"] = {"type-escape": random.choice(ESCAPES), "type-number": 3}.get(tale, PREFIX + "Evil")
        if tale == "type-missing":
            del which["type"]
    elif tale.startswith("path-"):
        target = {"path-parent": "../outside", "path-absolute": "/outside", "path-number": 3,
        "path-gone": "nowhere", "path-dot": "./1_Pooling/../1_Pooling",
                  "path-escape": random.choice(ESCAPES)}  # fmt: skip
        which["path"] = target.get(tale)
        if tale == "path-missing":
            del which["path"]
    elif tale == "nested":
        modules = [modules]
    elif tale == "long":
        modules += [dict(scaled) for _ in range(2_000)]
    elif tale.startswith("weights-below"):
        transformer["path"] = "0_Transformer"
        for name in [name for name in found if name not in SMALL]:
            found[f"0_Transformer/{name}"] = found.pop(name)
        if tale.endswith("gone"):
            del found["0_Transformer/model.safetensors"]
    found[MODULES] = _json(transformer if tale == "one-object" else modules)


# --- what is right ----------------------------------------------------------------------------------------------------


def pooled(states: Tensor, recipe: Mapping[str, Any]) -> Tensor | None:
    """Return the vector of one text as the small files plainly say; None where they say nothing that is known.

    Args:
        states: of its tokens, ``(tokens, size)``.
        recipe: ``1_Pooling/config.json``.
    """
    weights = torch.arange(1, len(states) + 1, dtype=states.dtype)[:, None]
    ways = {
        "cls": states[0], "mean": states.mean(0), "max": states.max(0).values, "lasttoken": states[-1],
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
    }  # fmt: skip
    of_mode = dict(zip(MODES, ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), strict=True))
    named = recipe.get("pooling_mode")
    chosen = (
        [named]
        if isinstance(named, str) and named
        else named or [of_mode[mode] for mode in MODES if recipe.get(mode) is True]
    )
    order = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
    if not isinstance(chosen, list) or not all(name in ways for name in chosen):
        return None
    chosen = chosen if named else sorted(chosen, key=order.index)
    return torch.cat([ways[name] for name in chosen]) if chosen else ways["mean"]


_clean: list[Tensor] = []


def run(case: Case, folder: Path) -> Verdict:
    """Load what the case made, and compare the vectors of a few texts."""
    if not _clean:
        place = folder.parent / f"undamaged-{NAME}"
        write_files(place, files())
        _clean.append(_vectors(place)[0])
    found = made(case.what)
    write_files(folder, found)
    if "entry" in case.what:
        _put(folder, *case.what["entry"])
        if case.what["entry"][1] == "absent":
            found.pop(case.what["entry"][0], None)
    return judge(case, lambda: _vectors(folder), lambda it: _right(*it, _clean[0], found))


def _put(folder: Path, name: str, kind: str) -> None:
    if name != "1_Pooling":
        put_entry(folder, name, kind)
        return
    data = (folder / POOLING).read_bytes()
    put_entry(folder, name, kind)
    target = folder.parent / "outside" / "config.json"
    if kind == "outside-folder":
        target.write_bytes(data)


def _vectors(folder: Path) -> tuple[Tensor, list[Tensor]]:
    """Return the vectors of texts and the states of their tokens."""
    model = library.load(folder, "base")
    texts = list(TEXTS)
    states = []
    for text in texts:
        with torch.no_grad():
            states.append(model(**model.tokenizer(text, return_tensors="pt"))[0][0])
    return model.encode(texts, convert_to_tensor=True, precision="exact"), states


def _right(vectors: Tensor, states: list[Tensor], clean: Tensor, found: Mapping[str, bytes]) -> Verdict:
    if vectors.shape == clean.shape and torch.equal(vectors, clean):
        return right()
    try:
        recipe = json.loads(found.get(POOLING, b"{}"))
        listed = json.loads(found[MODULES]) if MODULES in found else [{"type": "Transformer"}]
        kinds = [str(module["type"]).rpartition(".")[2] for module in listed]
        bound = json.loads(found.get(BOUNDS, b"{}")).get("max_seq_length")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return silent("vectors are others, and a small file says nothing")
    if kinds not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return silent(f"vectors of the modules {kinds[:5]}")
    if not states:
        return stated("not computed a second time")
    if isinstance(bound, int) and 2 < bound < 12:
        return stated("texts are cut at max_seq_length")
    plain = [pooled(state, recipe if "Pooling" in kinds else {}) for state in states]
    if any(vector is None for vector in plain):
        return silent("vectors are others, and the pooling is unknown")
    expected = torch.stack([vector for vector in plain if vector is not None])
    expected = normalize(expected, dim=-1) if "Normalize" in kinds else expected
    same = expected.shape == vectors.shape and torch.allclose(expected, vectors, atol=1e-5)
    return stated("as the small files plainly say") if same else silent("vectors are not what the small files say")
