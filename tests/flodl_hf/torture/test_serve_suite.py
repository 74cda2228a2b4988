"""The suite of the server: cases of each kind, what its grades mean, and what is said where the extra is absent."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from flodl_hf.serving.routes.route import ROUTES
from tests.torture import command, served
from tests.torture import serve as suite
from tests.torture.replies import refused
from tests.torture.runner import run_cases
from tests.torture.wire import Answer

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def chosen(count: int, kinds: tuple[str, ...]) -> list[Any]:
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for case in suite.cases(7, 110 * count):
        if case.kind in found and len(found[case.kind]) < count:
            found[case.kind].append(case)
    return [case for some in found.values() for case in some]


@forks
@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_server_answers_what_it_should_not_be_sent(count: int) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    kinds = tuple(kind.name for kind in suite.KINDS)
    cases = chosen(count, kinds)
    assert {case.kind for case in cases} == set(kinds)
    found = list(run_cases(suite, cases))
    assert [(case.line, verdict.grade, verdict.text) for case, verdict in found if not verdict.good] == []
    assert len(found) == len(cases)


def test_every_door_has_a_plain_request() -> None:
    # A request to /vertex contains requests to the root.
    routes = [route for route in ROUTES if route.path != "/vertex"]
    assert set(served.BODIES) == {route.path for route in routes}
    for route in routes:
        assert set(served.BODIES[route.path]) <= {field.name for field in route.fields}
        assert {field.name for field in route.fields if field.required} <= set(served.BODIES[route.path])


def said(status: int, text: str) -> Answer:
    return Answer(status, {}, json.dumps({"error": text}).encode())


@pytest.mark.parametrize(
    ("answer", "grade"),
    [
        (said(422, "inputs is 3; expected a string"), "refused"),
        (said(422, "it is 3; expected a string"), "unnamed"),
        (said(422, "inputs is wrong"), "unnamed"),
        (said(422, "inputs is \x1b[2J; expected a string"), "unnamed"),
        (said(422, ""), "unnamed"),
        (said(424, "AttributeError: 'int' object has no attribute 'lower', expected inputs"), "bare"),
        (said(500, "the server failed; see its log of inputs"), "bare"),
        (said(200, "inputs"), "silent"),
        (None, "unnamed"),
    ],
)
def test_what_a_refusal_has_to_say(answer: Answer | None, grade: str) -> None:
    assert refused(answer, key="inputs").grade.value == grade


def test_without_the_extra_the_suite_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served, "find_spec", lambda name: None)
    assert command.main(["serve", "--cases", "1"]) == 2
    assert "serve: left out; it needs starlette and uvicorn, of the extra serve: pip install" in capsys.readouterr().out
