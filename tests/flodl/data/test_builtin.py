"""The built-in sets: published layouts are read exactly, damaged bytes are refused."""

import gzip
import struct

import pytest
import torch

from flodl.data import Batch, Cifar10, DataLoader, Mnist, Shakespeare, Where, crop_and_flip
from flodl.errors import DataError

PIXELS = bytes(i % 256 for i in range(3 * 784))
IMAGES = struct.pack(">IIII", 2051, 3, 28, 28) + PIXELS
LABELS = struct.pack(">II", 2049, 3) + bytes([7, 0, 9])
RECORD = bytes([3]) + bytes([10] * 1024) + bytes([20] * 1024) + bytes([255] * 1024)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_mnist(pack):
    data = Mnist.parse(pack(IMAGES), pack(LABELS))
    batch = next(iter(DataLoader(data, 3, shuffle=False)))
    assert batch.names == ("image", "label")
    assert batch["image"].shape == (3, 1, 28, 28)
    assert batch["image"].flatten().mul(255).round().to(torch.uint8).tolist() == list(PIXELS)
    assert batch["image"].max() == 1
    assert batch["label"].tolist() == [7, 0, 9]
    assert DataLoader(data, 3).is_resident


def test_cifar10():
    data = Cifar10.parse([RECORD, RECORD + b"\x09" + RECORD[1:]])
    assert len(data) == 3
    part = data.get_batch([2, 0])
    assert part["label"].tolist() == [9, 3]
    assert part["image"][0, :, 5, 5].tolist() == pytest.approx([10 / 255, 20 / 255, 1])
    assert Cifar10.CLASSES[3] == "cat"
    plain = torch.tensor(Cifar10.MEAN).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    assert Cifar10.normalized(plain).abs().max() == 0


def test_shakespeare():
    data = Shakespeare.parse(b"hello world!", 4)
    assert data.vocabulary == " !dehlorw"
    assert len(data) == 2
    part = data.get_batch([0, 1])
    assert [data.decode(line) for line in part["input"]] == ["hell", "o wo"]
    assert [data.decode(line) for line in part["target"]] == ["ello", " wor"]
    assert data.decode(data.encode("low")) == "low"
    assert len(Shakespeare.parse("hello", 2, data.vocabulary)) == 2


@pytest.mark.parametrize(
    "act",
    [
        lambda: Mnist.parse(LABELS, LABELS),
        lambda: Mnist.parse(IMAGES[:-1], LABELS),
        lambda: Mnist.parse(IMAGES + b"x", LABELS),
        lambda: Mnist.parse(IMAGES, struct.pack(">II", 2049, 2) + b"\0\0"),
        lambda: Mnist.parse(IMAGES, struct.pack(">II", 2049, 3) + bytes([1, 2, 10])),
        lambda: Mnist.parse(b"", LABELS),
        lambda: Mnist.parse(gzip.compress(IMAGES)[:-20], LABELS),
        lambda: Mnist.parse(struct.pack(">IIII", 2051, 2**31, 2**31, 2**31), LABELS),
        lambda: Cifar10.parse([]),
        lambda: Cifar10.parse([b""]),
        lambda: Cifar10.parse([RECORD[:-1]]),
        lambda: Cifar10.parse([b"\x0a" + RECORD[1:]]),
        lambda: Shakespeare.parse("abc", 3),
        lambda: Shakespeare.parse("abc", 0),
        lambda: Shakespeare.parse(b"\xff\xff\xff", 1),
        lambda: Shakespeare.parse("abc", 1, "ab"),
        lambda: Shakespeare.parse("abc", 1).encode("z"),
    ],
)
def test_damaged_or_foreign_bytes_are_refused(act):
    with pytest.raises(DataError):
        act()


def test_every_faulty_cifar_file_is_named():
    with pytest.raises(DataError) as caught:
        Cifar10.parse([RECORD[:-1], RECORD, b"\x0a" + RECORD[1:]])
    assert len(caught.value.problems) == 2


def test_each_image_is_cropped_on_its_own_and_alike_in_any_batch():
    image = torch.arange(1, 65, dtype=torch.float32).view(1, 1, 8, 8).expand(40, 1, 8, 8)
    batch = Batch({"image": image}, 40)
    out = crop_and_flip(batch, Where(1, 0, 0, tuple(range(40))), pad=2)["image"]
    assert out.shape == image.shape
    assert len({tuple(o.flatten().tolist()) for o in out}) > 20
    alone = crop_and_flip(Batch({"image": image[:1]}, 1), Where(1, 0, 9, (17,)), pad=2)["image"]
    assert torch.equal(alone[0], out[17])
    other = crop_and_flip(batch, Where(1, 1, 0, tuple(range(40))), pad=2)["image"]
    assert not torch.equal(other, out)
    whole = crop_and_flip(batch, Where(1, 0, 0, tuple(range(40))), pad=0)["image"]
    flipped = [torch.equal(w, image[0].flip(-1)) for w in whole]
    assert 10 < sum(flipped) < 30
    assert all(f or torch.equal(w, image[0]) for f, w in zip(flipped, whole, strict=True))
