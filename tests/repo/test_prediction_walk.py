"""The way of six short texts from `predict` to their labels, counted in functions, files and folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flodl_hf

ROOT = str(Path(flodl_hf.__file__).parent.parent)
MAX_FUNCTIONS, MAX_FILES, MAX_FOLDERS = 98, 18, 6
"""Lower these numbers when the way becomes shorter."""


def test_a_warm_prediction_takes_a_short_way(demo_model: Path) -> None:
    model: Any = flodl_hf.load(demo_model, device="cpu")
    texts = ["good", "bad", "a film", "a cold room", "kind staff", "the film was good"]
    seen: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((f"{ROOT}/flodl/", f"{ROOT}/flodl_hf/")):
            seen.add((code.co_filename, code.co_qualname))

    for _ in range(2):
        model.predict(texts)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model.predict(texts)
    finally:
        sys.setprofile(before)
    files = {file for file, _ in seen}
    assert 50 < len(seen) <= MAX_FUNCTIONS
    assert len(files) <= MAX_FILES
    assert len({Path(file).parent for file in files}) <= MAX_FOLDERS
