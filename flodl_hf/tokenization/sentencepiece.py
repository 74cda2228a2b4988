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

__all__ = [
    "BYTE",
    "CONTROL",
    "NORMAL",
    "UNKNOWN",
    "UNUSED",
    "USER_DEFINED",
    "Piece",
    "SentencePieceModel",
    "read_model",
]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

UNIGRAM, BPE = 1, 2
_ALGORITHMS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

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


class _Reader:
    """Fields of one message; every read is checked against its end."""

    def __init__(self, data: bytes, where: str, start: int = 0, stop: int | None = None) -> None:
        self.data = data
        self.where = where
        self.at = start
        self.stop = len(data) if stop is None else stop

    def fail(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"{self.where}: byte {self.at}: {what}; expected a sentencepiece model, and the file is damaged or none; "
            "fetch it again",
            where=self.where,
            position=self.at,
            reason=what,
        )

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            if self.at >= self.stop:
                raise self.fail("a number is cut off")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise self.fail("a number is longer than ten bytes")

    def take(self, count: int) -> bytes:
        if count > self.stop - self.at:
            raise self.fail(f"{count} bytes are announced and {self.stop - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def fields(self) -> Iterator[tuple[int, int | float | bytes]]:
        """Yield field number and value: int for varints, float for 32 bits, bytes for the rest."""
        while self.at < self.stop:
            key = self.varint()
            number, wire = key >> 3, key & 7
            if number == 0:
                raise self.fail("field number 0")
            if wire == 0:
                yield number, self.varint()
            elif wire == 1:
                yield number, self.take(8)
            elif wire == 2:
                yield number, self.take(self.varint())
            elif wire == 5:
                yield number, struct.unpack("<f", self.take(4))[0]
            else:
                raise self.fail(f"wire type {wire}")


def _piece(data: bytes, where: str) -> Piece:
    reader = _Reader(data, where)
    text, score, kind = "", 0.0, NORMAL
    for number, value in reader.fields():
        if number == 1 and isinstance(value, bytes):
            try:
                text = value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise reader.fail("a piece is not UTF-8") from error
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
        elif number in (1, 2, 3):
            raise reader.fail(f"field {number} of a piece has the wrong type")
    if not text:
        raise reader.fail("a piece is empty")
    if not math.isfinite(score):
        raise reader.fail(f"the score of {printable(text, 40)} is {score}")
    if not NORMAL <= kind <= BYTE:
        raise reader.fail(f"the type of {printable(text, 40)} is {kind}")
    return Piece(text, score, kind)


def _numbers(data: bytes, where: str) -> dict[int, int | float | bytes]:
    return dict(_Reader(data, where).fields())


def read_model(data: bytes, where: str) -> SentencePieceModel:
    """Return the model in the bytes of a sentencepiece file.

    Args:
        data: contents of the file.
        where: its name, for messages.

    Raises:
        TokenizerError: if the file is damaged or not supported.
    """
    reader = _Reader(data, where)
    pieces: list[Piece] = []
    trainer: dict[int, int | float | bytes] = {}
    normalizer: dict[int, int | float | bytes] | None = None
    for number, value in reader.fields():
        if number > 5:
            continue
        if not isinstance(value, bytes):
            raise reader.fail(f"field {number} has the wrong type")
        if number == 1:
            if len(pieces) == _MAX_PIECES:
                raise reader.fail(f"more than {_MAX_PIECES} pieces")
            pieces.append(_piece(value, f"{where}, piece {len(pieces)}"))
        elif number == 2:
            trainer = _numbers(value, f"{where}, trainer settings")
        elif number == 3:
            normalizer = _numbers(value, f"{where}, normalizer settings")
    if not pieces:
        raise reader.fail("there are no pieces")
    if normalizer is None:
        raise reader.fail("the normalizer settings are missing")
    unknown = [piece.text for piece in pieces if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise reader.fail(f"there are {len(unknown)} unknown pieces, expected 1")
    texts = {piece.text for piece in pieces}
    if len(texts) != len(pieces):
        raise reader.fail(f"{len(pieces) - len(texts)} pieces occur more than once")

    def flag(spec: dict[int, int | float | bytes], number: int, default: bool) -> bool:
        return bool(spec.get(number, default))

    algorithm = trainer.get(3, UNIGRAM)
    charsmap = normalizer.get(2, b"")
    if not isinstance(charsmap, bytes):
        raise reader.fail("the character map has the wrong type")
    unsupported = []
    if algorithm not in (UNIGRAM, BPE):
        unsupported.append(f"the {_ALGORITHMS.get(int(algorithm), algorithm)!s} algorithm")
    if flag(trainer, 24, False):
        unsupported.append("spaces at the end of pieces (treat_whitespace_as_suffix)")
    if not flag(normalizer, 5, True):
        unsupported.append("plain spaces in pieces (escape_whitespaces false)")
    if unsupported:
        raise TokenizerError(
            f"{where}: uses {' and '.join(unsupported)}, expected unigram or BPE with spaces as U+2581; "
            "save it as tokenizer.json with the tool that created it, and load that file",
            where=where,
            found=unsupported,
        )
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=int(algorithm),
        charsmap=charsmap,
    )
