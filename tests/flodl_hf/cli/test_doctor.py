"""The doctor finds what there is, tells what costs speed, and ends with status 1 where something does not work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from flodl_hf import doctor
from flodl_hf.cli.app import app


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
    monkeypatch.setattr(doctor, "_usable_cores", lambda: 8)
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


def test_a_device_with_wrong_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flodl.errors import DeviceError

    doctor._compute(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self + 1)
    with pytest.raises(DeviceError, match="differs by"):
        doctor._compute(torch.device("cpu"))


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
