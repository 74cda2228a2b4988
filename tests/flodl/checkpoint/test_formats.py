"""Saved tensors are read back bit by bit, and damaged files are refused."""

from __future__ import annotations

import gzip
import os
import stat
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flodl.checkpoint import checkpoint_keys, load_tensors, save_tensors
from flodl.checkpoint import fdl_file as fdl
from flodl.checkpoint.tensor_bytes import TORCH_DTYPES
from flodl.errors import CheckpointError
from flodl.safetensors_header import name_fault

HASH = "0123456789abcdef" * 4
FDL = list(fdl.FDL_DTYPES)
SUFFIXES = ["safetensors", "fdl", "fdl.gz"]

names = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=20)
shapes = st.lists(st.integers(0, 4), max_size=8).map(tuple).filter(lambda s: torch.Size(s).numel() <= 256)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and bits(left[k]) == bits(right[k])
        for k in left
    )


@st.composite
def tables(draw: st.DrawFn, dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    table = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes)
        raw = draw(st.binary(min_size=shape_bytes(shape, dtype), max_size=shape_bytes(shape, dtype)))
        if dtype is torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        table[name] = flat.view(dtype).reshape(shape)
    return table


def shape_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tables(list(TORCH_DTYPES.values())),
    st.dictionaries(names.filter(lambda n: n != "format"), names, max_size=2),
)
def test_safetensors_round_trip_keeps_every_bit(folder, table, metadata):
    path = folder / "round.safetensors"
    save_tensors(path, table, structural_hash=HASH, metadata=metadata)
    back = load_tensors(path)
    assert same(back.tensors, table)
    assert (back.metadata, back.structural_hash, back.version, back.format) == (
        metadata,
        HASH,
        1,
        "safetensors",
    )
    assert same(load_file(path), table), "the reference library reads the same"


@pytest.mark.parametrize("suffix", ["fdl", "fdl.gz"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table=tables(FDL))
def test_fdl_round_trip_keeps_every_bit(folder, suffix, table):
    path = folder / f"round.{suffix}"
    save_tensors(path, table, structural_hash=HASH)
    back = load_tensors(path)
    assert same(back.tensors, table)
    assert list(back.tensors) == list(table) == checkpoint_keys(path), "file order is the order given"
    assert (back.structural_hash, back.version, back.format) == (HASH, 2, "fdl")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=6))
def test_a_name_is_kept_or_refused_never_changed(folder, name):
    for suffix in ("safetensors", "fdl"):
        path = folder / f"name.{suffix}"
        if name_fault(name):
            with pytest.raises(CheckpointError):
                save_tensors(path, {name: torch.ones(1)})
        else:
            save_tensors(path, {name: torch.ones(1)})
            assert list(load_tensors(path).tensors) == [name]


