"""Training data without a length: as many rows as the run can use, and the model that a list of them gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import labelled

from flodl.errors import ConfigError
from flodl_hf.training import data, finetune

ROWS = labelled(24)
BASIC: dict[str, Any] = {"max_length": 24, "lr": 1e-3, "batch_size": 4, "max_steps": 3}
read: list[int] = []


def endless() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        read.append(number)
        yield ROWS[number % len(ROWS)]


class Streamed:
    """As `datasets.IterableDataset`: it begins anew, and has no length."""

    features = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return endless()


@pytest.mark.parametrize("make", [endless, Streamed, lambda: endless], ids=["generator", "data set", "function"])
@pytest.mark.parametrize(
    ("options", "rows"), [({}, 12), ({"accumulate": 2}, 24), ({"eval": 0.25}, 17), ({"eval": 5}, 17)], ids=str
)
def test_a_stream_is_read_as_far_as_the_steps_go(
    make: Callable[[], Any], options: dict[str, Any], rows: int, base: Path
) -> None:
    read.clear()
    streamed = finetune(base, train=make(), **BASIC, **options)
    assert len(read) == rows
    listed = finetune(base, train=list(itertools.islice(endless(), rows)), **BASIC, **options)
    assert streamed.losses == listed.losses
    assert (streamed.steps, streamed.metrics) == (3, listed.metrics)
    a, b = streamed.model.graph.state_dict(), listed.model.graph.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("option", [{"tokens_per_batch": 64}, {"task": "mlm", "concatenate": True}], ids=str)
def test_a_stream_of_which_nobody_knows_how_much_is_needed_is_left_unread(option: dict[str, Any], base: Path) -> None:
    read.clear()
    with pytest.raises(ConfigError, match="found training data without a length") as caught:
        finetune(base, train=endless(), **BASIC, **option)
    assert caught.value.problems == [list(option)[-1]]
    assert not read


def test_a_stream_that_ends_is_read_to_its_end(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {**BASIC, "max_steps": None, "epochs": 1}
    assert finetune(base, train=iter(ROWS), **short).steps == 6
    monkeypatch.setattr(data, "MANY", 20)
    with pytest.warns(UserWarning, match="20 rows are read, and the stream has not ended; .* max_steps="):
        assert finetune(base, train=(row for row in ROWS), **short).steps == 6
