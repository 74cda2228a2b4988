"""The removed question-answering pipeline is repeated: its answers, its scores, its order.

The answers were recorded on one machine. Another one's exponential function may round the last bit in another way,
and numpy sorts and partitions equal scores in an order that depends on the processor, so that is how they are
compared: scores within the rounding of the arithmetic, answers of equal score as sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flodl_hf.errors import PredictError
from flodl_hf.inference.transformers_results import question_answering

TABLE = json.loads(Path(__file__).with_name("golden_qa_4_57.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = [case for case in TABLE["cases"] if case["sequence"] == 1]


def answers(case: dict[str, Any]) -> Any:
    rows = [SimpleNamespace(**window, first_token=0) for window in case["windows"]]
    dtype = getattr(torch, case["dtype"])
    return question_answering(
        [torch.tensor([window["start"], window["end"]], dtype=dtype).T for window in case["windows"]],
        rows,
        case["context"],
        cls_id=case["cls_id"],
        **case["options"],
    )


def test_the_table_covers_what_it_should() -> None:
    assert TABLE["transformers"].startswith("4.57")
    assert {case["dtype"] for case in CASES} == {"float32", "bfloat16", "float16"}
    assert max(len(case["windows"]) for case in CASES) > 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['dtype']}-{case['options']}")
def test_answers_equal_the_recorded_ones(case: dict[str, Any]) -> None:
    found, recorded = listed(answers(case)), listed(case["answer"])
    assert isinstance(answers(case), dict) == isinstance(case["answer"], dict)
    # exp is good to an ulp, the sum of n powers to n ulps at most; a score multiplies two of these.
    longest = max(len(window["start"]) for window in case["windows"])
    ulp = torch.finfo(torch.float16 if case["dtype"] == "float16" else torch.float32).eps
    bound = 2 * (longest + 4) * ulp
    # Zero and what rounds to it: hundreds of spans of which any may fill the list up.
    likely = [a for a in recorded if a["score"] > ulp**2]
    assert [a["score"] for a in found[: len(likely)]] == pytest.approx([a["score"] for a in likely], rel=bound)
    assert all(a["score"] <= ulp**2 * (1 + bound) for a in found[len(likely) :])
    for group, last in tied(likely, bound):
        begin = likely.index(group[0])
        theirs = {spot(a) for a in group}
        ours = {spot(a) for a in found[begin : begin + len(group)]}
        # Where the list ends inside a group, which of its answers still have a place is numpy's choice.
        assert ours == theirs or (last and len(recorded) == len(likely) and len(group) > 1)


def test_a_wrong_answer_is_seen() -> None:
    case = next(c for c in CASES if isinstance(c["answer"], list) and len(c["answer"]) > 2)
    broken = [dict(a) for a in case["answer"]]
    broken[0]["start"] += 1
    with pytest.raises(AssertionError):
        test_answers_equal_the_recorded_ones(case | {"answer": broken})


def listed(found: Any) -> list[dict[str, Any]]:
    return found if isinstance(found, list) else [found]


def spot(answer: dict[str, Any]) -> tuple[int, int, str]:
    return answer["start"], answer["end"], answer["answer"]


def tied(answers: list[dict[str, Any]], bound: float) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Yield runs of answers whose scores are equal within the bound, and whether the run is the last."""
    group: list[dict[str, Any]] = []
    for answer in answers:
        if group and group[-1]["score"] - answer["score"] > bound * group[-1]["score"]:
            yield group, False
            group = []
        group.append(answer)
    if group:
        yield group, True


def test_options_below_one_are_refused() -> None:
    with pytest.raises(PredictError) as caught:
        question_answering([], [], "", cls_id=2, top_k=0)
    assert caught.value.top_k == 0
