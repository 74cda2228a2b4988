"""A part of every suite that has no test of its own; `make torture` runs all of them in full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf import load
from flodl_hf.torture import config, runs
from flodl_hf.torture.case import Case, Fault
from flodl_hf.torture.checkpoints import checkpoint, write_files
from flodl_hf.torture.comparing import IDS
from flodl_hf.torture.runner import load_suite, run_cases
from flodl_hf.torture.subjects import Ours
from flodl_hf.torture.suites import SUITES

ELSEWHERE = ("interrupts", "runs", "powerloss", "disks", "hub", "serve")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", [name for name in SUITES if name not in ELSEWHERE])
def test_some_cases(name: str) -> None:
    suite = load_suite(name)
    cases = list(suite.cases(7, 12))
    found = list(run_cases(suite, cases, Ours()))
    assert [(case.line, verdict.grade, verdict.text) for case, verdict in found if not verdict.good] == []
    assert len(found) == len(cases)


def test_kinds_of_runs_are_forty_and_differ_in_all_that_runs_differ_in() -> None:
    kinds = [case.what for case in runs.cases(0, 40)]
    assert len({case.kind for case in runs.cases(0, 400)}) == 40
    assert {what["task"] for what in kinds} == set(runs.TASKS)
    assert {what["end"] for what in kinds} == set(runs.ENDS)
    assert {what["extra"] for what in kinds} == set(runs.EXTRAS)
    assert {what["schedule"] for what in kinds} == set(runs.SCHEDULES)
    assert {what["ranks"] for what in kinds} == {1, 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "kinds", [range(1), *(pytest.param(range(n, n + 3), marks=pytest.mark.slow) for n in range(1, 40, 3))], ids=str
)
def test_a_run_that_was_ended_is_gone_on_with_to_the_same_bits(kinds: range) -> None:
    found = list(run_cases(runs, [case for case in runs.cases(5, 40) if case.number in kinds], Ours()))
    assert [(case.line, verdict.text) for case, verdict in found if not verdict.good] == []
    assert len(found) == len(kinds)


def test_a_run_that_is_another_one_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = next(runs.cases(5, 1))
    (tmp_path / "case").mkdir()
    finetuned, ran = runs._finetuned, []

    def other(what: Any, root: Path, out: Path, **more: Any) -> Any:
        ran.append(out)
        found = finetuned(what, root, out, **more)
        if len(ran) > 1:
            found["history"] = found["history"][1:]
        return found

    monkeypatch.setattr(runs, "_finetuned", other)
    monkeypatch.setattr(runs, "_ended", lambda *_: None)
    monkeypatch.setattr(runs, "_left_alone", {})
    verdict = runs.run(case, tmp_path / "case", Ours())
    assert (verdict.grade.value, verdict.text) == ("silent", "not as a run left alone: history")


def test_a_head_of_a_file_that_says_it_is_an_encoder_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    files = dict(checkpoint())
    config = json.loads(files["config.json"])
    write_files(tmp_path / "whole", files)
    named = json.dumps({**config, "architectures": ["BertModel"]}).encode()
    write_files(tmp_path / "named", {**files, "config.json": named})
    scores = [load(tmp_path / name, head="sequence_classification")(input_ids=IDS)[0] for name in ("whole", "named")]
    assert torch.equal(*scores)
    assert load(tmp_path / "named").head == "base"
    report = load(tmp_path / "named", head="sequence_classification").load_report
    assert report is not None
    assert not report.new


@pytest.mark.parametrize("pad", [1, 3, 7])
def test_the_second_computation_counts_positions_past_padding(pad: int, tmp_path: Path) -> None:
    from flodl_hf.torture.checkpoints import tensors_in
    from flodl_hf.torture.plain import plain_scores

    files = dict(checkpoint("roberta"))
    config = {**json.loads(files["config.json"]), "pad_token_id": pad}
    write_files(tmp_path / "it", {**files, "config.json": json.dumps(config).encode()})
    with torch.no_grad():
        scores = load(tmp_path / "it", head="sequence_classification")(input_ids=IDS)[0]
    plain = plain_scores(config, tensors_in(files["model.safetensors"]), IDS)
    assert plain is not None
    assert torch.allclose(scores.double(), plain, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sizes_that_are_left_out_are_told_apart_or_named() -> None:
    sizes = ("num_hidden_layers", "n_layers", "num_attention_heads", "n_heads")
    absent = [(family, key) for family in config.FAMILIES for key in sizes if key in config.settings(family)]
    faults = [Fault({"family": family, "drop": key}, config.FILES, (key, *config.OTHERWISE)) for family, key in absent]
    cases = [Case(config.NAME, 0, number, "absent", fault) for number, fault in enumerate(faults)]
    assert len(cases) == 2 * len(config.FAMILIES)
    found = run_cases(config, cases, Ours())
    assert [(case.what, verdict.text) for case, verdict in found if not verdict.good] == []


def test_definitions_nested_as_deeply_as_they_come_can_be_written() -> None:
    from flodl_hf.torture import tokenizer

    deep = [case for case in tokenizer.cases(41, 600) if case.what.get("edit") == "normalizer"]
    assert deep
    for case in deep:
        assert tokenizer.damaged(case.what)
