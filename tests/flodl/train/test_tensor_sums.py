"""Several tensors are added up at once, as torch adds up each."""

import os
from importlib.util import find_spec

import pytest
import torch

from flodl.train.step import tensor_sums
from flodl.train.step.decide import load_kernels
from flodl.train.step.tensor_sums import TensorSums

CPU = torch.device("cpu")
SIZES = [(2,), (7, 5), (4096,), (3, 4097), (700, 4096), (33,)]
SQUARES = [False, True, True, False, False, True]


def make_sums(device: torch.device) -> TensorSums:
    sums = TensorSums(device)
    if device.type == "cpu":
        sums._kernels = load_kernels()
    return sums


def check(device: torch.device, dtype: torch.dtype) -> None:
    sums = make_sums(device)
    g = torch.Generator().manual_seed(1)
    values = [(torch.randn(size, generator=g) + 0.5).to(device, dtype) for size in SIZES]
    values.append(values[3].t())
    assert all(map(sums.takes, values))
    found = sums(values, [*SQUARES, True])
    assert found is not None
    wanted = [
        value.double().norm() if squared else value.double().sum()
        for value, squared in zip(values, [*SQUARES, True], strict=True)
    ]
    assert found.tolist() == pytest.approx([float(value) for value in wanted], rel=1e-5)
    again = sums(values, [*SQUARES, True])
    assert again is not None
    assert torch.equal(found, again)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_norms_are_torchs(dtype):
    check(CPU, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_norms_are_torchs_on_a_gpu(dtype):
    assert tensor_sums._kernels(torch.device("cuda", 0)) is not None
    check(torch.device("cuda", 0), dtype)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(4, 4)[:, :2], torch.zeros(4, dtype=torch.float64), torch.zeros(1), torch.zeros(0), torch.zeros(3)],
    ids=["gaps", "float64", "one", "none", "no kernels"],
)
def test_what_is_not_taken(value):
    sums = TensorSums(CPU)
    if value.numel() != 3:
        sums._kernels = object()
    assert not sums.takes(value)


def test_what_is_captured_reads_its_own_tensors(monkeypatch):
    sums = TensorSums(CPU)
    layout = sums._layout_of((4, 6), (True, False), torch.float32)
    assert layout is not None
    (room,) = layout.blocks.spare
    assert layout.firsts.tolist() == [0, 1, 2]
    assert layout.squares.tolist() == [1, 0]
    monkeypatch.setattr(tensor_sums, "capturing", lambda device: True)
    assert sums._layout_of((4, 6), (True, False), torch.float32) is layout
    assert sums._table(layout.blocks, [8, 16]) is room
    assert sums._layout_of((4, 6), (True, False), torch.float32) is None  # a second one has no room yet
    assert sums._layout_of((4, 7), (True, False), torch.float32) is None  # it has not run before
    sums.finish_capture()
    assert room.tolist() == [8, 16]
    assert layout.blocks.spare[0] is not room
