"""A sentencepiece model file as a record, read without the sentencepiece library.

The file is one protocol buffer message. The reader checks every length and returns only the fields that determine token
ids. Field numbers are the same as in ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flodl.errors import printable
from flodl_hf.errors import TokenizerError

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
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data, source):
        if number == 1 and isinstance(value, bytes):
            try:
                text = value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _fault(source, "a piece is not UTF-8") from error
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
        elif number in (1, 2, 3):
            raise _fault(source, f"field {number} of a piece has the wrong type")
    if not text:
        raise _fault(source, "a piece is empty")
    if not math.isfinite(score):
        raise _fault(source, f"the score of {printable(text, 40)} is {score}")
    if not NORMAL <= kind <= BYTE:
        raise _fault(source, f"the type of {printable(text, 40)} is {kind}")
    return Piece(text, score, kind)


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
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=int(algorithm),
        charsmap=charsmap,
    )
