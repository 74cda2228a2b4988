"""MNIST, CIFAR-10 and tiny Shakespeare out of their published bytes.

Decides how the bytes are laid out and checks them before a tensor is made. Nothing is downloaded: the caller brings the
bytes. Images stay bytes in memory and become floats batch by batch, so a set takes a quarter of the room.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flodl.data.batch import Batch
from flodl.data.collate import Where
from flodl.data.datasets import TensorRows
from flodl.errors import DataError

__all__ = ["Cifar10", "Mnist", "Shakespeare", "crop_and_flip"]


def _unpacked(data: bytes, limit: int, what: str) -> bytes:
    """Return at most ``limit`` bytes of ``data``, unpacked if it is gzip."""
    if data[:2] != b"\x1f\x8b":
        return data[:limit]
    try:
        # read in bounds, because a small file may unpack to any size
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read(limit)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{what}: damaged gzip data ({error}); download the file again", what=what) from None


def _idx(data: bytes, magic: int, dimensions: int, what: str) -> np.ndarray:
    """Return the array of an IDX file of bytes."""
    head = _unpacked(data, 4 + 4 * dimensions, what)
    words = np.frombuffer(head[: len(head) // 4 * 4], dtype=">u4").tolist()
    if len(words) != 1 + dimensions or words[0] != magic:
        raise DataError(
            f"{what}: the file begins with {words[:1]}, expected the number {magic} and {dimensions} sizes; "
            "is it the right file, and whole?",
            what=what,
            found=words[:1],
            expected=magic,
        )
    shape = words[1:]
    size = len(head) + int(np.prod([int(n) for n in shape], dtype=object))
    body = _unpacked(data, size + 1, what)
    if len(body) != size:
        raise DataError(
            f"{what}: {'more than ' * (len(body) > size)}{min(len(body), size)} bytes, the header says {size} for "
            f"shape "
            f"{shape}; download the file again",
            what=what,
            found=len(body),
            expected=size,
        )
    return np.frombuffer(body, dtype=np.uint8, offset=len(head)).reshape(shape).copy()


def _as_floats(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parts, "image": parts["image"].float() / 255}


class Mnist(TensorRows):
    """Handwritten digits: ``image``, float ``(batch, 1, 28, 28)`` within 0 and 1, and ``label``, int64 ``(batch,)``."""

    @staticmethod
    def parse(images: bytes, labels: bytes) -> Mnist:
        """Return the set from the bytes of an image file and a label file (IDX, gzip or not).

        Raises:
            DataError: a file is not what it should be, is cut short, or the two do not match.
        """
        pixels = _idx(images, 2051, 3, "MNIST images")
        digits = _idx(labels, 2049, 1, "MNIST labels")
        if len(pixels) != len(digits) or pixels.shape[1:] != (28, 28) or (digits.size and int(digits.max()) > 9):
            raise DataError(
                f"MNIST: images {pixels.shape}, {len(digits)} labels up to {digits.max(initial=0)}; expected as many "
                f"labels "
                "from 0 to 9 as images of 28 x 28",
                images=pixels.shape,
                labels=len(digits),
            )
        return Mnist(
            {"image": torch.from_numpy(pixels)[:, None], "label": torch.from_numpy(digits.astype(np.int64))}, _as_floats
        )


class Cifar10(TensorRows):
    """Small photographs: ``image``, float ``(batch, 3, 32, 32)`` within 0 and 1, and ``label``, int64 ``(batch,)``."""

    CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    MEAN = (0.4914, 0.4822, 0.4465)
    STD = (0.2023, 0.1994, 0.2010)

    @staticmethod
    def parse(files: Sequence[bytes]) -> Cifar10:
        """Return the set from the bytes of its binary batch files, one after another.

        Raises:
            DataError: there is no file, or one is not a whole number of records or holds a label above 9; ``problems``
                lists each.
        """
        record = 1 + 3 * 32 * 32
        problems = [] if files else ["no files"]
        tables = []
        for number, data in enumerate(files):
            if not data or len(data) % record:
                problems.append(f"file {number}: {len(data)} bytes, no whole number of records of {record} bytes")
                continue
            table = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
            if int(table[:, 0].max()) > 9:
                row = int((table[:, 0] > 9).argmax())
                problems.append(f"file {number}: record {row} has label {table[row, 0]}, expected 0 to 9")
            tables.append(table)
        if problems:
            raise DataError(
                "CIFAR-10: " + "; ".join(problems) + "; expected the binary version of the set", problems=problems
            )
        table = np.concatenate(tables)
        images = torch.from_numpy(table[:, 1:].reshape(-1, 3, 32, 32).copy())
        return Cifar10({"image": images, "label": torch.from_numpy(table[:, 0].astype(np.int64))}, _as_floats)

    @staticmethod
    def normalized(images: Tensor) -> Tensor:
        """Return ``images`` with the set's mean taken off and divided by its deviation, per channel."""
        mean, std = (images.new_tensor(v).view(1, 3, 1, 1) for v in (Cifar10.MEAN, Cifar10.STD))
        return (images - mean) / std


