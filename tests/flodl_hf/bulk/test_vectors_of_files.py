"""A file of texts to a file of vectors: every format in every precision, cut anywhere, and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flodl.errors import DataError
from flodl_hf import encode_file, predict_file
from flodl_hf.errors import PredictError
from flodl_hf.inference.quantize import PRECISIONS, quantize_embeddings, ranges_of
from flodl_hf.inference.vector_files import SUFFIXES, ranges_path, read_vectors
from flodl_hf.jobs.parts import Parts

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")


def texts_in(source: Path) -> list[str]:
    return [json.loads(line)["text"] for line in source.read_text().splitlines()]


QUICK = {(".npy", "float32"), (".npy", "int8"), (".npy", "ubinary"), (".jsonl", "int8"), (".parquet", "int8"),
         (".arrow", "float16")}  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "store"),
    [
        pytest.param(suffix, store, marks=() if (suffix, store) in QUICK else pytest.mark.slow)
        for suffix in SUFFIXES
        for store in PRECISIONS
    ],
)
def test_every_format_holds_the_models_vectors(
    store: str, suffix: str, model: Any, numbered: Any, tmp_path: Path
) -> None:
    if suffix in (".parquet", ".arrow"):
        pytest.importorskip("pyarrow")
    source, out, cut = numbered(30), tmp_path / f"v{suffix}", tmp_path / f"cut{suffix}"
    result = encode_file(model("base"), source, out, store=store, part_rows=10)
    assert (result.is_whole, result.written, result.parts) == (True, 30, 3)
    whole = model("base").encode(texts_in(source))
    kept = quantize_embeddings(whole, store)
    found = read_vectors(out)
    if suffix != ".jsonl":
        assert found.dtype == kept.dtype
    assert np.array_equal(found, kept)
    if store in ("int8", "uint8"):
        assert np.array_equal(np.load(ranges_path(out)), ranges_of(whole))
    asked = iter([False, False, True])
    first = encode_file(model("base"), source, cut, store=store, part_rows=10, should_stop=lambda: next(asked))
    assert (first.is_whole, cut.exists(), ranges_path(cut).exists()) == (False, False, False)
    assert encode_file(model("base"), source, cut, store=store).resumed == 2
    assert cut.read_bytes() == out.read_bytes()
    assert not Parts(cut, "").folder.exists()


@pytest.mark.parametrize(
    ("how", "same"),
    [
        ({"prompt": "query: "}, {"prompt": "query: "}),
        ({"prompt_name": "query"}, {"prompt": ""}),
        ({"precision": "exact"}, {"precision": "exact"}),
        ({"precision": "int8"}, {"precision": "int8", "store": "float32"}),  # of the computation, not of the file
    ],
    ids=str,
)
def test_options_of_encode_apply_to_files(
    how: dict[str, Any], same: dict[str, Any], model: Any, numbered: Any, tmp_path: Path
) -> None:
    source, out = numbered(12), tmp_path / "v.npy"
    encode_file(model("base"), source, out, batch_invariant=True, **how)
    assert np.array_equal(np.load(out), model("base").encode(texts_in(source), batch_invariant=True, **same))


@pytest.mark.parametrize("windows", [None, True])
def test_files_have_the_vectors_of_texts_in_memory(windows: bool | None, model: Any, tmp_path: Path) -> None:
    source, encoder = tmp_path / "in.txt", model("base")
    texts = ["the cat", "the cat sat on the mat " * 20, "a dog", "good film " * 40]
    source.write_text("\n".join(texts))
    how = {"windows": bool(windows), "batch_invariant": True}
    for write, suffix, method in ((encode_file, ".npy", encoder.encode), (predict_file, ".jsonl", encoder.embed)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = write(encoder, source, tmp_path / f"out{suffix}", part_rows=2, **how)
        assert ["truncated 2 of 4 texts" in str(one.message) for one in caught] == ([] if windows else [True])
        assert result.truncated == (0 if windows else 2)
        rows = (tmp_path / f"out{suffix}").read_text().splitlines() if suffix == ".jsonl" else []
        found = [json.loads(row)["embedding"] for row in rows] or np.load(tmp_path / "out.npy")
        assert np.array_equal(np.asarray(found, np.float32), np.asarray(method(texts, **how)))


@pytest.mark.parametrize(
    ("suffix", "store"),
    [
        (".jsonl", "int8"),
        (".parquet", "int8"),
        (".arrow", "float16"),
        pytest.param(".jsonl", "float16", marks=pytest.mark.slow),
        pytest.param(".arrow", "int8", marks=pytest.mark.slow),
    ],
)
def test_columns_stay_beside_vectors_and_faulty_rows_have_none(
    store: str, suffix: str, model: Any, jsonl: Any, tmp_path: Path
) -> None:
    if suffix != ".jsonl":
        pytest.importorskip("pyarrow")
    tricky = '"vector": "QUJD" and "vector": null'
    source = jsonl([{"id": 1, "text": "a cat"}, {"id": 2, "text": None}, {"id": 3, "text": tricky}] * 4)
    out = tmp_path / f"v{suffix}"
    result = encode_file(model("base"), source, out, store=store, on_error="null", part_rows=4)
    assert (result.written, result.faulty) == (12, 4)
    if suffix == ".jsonl":
        import json

        rows = [json.loads(line) for line in out.read_text().splitlines()]
    elif suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(out).to_pylist()
    else:
        import pyarrow

        with pyarrow.memory_map(str(out)) as file:
            rows = pyarrow.ipc.open_file(file).read_all().to_pylist()
    assert [list(row) for row in rows] == [["id", "text", "vector", "error"]] * 12
    assert [(row["id"], row["text"]) for row in rows[:3]] == [(1, "a cat"), (2, None), (3, tricky)]
    wanted = quantize_embeddings(model("base").encode(["a cat", tricky]), store)
    for row, vector in zip((rows[0], rows[2]), wanted, strict=True):
        assert np.array_equal(np.asarray(row["vector"], vector.dtype), vector)
        assert row["error"] is None
    assert rows[1]["vector"] is None
    assert "row 2" in rows[1]["error"]


@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        ("v.csv", {}, "does not support vectors"),
        ("v.npy", {"keep": "id"}, "only vectors"),
        ("v.npy", {"on_error": "null"}, "only vectors"),
        ("v.npy", {"store": "int9"}, "int8"),
        ("v.npy", {"top_k": 2}, "top_k"),
    ],
)
def test_what_cannot_be_is_refused(name: str, how: Any, says: str, model: Any, numbered: Any, tmp_path: Path) -> None:
    with pytest.raises((DataError, PredictError), match=says):
        encode_file(model("base"), numbered(5), tmp_path / name, **how)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.slow
def test_several_processes_write_the_same_file(folder: Any, numbered: Any, tmp_path: Path) -> None:
    source = numbered(40)
    encode_file(folder("base"), source, tmp_path / "one.npy", store="int8", part_rows=8, device="cpu")
    encode_file(folder("base"), source, tmp_path / "two.npy", store="int8", part_rows=8, devices=["cpu", "cpu"])
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "two.npy").read_bytes()


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
from flodl_hf import encode_file
from flodl_hf.heads.base import BaseModel
model, source, out = BaseModel.from_pretrained(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
chance = random.Random(3)
kills = 0
while not out.exists() or out.with_name(out.name + ".parts").exists():
    child = os.fork()
    if child == 0:
        encode_file(model, source, out, store="int8", part_rows=16)
        os._exit(0)
    if kills < 15:
        time.sleep(chance.uniform(0.02, 0.2))
        os.kill(child, signal.SIGKILL)
    kills += os.waitpid(child, 0)[1] == signal.SIGKILL
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_killed_at_random_it_goes_on_to_the_same_bytes(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    source, wanted, out = numbered(600), tmp_path / "wanted.npy", tmp_path / "out.npy"
    encode_file(model("base"), source, wanted, store="int8", part_rows=16)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder("base")), str(source), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    assert out.read_bytes() == wanted.read_bytes()
    assert ranges_path(out).read_bytes() == ranges_path(wanted).read_bytes()


PEAK = """
import resource, sys
from flodl_hf import encode_file
encode_file(sys.argv[1], sys.argv[2], sys.argv[3], device="cpu", store=sys.argv[4])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("store", ["float32", "int8"])
def test_memory_does_not_grow_with_the_file(store: str, folder: Any, tmp_path: Path) -> None:
    pytest.importorskip("resource")

    def peak(rows: int) -> int:
        source = tmp_path / f"{rows}.txt"
        with source.open("w") as file:
            file.writelines(f"cat number {i % 977}\n" for i in range(rows))
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder("base")), str(source), str(tmp_path / f"{rows}.npy"), store],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert read_vectors(tmp_path / f"{rows}.npy").shape[0] == rows
        return int(done.stdout)

    assert peak(100_000) < peak(10_000) * 1.05


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_rows_of_plain_text_are_its_lines(end: str, model: Any, tmp_path: Path) -> None:
    source, lines = tmp_path / "lines.txt", ["one", "", "  ", "two", "", "three"]
    source.write_bytes((end or "\n").join(lines).encode() + end.encode())  # what ends a file is no row
    for part_rows in (2, 100):
        result = encode_file(model("base"), source, tmp_path / "v.npy", part_rows=part_rows, overwrite=True)
        assert (result.rows, result.written, result.empty) == (6, 6, 3)
        assert np.array_equal(read_vectors(tmp_path / "v.npy"), model("base").encode([*lines[:2], "  ", *lines[3:]]))
