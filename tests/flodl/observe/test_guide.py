"""The blocks of the observation guide run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "observation.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="guides are not part of an installed package")
def test_the_guide_runs():
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for block in blocks:
        # Blank lines before the code make a traceback point into the guide.
        source = "\n" * text[: block.start(1)].count("\n") + block.group(1)
        exec(compile(source, str(GUIDE), "exec"), names)
