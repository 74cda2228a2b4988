"""The removed question-answering pipeline is repeated to the last bit, ties included."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flodl.errors import PredictError
from flodl_hf.decode.compat import question_answering

TABLE = json.loads(Path(__file__).with_name("golden_qa_4_57.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = TABLE["cases"]


def answers(case: dict[str, Any]) -> Any:
    rows = [SimpleNamespace(**window, first_token=0) for window in case["windows"]]
    dtype = getattr(torch, case["dtype"])
    return question_answering(
        [torch.tensor(window["start"], dtype=dtype) for window in case["windows"]],
        [torch.tensor(window["end"], dtype=dtype) for window in case["windows"]],
        rows,
        case["context"],
        cls_id=case["cls_id"],
        sequence=case["sequence"],
        **case["options"],
    )


def test_the_table_covers_what_it_should() -> None:
    assert TABLE["transformers"].startswith("4.57")
    assert {case["dtype"] for case in CASES} == {"float32", "bfloat16", "float16"}
    assert {case["sequence"] for case in CASES} == {0, 1}
    assert max(len(case["windows"]) for case in CASES) > 3
    assert any(isinstance(case["answer"], dict) and case["answer"]["score"] > 1 for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['dtype']}-{case['options']}")
def test_answers_equal_the_recorded_ones(case: dict[str, Any]) -> None:
    assert answers(case) == case["answer"]


def test_options_below_one_are_refused() -> None:
    with pytest.raises(PredictError) as caught:
        question_answering([], [], [], "", cls_id=2, top_k=0)
    assert caught.value.top_k == 0
