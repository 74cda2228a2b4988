"""Every part and state file of a run says whether it is as it was written; what is not is made again, never joined."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from flodl.files import seal, unseal
from flodl_hf import predict_file
from flodl_hf.errors import PredictError
from flodl_hf.jobs.parts import Parts

SUFFIXES = ["jsonl", "csv", "tsv", "parquet"]


def begun(model: Any, source: Path, out: Path) -> Path:
    """Leave a run behind that has finished two parts; return its folder."""
    asked = iter([False, False, True])
    assert predict_file(model, source, out, part_rows=10, should_stop=lambda: next(asked)).parts == 2
    return out.with_name(out.name + ".parts")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def json_equal(a: bytes, b: bytes) -> bool:
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_part_is_made_again_when_the_run_goes_on(
    suffix: str, model: Any, numbered: Any, tmp_path: Path
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    chance, source, wanted = random.Random(suffix), numbered(40), tmp_path / f"wanted.{suffix}"
    predict_file(model(), source, wanted, part_rows=10)
    out = tmp_path / f"out.{suffix}"
    folder = begun(model(), source, out)
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    for _ in range(5):
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        part = folder / f"part-0000000{chance.randrange(2)}.{suffix}"
        flip(part, chance.randrange(8 * part.stat().st_size))
        assert predict_file(model(), source, out).resumed == 1
        assert out.read_bytes() == wanted.read_bytes()
        assert not folder.exists()
        out.unlink()


def test_bits_of_the_state_files(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(40), tmp_path / "out.jsonl"
    folder = begun(model(), source, out)
    parts = Parts(out, "jsonl")
    record, manifest = folder / "part-00000001.json", folder / "manifest.json"
    for path, read in ((record, lambda: parts.record(1)), (manifest, parts.known)):
        whole, data = read(), path.read_bytes()
        assert whole
        for bit in range(0, 8 * len(data), 11):
            flip(path, bit)
            if path == manifest and not json_equal(path.read_bytes(), data):
                with pytest.raises(PredictError, match=r"manifest.json cannot be used"):
                    read()
            else:  # white space, and the case of an escape's letters, say nothing
                assert read() == whole if json_equal(path.read_bytes(), data) else read() is None
            path.write_bytes(data)


def test_a_damaged_manifest_is_refused_and_a_restart_removes_it(model: Any, numbered: Any, tmp_path: Path) -> None:
    source, out = numbered(40), tmp_path / "out.jsonl"
    folder = begun(model(), source, out)
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"part_rows": 10', b'"part_rows": 11'))
    with pytest.raises(PredictError, match=r"cannot be used.*--overwrite") as refused:
        predict_file(model(), source, out)
    assert refused.value.path == str(folder)
    assert (folder / "part-00000000.jsonl").exists()
    assert predict_file(model(), source, out, overwrite=True).rows == 40
    assert not folder.exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_part_that_changes_before_it_is_joined_is_made_again_by_the_next_call(
    suffix: str, model: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    source, wanted, out = numbered(40), tmp_path / f"wanted.{suffix}", tmp_path / f"out.{suffix}"
    predict_file(model(), source, wanted, part_rows=10)
    finish, hits = Parts.finish, [True]

    def damaged_first(self: Parts, *args: Any) -> None:
        if hits and hits.pop():
            flip(self._data(0), 77)
            flip(self._data(3), 5)
        finish(self, *args)

    monkeypatch.setattr(Parts, "finish", damaged_first)
    with pytest.raises(PredictError) as refused:
        predict_file(model(), source, out, part_rows=10)
    assert (refused.value.parts, out.exists()) == ([0, 3], False)
    result = predict_file(model(), source, out)
    assert (result.is_whole, result.rows, result.resumed) == (True, 40, 2)
    assert out.read_bytes() == wanted.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.jsonl", out.name, wanted.name])


def test_a_seal_is_of_the_values(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None, "é"], "a": {"x": float("inf")}}
    assert unseal(seal(value)) == value
    assert unseal(json.dumps(json.loads(seal(value)), indent=7).encode()) == value
    for damaged in (b"", b"[]", b"{}", b"{", seal(value).replace(b"2.5", b"2.4"), b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            unseal(damaged)
    assert unseal(b'{"b": 1}', before=("b",)) == {"b": 1}
    with pytest.raises(ValueError, match="no seal"):
        unseal(b'{"b": 1, "c": 1}', before=("b",))