def small(path: Path) -> bytes:
    table = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7), "none": torch.empty(0, 2)}
    save_tensors(path, table, structural_hash=HASH)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncation_at_every_byte_is_refused(tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    whole = small(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        for read in (load_tensors, checkpoint_keys):
            with pytest.raises(CheckpointError) as caught:
                read(path)
            assert caught.value.path == str(path)
    path.write_bytes(whole)
    assert len(load_tensors(path).tensors) == 3


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "tail", [b"\0", b"x", b"\0" * 512, gzip.compress(b"", mtime=0)], ids=["zero", "letter", "block", "gzip"]
)
def test_trailing_bytes_are_refused(tmp_path, suffix, tail):
    path = tmp_path / f"tail.{suffix}"
    path.write_bytes(small(path) + tail)
    if suffix == "fdl.gz" and tail != b"x":
        assert len(load_tensors(path).tensors) == 3, "gzip allows zeros and empty members at the end"
        return
    for read in (load_tensors, checkpoint_keys):
        with pytest.raises(CheckpointError):
            read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_any_flipped_bit_is_refused_or_leaves_a_readable_file(tmp_path, suffix):
    path = tmp_path / f"flip.{suffix}"
    whole = small(path)
    refused = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            load_tensors(path)
        except CheckpointError:
            refused += 1
    # gzip has a checksum, so only bits of its header (time, system) can change unnoticed.
    assert refused > len(whole) * (7 if suffix == "fdl.gz" else 1)


def entry(name=b"w", dims=(2,), tag=3, length=8, data=b"\0" * 8, name_length=None, ndim=None) -> bytes:
    return b"".join(
        (
            struct.pack("<I", len(name) if name_length is None else name_length) + name,
            struct.pack(f"<I{len(dims)}q", len(dims) if ndim is None else ndim, *dims),
            struct.pack("<BQ", tag, length) + data,
        )
    )


def fdl_bytes(*entries: bytes, magic=b"FDLC", version=2, digest=bytes(32), count=None) -> bytes:
    return (
        magic
        + struct.pack("<I", version)
        + digest
        + struct.pack("<I", len(entries) if count is None else count)
        + b"".join(entries)
    )


EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
HOSTILE_FDL = {
    "magic": fdl_bytes(magic=b"FDLX"),
    **{f"version {v}": fdl_bytes(entry(), version=v) for v in (0, 3, 2**32 - 1)},
    **{f"count {c}": fdl_bytes(entry(), count=c) for c in (0, 2, 2**31, 2**32 - 1)},
    **{f"name length {n}": fdl_bytes(entry(name_length=n)) for n in (0, 2, 4096, 2**31, 2**32 - 1)},
    **{f"ndim {n}": fdl_bytes(entry(ndim=n)) for n in (0, 2, 9, 2**31, 2**32 - 1)},
    **{
        f"dims {d}": fdl_bytes(entry(dims=d))
        for d in ((-1,), (2**62,), (2**62, 2**62), (-2, -1), (3,), (2**63 - 1, 0, 1))
    },
    **{f"tag {t}": fdl_bytes(entry(tag=t)) for t in range(256) if t not in (3, 5)},
    **{f"length {n}": fdl_bytes(entry(length=n)) for n in EXTREMES},
    "doubled name": fdl_bytes(entry(), entry()),
    "empty name": fdl_bytes(entry(name=b"")),
    "name not UTF-8": fdl_bytes(entry(name=b"\xff\xfe")),
    "surrogate in name": fdl_bytes(entry(name=b"\xed\xa0\x80")),
    "escape in name": fdl_bytes(entry(name=b"\x1b[31m")),
    "newline in name": fdl_bytes(entry(name=b"a\nb")),
}


@pytest.mark.parametrize("case", HOSTILE_FDL)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_hostile_fdl_is_refused(tmp_path, case, packed):
    data = HOSTILE_FDL[case]
    path = tmp_path / ("x.fdl.gz" if packed else "x.fdl")
    path.write_bytes(gzip.compress(data) if packed else data)
    for read in (load_tensors, checkpoint_keys):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert caught.value.path == str(path)
        assert "\x1b" not in str(caught.value)


def test_the_helper_of_the_hostile_cases_makes_good_files_too(tmp_path):
    path = tmp_path / "good.fdl"
    path.write_bytes(fdl_bytes(entry(), entry(name=b"v", tag=5), digest=bytes.fromhex(HASH)))
    back = load_tensors(path)
    assert back.structural_hash == HASH
    assert [str(t.dtype) for t in back.tensors.values()] == ["torch.float32", "torch.int32"]


@pytest.mark.parametrize("packed", [False, True])
def test_versions_one_and_two_are_read_alike(tmp_path, packed):
    path = tmp_path / ("old.fdl.gz" if packed else "old.fdl")
    for version in (1, 2):
        data = fdl_bytes(entry(), version=version)
        path.write_bytes(gzip.compress(data) if packed else data)
        assert load_tensors(path).version == version
        assert load_tensors(path).structural_hash == ""
        assert torch.equal(load_tensors(path).tensors["w"], torch.zeros(2))


def test_gzip_bomb_stops_at_the_ratio(tmp_path, monkeypatch):
    monkeypatch.setattr(fdl, "GZIP_FLOOR", 1 << 16)
    size = 1 << 22
    path = tmp_path / "bomb.fdl.gz"
    path.write_bytes(gzip.compress(fdl_bytes(entry(dims=(size // 4,), length=size, data=bytes(size)))))
    for read in (load_tensors, checkpoint_keys):
        with pytest.raises(CheckpointError, match="MAX_GZIP_RATIO"):
            read(path)
    with pytest.raises(CheckpointError, match="Nothing was written"):
        save_tensors(tmp_path / "own.fdl.gz", {"zeros": torch.zeros(size)})
    assert os.listdir(tmp_path) == ["bomb.fdl.gz"]


def test_a_false_length_in_gzip_takes_no_memory(tmp_path):
    path = tmp_path / "liar.fdl.gz"
    length = fdl.GZIP_FLOOR // 2
    path.write_bytes(gzip.compress(fdl_bytes(entry(dims=(length // 4,), length=length))))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load_tensors(path)
        assert tracemalloc.get_traced_memory()[1] < length // 8
    finally:
        tracemalloc.stop()


def test_damaged_gzip_names_the_file(tmp_path):
    path = tmp_path / "bad.fdl.gz"
    whole = gzip.compress(fdl_bytes(entry()))
    for damaged in (b"", b"FDLC" + bytes(60), whole[:-8] + bytes(8), zlib.compress(fdl_bytes(entry()))):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            load_tensors(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("suffix", "table", "words"),
    [
        (
            "fdl",
            {"flag": torch.tensor(True), "byte": torch.ones(1, dtype=torch.uint8)},
            ["'flag'", "'byte'", "float16"],
        ),
        ("safetensors", {"z": torch.ones(1, dtype=torch.complex128)}, ["'z'", "complex128"]),
        ("safetensors", {"m": torch.empty(2, device="meta")}, ["'m'", "meta"]),
        ("fdl", {"m": torch.empty(2, device="meta")}, ["'m'", "meta"]),
        ("safetensors", {"s": torch.eye(2).to_sparse()}, ["'s'", "dense"]),
        ("fdl", {"": torch.ones(1)}, ["is empty"]),
        ("safetensors", {"deep": torch.ones([1] * 9)}, ["'deep'", "9 dimensions"]),
        ("safetensors", {"__metadata__": torch.ones(1)}, ["reserved"]),
        ("fdl.gz", {"x" * 1025: torch.ones(1)}, ["1025"]),
        ("pt", {"a": torch.ones(1)}, [".safetensors"]),
    ],
)
def test_what_a_format_cannot_keep_is_refused_before_writing(tmp_path, suffix, table, words):
    with pytest.raises(CheckpointError) as caught:
        save_tensors(tmp_path / f"no.{suffix}", table)
    assert all(word in str(caught.value) for word in words)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("suffix", "arguments"),
    [
        ("fdl", {"metadata": {"a": "b"}}),
        ("safetensors", {"metadata": {"format": "tf"}}),
        ("safetensors", {"metadata": {"flodl.version": "9"}}),
        ("safetensors", {"metadata": {"a": 3}}),
        ("safetensors", {"metadata": {"a": "\ud800"}}),
        ("safetensors", {"structural_hash": "abc"}),
        ("fdl", {"structural_hash": "z" * 64}),
    ],
)
def test_bad_metadata_and_hashes_are_refused_before_writing(tmp_path, suffix, arguments):
    with pytest.raises(CheckpointError, match="Nothing was written"):
        save_tensors(tmp_path / f"no.{suffix}", {"a": torch.ones(1)}, **arguments)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_views_and_parameters_are_saved_as_they_look(tmp_path, suffix):
    base = torch.arange(12.0).reshape(3, 4)
    table = {
        "t": base.t(),
        "every_other": base[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "p": torch.nn.Parameter(base),
    }
    path = tmp_path / f"views.{suffix}"
    save_tensors(path, table)
    assert {k: v.tolist() for k, v in load_tensors(path).tensors.items()} == {k: v.tolist() for k, v in table.items()}
    assert not load_tensors(path).tensors["p"].requires_grad


def test_files_of_other_writers_are_read(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, path, metadata={"format": "pt", "note": "x"})
    back = load_tensors(path)
    assert (back.version, back.structural_hash, back.metadata) == (0, "", {"note": "x"})
    for metadata in ({"flodl.version": "2"}, {"flodl.structural_hash": "beef"}):
        save_file({"a": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(CheckpointError):
            load_tensors(path)


def test_an_all_zero_hash_means_unknown(tmp_path):
    for suffix in SUFFIXES:
        path = tmp_path / f"zero.{suffix}"
        save_tensors(path, {}, structural_hash="0" * 64)
        assert load_tensors(path).structural_hash == ""


def test_booleans_other_than_zero_and_one_are_refused(tmp_path):
    path = tmp_path / "bool.safetensors"
    save_tensors(path, {"flag": torch.tensor([True])})
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CheckpointError, match=r"flag.*boolean"):
        load_tensors(path)


def test_a_later_change_of_the_file_does_not_reach_the_tensors(tmp_path):
    for suffix in SUFFIXES:
        path = tmp_path / f"live.{suffix}"
        save_tensors(path, {"a": torch.ones(4)})
        loaded = load_tensors(path).tensors["a"]
        os.truncate(path, 1)
        loaded += 1
        assert loaded.tolist() == [2.0] * 4


def test_saving_over_the_file_one_loaded_from_keeps_the_values(tmp_path):
    path = tmp_path / "again.safetensors"
    save_tensors(path, {"a": torch.arange(4.0)})
    save_tensors(path, load_tensors(path).tensors)
    assert load_tensors(path).tensors["a"].tolist() == [0, 1, 2, 3]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "kept.fdl"
    save_tensors(path, {"a": torch.ones(2)})
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, full)
            with pytest.raises(OSError):
                save_tensors(path, {"a": torch.zeros(2)})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["kept.fdl"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_new_files_follow_the_umask_and_old_ones_keep_their_mode(tmp_path, umask):
    path = tmp_path / "mode.safetensors"
    previous = os.umask(umask)
    try:
        save_tensors(path, {})
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        path.chmod(0o640)
        save_tensors(path, {})
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(previous)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_paths_that_are_no_regular_files_are_refused_at_once(tmp_path, suffix):
    pipe, folder, loop = (tmp_path / f"{kind}.{suffix}" for kind in ("pipe", "folder", "loop"))
    os.mkfifo(pipe)
    folder.mkdir()
    loop.symlink_to(loop)
    for path in (pipe, folder, loop, tmp_path / f"absent.{suffix}", f"nul\0.{suffix}"):
        with pytest.raises(CheckpointError):
            load_tensors(path)
