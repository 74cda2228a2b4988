"""The annotations that users' editors read are checked where the checker is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
@pytest.mark.slow
def test_the_snippets_type_check() -> None:
    # `make check` looks at the same file; here it stands beside the other tests for whoever runs them alone.
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "tests/typing/user_snippets.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout


def test_the_snippets_are_checked_by_make_check() -> None:
    project = ROOT / "pyproject.toml"
    import tomllib

    assert "tests/typing" in tomllib.loads(project.read_text("utf-8"))["tool"]["pyright"]["include"]
