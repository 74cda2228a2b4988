"""Stores of vectors that are installed find what the exact search finds; the others are passed over."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "examples" / "vector_stores.py"


@pytest.mark.filterwarnings("ignore")
def test_every_store_that_is_here_finds_the_same() -> None:
    if not FILE.exists():
        pytest.skip("examples are not part of an installed package")
    spec: Any = importlib.util.spec_from_file_location("vector_stores", FILE)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main()
    assert list(found) == list(module.STORES)
    assert False not in found.values()
    here = {"faiss": "faiss", "usearch": "usearch", "LanceDB": "lancedb"}
    for store, package in here.items():
        assert (found[store] is None) == (importlib.util.find_spec(package) is None)
