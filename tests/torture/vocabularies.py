"""Tokenizers written out by hand, one of each sort that the families use: WordPiece, BPE over bytes, Unigram.

Each is the text of a ``tokenizer.json``, and the vocabulary files from which the same is built without it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["SORTS", "VOCABULARY", "pieces_in", "plainly", "sentencepiece", "tokenizer_files", "vocabulary_of"]

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "an", "cat", "dog", "sat", "on", "mat", "good", "bad", "film", "is", "was", "not", "very", "paris")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (*SPECIALS, *WORDS, *(f"##{c}" for c in LETTERS), *LETTERS, *".,!?'")
"""The tokens of the WordPiece tokenizer, in the order of their ids."""

SORTS = {"wordpiece": "bert", "bytes": "roberta", "unigram": "xlm-roberta"}
"""The sorts, each with a family that uses it."""

_ROUND = ("<s>", "<pad>", "</s>", "<unk>")


def vocabulary_of(sort: str) -> tuple[str, ...]:
    """Return the tokens of a sort in the order of their ids."""
    if sort == "wordpiece":
        return VOCABULARY
    if sort == "bytes":
        return (*_ROUND, *_byte_letters(), *(a + b for a, b in _merges()), "<mask>")
    return (*_ROUND, *(piece for piece, _ in _pieces()), "<mask>")


def tokenizer_files(sort: str = "wordpiece", *, built: bool = False) -> dict[str, bytes]:
    """Return the files of a tokenizer by name.

    Args:
        sort: one of `SORTS`.
        built: leave out ``tokenizer.json``, so that it is built from the vocabulary files.
    """
    definition, settings, files = _SORTS[sort]()
    settings = {"model_max_length": 36, **settings}
    files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
    if not built:
        files["tokenizer.json"] = json.dumps(definition).encode()
    return files


def _added(tokens: Sequence[tuple[int, str]], spaced: str = "") -> list[dict[str, Any]]:
    return [
        {"id": number, "content": name, "single_word": False, "lstrip": name == spaced, "rstrip": False,
         "normalized": False, "special": True}
        for number, name in tokens
    ]  # fmt: skip


def _template(*names: str) -> list[dict[str, Any]]:
    second = False
    parts: list[dict[str, Any]] = []
    for name in names:
        second = second or name == "B"
        kind = "Sequence" if name in "AB" else "SpecialToken"
        parts.append({kind: {"id": name, "type_id": int(second)}})
    return parts


def _processor(single: Sequence[str], pair: Sequence[str], ids: dict[str, int]) -> dict[str, Any]:
    tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()}
    return {"type": "TemplateProcessing", "single": _template(*single), "pair": _template(*pair),
            "special_tokens": tokens}  # fmt: skip


def _definition(added: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def _wordpiece() -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    ids = {name: VOCABULARY.index(name) for name in SPECIALS}
    definition = _definition(
        _added([(number, name) for name, number in ids.items()]),
        normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                    "strip_accents": None, "lowercase": True},
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=_processor(("[CLS]", "A", "[SEP]"), ("[CLS]", "A", "[SEP]", "B", "[SEP]"),
                                  {name: ids[name] for name in ("[CLS]", "[SEP]")}),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        model={"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(VOCABULARY)}},
    )  # fmt: skip
    settings = {
        "tokenizer_class": "BertTokenizer", "do_lower_case": True, "unk_token": "[UNK]", "pad_token": "[PAD]",
        "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
    }  # fmt: skip
    return definition, settings, {"vocab.txt": ("\n".join(VOCABULARY) + "\n").encode()}


def _byte_letters() -> list[str]:
    """Return the letters by which bytes are written, in the order of the bytes that print first."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + place) for place in range(256 - len(plain))]


def _merges() -> list[tuple[str, str]]:
    return [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "t"), ("Ġ", "c"), ("Ġc", "at"), ("o", "o"), ("oo", "d")]


def _round_settings(kind: str) -> dict[str, Any]:
    return {
        "tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>",
        "pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>",
    }  # fmt: skip


def _round_added(tokens: Sequence[str]) -> list[dict[str, Any]]:
    special = (*_ROUND, "<mask>")
    return _added([(i, name) for i, name in enumerate(tokens) if name in special], spaced="<mask>")


def _bytes() -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    tokens, merges = vocabulary_of("bytes"), _merges()
    vocab = {token: i for i, token in enumerate(tokens)}
    definition = _definition(
        _round_added(tokens),
        normalizer=None,
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        post_processor={"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True,
                        "add_prefix_space": False},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
               "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
               "vocab": vocab, "merges": [list(pair) for pair in merges]},
    )  # fmt: skip
    lines = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
    files = {"vocab.json": json.dumps(vocab).encode(), "merges.txt": lines.encode()}
    return definition, _round_settings("RobertaTokenizer"), files


def _pieces() -> list[tuple[str, float]]:
    words = [f"▁{word}" for word in WORDS] + ["▁"]
    return [(piece, -1.0 - 0.1 * place) for place, piece in enumerate([*words, *LETTERS, *".,!?'"])]


