"""Torch files are read to the bit, and a malicious one does nothing but raise."""

from __future__ import annotations

import builtins
import collections
import functools
import io
import operator
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flodl.errors import CheckpointError, UnsafeFileError
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.torch_file import _ALLOWED, NAMES

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def read_bin(file: Path) -> dict[str, Tensor]:
    with Checkpoint.open(file.parent, named=file.name) as source:
        return source.read_all()


def save(table: Any, file: Path, container: str) -> Path:
    torch.save(table, file, _use_new_zipfile_serialization=container == "zip")
    return file


@pytest.fixture(params=["zip", "legacy"])
def container(request: pytest.FixtureRequest) -> str:
    return request.param


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    container=st.sampled_from(["zip", "legacy"]),
    view=st.sampled_from(["whole", "part", "transposed"]),
)
def test_reads_what_torch_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    dtype: torch.dtype,
    container: str,
    view: str,
) -> None:
    table = collections.OrderedDict()
    for place, shape in enumerate(shapes):
        tensor = torch.arange(torch.Size(shape).numel() + 1)[1:].reshape(shape).to(dtype)
        if view == "part" and shape:
            tensor = tensor[1:]
        if view == "transposed" and len(shape) > 1:
            tensor = tensor.transpose(0, 1)
        table[f"layer.{place}"] = tensor
    file = save(table, tmp_path_factory.mktemp("bin") / "pytorch_model.bin", container)
    expected = torch.load(file, weights_only=True)
    found = read_bin(file)
    assert list(found) == list(expected)
    assert all(torch.equal(found[n], expected[n]) and found[n].dtype == dtype for n in expected)
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_a_real_state_dict_with_parameters_and_ties(tmp_path: Path, container: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 5))
    model[2].weight = model[0].weight
    for state in (model.state_dict(), dict(model.named_parameters(remove_duplicate=False))):
        found = read_bin(save(state, tmp_path / "x.bin", container))
        assert list(found) == list(state)
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert found["0.weight"] is found["2.weight"]


def test_shared_storages_are_kept_and_named(tmp_path: Path, container: str) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    table = {"a": base, "b": base, "c": base[1:], "d": base.clone()}
    save(table, tmp_path / "pytorch_model.bin", container)
    with Checkpoint.open(tmp_path) as source:
        assert source.manifest.ties == {"b": "a"}
        found = source.read_all()
        assert torch.equal(source.read_all(["c"])["c"], base[1:])
    assert found["a"] is found["b"]
    assert found["a"].data_ptr() != found["d"].data_ptr()


def test_only_what_was_asked_is_read(tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"small": torch.ones(2), "large": torch.ones(100_000)}
    save(table, tmp_path / "pytorch_model.bin", container)
    taken: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], position: int) -> int:
        taken.append(sum(map(len, buffers)))
        return real(descriptor, buffers, position)

    with Checkpoint.open(tmp_path) as source:
        monkeypatch.setattr(os, "preadv", counted)
        assert torch.equal(source.read_all(["small"])["small"], torch.ones(2))
    assert sum(taken) == 8


# --- attacks -----------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of ``function(*arguments)``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """Never reached: pickle wants what it calls to look callable, and this is written as its own call."""


def payloads(canary: Path) -> dict[str, Any]:
    touch = f"touch '{canary}'"
    code = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, touch),
        "builtins.eval": Calls(builtins.eval, code),
        "builtins.exec": Calls(builtins.exec, code),
        "builtins.open": Calls(builtins.open, str(canary), "w"),
        "builtins.__import__": Calls(builtins.__import__, "os"),
        "getattr chain": Calls(Calls(getattr, Calls(builtins.__import__, "os"), "system"), touch),
        "subprocess": Calls(subprocess.Popen, ["touch", str(canary)]),
        "functools.partial": Calls(Calls(functools.partial, os.system, touch)),
        "operator.methodcaller": Calls(operator.methodcaller("touch"), canary),
        "operator.attrgetter": Calls(Calls(operator.attrgetter("system"), Calls(builtins.__import__, "os")), touch),
        "map": Calls(list, Calls(map, os.system, [touch])),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, touch))),
        "torch.load": Calls(torch.load, str(canary)),
        "torch.jit.load": Calls(torch.jit.load, str(canary)),
        "torch.hub": Calls(torch.hub.load, "x", "y"),
        "nested in a table": {"weight": torch.ones(2), "x": [{"y": (Calls(os.system, touch),)}]},
        "as a name": {Calls(os.system, touch): torch.ones(1)},
        "a module": torch.nn.Linear(1, 1),
        "a set": {1, 2},
        "a class": Path,
        "numpy": torch.ones(2).numpy(),
        "defaultdict": collections.defaultdict(list),
    }


