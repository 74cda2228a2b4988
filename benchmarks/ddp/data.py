"""What is learned from: digits, small photographs and a text, real where the files are there, else made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ddp.builtin import CharacterRows, parse_cifar10, parse_mnist
from benchmarks.ddp.fetch import CIFAR, MNIST, SHAKESPEARE, missing
from flodl.data import TensorRows

__all__ = ["Split", "digits", "photographs", "text"]

SEQ = 128
Split = tuple[Any, Any]


def _said(folder: Path | None, sources: Any) -> bool:
    """Return whether the files are there; where a folder was given and they are not, say what belongs into it."""
    if folder is None:
        return False
    absent = missing(folder, sources)
    if absent:
        print(
            f"made-up data in place of files that are not there (python -m benchmarks.ddp.fetch):\n{absent}", flush=True
        )
    return not absent


def digits(folder: Path | None) -> Split:
    """Return MNIST; where its second part is all there is, 8,000 images of that to train on and 2,000 held out."""
    if folder is not None and not missing(folder, MNIST):
        train, held = (_mnist(folder, part) for part in ("train", "t10k"))
        return _images(*train), _images(*held)
    if not _said(folder, MNIST[2:]):
        image, label = _made_up(640, 1, 28)
        return _images(image[:512], label[:512]), _images(image[512:], label[512:])
    assert folder is not None
    image, label = _mnist(folder, "t10k")
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    image, label = image[order], label[order]
    return _images(image[:8000], label[:8000]), _images(image[8000:], label[8000:])


def _mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    place = folder / "mnist"
    images, labels = place / f"{part}-images-idx3-ubyte.gz", place / f"{part}-labels-idx1-ubyte.gz"
    return parse_mnist(images.read_bytes(), labels.read_bytes())


def _images(image: Tensor, label: Tensor) -> TensorRows:
    return TensorRows({"image": image.float() / 255, "label": label})


def _made_up(count: int, colours: int, size: int) -> tuple[Tensor, Tensor]:
    """Return images of ten shapes in changing light, which can be told apart."""
    generator = torch.Generator().manual_seed(5)
    label = torch.randint(0, 10, (count,), generator=generator)
    shapes = torch.rand(10, colours, size, size, generator=generator)
    light = 0.5 + torch.rand(count, colours, size, size, generator=generator) / 2
    return (shapes[label] * 255 * light).to(torch.uint8), label


def photographs(folder: Path | None) -> Split:
    """Return CIFAR-10, 50,000 photographs to train on and 10,000 held out, or made-up ones of the same shape."""
    if not _said(folder, [CIFAR]):
        image, label = _made_up(640, 3, 32)
        return _images(image[:512], label[:512]), _images(image[512:], label[512:])
    assert folder is not None
    *train, held = [path.read_bytes() for path in CIFAR.wanted(folder)]
    return parse_cifar10(train), parse_cifar10([held])


def text(folder: Path | None) -> Split:
    """Return windows of a text: the first nine tenths to train on, the rest held out."""
    if not _said(folder, [SHAKESPEARE]):
        whole = "the quick brown fox jumps over the lazy dog; " * 400
    else:
        assert folder is not None
        whole = (folder / SHAKESPEARE.place).read_text("utf-8")
    cut = len(whole) * 9 // 10
    vocabulary = "".join(sorted(set(whole)))
    return CharacterRows(whole[:cut], SEQ, vocabulary), CharacterRows(whole[cut:], SEQ, vocabulary)
