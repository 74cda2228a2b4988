"""Parsers for MNIST, CIFAR-10 and a text by characters. `fetch` has already compared the files with their checksums."""

from __future__ import annotations

import gzip
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flodl.data import TensorRows
from flodl.errors import DataError

__all__ = ["CharacterRows", "normalize_cifar10", "parse_cifar10", "parse_mnist"]

CIFAR10_RECORD = 1 + 3 * 32 * 32  # bytes: the label, then one plane for each colour
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2023, 0.1994, 0.2010)


def _idx(data: bytes, magic: int) -> np.ndarray:
    """Return the array of an IDX file of bytes, gzip or not."""
    raw = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    found = int.from_bytes(raw[:4], "big")
    if found != magic:
        raise DataError(f"IDX file: found the number {found}, expected {magic}. Check which file this is.")
    dimensions = magic & 0xFF
    shape = np.frombuffer(raw, ">u4", dimensions, offset=4).tolist()
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def parse_mnist(images: bytes, labels: bytes) -> tuple[Tensor, Tensor]:
    """Return images, uint8 ``(rows, 1, 28, 28)``, and labels, int64 ``(rows,)``."""
    return torch.from_numpy(_idx(images, 2051))[:, None], torch.from_numpy(_idx(labels, 2049).astype(np.int64))


def _as_floats(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parts, "image": parts["image"].float() / 255}


def parse_cifar10(files: Sequence[bytes]) -> TensorRows:
    """Return rows with ``image``, float ``(3, 32, 32)`` within 0 and 1, and ``label``, from binary batch files."""
    table = np.concatenate([np.frombuffer(data, np.uint8).reshape(-1, CIFAR10_RECORD) for data in files])
    images = torch.from_numpy(table[:, 1:].reshape(-1, 3, 32, 32).copy())
    return TensorRows({"image": images, "label": torch.from_numpy(table[:, 0].astype(np.int64))}, _as_floats)


def normalize_cifar10(images: Tensor) -> Tensor:
    """Return ``images`` minus the mean of the data set, divided by its standard deviation, for each colour."""
    mean, std = (images.new_tensor(values).view(1, 3, 1, 1) for values in (CIFAR10_MEAN, CIFAR10_STD))
    return (images - mean) / std


class CharacterRows(TensorRows):
    """Windows of characters as ``input`` and ``target``, int64 ``(seq_len,)``, the target one character ahead.

    Args:
        text: the text; characters after the last whole window are ignored.
        seq_len: characters in a window.
        vocabulary: all characters; the number of a character is its index here.
    """

    def __init__(self, text: str, seq_len: int, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        number = {character: k for k, character in enumerate(vocabulary)}
        codes = torch.tensor([number[character] for character in text])
        count = (len(text) - 1) // seq_len
        size = count * seq_len
        windows, targets = codes[:size].view(count, seq_len), codes[1 : size + 1].view(count, seq_len)
        super().__init__({"input": windows, "target": targets})
