"""A part of every suite that has no test of its own; `make torture` runs all of them in full."""

from __future__ import annotations

import os

import pytest

from flodl_hf.torture.runner import load_suite, run_cases
from flodl_hf.torture.subjects import Ours
from flodl_hf.torture.suites import SUITES

ELSEWHERE = ("interrupts", "powerloss", "disks")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", [name for name in SUITES if name not in ELSEWHERE])
def test_some_cases(name: str) -> None:
    suite = load_suite(name)
    cases = list(suite.cases(7, 20))
    found = list(run_cases(suite, cases, Ours()))
    assert [(case.line, verdict.grade, verdict.text) for case, verdict in found if not verdict.good] == []
    assert len(found) == len(cases)
