"""No case of the original libraries gives another result here; `python -m tests.peers` runs all cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.case import Case, compare
from tests.peers.command import GROUPS, as_text, missing, run, summary


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", [
    pytest.param(group, marks=() if group in ("tokenizers", "pipelines") else pytest.mark.slow) for group in GROUPS
])  # fmt: skip
def test_no_case_is_different(group: str) -> None:
    lacking = missing(group)
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not installed")
    report = summary(run(group, quick=True))
    assert report["equal"] > 30
    assert not report["different"], as_text(group, report, 20)


def raised(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(("theirs", "ours", "kind"), [
    (lambda: [1.0, {"a": 2}], lambda: (1.0 + 1e-7, {"a": 2}), "equal"),
    (lambda: [1.0], lambda: [1.1], "different"),
    (lambda: 1, lambda: True, "different"),
    (lambda: {"a": 1}, lambda: {"a": 1, "b": 2}, "different"),
    (lambda: 1, lambda: raised(TypeError("x")), "different"),
    (lambda: raised(ValueError("x")), lambda: 1, "different"),
    (lambda: raised(IndexError("x")), lambda: 1, "more"),
    (lambda: raised(ValueError("x")), lambda: raised(KeyError("y")), "failed"),
])  # fmt: skip
def test_outcomes(theirs: Any, ours: Any, kind: str) -> None:
    assert compare(Case("a case", theirs, ours)).kind == kind
