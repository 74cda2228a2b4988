"""The benchmarks of what watching costs run and measure what they say, on whatever there is."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("benchmarks")

from benchmarks import monitor_cost, observing


def test_watching_values(tmp_path, capsys):
    size = ["--layers", "4", "--width", "64", "--batch", "4", "--length", "8", "--steps", "3", "--epochs", "2"]
    found = observing.main([*size, "--rounds", "2", "--json", str(tmp_path / "x.json")])
    assert {name: len(times) for name, times in found.seconds.items()} == dict.fromkeys(observing.CONTENDERS, 2)
    assert all(seconds > 0 for times in found.seconds.values() for seconds in times)
    assert found.ratio("plain") == (0.0, 0.0)
    assert "10 values" in capsys.readouterr().out
    kept = json.loads((tmp_path / "x.json").read_text())
    assert kept["seconds"] == found.seconds


def test_ten_values_are_watched_however_few_layers_there_are():
    for layers in (4, 5, 12):
        chosen = observing.watch(observing.Size(layers, 64, 1, 1, 1, 2))
        assert len(set(chosen)) == observing.WATCHED


def test_being_watched_by_a_monitor_and_readers(tmp_path, capsys):
    given = ["--rounds", "1", "--steps", "40", "--width", "16", "--batch", "8", "--readers", "2", "--device", "cpu"]
    assert monitor_cost.main([*given, "--json", str(tmp_path / "x.json")]) == 0
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["device"]
    kinds = [figures["figures"][kind]["ratio"] for kind in monitor_cost.KINDS[1:]]
    assert ("not held here" in capsys.readouterr().out) == (max(kinds) - 1 >= monitor_cost.LIMIT)
    assert figures["figures"]["unwatched_ms"] > 0
    for kind in monitor_cost.KINDS[1:]:
        assert figures["figures"][kind]["ratio"] > 0
        assert figures["figures"][kind]["monitor_ms"] > 0
