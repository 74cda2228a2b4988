"""Tokenizers of sentencepiece models, as transformers 5 builds them with the tokenizers library, and the model files.

A file is one protocol buffer message. The reader checks every length and returns only the fields that determine token
ids. Field numbers are the same as in ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flodl.errors import printable
from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.guard import check_table
from flodl_hf.tokenization.settings import Source, content

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

UNIGRAM, BPE = 1, 2
_ALGORITHMS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

Value = int | float | bytes

# XLM-R, the largest vocabulary of the supported families, has 250,000 pieces.
_MAX_PIECES = 2_000_000


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its position in the file is its id.

    Attributes:
        text: the piece, with U+2581 for a space.
        score: log probability (unigram) or negative merge rank (BPE).
        kind: ``NORMAL``, ``UNKNOWN``, ``CONTROL``, ``USER_DEFINED``, ``UNUSED`` or ``BYTE``.
    """

    text: str
    score: float
    kind: int = NORMAL


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The segmentation settings of a sentencepiece model file.

    Attributes:
        pieces: the vocabulary in the order of ids.
        algorithm: ``UNIGRAM`` or ``BPE``.
        charsmap: compiled character replacements, empty for none.
    """

    pieces: tuple[Piece, ...]
    algorithm: int
    charsmap: bytes

    @property
    def unk_id(self) -> int:
        """Position of the unknown piece."""
        return next(i for i, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)


def _fault(source: str, what: str) -> TokenizerError:
    return TokenizerError(
        f"{source}: {what}; expected a sentencepiece model, and the file is damaged or none; fetch it again",
        where=source,
        reason=what,
    )


def _varint(data: bytes, at: int, source: str) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _fault(source, "a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _fault(source, "a number is longer than ten bytes")


def _fields(data: bytes, source: str) -> Iterator[tuple[int, Value]]:
    """Yield field number and value of a message: int for varints, float for 32 bits, bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, source)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise _fault(source, "field number 0")
        if wire not in (0, 1, 2, 5):
            raise _fault(source, f"wire type {wire}")
        size = {1: 8, 5: 4}.get(wire, 0)
        if not size:
            size, at = _varint(data, at, source)
        if wire == 0:
            yield number, size
            continue
        if size > len(data) - at:
            raise _fault(source, f"{size} bytes are announced and {len(data) - at} are left")
        part = data[at : at + size]
        at += size
        yield number, struct.unpack("<f", part)[0] if wire == 5 else part


def _piece(data: bytes, source: str) -> Piece:
    found: dict[int, Any] = {1: b"", 2: 0.0, 3: NORMAL}
    for number, value in _fields(data, source):
        if number in found and type(value) is not type(found[number]):
            raise _fault(source, f"field {number} of a piece has the wrong type")
        found[number] = value
    try:
        piece = Piece(found[1].decode("utf-8"), found[2], found[3])
    except UnicodeDecodeError as error:
        raise _fault(source, "a piece is not UTF-8") from error
    if not piece.text:
        raise _fault(source, "a piece is empty")
    if not math.isfinite(piece.score):
        raise _fault(source, f"the score of {printable(piece.text, 40)} is {piece.score}")
    if not NORMAL <= piece.kind <= BYTE:
        raise _fault(source, f"the type of {printable(piece.text, 40)} is {piece.kind}")
    return piece


def read_model(data: bytes, source: str) -> SentencePieceModel:
    """Return the model in the bytes of a sentencepiece file.

    Args:
        data: contents of the file.
        source: its name, for messages.

    Raises:
        TokenizerError: if the file is damaged or not supported.
    """
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] | None = None
    for number, value in _fields(data, source):
        if number > 5:
            continue
        if not isinstance(value, bytes):
            raise _fault(source, f"field {number} has the wrong type")
        if number == 1:
            if len(pieces) == _MAX_PIECES:
                raise _fault(source, f"more than {_MAX_PIECES} pieces")
            pieces.append(_piece(value, f"{source}, piece {len(pieces)}"))
        elif number == 2:
            trainer = dict(_fields(value, f"{source}, trainer settings"))
        elif number == 3:
            normalizer = dict(_fields(value, f"{source}, normalizer settings"))
    if not pieces:
        raise _fault(source, "there are no pieces")
    if normalizer is None:
        raise _fault(source, "the normalizer settings are missing")
    unknown = [piece.text for piece in pieces if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise _fault(source, f"there are {len(unknown)} unknown pieces, expected 1")
    texts = {piece.text for piece in pieces}
    if len(texts) != len(pieces):
        raise _fault(source, f"{len(pieces) - len(texts)} pieces occur more than once")

    algorithm = trainer.get(3, UNIGRAM)
    charsmap = normalizer.get(2, b"")
    if not isinstance(charsmap, bytes):
        raise _fault(source, "the character map has the wrong type")
    unsupported = []
    if algorithm not in (UNIGRAM, BPE):
        unsupported.append(f"the {_ALGORITHMS.get(int(algorithm), algorithm)!s} algorithm")
    if trainer.get(24, False):
        unsupported.append("spaces at the end of pieces (treat_whitespace_as_suffix)")
    if not normalizer.get(5, True):
        unsupported.append("plain spaces in pieces (escape_whitespaces false)")
    if unsupported:
        raise TokenizerError(
            f"{source}: uses {' and '.join(unsupported)}, expected unigram or BPE with spaces as U+2581; "
            "save it as tokenizer.json with the tool that created it, and load that file",
            where=source,
            found=unsupported,
        )
    return SentencePieceModel(tuple(pieces), int(algorithm), charsmap)


# Tokenizers

_SPACE = "\u2581"
_QUOTES = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
_ACCENTS = [normalizers.NFKD(), normalizers.StripAccents()]
_SPACES = [normalizers.Replace(Regex(" {2,}"), " ")]
_BLANKS = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(False, True)]

