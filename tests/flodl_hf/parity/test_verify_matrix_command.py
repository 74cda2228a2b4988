"""``flodl-hf verify-matrix``: what it prints, writes and returns."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flodl_hf.errors import ParityError
from flodl_hf.parity import matrix
from flodl_hf.parity.cell import Cell, Evidence
from flodl_hf.parity.matrix import CellResult, as_json, as_markdown, as_text, run_cell, run_matrix, select_cells

typer_testing = pytest.importorskip("typer.testing")
transformers = pytest.mark.transformers


def run(*arguments: str) -> Any:
    from flodl_hf.cli.app import app

    return typer_testing.CliRunner().invoke(app, ["verify-matrix", *arguments])


@transformers
def test_json_says_what_was_measured_and_on_what() -> None:
    done = run("--families", "bert", "--heads", "base", "--checks", "forward,strict_load", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["counts"] == {"pass": 1}
    (cell,) = told["cells"]
    assert (cell["cell"], cell["family"], cell["head"], cell["status"]) == ("bert/base", "bert", "base", "pass")
    assert [(c["check"], c["status"], c["measured"]) for c in cell["checks"]] == [
        ("strict load", "pass", None), ("forward", "pass", 0.0),
    ]  # fmt: skip
    assert told["provenance"].keys() >= {"size", "torch", "transformers", "python", "processor", "threads", "command"}


@transformers
def test_a_table_a_page_and_a_file(tmp_path: Path) -> None:
    page, out = tmp_path / "parity.md", tmp_path / "parity.json"
    done = run(
        "--families",
        "bert,distilbert",
        "--heads",
        "qa",
        "--checks",
        "strict_load",
        "--markdown",
        str(page),
        "--out",
        str(out),
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["qa"]
    assert [line.split() for line in lines[1:3]] == [["bert", "pass"], ["distilbert", "pass"]]
    assert "2 cells at tiny size: 2 pass." in page.read_text("utf-8")
    assert json.loads(out.read_text("utf-8"))["counts"] == {"pass": 2}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--families", "brt"), "no family 'brt', did you mean 'bert'"),
        (("--heads", "tokclss"), "found 'tokclss', did you mean 'tokcls'"),
        (("--families", "bert", "--checks", "forwrd"), "no check 'forwrd', did you mean 'forward'"),
        (("--families", "brt"), "expected albert, bert"),
        (("--checks", "forwrd"), "expected config_triage"),
        (("--size", "huge"), "'tiny', 'real'"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert says in " ".join(done.stderr.replace("│", " ").split())


@transformers
def test_a_failing_cell_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: Any) -> Evidence:
        return Evidence("forward", "fail", "3 outputs, largest difference 1 in logits", 1.0, "head.classifier")

    wrong.__name__ = "forward"
    monkeypatch.setattr(matrix, "CHECKS", (wrong,))
    monkeypatch.setattr("flodl_hf.parity.matrix.first_parting", lambda *a, **k: None)
    done = run("--families", "bert", "--heads", "seqcls")
    assert done.exit_code == 1
    assert "fail: bert/seqcls, forward: 3 outputs" in done.stdout


@transformers
@pytest.mark.slow
def test_two_jobs_find_what_one_finds() -> None:
    cells = select_cells(["bert"], ["qa", "base"])
    options: dict[str, Any] = {"checks": ["strict_load", "forward"]}
    alone = {r.cell: r.evidence for r in run_matrix(cells, **options)}
    together = {r.cell: r.evidence for r in run_matrix(cells, jobs=2, **options)}
    assert together == alone
    assert len(alone) == 2


def test_what_is_not_installed_or_not_stated_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("bert", "base")
    monkeypatch.setattr("flodl_hf.parity.reference.available", lambda: False)
    missing = run_cell(cell)
    assert missing.status == "not run"
    assert {e.detail for e in missing.evidence} == {"transformers is not installed"}
    assert len(missing.evidence) == len(matrix.check_names())
    monkeypatch.setattr(matrix, "variants_of", lambda *_: ())
    assert {e.detail for e in run_cell(cell).evidence} == {"no tiny configuration is stated for bert"}
    headless = replace(cell.record, heads={})
    monkeypatch.setattr(Cell, "record", property(lambda _: headless))
    none = run_cell(Cell("bert", "masked_lm"))
    assert none.status == "unsupported"
    assert {e.detail for e in none.evidence} == {"bert has no masked_lm head"}


def test_reports_show_every_status_and_the_largest_difference() -> None:
    results = [
        CellResult(Cell("bert", "base"), [Evidence("forward", "pass", "fine", 0.0), Evidence("layouts", "pass", "fine", 2e-7)]),
        CellResult(Cell("bert", "masked_lm"), [Evidence("forward", "fail", "off", 0.5, "head.dense"), Evidence("layouts", "pass", "fine", 3e-7)]),
        CellResult(Cell("albert", "base", "groups"), [Evidence("forward", "not run", "no transformers")]),
        CellResult(Cell("albert", "masked_lm", "groups"), [Evidence("forward", "unsupported", "no head")]),
    ]  # fmt: skip
    text = as_text(results)
    assert "fail: bert/mlm, forward: off" in text
    assert "0.5 (bert/mlm)" in text
    assert "3e-07 (bert/mlm)" in text
    facts = {
        "size": "tiny",
        "torch": "x",
        "transformers": "y",
        "python": "z",
        "processor": "p",
        "threads": 1,
        "command": None,
    }
    page = as_markdown(results, facts)
    assert "4 cells at tiny size: 1 pass, 1 fail, 1 not run, 1 unsupported." in page
    assert "| albert (groups) | not run | unsupported |" in page
    assert as_json(results, facts)["counts"] == {"pass": 1, "fail": 1, "not run": 1, "unsupported": 1}


@pytest.mark.parametrize("family", ["new", "jina_bert", "jina_embeddings_v3_tasks"])
def test_families_that_transformers_cannot_read_have_a_status_of_their_own(family: str) -> None:
    done = run("--families", family, "--heads", "base")
    assert done.exit_code == 0, done.output
    assert [line for line in done.stdout.splitlines() if line.startswith(f"no reference: {family}/base: ")]
    assert run_cell(Cell(family, "base")).status == "no reference"


@transformers
def test_the_limit_of_adapters_follows_the_rounding_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that float32 itself makes 2e-5 wrong may differ by as much as the same sums in another order do."""
    options: dict[str, Any] = {"checks": ["adapters"]}
    cell = Cell("gte", "token_classification", "no token types")
    [fine] = run_cell(cell, **options).evidence
    monkeypatch.setattr("flodl_hf.parity.adapters.gap", lambda a, b: 1e-3 if a.dtype == b.dtype else 0.0)
    [wrong] = run_cell(cell, **options).evidence
    assert fine.status == "pass"
    assert fine.measured is not None
    assert fine.measured < 1e-5
    assert wrong.status == "fail"


def test_unknown_checks_raise_before_anything_runs() -> None:
    with pytest.raises(ParityError, match="did you mean 'gradients'"):
        next(run_matrix(select_cells(["bert"]), checks=["gradient"]))


def test_processes_know_the_families_that_were_registered_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flodl_hf import families

    (tmp_path / "our_family_module.py").write_text(
        "from flodl_hf.families import bert\nOURS = bert.FAMILY.renamed('our-bert', 'OurBert')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "_registered", {})
    families.register(importlib.import_module("our_family_module").OURS)
    (found,) = run_matrix([Cell("our-bert", "base")], checks=["key_map"], jobs=2)
    (here,) = run_matrix([Cell("our-bert", "base")], checks=["key_map"])
    assert [(e.check, e.status) for e in found.evidence] == [(e.check, e.status) for e in here.evidence]
