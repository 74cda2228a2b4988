"""The notebooks run from their first cell to their last, and what they end a cell with can be shown."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_the_notebooks_are_found() -> None:
    assert len(NOTEBOOKS) >= 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("demo_is_trained")
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A notebook's own temporary files go where pytest cleans up.
    monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path))
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    shown = 0
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"{path.name}, cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), module.__dict__)
        if last is None:
            continue
        value = eval(compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval"), module.__dict__)
        drawn = next((getattr(value, name) for name in ("_repr_html_", "_repr_svg_") if hasattr(value, name)), None)
        if drawn is not None:
            assert drawn().lstrip().startswith("<")
            shown += 1
    assert shown >= 1
