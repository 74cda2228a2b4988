"""A part of every suite that has no test of its own; `make torture` runs all of them in full."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from flodl_hf import load
from tests.torture import config
from tests.torture.case import Case, Fault
from tests.torture.checkpoints import checkpoint, write_files
from tests.torture.comparing import IDS
from tests.torture.runner import load_suite, run_cases
from tests.torture.suites import SUITES

ELSEWHERE = ("interrupts", "hub", "serve")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", [name for name in SUITES if name not in ELSEWHERE])
def test_some_cases(name: str) -> None:
    suite = load_suite(name)
    cases = list(suite.cases(7, 12))
    found = list(run_cases(suite, cases))
    assert [(case.line, verdict.grade, verdict.text) for case, verdict in found if not verdict.good] == []
    assert len(found) == len(cases)


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
    from tests.torture.checkpoints import tensors_in
    from tests.torture.reference_fp64 import plain_scores

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
    found = run_cases(config, cases)
    assert [(case.what, verdict.text) for case, verdict in found if not verdict.good] == []


def test_definitions_nested_as_deeply_as_they_come_can_be_written() -> None:
    from tests.torture import tokenizer

    deep = [case for case in tokenizer.cases(41, 600) if case.what.get("edit") == "normalizer"]
    assert deep
    for case in deep:
        assert tokenizer.damaged(case.what)
