"""Suite ``tokenizer``: tokenizer files of three sorts damaged, exchanged, or at odds with the model.

``tokenizer.json`` is the truth: a load is right where the ids of a few texts are those that the tokenizers library
alone gives for the file, and every id has a row in the model's word table. Where the tokenizer is built from
vocabulary files, the ids have to be those of the undamaged file, or what the changed lines plainly say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

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
from tests.torture.definitions import EDITS
from tests.torture.judging import judge
from tests.torture.vocabularies import SORTS, plainly, tokenizer_files, vocabulary_of

__all__ = ["NAME", "cases", "prepare", "run"]

NAME = "tokenizer"
HEAD = "sequence_classification"
DEFINITION = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
ALL_TEXTS = (*TEXTS, "The  CAT sat \u00e9\u4e2d [MASK] <mask> aaaaaaaaaaaaaaaaaaaaaaaaaaab", "")
BUILT = {"wordpiece": ("vocab.txt",), "bytes": ("vocab.json", "merges.txt"), "unigram": ("sentencepiece.bpe.model",)}
_NAMES = tuple(SORTS)


@cache
def files(sort: str, built: bool = False) -> Mapping[str, bytes]:
    """Return a checkpoint with a tokenizer of a sort; ``built`` leaves out ``tokenizer.json``."""
    made = dict(checkpoint(SORTS[sort], HEAD, 1, sort))
    if built:
        del made[DEFINITION]
    return made


def _sort(number: int) -> str:
    return _NAMES[number % 3]


# --- damage -----------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, number: int) -> Fault:
    return Fault({"sort": _sort(number), "built": bool(number // 3 % 2)})


def _edited(random: Random, number: int) -> Fault:
    names = list(EDITS)
    return Fault(
        {"sort": _sort(number), "edit": names[number // 3 % len(names)], "draw": random.randrange(2**32)}, FILES
    )


def _bytes(random: Random, number: int) -> Fault:
    sort, ways = _sort(number), ("flip", "put", "put", "cut", "flip")
    size = len(files(sort)[DEFINITION])
    return Fault({"sort": sort, "file": DEFINITION, **BYTE_DAMAGE[ways[number % 5]](random, number, size)}, FILES)


def _vocabulary_bytes(random: Random, number: int) -> Fault:
    sort = _sort(number)
    file = random.choice(BUILT[sort])
    size = len(files(sort, built=True)[file])
    way = random.choice(("flip", "put", "cut"))
    return Fault({"sort": sort, "built": True, "file": file, **BYTE_DAMAGE[way](random, number, size)}, FILES)


LINES = (
    "twice",
    "gone",
    "empty",
    "blank-end",
    "crlf",
    "bom",
    "swap",
    "more",
    "special-gone",
    "escape",
    "latin",
    "long",
    "none",
    "spaces",
)


def _vocabulary_lines(_random: Random, number: int) -> Fault:
    return Fault({"sort": "wordpiece", "built": True, "lines": LINES[number % len(LINES)], "draw": number}, FILES)


SETTING_KEYS = (
    "model_max_length", "max_len", "padding_side", "truncation_side", "unk_token", "pad_token", "cls_token",
    "sep_token", "mask_token",
    "bos_token", "eos_token", "do_lower_case", "strip_accents", "tokenize_chinese_chars", "tokenizer_class",
    "added_tokens_decoder",
    "extra_special_tokens", "additional_special_tokens", "model_input_names", "clean_up_tokenization_spaces",
    "split_special_tokens",
    "add_prefix_space", "auto_map", "chat_template", "name_or_path", "new", "add_bos_token", "tokenizer_file",
    "vocab_file",
)  # fmt: skip
SETTING_VALUES: tuple[Any, ...] = (
    *VALUES, *(f"{RAW}{number}" for number in NUMBERS), "[MASK]", "<mask>", "cat", "nobody", "left", "right",
    "GPT2Tokenizer", "EvilTokenizer",
    "PreTrainedTokenizerFast", "BertTokenizerFast", "XLMRobertaTokenizer", {"content": "nobody"},
    {"content": None}, {"__type": "AddedToken"},
    {"0": {"content": "x"}}, {"999999": {"content": "new"}}, {"-1": {"content": "new"}}, {"x": 1}, {"4": "new"},
    ["cat", "nobody"], [None],
    {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, {"5": {"content": "the", "special": True}},
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}", "/etc/passwd", "../outside/secret.txt", 1e30, 0.5, 36.0, *ESCAPES,
)  # fmt: skip


def _setting(random: Random, number: int) -> Fault:
    file = SETTINGS if random.random() < 0.8 else "special_tokens_map.json"
    key = SETTING_KEYS[number // 6 % len(SETTING_KEYS)]
    return Fault(
        {
            "sort": _sort(number),
            "built": bool(number // 3 % 2),
            "in": file,
            "set": [[key, random.choice(SETTING_VALUES)]],
        },
        FILES,
    )


def _added_file(random: Random, number: int) -> Fault:
    value = random.choice(
        [{"new": 81}, {"new": 10**9}, {"new": -1}, {"new": "x"}, {"new": None}, {"cat": 7}, {"cat": 70}, {"": 5},
        {"\x1b[2J": 81}, [], 3,
         {"new": 81, "newer": 81}, {"[CLS]": 2}, {"[CLS]": 5}, {"new": 2**64}, {"new": 1.5}]
    )  # fmt: skip
    return Fault({"sort": _sort(number), "built": bool(number // 3 % 2), "whole": ["added_tokens.json", value]}, FILES)


def _damaged_settings(random: Random, number: int) -> Fault:
    size = len(files("wordpiece")[SETTINGS])
    way = ("flip", "put", "cut")[number % 3]
    return Fault({"sort": "wordpiece", "file": SETTINGS, **BYTE_DAMAGE[way](random, number, size)}, FILES)


def _exchanged(_random: Random, number: int) -> Fault:
    """The tokenizer of another model."""
    pairs = [(one, other) for one in _NAMES for other in _NAMES if one != other]
    one, other = pairs[number % len(pairs)]
    return Fault({"sort": one, "of": other, "built": bool(number // len(pairs) % 2)}, FILES)


def _entry(_random: Random, number: int) -> Fault:
    names = [(sort, name) for sort in _NAMES for name in (DEFINITION, SETTINGS, *BUILT[sort])]
    sort, name = names[number // len(ENTRIES) % len(names)]
    return Fault({"sort": sort, "entry": [name, ENTRIES[number % len(ENTRIES)]], "built": name in BUILT[sort]}, FILES)


def _code(random: Random, number: int) -> Fault:
    sets = (
        [["auto_map", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}]],
        [["auto_map", {"AutoTokenizer": ["evil.Evil", None]}], ["tokenizer_class", "Evil"]],
        [["tokenizer_class", "evil.Evil"]],
        [["tokenizer_class", "os.system"]],
        [["tokenizer_file", "../outside/secret.txt"]],
        [["vocab_file", "../outside/secret.txt"]],
        [["name_or_path", "http://127.0.0.1:9/x"]],
        [["chat_template", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]],
        [["chat_template", "{% for a in range(999999999) %}{% for b in range(999999999) %}{% endfor %}{% endfor %}"]],
    )
    return Fault({"sort": _sort(number), "in": SETTINGS, "set": sets[number // 3 % len(sets)], "evil": True}, FILES)


FILES = (
    DEFINITION, SETTINGS, "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip

KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("edit", 60, _edited, {"wall_s": 40.0}),
    Kind("bytes", 40, _bytes),
    Kind("vocabulary-bytes", 30, _vocabulary_bytes),
    Kind("vocabulary-lines", 3, _vocabulary_lines),
    Kind("setting", 30, _setting),
    Kind("settings-bytes", 8, _damaged_settings),
    Kind("added-tokens", 4, _added_file),
    Kind("exchanged", 2, _exchanged),
    Kind("entry", 3, _entry, {"wall_s": 20.0}),
    Kind("code", 3, _code),
)

cases = partial(dealt, NAME, KINDS)


def prepare() -> None:
    """Make the checkpoints before workers are forked."""
    for sort in _NAMES:
        files(sort)


# --- what is written --------------------------------------------------------------------------------------------------


def damaged(what: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a case."""
    found = dict(files(what["sort"], what.get("built", False)))
    if "edit" in what:
        definition = json.loads(found[DEFINITION])
        edited = EDITS[what["edit"]](definition, Random(what["draw"]))
        if not isinstance(edited, bytes):
            edited = spelled(definition) if edited is None else edited
            edited = edited.encode("utf-8", "surrogatepass")
        found[DEFINITION] = edited
    elif "how" in what:
        found[what["file"]] = damaged_bytes(found[what["file"]], what)
    elif "set" in what:
        settings = json.loads(found.get(what["in"], b"{}"))
        settings.update(dict(map(tuple, what["set"])))
        found[what["in"]] = spelled(settings).encode("utf-8", "surrogatepass")
    elif "whole" in what:
        name, value = what["whole"]
        found[name] = json.dumps(value).encode()
    elif "of" in what:
        for name in list(found):
            if name not in ("config.json", "model.safetensors"):
                del found[name]
        found |= tokenizer_files(what["of"], built=what["built"])
    elif "lines" in what:
        found["vocab.txt"] = _lines(what["lines"], Random(what["draw"]))
    if "evil" in what:
        from tests.torture.config import EVIL

        found["evil.py"] = EVIL
    return found


