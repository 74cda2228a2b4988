"""A header that breaks a rule is refused, naming file and tensor, before any data is read."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from flodl import safetensors_header
from flodl.errors import CheckpointError
from flodl.safetensors_header import DTYPE_BITS, TensorInfo, read_header

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, header, data=b"\0" * 8, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def two(**second) -> dict:
    return {"w": ONE, "v": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16], **second}}


NAMED = {
    "unknown dtype": {"w": {**ONE, "dtype": "F33"}},
    "lower-case dtype": {"w": {**ONE, "dtype": "f32"}},
    "dtype no text": {"w": {**ONE, "dtype": 3}},
    "extra field": {"w": {**ONE, "extra": 1}},
    "missing field": {"w": {"dtype": "F32", "shape": [2]}},
    "entry no table": {"w": [1]},
    "shape no list": {"w": {**ONE, "shape": 2}},
    "negative size": {"w": {**ONE, "shape": [-2]}},
    "float size": {"w": {**ONE, "shape": [2.0]}},
    "boolean size": {"w": {**ONE, "shape": [True, 2]}},
    "size over 63 bits": {"w": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}},
    "nine dimensions": {"w": {**ONE, "shape": [2, *[1] * 8]}},
    "overflowing product": {"w": {**ONE, "shape": [2**62] * 8}},
    "wrong length": {"w": {**ONE, "shape": [3]}},
    "falling offsets": {"w": {**ONE, "data_offsets": [8, 0]}},
    "three offsets": {"w": {**ONE, "data_offsets": [0, 8, 8]}},
    "float offsets": {"w": {**ONE, "data_offsets": [0.0, 8.0]}},
    "negative offset": {"w": {**ONE, "data_offsets": [-8, 0]}},
    "half a byte": {"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}},
    "beyond the file": {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
    "gap before": {"w": {**ONE, "data_offsets": [8, 16]}},
    "overlap": {"v": ONE, "w": {**ONE, "data_offsets": [4, 12]}},
}
OTHER = {
    "not JSON": b'{"w":',
    "a list": b"[]",
    "a text": b'"w"',
    "empty": b"",
    "blank first": b" {}",
    "text after": b"{} x",
    "newline after": b"{}\n",
    "not UTF-8": b'{"\xff":1}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "NaN": b'{"w":NaN}',
    "deep": b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge number": b'{"w":' + b"9" * 10_000 + b"}",
    "doubled tensor": b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "doubled field": b'{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "doubled metadata": b'{"__metadata__":{},"__metadata__":{}}',
    "metadata number": b'{"__metadata__":{"a":1}}',
    "metadata list": b'{"__metadata__":[]}',
    "metadata surrogate": b'{"__metadata__":{"a":"\\ud800"}}',
    "empty name": json.dumps({"": ONE}).encode(),
    "NUL in name": json.dumps({"a\0b": ONE}).encode(),
    "newline in name": json.dumps({"a\nb": ONE}).encode(),
    "escape in name": json.dumps({"\x1b[2J": ONE}).encode(),
    "surrogate name": json.dumps({"\ud800": ONE}).encode(),
    "long name": json.dumps({"x" * 1025: ONE}).encode(),
    "nothing for 8 bytes": b"{}",
}


@pytest.mark.parametrize("case", NAMED)
def test_a_fault_of_a_tensor_names_file_and_tensor(tmp_path, case):
    path = write(tmp_path / "bad.safetensors", NAMED[case])
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)
    assert "'w'" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


@pytest.mark.parametrize("case", OTHER)
def test_a_fault_of_the_header_names_the_file(tmp_path, case):
    path = write(tmp_path / "bad.safetensors", OTHER[case])
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)
    assert not set(str(caught.value)) & {"\0", "\x1b"}


@pytest.mark.parametrize("length", [0, 1, 7, 10**8 + 1, 99_999_999, 2**63, 2**64 - 1])
def test_a_lying_header_length_is_refused_without_allocating(tmp_path, length):
    with pytest.raises(CheckpointError):
        read_header(write(tmp_path / "x", {"w": ONE}, length=length))


def test_a_gap_in_the_data_is_refused_though_the_file_is_long_enough(tmp_path):
    with pytest.raises(CheckpointError, match="gap"):
        read_header(write(tmp_path / "x", {"w": {**ONE, "data_offsets": [8, 16]}}, bytes(16)))


def test_all_faulty_tensors_are_listed_at_once(tmp_path):
    header = {f"t{i}": {**ONE, "dtype": "XX"} for i in range(3)}
    with pytest.raises(CheckpointError) as caught:
        read_header(write(tmp_path / "x", header))
    assert [p.split(":")[0] for p in caught.value.problems] == ["tensor 't0'", "tensor 't1'", "tensor 't2'"]


def test_a_valid_header_has_the_position_of_every_tensor(tmp_path):
    header = {
        "__metadata__": {"k": "v"},
        "late": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]},
        "w": ONE,
    }
    read = read_header(write(tmp_path / "x", json.dumps(header).encode() + b"   ", b"\0" * 16))
    assert read.order == list(read.tensors) == ["w", "late"]
    assert read.tensors["late"] == TensorInfo("I64", (), 8, 16)
    assert read.tensors["late"].num_bytes == 8
    assert read.metadata == {"k": "v"}
    assert read.data_start == 8 + len(json.dumps(header)) + 3


def test_null_metadata_is_read_as_none(tmp_path):
    read = read_header(write(tmp_path / "x", {"__metadata__": None, "w": ONE}, bytes(8)))
    assert read.metadata == {}
    assert read.order == ["w"]


def test_a_descriptor_is_read_in_place_and_left_open(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x")
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    os.lseek(descriptor, 5, os.SEEK_SET)
    assert read_header(descriptor, name="shard 1").order == ["a"]
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 5
    os.close(descriptor)


def test_a_fault_of_a_descriptor_has_the_given_name(tmp_path):
    descriptor = os.open(write(tmp_path / "x", b"[]"), os.O_RDONLY)
    with pytest.raises(CheckpointError, match="shard 1"):
        read_header(descriptor, name="shard 1")
    os.close(descriptor)


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_TENSORS", 2), ("MAX_NAME_CHARS", 4), ("MAX_DIMS", 3), ("MAX_HEADER_BYTES", 0)]
)
def test_limits_are_exact(tmp_path, monkeypatch, limit, value):
    header = {
        "aaaa": {"dtype": "U8", "shape": [1, 1, 1], "data_offsets": [0, 1]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
    }
    path = write(tmp_path / "x", header, b"\0\0")
    exact = value or len(json.dumps(header))
    monkeypatch.setattr(safetensors_header, limit, exact)
    assert len(read_header(path).order) == 2
    monkeypatch.setattr(safetensors_header, limit, exact - 1)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_a_million_empty_tensors_are_refused_without_parsing(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "_DECODER", None)
    entries = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(100_001))
    with pytest.raises(CheckpointError, match="100001 tensors"):
        read_header(write(tmp_path / "x", b"{" + entries + b"}", b""))


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_is_measured_in_bits(tmp_path, dtype):
    size = DTYPE_BITS[dtype]
    entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}
    assert read_header(write(tmp_path / "x", {"w": entry}, bytes(size))).tensors["w"].dtype == dtype