NAMES_OF_PAYLOADS = list(payloads(Path("x")))


@pytest.mark.parametrize("name", NAMES_OF_PAYLOADS)
@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_program_does_nothing_but_raise(tmp_path: Path, name: str, protocol: int) -> None:
    canary = tmp_path / "canary"
    program = pickle.dumps(payloads(canary)[name], protocol)
    (tmp_path / "raw.bin").write_bytes(program)
    with zipfile.ZipFile(tmp_path / "zip.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3")
    magic = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    (tmp_path / "legacy.bin").write_bytes(magic + program + pickle.dumps([], 2))
    for file in ("raw.bin", "zip.bin", "legacy.bin"):
        with pytest.raises(CheckpointError) as caught:
            read_bin(tmp_path / file)
        assert not canary.exists()
        assert str(tmp_path / file) in caught.value.message
        if protocol == 2 and name in ("os.system", "builtins.eval"):
            module = {"os.system": "posix.system", "builtins.eval": "__builtin__.eval"}[name]
            assert isinstance(caught.value, UnsafeFileError)
            assert caught.value.problems == [f"the name '{module}'"]


def test_torch_itself_runs_such_a_file(tmp_path: Path) -> None:
    """The attack is real: what we refuse, an unrestricted load executes."""
    canary = tmp_path / "canary"
    torch.save({"x": Calls(os.system, f"touch '{canary}'")}, tmp_path / "x.bin")
    with pytest.raises(UnsafeFileError):
        read_bin(tmp_path / "x.bin")
    assert not canary.exists()
    command = [
        sys.executable,
        "-c",
        f"import torch; torch.load({str(tmp_path / 'x.bin')!r}, weights_only=False)",
    ]
    subprocess.run(command, check=True)
    assert canary.exists()


def test_every_other_instruction_is_refused(tmp_path: Path) -> None:
    refused = 0
    for code in range(256):
        # Enough on the stack for any instruction, and bytes that name no allowed thing.
        program = b"\x80\x02}X\x01\x00\x00\x00a](" + bytes([code]) + b"\x00os\nsystem\n.\n" * 3
        (tmp_path / "x.bin").write_bytes(program)
        with pytest.raises(CheckpointError) as caught:
            read_bin(tmp_path / "x.bin")
        if bytes([code]) not in _ALLOWED:
            assert isinstance(caught.value, UnsafeFileError)
            assert caught.value.problems == [f"instruction 0x{code:02x}"]
            refused += 1
    assert refused == 256 - len(_ALLOWED)


def test_the_list_of_names_holds_nothing_that_python_could_call() -> None:
    import importlib

    for name, meaning in NAMES.items():
        module, _, attribute = name.rpartition(".")
        real = getattr(importlib.import_module(module), attribute)
        assert meaning is not real
        assert getattr(meaning, "apply", None) is not real


def hand_made(tmp_path: Path, program: bytes, storages: dict[str, bytes]) -> Path:
    file = tmp_path / "x.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
    return file


def number(value: int) -> bytes:
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor_program(
    numel: int = 4,
    offset: int = 0,
    shape: tuple[int, ...] = (2, 2),
    strides: tuple[int, ...] = (2, 1),
    key: str = "0",
) -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(numel) + b"tQ"
    sizes = b"(" + b"".join(map(number, shape)) + b"t" + b"(" + b"".join(map(number, strides)) + b"t"
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + number(offset)
        + sizes
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )
    return b"\x80\x02}" + text("w") + tensor + b"s."


FOUR = struct.pack("<4f", 1, 2, 3, 4)


def test_the_hand_made_program_is_good(tmp_path: Path) -> None:
    found = read_bin(hand_made(tmp_path, tensor_program(), {"0": FOUR}))
    assert torch.equal(found["w"], torch.tensor([[1.0, 2], [3, 4]]))
    transposed = read_bin(hand_made(tmp_path, tensor_program(strides=(1, 2)), {"0": FOUR}))
    assert torch.equal(transposed["w"], torch.tensor([[1.0, 3], [2, 4]]))


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (1,), (1, 1), (0,), (2, 1, 2), (2, 2)])
@pytest.mark.parametrize("stride", [1, 7, 2**63 - 1])
def test_tensors_have_the_usual_strides_whatever_the_file_states(
    shape: tuple[int, ...], stride: int, tmp_path: Path
) -> None:
    usual = torch.empty(shape).stride()
    strides = tuple(stride if size < 2 else step for size, step in zip(shape, usual, strict=True))
    found = read_bin(hand_made(tmp_path, tensor_program(shape=shape, strides=strides), {"0": FOUR}))["w"]
    assert (found.shape, found.stride()) == (shape, usual)
    assert torch.equal(found.flatten(), torch.arange(1.0, found.numel() + 1))