def _lines(how: str, random: Random) -> bytes:
    lines = list(vocabulary_of("wordpiece"))
    at = random.randrange(5, len(lines))
    if how == "twice":
        lines[at] = lines[at - 1]
    elif how == "gone":
        del lines[at]
    elif how == "empty":
        lines[at] = ""
    elif how == "swap":
        lines[at], lines[at - 1] = lines[at - 1], lines[at]
    elif how == "more":
        lines += [f"zz{number}" for number in range(random.choice((1, 100, 100_000)))]
    elif how == "special-gone":
        lines[random.randrange(5)] = "nobody"
    elif how == "escape":
        lines[at] = "\x1b[2J"
    elif how == "long":
        lines[at] = "x" * 1_000_000
    elif how == "spaces":
        lines[at] = " " + lines[at] + " "
    text = ("\r\n" if how == "crlf" else "\n").join(lines) + ("\n\n\n" if how == "blank-end" else "\n")
    if how == "none":
        return b""
    return ("\ufeff" + text if how == "bom" else text).encode("latin-1" if how == "latin" else "utf-8")


# --- what is right ----------------------------------------------------------------------------------------------------


def run(case: Case, folder: Path) -> Verdict:
    """Load what the case damaged, and compare the ids of some texts."""
    what = case.what
    made = damaged(what)
    write_files(folder, made)
    if "entry" in what:
        put_entry(folder, *what["entry"])

    def act() -> tuple[list[list[int]], torch.Tensor]:
        model = library.load(folder, HEAD)
        return library.ids(model, ALL_TEXTS), library.answers(model, [text[:30] for text in ALL_TEXTS if text])

    return judge(case, act, lambda found: _right(case, made, *found))


