"""A run that was ended, at any point and by any means, goes on and writes what an uninterrupted one writes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import DataError
from flodl_hf import predict_file
from flodl_hf.errors import PredictError

ROOT = Path(__file__).parents[3]
HEAD = "sequence_classification"


class Cut(BaseException):
    """Ends a run as nothing in it expects."""


def folder_of(out: Path) -> Path:
    return out.with_name(out.name + ".parts")


def same(out: Path, wanted: Path) -> bool:
    if out.suffix != ".parquet":
        return out.read_bytes() == wanted.read_bytes()
    parquet = pytest.importorskip("pyarrow.parquet")
    return parquet.read_table(out).equals(parquet.read_table(wanted))


@pytest.mark.parametrize("suffix", ["jsonl", *(pytest.param(s, marks=pytest.mark.slow) for s in ("csv", "parquet"))])
def test_a_run_cut_at_every_rename_goes_on(
    suffix: str, model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    source, wanted = numbered(40), tmp_path / f"wanted.{suffix}"
    real = os.replace
    calls = 0

    def counted(*paths: Any) -> None:
        nonlocal calls
        # The heartbeat's thread renames too, whenever it likes; what is cut is the run.
        if threading.current_thread() is threading.main_thread():
            calls += 1
            if calls == cut_at:
                raise Cut
        real(*paths)

    monkeypatch.setattr(os, "replace", counted)
    cut_at = 0
    predict_file(model(), source, wanted, part_rows=16)
    every = range(1, calls + 1)
    assert len(every) >= 1 + 2 * 3 + 1  # the manifest, a part and its record three times, the output
    resumed = 0
    for cut_at in every:
        out, calls = tmp_path / f"cut{cut_at}.{suffix}", 0
        try:
            predict_file(model(), source, out, part_rows=16)
        except Cut:
            cut_at, calls = 0, 0
            resumed += predict_file(model(), source, out, part_rows=16).resumed
        assert same(out, wanted)
        assert not folder_of(out).exists()
    assert resumed >= len(every)


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
from flodl_hf import load, predict_file
model, source, out, seed = load(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)
kills = runs = 0
while not out.exists() or out.with_name(out.name + ".parts").exists():
    runs += 1
    child = os.fork()
    if child == 0:
        predict_file(model, source, out, part_rows=16)
        os._exit(0)
    if kills < 12:
        time.sleep(chance.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
    kills += os.waitpid(child, 0)[1] == signal.SIGKILL
print(kills, runs)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_run_killed_at_random_goes_on(suffix: str, folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    source, wanted, out = numbered(960), tmp_path / f"wanted.{suffix}", tmp_path / f"out.{suffix}"
    predict_file(model(), source, wanted, part_rows=16)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder(HEAD)), str(source), str(out), "7"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    kills, _ = map(int, done.stdout.split())
    assert kills >= 3
    assert same(out, wanted)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == sorted(
        ["in.jsonl", wanted.name, out.name]
    )


def test_a_run_that_is_told_to_stop_ends_after_its_part(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, wanted, out = numbered(50), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=10)
    asked = iter([False, False, True])
    first = predict_file(model(), source, out, part_rows=10, should_stop=lambda: next(asked))
    assert (first.is_whole, first.rows, first.parts, out.exists()) == (False, 20, 2, False)
    second = predict_file(model(), source, out)
    assert (second.is_whole, second.rows, second.parts, second.resumed, second.new_rows) == (True, 50, 5, 2, 30)
    assert same(out, wanted)


def begun(model: Any, source: Path, out: Path, **options: Any) -> None:
    """Leave a run behind that has finished two parts."""
    asked = iter([False, False, True])
    assert predict_file(model, source, out, part_rows=10, should_stop=lambda: next(asked), **options).parts == 2


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"top_k": 2}, "options.top_k"),
        ({"keep": "none"}, "options.keep: was None, now []"),
        ({"on_error": "null"}, "options.on_error"),
        ({"text_column": "id"}, "options.first"),
    ],
)
def test_other_options_are_refused_and_said(now: Any, says: str, model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(40), tmp_path / "out.jsonl"
    begun(model(), source, out)
    before = {p.name: p.read_bytes() for p in folder_of(out).glob("part-*")}
    with pytest.raises(PredictError) as refused:
        predict_file(model(), source, out, **now)
    assert any(line.startswith(says) for line in refused.value.problems)
    assert {p.name: p.read_bytes() for p in folder_of(out).glob("part-*")} == before
    with pytest.raises(DataError) if "text_column" in now else _nothing():
        assert predict_file(model(), source, out, overwrite=True, **now).resumed == 0


def test_rows_read_ahead_are_the_same_rows(model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from flodl_hf.jobs.run import Run

    source, wanted, out = numbered(95), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=10)
    monkeypatch.setattr(Run, "_is_ahead", lambda run: True)
    begun(model(), source, out)
    assert predict_file(model(), source, out).resumed == 2
    assert same(out, wanted)
    source.write_text(source.read_text() + "{\n")
    with pytest.raises(DataError, match="row 96"):
        predict_file(model(), source, tmp_path / "faulty.jsonl", part_rows=10)
    assert len(list(folder_of(tmp_path / "faulty.jsonl").glob("part-*.json"))) == 9


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...


def test_another_input_or_model_is_refused(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(40), tmp_path / "out.jsonl"
    begun(model(), source, out)
    with pytest.raises(PredictError) as refused:
        predict_file(model("base"), source, out)
    assert any(line.startswith("model.weights") for line in refused.value.problems)
    text = source.read_text()
    source.write_text(text.replace('"id": 39', '"id": 93'))
    with pytest.raises(PredictError) as refused:
        predict_file(model(), source, out)
    assert {line.split(":")[0] for line in refused.value.problems} == {"input.sha256"}
    parameter = next(model().graph.parameters())
    source.write_text(text)
    parameter.data.view(-1)[0] += 1
    try:
        with pytest.raises(PredictError) as refused:
            predict_file(model(), source, out)
    finally:
        parameter.data.view(-1)[0] -= 1
    assert any(line.startswith("model.weights") for line in refused.value.problems)
    assert predict_file(model(), source, out, overwrite=True).rows == 40


def test_an_input_that_changes_while_it_is_read_is_no_output(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(40), tmp_path / "out.jsonl"

    def meddle() -> bool:
        with source.open("a") as file:
            file.write(json.dumps({"id": 40, "text": "a cat"}) + "\n")
        return False

    with pytest.raises(DataError, match="was changed while it was read"):
        predict_file(model(), source, out, part_rows=10, should_stop=meddle)
    assert not out.exists()


def test_an_output_that_is_there_is_only_replaced_when_told(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(40), tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(PredictError, match="exists already"):
        predict_file(model(), source, out)
    assert out.read_text() == "precious"
    asked = iter([False, True])
    predict_file(model(), source, out, part_rows=10, overwrite=True, should_stop=lambda: next(asked))
    assert out.read_text() == "precious"
    assert predict_file(model(), source, out).resumed == 1
    assert len(out.read_text().splitlines()) == 40


def test_a_folder_that_is_not_ours_is_left_alone(model: Any, numbered: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    folder_of(out).mkdir()
    (folder_of(out) / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(PredictError, match=r"thesis.txt"):
            predict_file(model(), numbered(5), out, overwrite=overwrite)
    assert (folder_of(out) / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("which", ["part-00000001.jsonl", "part-00000001.json", "output"])
def test_a_full_disk_loses_no_finished_part(
    which: str, model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    import flodl_hf.jobs.parts as parts

    source, wanted, out = numbered(40), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=10)
    real = parts.write_atomically

    def full(path: Path, chunks: Any) -> None:
        if path.name == which or (which == "output" and path == out):
            list(chunks)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, chunks)

    monkeypatch.setattr(parts, "write_atomically", full)
    with pytest.raises(PredictError, match="no space is left") as refused:
        predict_file(model(), source, out, part_rows=10)
    finished = 4 if which == "output" else 1
    assert refused.value.finished == finished
    monkeypatch.undo()
    assert predict_file(model(), source, out).resumed == finished
    assert same(out, wanted)


@pytest.mark.parametrize("damage", ["truncated", "missing", "record"])
def test_a_damaged_part_is_made_again(damage: str, model: Any, numbered: Any, tmp_path: Path) -> None:
    source, wanted, out = numbered(40), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=10)
    begun(model(), source, out)
    data, record = (folder_of(out) / f"part-00000001.{suffix}" for suffix in ("jsonl", "json"))
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-5])
    elif damage == "missing":
        data.unlink()
    else:
        record.write_text("{")
    assert predict_file(model(), source, out).resumed == 1
    assert same(out, wanted)


# ---- standard input ------------------------------------------------------------------------------------


class _Stdin:
    def __init__(self, path: Path) -> None:
        self.buffer = path.open("rb")


def test_standard_input_goes_on_when_it_is_sent_again(
    model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    source, wanted, out = numbered(40), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=10)

    def send(text: str) -> None:
        again = tmp_path / "again.jsonl"
        again.write_text(text)
        stdin = _Stdin(again)
        opened.append(stdin.buffer)
        monkeypatch.setattr(sys, "stdin", stdin)

    opened: list[Any] = []
    text = source.read_text()
    try:
        send(text)
        asked = iter([False, False, True])
        predict_file(model(), "-", out, format="jsonl", part_rows=10, should_stop=lambda: next(asked))
        send(text.replace('"id": 12', '"id": 21'))
        with pytest.raises(DataError, match="the rows of part 1"):
            predict_file(model(), "-", out, format="jsonl")
        send(text)
        assert predict_file(model(), "-", out, format="jsonl").resumed == 2
    finally:
        for file in opened:
            file.close()
    assert same(out, wanted)


# ---- the command line, signals, and several processes --------------------------------------------------


def start(*args: Any, rank: tuple[int, int] | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if rank is not None:
        env |= {"RANK": str(rank[0]), "WORLD_SIZE": str(rank[1])}
    command = [sys.executable, "-m", "flodl_hf.cli", "predict", *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 600
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_the_part_and_say_how_to_go_on(
    number: signal.Signals, folder: Any, model: Any, numbered: Any, tmp_path: Path
) -> None:
    pytest.importorskip("typer")
    source, wanted, out = numbered(400), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    running = start(folder(HEAD), "--in", source, "--out", out, "--part-rows", 4)
    wait_for(lambda: (folder_of(out) / "part-00000001.json").exists(), running)
    running.send_signal(number)
    code, _, said = ended(running)
    assert code == 128 + number
    assert "run the same command again to resume" in said
    assert not list(folder_of(out).glob(".*"))
    records = len(list(folder_of(out).glob("part-*.json")))
    assert records == len(list(folder_of(out).glob("part-*.jsonl"))) >= 2
    assert predict_file(model(), source, out).resumed == records
    predict_file(model(), source, wanted, part_rows=4)
    assert same(out, wanted)


@pytest.mark.slow
def test_several_processes_write_what_one_writes(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    source, wanted, out = numbered(200), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=16)
    args = (folder(HEAD), "--in", source, "--out", out, "--part-rows", 16)
    code, said, err = ended(start(*args, "--devices", "cpu,cpu", "--json"))
    assert code == 0, err
    assert json.loads(said)["rows"] == 200
    assert same(out, wanted)
    out.unlink()
    ranks = [start(*args, rank=(rank, 2)) for rank in (0, 1)]
    (code, first, err), (other, second, more) = map(ended, ranks)
    assert (code, other) == (0, 0), err + more
    assert "200 rows" in first
    assert second == ""
    assert same(out, wanted)
    assert not folder_of(out).exists()


def test_a_rank_that_dies_is_named_and_the_run_goes_on(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    source, wanted, out = numbered(100), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=16)
    # Part 1 is rank 1's, and holds a row that rank 1 refuses.
    rows = source.read_text().splitlines()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([*rows[:20], "{", *rows[20:]]) + "\n")
    args = (folder(HEAD), "--in", broken, "--out", out, "--part-rows", 16)
    ranks = [start(*args, rank=(rank, 2)) for rank in (0, 1)]
    (code, _, said), (other, _, why) = map(ended, ranks)
    assert (code, other) == (1, 1)
    assert "row 21 (line 21): found invalid JSON" in why
    assert "rank 1: DataError" in said
    assert "row 21 (line 21): found invalid JSON" in said
    # Rank 0's parts are done, and one process alone goes on with all of it.
    result = predict_file(model(), broken, out, on_error="skip")
    assert (result.is_whole, result.rows, result.written, result.faulty) == (True, 101, 100, 1)
    assert result.resumed >= 4
    assert result.faults[0].startswith("row 21 (line 21): found invalid JSON")
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == list(range(100))


def test_a_silent_rank_is_given_up(model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import flodl_hf.jobs.ranks as ranks

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "START_S", 0.3)
    source, wanted, out = numbered(50), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(PredictError, match="no status for") as lost:
        predict_file(model(), source, out, part_rows=10)
    assert (lost.value.rank, lost.value.missing) == (1, [1, 3])
    monkeypatch.undo()
    assert predict_file(model(), source, out).resumed == 3
    predict_file(model(), source, wanted, part_rows=10)
    assert same(out, wanted)


@pytest.mark.parametrize("env", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_ranks_that_make_no_sense(env: Any, model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PredictError, match="0 <= RANK < WORLD_SIZE"):
        predict_file(model(), numbered(5), tmp_path / "out.jsonl")


# ---- memory --------------------------------------------------------------------------------------------

MEMORY = """
import json, resource, sys
from pathlib import Path
from flodl_hf import load, predict_file
from flodl_hf.inference.results import Classification

def rows(count):
    for i in range(count):
        yield json.dumps({"id": i, "text": f"text {i} " + "the cat sat on the mat " * 12})

model, folder = load(sys.argv[1]), Path(sys.argv[2])
model.predict = lambda texts, top_k=None: ([Classification("a", 0.5)] for _ in texts)  # the file's way alone
peaks = []
for name, count in (("small", 6000), ("big", 100000)):
    with (folder / f"{name}.jsonl").open("w") as file:
        file.writelines(row + "\\n" for row in rows(count))
    predict_file(model, folder / f"{name}.jsonl", folder / f"{name}-out.{sys.argv[3]}", part_rows=2048)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(*peaks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_file(suffix: str, folder: Any, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder(HEAD)), str(tmp_path), suffix],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    small, big = map(int, done.stdout.split())
    size = (tmp_path / "big.jsonl").stat().st_size / 1e6
    assert size > 25
    # A joined Parquet file holds one group of rows at a time besides.
    assert big - small < (15 if suffix == "jsonl" else 60), (small, big, size)
