"""Named entity recognition on CoNLL files: train, evaluate, predict.

    python examples/entities.py [MODEL TRAIN [HELD_OUT]]

MODEL is a folder or a Hub name. TRAIN and HELD_OUT are CoNLL files: a word and its tag per line, an empty line between
sentences. Without arguments a small model is trained on sentences of this program.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from flodl_hf import finetune
from flodl_hf.training.demo import write_demo

NAMES = ("Ada", "Bob", "Eve", "Kim", "Lee", "Mia", "Noah", "Omar", "Zoe")
PLACES = ("Bern", "Kyiv", "London", "New York", "Oslo", "Paris", "Rome", "The Hague")
SENTENCES = (
    ("{name} lives in {place} .", "the food in {place} was good .", "{name} and {other} went to {place} ."),
    ("{place} was cold , {name} said .", "{name} loves the music .", "the train from {place} was late ."),
)


def made_up(count: int, seed: int) -> list[dict[str, list[str]]]:
    """Return sentences with a tag per word; further words of a name have the tag ``I-``."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        values = {"name": draw.choice(NAMES), "other": draw.choice(NAMES), "place": draw.choice(PLACES)}
        words, tags = [], []
        for part in draw.choice(draw.choice(SENTENCES)).split():
            kind = part.strip("{}") if part.startswith("{") else None
            for at, word in enumerate((values[kind] if kind else part).split()):
                words.append(word)
                tags.append("O" if kind is None else ("B-" if not at else "I-") + ("LOC" if kind == "place" else "PER"))
        rows.append({"words": words, "tags": tags})
    return rows


def main(model: str | None = None, train: Any = None, held_out: Any = None) -> float:
    """Train, print the metrics of each type and some entities; return the F1 of spans."""
    with tempfile.TemporaryDirectory() as place:
        if model is None:
            model, epochs, rate = str(write_demo(Path(place) / "demo")), 6, 2e-3
            train, held_out = made_up(300, seed=1), made_up(60, seed=2)
        else:
            epochs, rate = 3, 5e-5
        result = finetune(
            model, task="ner", train=train, eval=held_out if held_out is not None else 0.1, out=Path(place) / "tagger",
            epochs=epochs, lr=rate, warmup=0.1, batch_size=16,
        )  # fmt: skip
        for name, value in sorted(result.metrics.items()):
            print(f"{name:24} {value:.3f}")
        for text in ("Mia went to New York .", "Kim said the food in Rome was late ."):
            found = result.model.predict(text)
            print(text, "->", ", ".join(f"{e.word} ({e.label}, {e.score:.2f})" for e in found) or "nothing")
            assert all(text[e.start : e.end] == e.word for e in found)
        return result.metrics["f1"]


if __name__ == "__main__":
    main(*sys.argv[1:4])