def _unigram() -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    tokens = vocabulary_of("unigram")
    scored = [(name, 0.0) for name in _ROUND] + _pieces() + [("<mask>", 0.0)]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    definition = _definition(
        _round_added(tokens),
        normalizer={"type": "Sequence", "normalizers": [
            {"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        post_processor=_processor(("<s>", "A", "</s>"), ("<s>", "A", "</s>", "</s>", "B", "</s>"),
                                  {"<s>": 0, "</s>": 2}),
        decoder=metaspace,
        model={"type": "Unigram", "unk_id": 3, "vocab": [list(pair) for pair in scored], "byte_fallback": False},
    )  # fmt: skip
    files = {"sentencepiece.bpe.model": sentencepiece(_pieces())}
    return definition, _round_settings("XLMRobertaTokenizer"), files


_SORTS = {"wordpiece": _wordpiece, "bytes": _bytes, "unigram": _unigram}


# --- sentencepiece models as their protocol buffers lie in a file -----------------------------------------------------


def sentencepiece(pieces: Sequence[tuple[str, float]]) -> bytes:
    """Return a unigram model: the unknown piece, two control pieces, then these, each with its score."""

    def number(value: int) -> bytes:
        out = b""
        while value > 127:
            out += bytes([value % 128 + 128])
            value //= 128
        return out + bytes([value])

    def field(place: int, data: bytes) -> bytes:
        return number(place << 3 | 2) + number(len(data)) + data

    def piece(text: str, score: float, kind: int) -> bytes:
        body = field(1, text.encode()) + number(2 << 3 | 5) + struct.pack("<f", score)
        return field(1, body + (number(3 << 3) + number(kind) if kind != 1 else b""))

    first = piece("<unk>", 0.0, 2) + piece("<s>", 0.0, 3) + piece("</s>", 0.0, 3)
    trainer = number(3 << 3) + number(1) + number(4 << 3) + number(len(pieces) + 3)
    normalizer = field(1, b"identity") + b"".join(number(place << 3) + number(1) for place in (3, 4, 5))
    return first + b"".join(piece(text, score, 1) for text, score in pieces) + field(2, trainer) + field(3, normalizer)


def pieces_in(data: bytes) -> list[tuple[str, float, int]]:
    """Return the pieces of a sentencepiece model: text, score, kind.

    Raises:
        ValueError: the bytes are no such model.
    """
    found = []
    for place, value in _fields(data):
        if place == 1:
            parts = dict(_fields(bytes(value)))
            score = struct.unpack("<f", parts[2])[0] if 2 in parts else 0.0
            found.append((bytes(parts.get(1, b"")).decode(), score, int(parts.get(3, 1))))
    return found


def _fields(data: bytes) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("cut")
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        key = number()
        size = {0: 0, 1: 8, 2: -1, 5: 4}.get(key & 7)
        if size is None:
            raise ValueError("no such field")
        if size == 0:
            found.append((key >> 3, number()))
            continue
        size = number() if size < 0 else size
        if at + size > len(data):
            raise ValueError("cut")
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def plainly(sort: str, files: Mapping[str, bytes]) -> str:
    """Return the definition that vocabulary files plainly stand for, read line by line.

    Raises:
        ValueError: they stand for none.
    """
    definition = json.loads(tokenizer_files(sort)["tokenizer.json"])
    if sort == "wordpiece":
        lines = files["vocab.txt"].decode().split("\n")
        lines = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
        vocab = {line: number for number, line in enumerate(lines)}
        definition["model"]["vocab"] = vocab
        special = SPECIALS
    elif sort == "bytes":
        vocab = definition["model"]["vocab"] = json.loads(files["vocab.json"])
        lines = files["merges.txt"].decode().split("\n")
        merges = [line.rstrip("\r").split(" ") for line in lines if line and not line.startswith("#version")]
        definition["model"]["merges"] = merges
        special = (*_ROUND, "<mask>")
    else:
        pieces = pieces_in(files["sentencepiece.bpe.model"])
        scored = [(name, 0.0) for name in _ROUND] + [(text, score) for text, score, _ in pieces[3:]] + [("<mask>", 0.0)]
        definition["model"]["vocab"] = scored
        vocab = {text: number for number, (text, _) in enumerate(scored)}
        special = (*_ROUND, "<mask>")
    ids = {name: vocab[name] for name in special if name in vocab}
    for name in special:  # what the lines lack comes behind them
        ids.setdefault(name, max((*vocab.values(), *ids.values()), default=-1) + 1)
    known = sorted((entry for entry in definition["added_tokens"]), key=lambda entry: ids[entry["content"]])
    # Built from these files, a mask takes no space before it.
    definition["added_tokens"] = [
        entry | {"id": ids[entry["content"]], "lstrip": entry["lstrip"] and sort != "bytes"} for entry in known
    ]
    try:
        if sort != "bytes":
            tokens = definition["post_processor"]["special_tokens"]
            for name in tokens:
                tokens[name]["ids"] = [ids[name]]
        else:
            definition["post_processor"] |= {"sep": ["</s>", ids["</s>"]], "cls": ["<s>", ids["<s>"]]}
    except KeyError as fault:
        raise ValueError(f"no {fault}") from None
    return json.dumps(definition)