def crop_and_flip(batch: Batch, where: Where, *, pad: int = 4) -> Batch:
    """Return the batch with each image shifted and mirrored on its own: a transform for a loader.

    An image is padded with zeros, cropped to its size at a random place, and mirrored in half of all cases. The choice
    depends on the seed, the epoch and the row, so it comes back after a resume and for any batch size.
    """
    images = batch["image"]
    size = images.shape[-1]
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
    out = []
    for image, row in zip(padded, where.indices, strict=True):
        rng = where.rng("crop", row)
        top, left = rng.integers(2 * pad + 1, 2).tolist()
        part = image[:, top : top + size, left : left + size]
        out.append(part.flip(-1) if rng.bernoulli(0.5) else part)
    return batch.with_parts(image=torch.stack(out))


class Shakespeare(TensorRows):
    """Characters of a text: parts ``input`` and ``target``, int64 ``(batch, seq)``, the target one character ahead.

    Attributes:
        vocabulary: all characters of the text, sorted; a character's number is its place.
    """

    vocabulary: str

    @staticmethod
    def parse(text: str | bytes, seq_len: int, vocabulary: str | None = None) -> Shakespeare:
        """Return non-overlapping windows of ``seq_len`` characters; what is left at the end is too short to be one.

        Args:
            text: the text, or its UTF-8 bytes.
            seq_len: characters in a window.
            vocabulary: the characters to number by, for a part of a text whose other part is already numbered.

        Raises:
            DataError: the text is too short, not UTF-8, or has characters outside ``vocabulary``.
        """
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"Shakespeare: byte {error.start} is not UTF-8 text", position=error.start) from None
        if seq_len < 1 or len(text) <= seq_len:
            raise DataError(
                f"Shakespeare: {len(text)} characters for windows of {seq_len}; expected a window of at least 1 and "
                f"one "
                "character more than a window holds",
                found=len(text),
                seq_len=seq_len,
            )
        known = "".join(sorted(set(text))) if vocabulary is None else vocabulary
        strange = sorted(set(text) - set(known))
        if strange:
            raise DataError(f"Shakespeare: characters outside the vocabulary: {strange[:20]}", found=strange)
        number = {character: k for k, character in enumerate(known)}
        codes = torch.tensor([number[character] for character in text])
        count = (len(text) - 1) // seq_len
        data = Shakespeare(
            {
                "input": codes[: count * seq_len].view(count, seq_len),
                "target": codes[1 : count * seq_len + 1].view(count, seq_len),
            }
        )
        data.vocabulary = known
        return data

    def encode(self, text: str) -> Tensor:
        """Return the numbers of ``text``'s characters, int64 ``(len(text),)``.

        Raises:
            DataError: a character is not in the vocabulary.
        """
        unknown = sorted(set(text) - set(self.vocabulary))
        if unknown:
            raise DataError(f"Shakespeare: characters outside the vocabulary: {unknown[:20]}", found=unknown)
        return torch.tensor([self.vocabulary.index(character) for character in text], dtype=torch.int64)

    def decode(self, codes: Tensor | Sequence[int]) -> str:
        """Return the text of character numbers."""
        return "".join(self.vocabulary[int(code)] for code in codes)
