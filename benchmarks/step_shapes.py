"""How many shapes the batches of a run come in, what fills them up, and how many steps are replayed; without a GPU.

    python -m benchmarks.step_shapes --data FOLDER [--batches 16 32 64] [--steps 300]

``--data`` holds the folders that `benchmarks.corpus` names. Tokens are counted as 1.3 a word and two besides, 128 at
most. A shape's first step is ordinary, its second one is captured, all others are replayed; a shape that comes seldom
is captured later (`flodl.train.step.capture`). Packed batches are those of bf16 and fp16, padded ones of fp32 and tf32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.corpus import mixed_texts, source_texts
from flodl.data import FixedBatches, RandomSampler
from flodl.train.step.capture import MAX_GAP_STEPS, MIN_OCCURRENCES
from flodl_hf.training.rows import choose_shapes, choose_widths

LONGEST = 128


def lengths_of(texts: list[str]) -> NDArray[np.int64]:
    """Return about how many tokens texts have."""
    return np.asarray([min(LONGEST, round(1.3 * len(text.split())) + 2) for text in texts], np.int64)


def replayed(keys: list[Hashable]) -> list[bool]:
    """Return which steps of these shapes are replayed."""
    came: dict[Hashable, tuple[int, int]] = {}
    captured: set[Hashable] = set()
    found = []
    for step, key in enumerate(keys):
        found.append(key in captured)
        count, first = came.get(key, (0, step))
        came[key] = count + 1, first
        if count and (count + 1 >= MIN_OCCURRENCES or step - first <= MAX_GAP_STEPS * count):
            captured.add(key)
    return found


def told(
    name: str, source: Any, lengths: NDArray[np.int64], steps: int, shape: Callable[[NDArray[np.int64]], Any], own: Any
) -> str:
    """Return a line of figures for the first steps of a run."""
    keys, filled, real = [], 0, 0
    for rows in first_batches(source, steps):
        key, size = shape(lengths[rows])
        keys.append(key)
        filled += size
        real += own(lengths[rows])
    seen = replayed(keys)
    shares = "  ".join(f"{np.mean(seen[:count]):.0%} of {count}" for count in (50, 100, steps) if count <= steps)
    return f"{name}: {len(set(keys)):>3} shapes, {filled / real - 1:6.1%} filling, replayed {shares}"


def first_batches(source: Any, steps: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of the first batches."""
    epoch = 0
    while steps > 0:
        for rows in list(source.plan(epoch))[:steps]:
            yield rows
            steps -= 1
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    corpora = {name: source_texts(given.data, name) for name in ("sst2", "wnut17")}
    corpora["mixed"] = mixed_texts(given.data, 20_000)
    for size in given.batches:
        for name, texts in corpora.items():
            lengths = lengths_of(texts)
            source = FixedBatches(RandomSampler(len(lengths), 42), size)
            shapes, widths = choose_shapes(lengths, source, LONGEST), choose_widths(lengths, lengths, source)

            def packed(rows: NDArray[np.int64], shapes: Any = shapes) -> tuple[Hashable, int]:
                bucket = shapes.bucket(rows)
                return bucket, bucket.tokens

            def padded(rows: NDArray[np.int64], widths: Any = widths) -> tuple[Hashable, int]:
                width = next((one for one in widths if one >= rows.max()), int(rows.max()))
                return (len(rows), width), len(rows) * width

            def whole(rows: NDArray[np.int64]) -> int:
                return len(rows) * int(rows.max())

            def alone(rows: NDArray[np.int64]) -> tuple[Hashable, int]:
                return (len(rows), int(rows.max())), len(rows) * int(rows.max())

            ways: Any = {"packed": (packed, np.sum), "padded": (padded, whole), "padded, own widths": (alone, whole)}
            for way, (shape, own) in ways.items():
                print(told(f"batch {size}, {name}, {way}", source, lengths, given.steps, shape, own))


if __name__ == "__main__":
    main()
