"""A newcomer's thirty tasks: each runs, by itself and in a folder of its own."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from flodl_hf.demo import write_demo

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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo") / "demo-model")


def test_there_are_thirty() -> None:
    assert len(HOUR.TASKS) == 30
    assert all(task.__doc__ for task in HOUR.TASKS)


@pytest.mark.parametrize("task", HOUR.TASKS, ids=lambda task: task.__name__)
def test_a_task_of_the_first_hour(task, demo: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "demo-model"
    shutil.copytree(demo, folder)
    found = task(folder)
    assert found is not None
    assert len(repr(found)) < 2000
