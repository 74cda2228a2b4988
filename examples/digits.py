"""Classify the digits of MNIST with a graph of convolutions and the Trainer.

    python examples/digits.py [FOLDER]

FOLDER contains the files of MNIST (``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, gzip or not; the training
files are optional). Without FOLDER the program draws digits, so that it runs everywhere.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flodl import FlowBuilder, Graph
from flodl.data import Batch, TensorRows
from flodl.train import Loss, Trainer, adamw
from flodl.train.schedule import OneCycle

# Seven segments of a display, as rectangles (top, left, height, width) of 28 x 28, then the segments of each digit.
SEGMENTS = {"a": (5, 9, 2, 10), "b": (6, 18, 8, 2), "c": (14, 18, 8, 2), "d": (21, 9, 2, 10), "e": (14, 8, 8, 2),
            "f": (6, 8, 8, 2), "g": (13, 9, 2, 10)}  # fmt: skip
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def drawn_digits(count: int, seed: int = 0) -> TensorRows:
    """Return digits of a display, shifted and covered with noise, in the form of MNIST."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.zeros(10, 28, 28)
    for digit, segments in enumerate(DIGITS):
        for top, left, height, width in map(SEGMENTS.__getitem__, segments):
            plain[digit, top : top + height, left : left + width] = 1
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.stack(
        [plain[label].roll(tuple(torch.randint(-3, 4, (2,), generator=generator).tolist()), (0, 1)) for label in labels]
    )
    images = (images * 0.8 + 0.3 * torch.randn(images.shape, generator=generator)).clamp(0, 1)
    return TensorRows({"image": images[:, None], "label": labels})


def read_mnist(folder: Path, part: str) -> TensorRows:
    """Return the images and labels of MNIST's files, images as floats within 0 and 1."""
    raw = {}
    for name, header_bytes in (("images", 16), ("labels", 8)):
        data = next(folder.glob(f"{part}-{name}*")).read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        raw[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header_bytes)
    return TensorRows({"image": raw["images"].view(-1, 1, 28, 28) / 255, "label": raw["labels"].long()})


def find_digits(folder: Path | None) -> tuple[TensorRows, TensorRows]:
    """Return rows for training and rows for evaluation."""
    if folder is None:
        return drawn_digits(2_000), drawn_digits(500, seed=1)

    test = read_mnist(folder, "t10k")
    if any(folder.glob("train-images*")):
        return read_mnist(folder, "train"), test
    # test images alone: four fifths for training, the rest for evaluation
    image, label = _all_of(test)
    cut = len(label) * 4 // 5
    return (
        TensorRows({"image": image[:cut], "label": label[:cut]}),
        TensorRows({"image": image[cut:], "label": label[cut:]}),
    )


def make_model(device: torch.device) -> Graph:
    """Return the network: two convolutions, the second with a residual connection, and a classifier."""
    return (
        FlowBuilder(nn.Conv2d(1, 16, 3, stride=2, padding=1), entry="image")
        .through(nn.BatchNorm2d(16))
        .through(nn.GELU())
        .tag("edges")
        .also(nn.Conv2d(16, 16, 3, padding=1), name="mix")
        .through(nn.AdaptiveAvgPool2d(4))
        .through(nn.Flatten())
        .through(nn.Linear(256, 10), name="classifier")
        .label("digits")
        .build()
    )


def step(model: nn.Module, batch: Batch) -> Loss:
    """Return the loss of a batch as a sum and a count."""
    logits: Tensor = model(batch["image"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))


def judge(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    """Return the number of correct predictions of a batch."""
    hits = (model(batch["image"]).argmax(1) == batch["label"]).sum()
    return {"accuracy": (hits, len(batch["label"]))}


def main(folder: Path | None = None, epochs: int = 3) -> float:
    """Train, print a line per epoch and the most frequent confusion; return the last accuracy."""
    train, test = find_digits(folder)
    steps = epochs * -(-len(train) // 64)
    run = Trainer.builder(make_model, adamw(3e-3), step).dataset(train).batch_size(64).num_epochs(epochs)
    run.evaluate(judge, test, batch_size=250).scheduler(OneCycle(3e-3, total=steps)).progress(False)
    trained = run.run()
    for epoch in trained.metrics:
        print(f"epoch {epoch.epoch + 1}: loss {epoch.loss:.3f}, evaluation accuracy {epoch.eval['accuracy']:.1%}")
    model = trained.load_into(make_model(torch.device("cpu"))).eval()
    image, label = _all_of(test)
    with torch.no_grad():
        guess = model(image).argmax(1)
    mixed = torch.zeros(10, 10, dtype=torch.long).index_put_((label, guess), torch.ones_like(label), accumulate=True)
    mixed.fill_diagonal_(0)
    worst = int(mixed.argmax())
    print(f"most frequent confusion: {worst // 10} predicted as {worst % 10}, {int(mixed.max())} of {len(label)}")
    with tempfile.TemporaryDirectory() as place:
        model.svg(Path(place) / "digits.svg")
        print(f"drawing of the network: {(Path(place) / 'digits.svg').stat().st_size:,} bytes of SVG")
    return trained.metrics[-1].eval["accuracy"]


def _all_of(rows: TensorRows) -> tuple[Tensor, Tensor]:
    whole = rows.get_batch(range(len(rows)))
    return whole["image"], whole["label"]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
