"""The mixed corpus of the speed measurements: real text cut to log-normal lengths, drawn from a seed.

Sources are SST-2 sentences, WNUT-17 posts, XQuAD paragraphs and Shakespeare's lines, in folders named after them.
Lengths are log-normal, median 22 words, sigma 1, at most 300 words.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

__all__ = ["SOURCES", "mixed_texts", "source_texts"]

SOURCES = ("sst2", "wnut17", "xquad", "shakespeare")


def source_texts(folder: Path, name: str) -> list[str]:
    """Return the texts of one source."""
    if name == "sst2":
        lines = (folder / name / "dev.tsv").read_text("utf-8").splitlines()
        return [line.rpartition("\t")[0] for line in lines]
    if name == "wnut17":
        posts = (folder / name / "dev.conll").read_text("utf-8").split("\n\n")
        return [" ".join(line.split("\t")[0].split(" ")[0] for line in post.splitlines() if line) for post in posts]
    if name == "xquad":
        data = json.loads((folder / name / "dev.json").read_text("utf-8"))["data"]
        return [paragraph["context"] for article in data for paragraph in article["paragraphs"]]
    whole = (folder / name / "input.txt").read_text("utf-8")
    return [speech for speech in whole.split("\n\n") if speech]


def mixed_texts(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Return ``count`` texts of log-normal lengths, each a run of words of one source."""
    words = [[w for text in source_texts(folder, name) for w in text.split()] for name in SOURCES]
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        pool = draw.choice(words)
        length = max(1, min(300, round(math.exp(draw.gauss(math.log(22), 1.0)))))
        start = draw.randrange(0, len(pool) - length)
        texts.append(" ".join(pool[start : start + length]))
    return texts
