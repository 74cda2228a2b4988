"""The guide says what is so: its blocks run, one after another."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "data.md"


def test_the_blocks_of_the_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 8
    namespace: dict[str, object] = {}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        # leading newlines make a traceback point at the guide's own line
        exec(compile("\n" * line + block[1], str(GUIDE), "exec"), namespace)