def test_small_files_are_compared_with_their_checksums_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "x.bin")
    monkeypatch.delattr("flodl_hf.checkpoints.weights.torch_file.ThreadPoolExecutor")
    assert len(read_bin(tmp_path / "x.bin")) == 2


BAD_TENSORS: dict[str, dict[str, Any]] = {
    "beyond the storage": {"offset": 1},
    "negative offset": {"offset": -1},
    "negative size": {"shape": (-2, 2)},
    "negative stride": {"strides": (-2, 1)},
    "fewer strides": {"strides": (1,)},
    "numbers repeated": {"strides": (0, 0)},
    "bomb by expansion": {"shape": (2**40, 2**20), "strides": (0, 0)},
    "size beyond 64 bits": {"shape": (2**63, 2)},
    "storage smaller than declared": {"numel": 5},
    "storage larger than declared": {"numel": 3, "shape": (3,), "strides": (1,)},
    "huge storage": {"numel": 2**62},
    "storage not there": {"key": "1"},
    "storage by path": {"key": "../data.pkl"},
    "nine dimensions": {"shape": (1,) * 9, "strides": (1,) * 9},
}


@pytest.mark.parametrize("change", BAD_TENSORS.values(), ids=list(BAD_TENSORS))
def test_tensors_stay_inside_their_storage(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read_bin(hand_made(tmp_path, tensor_program(**change), {"0": FOUR}))


BAD_PROGRAMS = {
    "empty": b"",
    "no end": b"\x80\x02}",
    "nothing left": b"\x80\x02.",
    "two values": b"\x80\x02}}.",
    "pop from nothing": b"\x80\x02R.",
    "no mark": b"\x80\x02}u.",
    "odd items": b"\x80\x02}(" + text("a") + b"u.",
    "unknown memo": b"\x80\x02h\x07.",
    "text too long": b"\x80\x02X\xff\xff\xff\xff",
    "text not UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "key is a tuple": b"\x80\x02})Ns.",
    "not a table": b"\x80\x02].",
    "value is a number": b"\x80\x02}" + text("a") + b"K\x01s.",
    "name is a number": b"\x80\x02}K\x01K\x01s.",
    "name with a newline": tensor_program().replace(text("w"), text("w\n")),
    "table in a table": b"\x80\x02}" + text("state_dict") + b"}s.",
    "bytes after the end": tensor_program() + b"x",
    "a function left": b"\x80\x02ccollections\nOrderedDict\n.",
    "storage called": b"\x80\x02ctorch\nFloatStorage\n)R.",
    "arguments for a table": b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.",
    "hashed for ever by a table": b"\x80\x02ccollections\nOrderedDict\n(]((N\x85" + b"q\x00h\x00\x86" * 200 + b"NtetR.",
    "attributes that are no table": b"\x80\x02}Nb.",
    "storage of text": b"\x80\x02" + text("storage") + b"Q.",
    "dotted name": b"\x80\x02ctorch\nstorage.os.system\n.",
    "name without end": b"\x80\x02c" + b"a" * 10_000,
    "hashed for ever": b"\x80\x02}" + b"N\x85" + b"q\x00h\x00\x86" * 200 + b"Ns.",
}


