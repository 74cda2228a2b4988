"""Small checkpoints of every task, and files of texts for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bulk_inputs import texts

from flodl_hf import load
from flodl_hf.models.encoder_model import EncoderModel

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def folder() -> Callable[[str], Path]:
    """Return the folder of a small model for a head."""
    return lambda head: GOLDEN / f"bert-{head}"


@pytest.fixture(scope="session")
def model(folder: Callable[[str], Path]) -> Callable[[str], EncoderModel]:
    """Return a small model for a head, loaded once."""
    loaded: dict[str, EncoderModel] = {}

    def get(head: str = "sequence_classification") -> EncoderModel:
        if head not in loaded:
            loaded[head] = load(folder(head))
        return loaded[head]

    return get


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines."""

    def write(rows: Sequence[Any], name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
        return path

    return write


@pytest.fixture
def numbered(jsonl: Callable[..., Path]) -> Callable[..., Path]:
    """Write so many rows with a number and a text."""
    return lambda count=50, **more: jsonl([{"id": i, "text": t} for i, t in enumerate(texts(count))], **more)
