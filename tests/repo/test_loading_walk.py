"""The way of a warm `from_pretrained` through the files of both packages, counted."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import flodl_hf

ROOT = Path(flodl_hf.__file__).parent.parent
MAX_FILES, MAX_MOVES = 42, 334
"""Lower these numbers when the way becomes shorter."""


def test_a_warm_load_takes_a_short_way(demo_model: Path) -> None:
    files: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith((f"{ROOT}/flodl/", f"{ROOT}/flodl_hf/")):
            files.append(frame.f_code.co_filename)

    flodl_hf.AutoModelForSequenceClassification.from_pretrained(demo_model)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        flodl_hf.AutoModelForSequenceClassification.from_pretrained(demo_model)
    finally:
        sys.setprofile(before)
    moves = sum(a != b for a, b in pairwise(files))
    assert 20 < len(set(files)) <= MAX_FILES
    assert 100 < moves <= MAX_MOVES