_OF_BUILT = (
    "do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "unk_token", "sep_token",
    "cls_token", "mask_token", "pad_token", "bos_token", "eos_token", "added_tokens_decoder", "tokenizer_class",
    "extra_special_tokens", "additional_special_tokens",
)  # fmt: skip


def _right(case: Case, made: Mapping[str, bytes], ids: list[list[int]], scores: torch.Tensor) -> Verdict:
    what = case.what
    if not bool(torch.isfinite(scores).all()):
        return silent("scores are not finite")
    rows = len(vocabulary_of(what["sort"]))
    if any(not 0 <= number < rows for row in ids for number in row):
        return silent("an id without a row in the word table")
    clean = _library(files(what["sort"])[DEFINITION])
    absent = what.get("entry") == [DEFINITION, "absent"]
    if (what.get("built") and DEFINITION not in made) or absent:
        clean = _library(plainly(what["sort"], files(what["sort"], built=True)).encode())
    if what.get("entry", [""])[0] == DEFINITION and ids != clean:
        return silent("other ids than those of tokenizer.json")
    if ids == clean:
        return right()
    for key, value in what.get("set", ()):
        # These are for the tokenizer's ids what they say; files of settings have no other truth to hold them to.
        if (key == "split_special_tokens" and value is True) or (DEFINITION not in made and key in _OF_BUILT):
            return stated(f"{key} says so")
    if DEFINITION in made:
        expected = _library(made[DEFINITION])
        return stated("as the tokenizers library") if ids == expected else silent(f"ids are {ids[:2]}")
    try:
        expected = _library(plainly(what["of"] if "of" in what else what["sort"], made).encode())
    except (ValueError, UnicodeDecodeError):
        expected = None
    return stated("as the lines plainly say") if ids == expected else silent(f"ids are {ids[:2]}")


def _library(definition: bytes) -> list[list[int]] | None:
    from tests.torture.own_ids import library_ids

    try:
        return library_ids(definition.decode("utf-8-sig"), ALL_TEXTS)
    except Exception:
        return None
