"""The doctor finds what there is, tells what costs speed, and ends with status 1 where something does not work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from flodl_hf.cli.app import app
from flodl_hf.inference import doctor


@pytest.fixture
def around(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hub"), "FLODL_HF_CACHE": str(tmp_path / "own")}


def named(found: doctor.Examination) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in found.findings}


def test_a_sound_machine(around: dict[str, str]) -> None:
    found = doctor.examine(around)
    assert found.sound
    by_name = named(found)
    assert by_name["torch"].found == torch.__version__
    assert by_name["cpu, fp32"].state == "ok"
    assert {finding.part for finding in found.findings} >= {"machine", "packages", "devices", "kernels", "files"}
    assert all(finding.advice for finding in found.findings if finding.state != "ok")


def test_what_is_set_is_judged(around: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cores", lambda: 8)
    found = named(doctor.examine(around | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FLODL_HF_CACHE": "off"}))
    assert found["OMP_NUM_THREADS"].state == "note"
    assert "8 cores" in found["OMP_NUM_THREADS"].advice
    assert found["HF_HUB_OFFLINE"].state == "note"
    assert found["our cache"].state == "note"


def test_what_is_missing_is_a_problem(around: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: {"torch": "2.9.1", "tokenizers": None}.get(name, known(name)))
    found = doctor.examine(around)
    assert not found.sound
    by_name = named(found)
    assert by_name["tokenizers"].state == by_name["torch"].state == "problem"
    assert "pip install tokenizers" in by_name["tokenizers"].advice


def test_a_broken_package_does_not_end_the_doctor() -> None:
    script = "import sys; sys.modules['tokenizers'] = None; from flodl_hf.inference.doctor import examine; examine()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_device_with_wrong_numbers_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the processor is looked at where it is the best device")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self + 1)
    found = next(one for one in doctor._devices() if one.name == "cpu")
    assert found.state == "problem"
    assert "differ by" in found.found


def test_a_level_of_verbosity_that_does_not_exist_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one.name: one for one in doctor.examine({"FLODL_VERBOSITY": "loud"}).findings}["FLODL_VERBOSITY"]
    assert found.state == "note"
    assert "expected quiet, normal" in found.advice


def test_flags_set_how_much_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from flodl.verbosity import verbosity

    monkeypatch.setenv("FLODL_VERBOSITY", "normal")
    levels = []
    monkeypatch.setattr(
        "flodl_hf.inference.doctor.examine", lambda *a: levels.append(verbosity().name) or doctor.Examination()
    )
    for flags in ([], ["-q"], ["-v"], ["-vv"], ["-v", "-v", "-v"], ["-vvvvv"], ["--quiet", "--verbose"]):
        monkeypatch.setenv("FLODL_VERBOSITY", "normal")
        assert CliRunner().invoke(app, [*flags, "doctor"]).exit_code == 0
    assert levels == ["NORMAL", "QUIET", "VERBOSE", "DEBUG", "TRACE", "TRACE", "QUIET"]


def test_the_command(around: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content["sound"] is True
    assert {"part", "name", "found", "state", "advice"} == set(content["findings"][0])
    text = CliRunner().invoke(app, ["doctor"])
    assert text.exit_code == 0
    assert "no problems" in text.stdout
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_the_folder_of_the_cache_has_to_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert doctor._folder("cache", tmp_path / "deep" / "er", "x").state == "problem"
