"""The benchmark of two devices runs from end to end, small and on processors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if not (ROOT / "benchmarks" / "two_ranks.py").is_file():
    pytest.skip("the benchmarks are not here", allow_module_level=True)


def test_spans_of_time_are_joined():
    from benchmarks.two_ranks import length_of, union

    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length_of(union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)])) == 3.5


@pytest.mark.slow
def test_all_of_it_runs_on_processors(tmp_path):
    command = [sys.executable, "-m", "benchmarks.two_ranks", "--tiny", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    assert not list(ROOT.glob("*-finetuned*"))
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [len(row["told"]) for row in rows if row["part"] in ("cli", "script")] == [4] * 5
    watched = [row for row in rows if row["part"] == "timeline"]
    assert [row["rank"] for row in watched] == [0, 0, 0, 1]
    assert all("data" in row["host_ms"] for row in watched)
    assert all("forward" in row["host_ms"] for row in watched[2:])  # one rank alone reports no phases of a step
    assert "reduce" in watched[2]["host_ms"]
