"""Every block of the training guide runs, in order, in an empty folder."""

import re
from pathlib import Path

import torch

torch.set_num_threads(1)
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "training.md"


def test_the_blocks_of_the_guide_run(tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"training.md, block {number}", "exec"), names)
