"""One server for all tests of a run: every head, one worker, real HTTP."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
for needed in ("starlette", "uvicorn", "httpx"):
    if importlib.util.find_spec(needed) is None:
        collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from serving_models import MODELS, write

    root = tmp_path_factory.mktemp("served")
    return {name: write(root, name) for name in MODELS}


@pytest.fixture(scope="session")
def served(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    """The address of the server, and its application."""
    from flodl_hf.serving.running import running
    from flodl_hf.serving.settings import Served, Settings

    settings = Settings(
        models=tuple(Served(name, str(path)) for name, path in folders.items()), devices=("cpu",), max_body=1 << 20,
        header_s=1.0, body_s=2.0, write_s=1.0,
    )  # fmt: skip
    with running(settings) as found:
        yield found


@pytest.fixture(scope="session")
def http(served: tuple[str, Any]) -> Iterator[Any]:
    """A client of it."""
    import httpx

    with httpx.Client(base_url=served[0], timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def local(folders: dict[str, Path]) -> dict[str, Any]:
    """The same models here."""
    from flodl_hf.heads.auto import load

    return {name: load(path) for name, path in folders.items()}
