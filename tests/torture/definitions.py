"""Edits of a ``tokenizer.json``: vocabulary, patterns, templates and sections, each as somebody might write it.

An edit changes the definition, an object; what it returns, if anything, stands there instead: an object, or the very
text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.torture.damage import ESCAPES, VALUES

__all__ = ["EDITS"]

Edit = Callable[[dict[str, Any], Random], Any]
EDITS: dict[str, Edit] = {}
"""The edits by name."""

IDS = (-1, 2**31, 2**32 - 1, 2**32, 2**63, 10**30, 1.5, "3", None, True, [3], 10_000, 80)
PATTERNS = (
    "(a+)+$", "(a|a)*b", "(.*)*x", "(?:a?){40}a{40}", "(", "[", "\\p{Nothing}", "(?=x)", "(?<!a)b", "\\1", "",
    ".", "a*", "^", "$",
    "(?i)THE", "[\\s\\S]", "\\b", "(?<name>a)\\k<name>", "a{0,100000}", "((((((((((a))))))))))", "(?m)^",
    "\\x{110000}", "e",
)  # fmt: skip


def _edit(function: Edit) -> Edit:
    EDITS[function.__name__.removeprefix("_")] = function
    return function


def _vocab(definition: dict[str, Any]) -> Any:
    return definition["model"]["vocab"]


@_edit
def _swapped_ids(definition: dict[str, Any], random: Random) -> None:
    """Two tokens change places: a good file of another model."""
    vocab = _vocab(definition)
    one, other = random.sample(range(5, len(vocab)), 2)
    if isinstance(vocab, dict):
        first, second = list(vocab)[one], list(vocab)[other]
        vocab[first], vocab[second] = vocab[second], vocab[first]
    else:
        vocab[one], vocab[other] = vocab[other], vocab[one]


@_edit
def _id(definition: dict[str, Any], random: Random) -> None:
    vocab = _vocab(definition)
    if isinstance(vocab, dict):
        vocab[random.choice(list(vocab))] = random.choice(IDS)
    else:
        vocab[random.randrange(len(vocab))] = random.choice(
            (["x"], ["x", "y"], [1, 2], "x", None, ["x", None], ["x", 1, 2])
        )


@_edit
def _same_id(definition: dict[str, Any], random: Random) -> None:
    vocab = _vocab(definition)
    if isinstance(vocab, dict):
        one, other = random.sample(list(vocab), 2)
        vocab[one] = vocab[other]
    else:
        one, other = random.sample(range(len(vocab)), 2)
        vocab[one] = list(vocab[other])


@_edit
def _token_gone(definition: dict[str, Any], random: Random) -> None:
    vocab = _vocab(definition)
    if isinstance(vocab, dict):
        del vocab[random.choice((*list(vocab)[:5], *vocab))]
    else:
        del vocab[random.choice((*range(5), *range(len(vocab))))]


@_edit
def _token_strange(definition: dict[str, Any], random: Random) -> None:
    vocab = _vocab(definition)
    new = random.choice((*ESCAPES, "", " ", "x" * 100_000))
    if isinstance(vocab, dict):
        vocab[new] = vocab.pop(random.choice(list(vocab)[5:]))
    else:
        vocab[random.randrange(5, len(vocab))][0] = new


@_edit
def _more_tokens(definition: dict[str, Any], random: Random) -> None:
    vocab, count = _vocab(definition), random.choice((1, 5, 1_000, 200_000))
    if isinstance(vocab, dict):
        vocab.update({f"zz{number}": len(vocab) + number for number in range(count)})
    else:
        vocab += [[f"zz{number}", -9.0] for number in range(count)]


@_edit
def _score(definition: dict[str, Any], random: Random) -> Any:
    vocab = _vocab(definition)
    if isinstance(vocab, dict):
        definition["model"]["merges"] = random.choice(
            ([["a"]], [["a", "b", "c"]], ["a b"], ["ab"], [["zz", "yy"]], "x", None, [[1, 2]], [["a", "a"]] * 3, [[]])
        )
        return None
    vocab[random.randrange(len(vocab))][1] = random.choice((1e308, -1e308, 0, 1e-300, "x", None, True, 5.0))
    return None


@_edit
def _model_field(definition: dict[str, Any], random: Random) -> None:
    field = random.choice((*definition["model"], "type", "unk_token", "unk_id", "new"))
    definition["model"][field] = random.choice((*VALUES, "BPE", "WordPiece", "Unigram", "WordLevel", "[PAD]", 10**6))


@_edit
def _model_field_gone(definition: dict[str, Any], random: Random) -> None:
    del definition["model"][random.choice(list(definition["model"]))]


@_edit
def _section(definition: dict[str, Any], random: Random) -> None:
    definition[random.choice((*definition, "new"))] = random.choice((*VALUES, {"type": "Evil"}, {"type": None}, [{}]))


@_edit
def _section_gone(definition: dict[str, Any], random: Random) -> None:
    del definition[random.choice(list(definition))]


@_edit
def _section_field(definition: dict[str, Any], random: Random) -> None:
    """One field of one section, somewhere below."""
    here: Any = definition[random.choice([key for key, value in definition.items() if isinstance(value, (dict, list))])]
    for _ in range(6):
        if not here:
            return
        key = random.choice(list(here)) if isinstance(here, dict) else random.randrange(len(here))
        if isinstance(here[key], (dict, list)) and here[key] and random.random() < 0.7:
            here = here[key]
            continue
        here[key] = random.choice((*VALUES, *IDS, *ESCAPES))
        return


@_edit
def _normalizer(definition: dict[str, Any], random: Random) -> None:
    def replace(pattern: Any, text: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": text}

    grown = replace({"String": "a"}, "a" * 1000)
    deep: dict[str, Any] = {"type": "NFC"}
    for _ in range(random.choice((10, 100, 400))):
        deep = {"type": "Sequence", "normalizers": [deep]}
    junk = base64.b64encode(random.randbytes(random.choice((0, 1, 4, 40, 4000)))).decode()
    definition["normalizer"] = random.choice(
        [{"type": "Sequence", "normalizers": [grown] * 3}, grown, {"type": "Sequence", "normalizers": [grown] * 20},
         replace({"Regex": random.choice(PATTERNS)}, random.choice(("", "x", "xy", "a" * 1000))),
         replace({"Regex": ""}, "x" * 1000),
         replace({"String": ""}, "x"), replace("a", "b"), deep, {"type": "Precompiled", "precompiled_charsmap": junk},
         {"type": "Precompiled", "precompiled_charsmap": "not base64!"}, {"type": "Precompiled"}, {"type": "Nmt"},
         {"type": "Prepend", "prepend": random.choice(("x", "x" * 100_000))}, {"type": "Evil"}, {"type": "Lowercase"},
         {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * random.choice((2, 50_000))},
         {"type": "StripAccents"},
         {"type": "Strip", "strip_left": True, "strip_right": "x"}, {"type": "BertNormalizer"}, {"type": "ByteLevel"}]
    )  # fmt: skip


@_edit
def _pre_tokenizer(definition: dict[str, Any], random: Random) -> None:
    pattern = random.choice(PATTERNS)

    def split(**fields: Any) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **fields}

    definition["pre_tokenizer"] = random.choice(
        [split(), split(), split(invert=True), split(behavior=random.choice(("Removed", "MergedWithPrevious",
        "Contiguous", "x"))),
         split(pattern={"String": ""}), split(pattern=None), {"type": "Sequence",
         "pretokenizers": [split()] * random.choice((2, 500))},
         {"type": "Sequence", "pretokenizers": []}, {"type": "Whitespace"}, {"type": "Punctuation",
         "behavior": "Removed"},
         {"type": "CharDelimiterSplit", "delimiter": random.choice(("a", "", "ab"))}, {"type": "Digits",
         "individual_digits": 3},
         {"type": "Metaspace", "replacement": random.choice(("", "ab", "▁", None)), "prepend_scheme": "always",
         "split": True},
         {"type": "UnicodeScripts"}, {"type": "ByteLevel"}, {"type": "FixedLength", "length": random.choice((0, 1,
         2**40))},
         {"type": "Evil"}, None]
    )  # fmt: skip


@_edit
def _processor(definition: dict[str, Any], random: Random) -> None:
    names = ("[CLS]", "[SEP]") if "[CLS]" in str(definition["added_tokens"]) else ("<s>", "</s>")

    def special(ids: Any, name: str = names[0]) -> dict[str, Any]:
        return {name: {"id": name, "ids": ids, "tokens": [name] * (len(ids) if isinstance(ids, list) else 1)},
                names[1]: {"id": names[1], "ids": [3], "tokens": [names[1]]}}  # fmt: skip

    def made(single: Any, tokens: Any = None, pair: Any = None) -> dict[str, Any]:
        return {"type": "TemplateProcessing", "single": single, "pair": pair or single,
                "special_tokens": special([2]) if tokens is None else tokens}  # fmt: skip

    first, text = {"SpecialToken": {"id": names[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": random.choice((0, 1, 2, 7, 2**31, 2**32 - 1))}}
    definition["post_processor"] = random.choice(
        [made([first, text], special([10**9])), made([first, text], special([80])), made([first, text],
        special([2] * 3)),
         made([first, text], special([2] * random.choice((100, 5_000, 1_000_000)))), made([first] * 100_000 + [text]),
         made([text, text]), made([]), made([first]), made([second]), made([first, text], None, [first, text,
         second]),
         made([first, text], {}), made([first, text], special([])), made([first, text], special("x")), made("x"),
         made(None),
         made([{"SpecialToken": {"id": names[0], "type_id": random.choice((2, 7, 2**31, 2**32, -1))}}, text]),
         made([{"SpecialToken": {"id": "nobody", "type_id": 0}}, text]), {"type": "Sequence", "processors": []},
         {"type": "BertProcessing", "sep": ["[SEP]", 10**9], "cls": ["[CLS]", 2]}, {"type": "RobertaProcessing"},
         {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", -1], "trim_offsets": True,
         "add_prefix_space": False},
         {"type": "ByteLevel"}, {"type": "Evil"}, None, {"type": "Sequence", "processors": [made([first, text])] * 3}]
    )  # fmt: skip


@_edit
def _cutting(definition: dict[str, Any], random: Random) -> None:
    definition["truncation"] = random.choice(
        [{"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": stride}
         for length in (0, 1, 5, 2**31, 2**64 - 1, -1, "x") for stride in (0, 3, 10**9)]
        + [{"max_length": 5}, {"strategy": "Evil"}, {}, [], 5]
    )  # fmt: skip


@_edit
def _filling(definition: dict[str, Any], random: Random) -> None:
    definition["padding"] = random.choice(
        [{"strategy": strategy, "direction": direction, "pad_to_multiple_of": multiple, "pad_id": number,
        "pad_type_id": 0,
          "pad_token": "[PAD]"}
         for strategy in ({"Fixed": 2**31}, {"Fixed": 2**40}, {"Fixed": 100}, "BatchLongest", "Evil")
         for direction in ("Left", "Right") for multiple in (None, 0, 8, 2**40) for number in (0, 10**6)]
        + [{}, {"strategy": "BatchLongest"}, 5]
    )  # fmt: skip


@_edit
def _added(definition: dict[str, Any], random: Random) -> None:
    def token(number: Any, content: Any, **fields: Any) -> dict[str, Any]:
        return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False,
                "special": True, **fields}  # fmt: skip

    size = len(_vocab(definition))
    definition["added_tokens"] += random.choice(
        [[token(size, "new")], [token(2**31, "new")], [token(-1, "new")], [token("x", "new")], [token(size, "")],
        [token(3, "cat")],
         [token(size, "cat")], [token(size, "e", special=False)], [token(size, "a", normalized=True)],
         [token(size, None)],
         [token(size, "THE", normalized=True, single_word=True)], [token(size + i, f"t{i}") for i in range(20_000)],
         [token(size, "x" * 100_000)], [token(size, "[CLS]")], [token(size, "\x1b[2J")], [token(size, "(a+)+$")],
         [{}], [None],
         [token(0, "new")], [token(size + 5, "new")], [token(size, "new"), token(size, "newer")], [{"id": size,
         "content": "new"}]]
    )  # fmt: skip


@_edit
def _added_gone(definition: dict[str, Any], random: Random) -> None:
    del definition["added_tokens"][random.randrange(len(definition["added_tokens"]))]


@_edit
def _decoder(definition: dict[str, Any], random: Random) -> None:
    definition["decoder"] = random.choice(
        [None, {"type": "Evil"}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "WordPiece"},
        {"type": "Sequence", "decoders": []},
         {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, {"type": "CTC"}, []]
    )  # fmt: skip


@_edit
def _version(definition: dict[str, Any], random: Random) -> None:
    definition["version"] = random.choice((None, "2.0", 1.0, "", "1.0.0", []))


@_edit
def _text(definition: dict[str, Any], random: Random) -> Any:
    text = json.dumps(definition)
    return random.choice(
        ["", "{}", "[]", "null", "1", '"x"', "[" * 100_000, text[:-1], text + "x", "\ufeff" + text, text + "\0",
         text.replace(":", ": NaN,", 1), text.replace('"version"', '"model": {}, "version"'),
         text.encode("utf-16"), text[:-1] + ', "model": {}}',
         text.replace('"id": 2', '"id": 2, "id": 5'), text.replace("the", "\\ud800"),
         "version https://git-lfs.github.com/spec/v1\noid x\n"]
    )  # fmt: skip
