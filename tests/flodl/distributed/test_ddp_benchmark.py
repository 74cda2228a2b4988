"""The benchmark of several ranks runs from end to end on small made-up data."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if not (ROOT / "benchmarks" / "ddp").is_dir():
    pytest.skip("the benchmarks are not here", allow_module_level=True)

from benchmarks.ddp.__main__ import arguments  # noqa: E402


def run(tmp_path, *options):
    command = [sys.executable, "-m", "benchmarks.ddp", *options, "--device", "cpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "results.json").read_text())


@pytest.mark.slow
def test_two_ranks_fill_every_table(tmp_path):
    found = run(
        tmp_path, "modes", "unequal", "equal", "scaling", "--ranks", "2", "--models", "mlp", "--unequal-models", "mlp",
        "--unequal-seeds", "2", "--slow", "1:2", "--steps", "9", "--nap-ms", "1", "--batch-size", "16",
    )  # fmt: skip
    assert [row["mode"] for row in found["modes"]] == ["solo", "cpu-sync", "cpu-cadence", "cpu-async"]
    for row in found["modes"]:
        assert row["loss"][0] < 2.3
        assert 0 <= row["figure"][0] <= 1
        assert all(0 <= idle < 1 for idle in row["idle"])
        assert sum(row["share"]) == pytest.approx(1)
    cadence = next(row for row in found["unequal"] if row["mode"] == "cpu-cadence")
    assert len(cadence["runs"]) == 2
    assert cadence["syncs"] >= 1
    assert 1 < cadence["at_most"] < 2
    assert [row["largest_relative_difference"] < 1e-3 for row in found["equal"]] == [True, True]
    assert {row["ranks"] for row in found["scaling"]} == {1, 2}
    table = (tmp_path / "results.md").read_text()
    assert "| mlp | cpu-cadence |" in table
    with (tmp_path / "modes" / "mlp" / "cpu-cadence.csv").open() as lines:
        kinds = {row["kind"] for row in csv.DictReader(lines)}
    assert {"step", "sync"} <= kinds
    timeline = json.loads((tmp_path / "modes" / "mlp" / "cpu-cadence.json").read_text())
    assert set(timeline) == {"spans", "gaps", "samples", "summary"}


@pytest.mark.slow
def test_one_rank_has_its_own_row(tmp_path):
    found = run(tmp_path, "--models", "conv-ae")
    assert [row["mode"] for row in found["modes"]] == ["solo"]


@pytest.mark.parametrize("option", ["--modes", "--models", "--unequal-models"])
def test_what_does_not_exist_is_named_before_anything_starts(option, capsys):
    with pytest.raises(SystemExit):
        arguments([option, "sync,nothing"])
    assert f"{option}: found 'sync'; expected some of " in capsys.readouterr().err