@pytest.mark.parametrize("program", BAD_PROGRAMS.values(), ids=list(BAD_PROGRAMS))
def test_damaged_programs_are_refused(tmp_path: Path, program: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_bin(hand_made(tmp_path, program, {"0": FOUR}))


def test_a_program_may_not_work_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl_hf.checkpoints.weights.torch_file._MAX_STEPS", 1000)
    with pytest.raises(CheckpointError, match="more than 1,000 instructions"):
        read_bin(hand_made(tmp_path, b"\x80\x02" + b"}" * 5000, {}))


# --- containers --------------------------------------------------------------------------------------


def rezipped(tmp_path: Path, **change: Any) -> Path:
    """Write a good file again with one thing wrong."""
    torch.save({"w": torch.ones(300)}, tmp_path / "good.bin")
    bad = tmp_path / "bad.bin"
    with zipfile.ZipFile(tmp_path / "good.bin") as good, zipfile.ZipFile(bad, "w") as archive:
        for info in good.infolist():
            name = info.filename
            data = change.get("data", {}).get(name.partition("/")[2], good.read(info))
            if name.partition("/")[2] in change.get("drop", ()):
                continue
            archive.writestr(name, data, change.get("method", zipfile.ZIP_STORED))
        for name, data in change.get("add", {}).items():
            archive.writestr(f"good/{name}" if "/" not in name else name, data)
    return bad


BAD_ARCHIVES: dict[str, dict[str, Any]] = {
    "compressed": {"method": zipfile.ZIP_DEFLATED},
    "no program": {"drop": ("data.pkl",)},
    "two programs": {"add": {"other/data.pkl": b"."}},
    "no storage": {"drop": ("data/0",)},
    "storage cut": {"data": {"data/0": b"\0" * 1196}},
    "big-endian": {"data": {"byteorder": b"big"}},
    "a script": {"add": {"constants.pkl": b"."}},
}


@pytest.mark.parametrize("change", BAD_ARCHIVES.values(), ids=list(BAD_ARCHIVES))
def test_odd_archives_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read_bin(rezipped(tmp_path, **change))


def _directory_entry_beyond_any_file(data: bytes) -> bytes:
    """Place the last member at an offset of 64 bits that no file has."""
    at, end = data.rfind(b"PK\x01\x02"), data.rfind(b"PK\x05\x06")
    length = int.from_bytes(data[at + 28 : at + 30], "little")
    entry = bytearray(data[at : at + 46 + length])
    entry[30:32], entry[42:46] = (12).to_bytes(2, "little"), b"\xff" * 4
    entry += b"\x01\0\x08\0" + b"\xff" * 8
    record = bytearray(data[end:])
    record[12:16] = (int.from_bytes(record[12:16], "little") + 12).to_bytes(4, "little")
    return data[:at] + bytes(entry) + bytes(record)


BAD_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "bytes after it": lambda data: data + b"x",
    "a comment": lambda data: data[:-2] + b"\1\0x",
    "an archive before it": lambda data: data + data,
    "an offset of 64 bits": _directory_entry_beyond_any_file,
    "no end": lambda data: data[:-22],
}


@pytest.mark.parametrize("change", BAD_BYTES.values(), ids=list(BAD_BYTES))
def test_bytes_around_an_archive_and_impossible_offsets_are_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    file = rezipped(tmp_path)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError):
        read_bin(file)


def test_a_directory_of_very_many_members_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_bin(rezipped(tmp_path, add={f"data/x{i}": b"" for i in range(80_000)}))
    assert caught.value.problems == ["it is too long"]


def test_a_rewritten_good_archive_is_read(tmp_path: Path) -> None:
    assert torch.equal(read_bin(rezipped(tmp_path))["w"], torch.ones(300))


def test_a_bomb_is_not_inflated(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("archive/data.pkl", tensor_program(numel=2**24, shape=(2**24,), strides=(1,)))
        archive.writestr("archive/data/0", bytes(2**26))
    (tmp_path / "x.bin").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="compressed"):
        read_bin(tmp_path / "x.bin")


def test_overlapping_members_are_refused(tmp_path: Path) -> None:
    program = (
        b"\x80\x02}"
        + b"".join(tensor_program(key=key)[3:-2].replace(text("w"), text(key)) + b"s" for key in "01")
        + b"."
    )
    file = hand_made(tmp_path, program, {"0": FOUR, "1": FOUR})
    assert len(read_bin(file)) == 2
    data = bytearray(file.read_bytes())
    # Point the second storage's directory entry, and its name there, at the first one's bytes.
    first, second = data.rfind(b"archive/data/0"), data.rfind(b"archive/data/1")
    data[second - 46 + 42 : second] = data[first - 46 + 42 : first]
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        read_bin(file)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), container=st.sampled_from(["zip", "legacy"]))
def test_flipped_bits_give_an_error_or_tensors_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, container: str
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    file = save({"a": torch.ones(3), "b": torch.zeros(2, 2).half()}, folder / "x.bin", container)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    try:
        found: object = read_bin(file)
    except CheckpointError as error:
        found = error
    if isinstance(found, CheckpointError):
        assert str(file) in found.message
    else:
        assert isinstance(found, dict)
        assert all(isinstance(tensor, Tensor) for tensor in found.values())


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_number_is_seen_by_the_archives_checksum(tmp_path: Path, checksums: bool) -> None:
    """torch writes checksums and does not look at them; without them (zeros) a file is taken as it is."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save({"a": torch.arange(3.0), "b": torch.arange(9.0)}, tmp_path / "w.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    data = bytearray((tmp_path / "w.bin").read_bytes())
    at = data.find(torch.arange(9.0).numpy().tobytes())
    data[at + 30] ^= 4
    (tmp_path / "w.bin").write_bytes(data)
    if not checksums:
        assert not torch.equal(read_bin(tmp_path / "w.bin")["b"], torch.arange(9.0))
        return
    with pytest.raises(CheckpointError, match="members are damaged") as caught:
        read_bin(tmp_path / "w.bin")
    assert caught.value.problems == ["'data/1': checksum differs"]
    assert "w.bin" in str(caught.value)
