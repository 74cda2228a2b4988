"""The page for those who come from transformers: what it says is taken is taken, what it says is refused is refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import flodl_hf
from flodl_hf.checkpoints.keywords import LOAD
from flodl_hf.models.opening import LoadKeywords
from flodl_hf.training import finetune
from flodl_hf.training.options import Options
from flodl_hf.training.training_arguments import INERT, REFUSED, TAKEN

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-transformers.md"
if not PAGE.exists():
    pytest.skip("documents are not part of an installed package", allow_module_level=True)
TEXT = PAGE.read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def keywords(cell: str) -> list[str]:
    return re.findall(r"\b([a-z]\w+)=", re.sub(r"\([^)]*\)", "", cell.replace("early_stopping_patience", "")))


def test_every_word_of_loading_is_known() -> None:
    known = {*LOAD, *LoadKeywords.__annotations__}
    named = [name for there, *_ in rows("Loading") for name in keywords(there)]
    assert len(named) > 12
    assert [name for name in named if name not in known] == []


def test_what_loading_refuses_is_refused() -> None:
    refused = [name for there, here, *_ in rows("Loading") if here.startswith("refused") for name in keywords(there)]
    assert len(refused) >= 3
    assert [name for name in refused if LOAD[name].ours is not None or not LOAD[name].reason] == []


def test_every_word_of_the_trainer_is_known() -> None:
    # What is no option, because no recipe can hold it, is a keyword of `finetune` itself.
    known = {*TAKEN, *INERT, *REFUSED, *Options.__dataclass_fields__, *inspect.signature(finetune).parameters}
    for there, here, *_ in rows("Trainer")[1:]:
        for name in keywords(there):
            assert name in known, name
            if here.startswith("the same"):
                assert name not in REFUSED, name
            if here.startswith("refused"):
                assert name in REFUSED, name


def test_every_import_is_there() -> None:
    for there, here, *_ in rows("Imports"):
        names = re.findall(r"from flodl_hf import (\w+)", here) or (
            re.findall(r"`(Auto\w+)`", there) if here == "the same names" else re.findall(r"`(Auto\w+)`", here)
        )
        assert names, here
        assert [name for name in names if name not in flodl_hf.__all__] == []


def test_methods_that_are_named_are_there() -> None:
    from flodl_hf.families.schema.tasks import HEADS

    there = {name for head in HEADS for name in dir(head.model)}
    named = set(re.findall(r"`model\.(\w+)\(", TEXT)) - {"bert"}
    assert len(named) > 8
    assert named <= there
