"""Tensors are added up in a launch each, as torch adds up each."""

import os
from importlib.util import find_spec

import pytest
import torch

from flodl.monitor.collect import Collector, Reduce
from flodl.train.step import tensor_sums
from flodl.train.step.decide import load_kernels
from flodl.train.step.tensor_sums import PROGRAMS, TensorSums

CPU = torch.device("cpu")
SIZES = [(2,), (7, 5), (4096,), (3, 4097), (33,)]


class ByTorch:
    """The kernel's arithmetic by a few operations of torch."""

    class finish_sums:
        @classmethod
        def __class_getitem__(cls, grid):
            def run(sums, found, norms, block, num_warps):
                for place in range(grid[0]):
                    total = sums[place].double().sum()
                    found[place] = total.sqrt() if norms >> place & 1 else total

            return run

    class one_sum:
        @classmethod
        def __class_getitem__(cls, grid):
            def run(values, sums, size, span, squared, block, num_warps):
                flat = values.reshape(-1).float()
                flat = flat * flat if squared else flat
                parts = [flat[i * span : (i + 1) * span].sum() for i in range(grid[0])]
                sums.copy_(torch.stack(parts))

            return run


def check(sums: TensorSums, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    values = [(torch.randn(size, generator=g) + 0.5).to(sums.device, dtype) for size in SIZES]
    values.append(values[3].t())
    assert all(map(sums.takes, values))

    def told(values: list[torch.Tensor]) -> list[float]:
        for i, value in enumerate(values):
            sums.add(value, squared=bool(i % 3))
        return sums.finish().tolist()

    for many in (values, 5 * values):  # of those more than one launch finishes
        found = told(many)
        wanted = [float(value.double().norm() if i % 3 else value.double().sum()) for i, value in enumerate(many)]
        assert found == pytest.approx(wanted, rel=1e-5)
        assert told(many) == found
    assert sums.finish().tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_launches_leave_is_added_up(dtype):
    check(TensorSums(CPU, ByTorch), dtype)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton's interpreter"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_norms_are_torchs(monkeypatch, dtype):
    monkeypatch.setattr(tensor_sums, "PROGRAMS", 8)  # an interpreter takes its time
    check(TensorSums(CPU, load_kernels()), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_norms_are_torchs_on_a_gpu(dtype):
    device = torch.device("cuda", 0)
    assert tensor_sums._kernels(device) is not None
    check(TensorSums.of(device), dtype)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(4, 4)[:, :2], torch.zeros(4, dtype=torch.float64), torch.zeros(1), torch.zeros(0)],
    ids=["gaps", "float64", "one", "none"],
)
def test_what_is_not_taken(value):
    assert not TensorSums(CPU, ByTorch).takes(value)
    assert not TensorSums(CPU).takes(torch.zeros(3))


def test_values_of_a_forward_pass_are_told_as_torch_adds_them_up():
    x, y = torch.arange(6.0).reshape(2, 3), torch.tensor([3.0, 4.0])
    told = []
    for adder in (None, TensorSums(CPU, ByTorch)):
        seen = Collector({}, adder)
        for how in Reduce:
            seen.add_tensor(f"x:{how}", x, how)
        seen.add_tensor("twice", x)
        seen.add_tensor("twice", y)
        seen.add_tensor("y", y, Reduce.NORM)
        seen.add("z", 2.0, 4.0)
        assert seen.names() == {*(f"x:{how}" for how in Reduce), "twice", "y", "z"}
        told.append({name: (float(a), float(b)) for name, (a, b) in seen.pack().items()})
    assert told[0].keys() == told[1].keys()
    for name, pair in told[0].items():
        assert pair == pytest.approx(told[1][name])
    assert told[1]["twice"] == (22.0, 8.0)
    assert told[1]["y"] == (5.0, 1.0)


def test_a_forward_pass_that_failed_leaves_nothing():
    sums = TensorSums(CPU, ByTorch)
    Collector({}, sums).add_tensor("x", torch.ones(3))
    seen = Collector({}, sums)
    seen.add_tensor("y", torch.ones(PROGRAMS))
    assert {name: float(pair[0]) for name, pair in seen.pack().items()} == {"y": PROGRAMS}


@pytest.mark.gpu
def test_captured_sums_are_of_tensors_whose_memory_is_free_for_what_comes_next():
    device = torch.device("cuda", 0)
    sums = TensorSums.of(device)
    x = torch.linspace(0, 1, 3 << 20, device=device)
    factors = torch.arange(1.0, 13.0, device=device)

    def forward() -> torch.Tensor:
        for i, factor in enumerate(factors.unbind()):
            made = x * factor
            sums.add(made, squared=bool(i % 2))
            del made
            torch.full_like(x, 7.0)  # takes the memory of what is not kept
        return sums.finish()

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward()
    for turn in range(1, 4):
        graph.replay()
        wanted = [
            turn * f * float(x.double().norm() if i % 2 else x.double().sum()) for i, f in enumerate(range(1, 13))
        ]
        assert found.tolist() == pytest.approx(wanted, rel=1e-5)
        assert torch.equal(found, forward())
        factors.mul_((turn + 1) / turn)