Step = Callable[[Source, list[normalizers.Normalizer]], Sequence[normalizers.Normalizer]]

# Each returns normalizers, given the table of the model as a list of one or none.
STEPS: Mapping[str, Step] = {
    "quotes": lambda _, table: _QUOTES,
    "accents": lambda _, table: _ACCENTS,
    "accents unless kept": lambda source, _: [] if source.flag("keep_accents", not source.rules.cleaned) else _ACCENTS,
    "lower": lambda source, _: (
        [normalizers.Lowercase()] if source.flag("do_lower_case", source.rules.lowercase is True) else []
    ),
    "charsmap": lambda _, table: table,
    "charsmap or lines": lambda _, table: table or [normalizers.Replace("\n", " ")],
    "spaces": lambda _, table: _SPACES,
    "marked spaces": lambda _, table: [normalizers.Replace(Regex(" {2,}"), _SPACE)],
    "marks": lambda _, table: [normalizers.Replace(" ", _SPACE)],
    "blanks": lambda _, table: _BLANKS,
}


def _read(source: Source) -> SentencePieceModel:
    name = source.rules.files[0]
    return read_model(source.files[name], f"{source.folder}/{name}")


def _merges(model: SentencePieceModel, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return merges by which BPE arrives at the pieces, best score first."""
    usable = {piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)} & set(ids)
    ranked = sorted((piece for piece in model.pieces if piece.text in usable), key=lambda piece: -piece.score)
    return [
        (piece.text[:cut], piece.text[cut:])
        for piece in ranked
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in usable and piece.text[cut:] in usable
    ]


def _tokens(source: Source, entry: str) -> list[str]:
    """Return the tokens of an entry of ``first`` or ``last``."""
    if entry == "extra_ids":
        count = source.settings.get("extra_ids", 100)
        return [f"<extra_id_{number}>" for number in range(count - 1, -1, -1)]
    role, _, default = entry.partition("=")
    stated = content(source.settings.get(role)) if default else source.tokens.get(role)
    return [stated or default or role]


def pieces(source: Source) -> Tokenizer:
    """Return a tokenizer with the numbering and the normalizers that the rules of the class list."""
    rules = source.rules
    model = _read(source)
    scored = [(piece.text, piece.score) for piece in model.pieces]
    first, last = ([text for entry in part for text in _tokens(source, entry)] for part in (rules.first, rules.last))
    if source.rows is not None:
        last = last[: max(0, source.rows - len(first) - len(scored) + rules.skipped)]
    vocab = [*((text, 0.0) for text in first), *scored[rules.skipped :], *((text, 0.0) for text in last)]
    ids = {text: number for number, (text, _) in enumerate(vocab)}
    unknown = ids.get(source.tokens["unk_token"], model.unk_id) if rules.unknown is None else rules.unknown
    unknown = min(unknown, len(vocab) - 1)
    if rules.build == "bpe":
        merges = _merges(model, ids)
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=vocab[unknown][0], fuse_unk=True))
    else:
        tokenizer = Tokenizer(models.Unigram(vocab, unknown, False))
    check_table(model.charsmap, f"{source.folder}/{rules.files[0]}")
    table: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    steps = [normalizer for name in rules.steps for normalizer in STEPS[name](source, table)]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always"
    if rules.prefix and not source.flag("add_prefix_space", True):
        scheme = "first" if rules.spaces == "first" else "never"
    if rules.spaces:
        splitters: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace(_SPACE, scheme)]
        if rules.spaces == "words":
            splitters.insert(0, pre_tokenizers.WhitespaceSplit())
        if rules.split_punctuation is not None and source.flag("split_by_punct", rules.split_punctuation):
            splitters.insert(0, pre_tokenizers.Punctuation("isolated"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.Metaspace(_SPACE, scheme) if rules.spaces else decoders.Replace(_SPACE, " ")
    _add_kinds(tokenizer, model.pieces[rules.skipped :])
    roles = {token for role, token in source.tokens.items() if role.endswith("_token")}
    extra = [text for text in (*first, *last) if text not in roles and not text.endswith("NOTUSED")]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in extra])
    return tokenizer


def _add_kinds(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> None:
    """Match control pieces and user-defined pieces as whole tokens; control pieces are special."""
    kinds = [piece for piece in pieces if piece.kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(one.text, normalized=False, special=one.kind == CONTROL) for one in kinds])


def llama(source: Source) -> Tokenizer:
    """Return a tokenizer of BPE with byte pieces that marks a space before a text and does not split words."""
    model = _read(source)
    if model.algorithm != BPE:
        raise TokenizerError(
            f"{source.folder}/{source.rules.files[0]}: found a unigram model, expected BPE. Correct tokenizer_class.",
            where=source.folder,
        )
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(models.BPE(ids, _merges(model, ids), fuse_unk=True, byte_fallback=True))
    prefix = source.flag("add_prefix_space", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first" if prefix else "never", split=False)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    _add_kinds(tokenizer, model.pieces)
    return tokenizer


def sentencepiece_pieces(source: Source) -> Tokenizer:
    """Return a tokenizer with the pieces that the package sentencepiece finds."""
    from flodl_hf.tokenization.python_words import sentencepieces, splitter

    name = source.rules.files[0]
    model = _read(source)
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=model.pieces[model.unk_id].text))
    tokenizer.pre_tokenizer = splitter(sentencepieces(source.files[name]))
    stripped = decoders.Replace(Regex(r"\A\s+|\s+\z"), "")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse(), stripped])
    return tokenizer
