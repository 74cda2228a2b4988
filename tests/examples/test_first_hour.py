"""A newcomer's thirty tasks: each runs, by itself and in a folder of its own."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "examples" / "first_hour.py"
if not FILE.exists():
    pytest.skip("examples are not part of an installed package", allow_module_level=True)


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hour", FILE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


HOUR = module()


def test_there_are_thirty() -> None:
    assert len(HOUR.TASKS) == 30
    assert all(task.__doc__ for task in HOUR.TASKS)


@pytest.mark.parametrize("task", HOUR.TASKS, ids=lambda task: task.__name__)
def test_a_task_of_the_first_hour(task, demo_model: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "demo-model"
    shutil.copytree(demo_model, folder)
    found = task(folder)
    assert found is not None
    assert len(repr(found)) < 2000


def test_they_are_one_program(
    demo_is_trained: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(HOUR, "write_demo", demo_is_trained)
    monkeypatch.setattr(HOUR, "TASKS", HOUR.TASKS[:2])
    HOUR.main(tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert (first[:4], second[:4]) == (" 1. ", " 2. ")
