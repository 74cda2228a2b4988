"""Available and absent devices, and the best one, on simulated machines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flodl import devices
from flodl.errors import DeviceError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what gives this machine so many CUDA devices, and MPS or not."""

    def has(cuda: int = 0, mps: bool = False, built: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(devices, "mps_fault", lambda: None)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("RANK", raising=False)

    return has


def test_the_best_device(machine: Any) -> None:
    for given, best, every in (
        ({}, "cpu", ["cpu"]),
        ({"mps": True}, "mps", ["mps"]),
        ({"cuda": 1}, "cuda", ["cuda:0"]),
        ({"cuda": 3, "mps": True}, "cuda", ["cuda:0", "cuda:1", "cuda:2"]),
    ):
        machine(**given)
        assert str(devices.best_device()) == str(devices.find_device("auto")) == best
        assert [str(found) for found in devices.all_devices()] == every


def test_mps_is_tried_before_it_is_taken(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(mps=True)
    monkeypatch.setattr(devices, "mps_fault", lambda: "cumsum is not implemented there")
    with pytest.warns(UserWarning, match="cumsum is not"):
        assert devices.best_device() == torch.device("cpu")
    assert devices.find_device("mps") == torch.device("mps"), "who names it has it"
    monkeypatch.undo()
    if not torch.backends.mps.is_available():
        assert devices.mps_fault(), "here it has nothing"


def test_an_absent_device_is_reported_in_one_line(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(name: str, **has: Any) -> str:
        machine(**has)
        with pytest.raises(DeviceError) as caught:
            devices.find_device(name)
        assert caught.value.device == name
        text = str(caught.value)
        assert "\n" not in text
        return text

    assert "built without CUDA" in fault("cuda", built=None)
    assert "Use mps or cpu" in fault("cuda", mps=True, built=None)
    assert "cuda:0 to cuda:1. Use cuda:0 or cuda:1 or cpu" in fault("cuda:2", cuda=2)
    assert "available is cuda:0" in fault("cuda:1", cuda=1)
    assert "Apple" in fault("mps", cuda=1)
    assert "did you mean 'cuda'" in fault("cudda")
    assert "expected cpu, cuda" in fault("cuda:x")
    assert "did you mean 'cuda'" in fault("gpu")
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in devices.why_no_cuda()


def test_devices_to_train_on(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(cuda=2)
    assert devices.training_devices("auto") == ["cuda:0", "cuda:1"]
    assert devices.training_devices(["cuda:1", torch.device("cpu")]) == ["cuda:1", "cpu"]
    assert devices.training_devices("cuda:1") == "cuda:1"
    assert devices.training_devices(3) == 3
    with pytest.raises(DeviceError, match="found 3 with 2 CUDA devices"):
        devices.training_devices(3, shared=False)
    with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
        devices.training_devices(["cuda:0", "cuda:5"])
    with pytest.raises(DeviceError, match="empty"):
        devices.training_devices([])
    assert devices.pick_device(None, 3) == devices.pick_device("cuda", 3) == torch.device("cuda:1")
    monkeypatch.setenv("RANK", "1")
    assert devices.training_devices("auto") is None, "the launcher has chosen"
    machine(cuda=1)
    assert devices.training_devices("auto") == "cuda:0"
    machine(mps=True)
    assert devices.training_devices("auto") == "cpu"
    assert devices.pick_device(None, 0) == torch.device("cpu")
    for call in (
        lambda: devices.training_devices("mps"),
        lambda: devices.training_devices(["mps"]),
        lambda: devices.pick_device("mps", 0),
    ):
        with pytest.raises(DeviceError, match="float64"):
            call()
    machine()
    assert devices.training_devices(2, shared=False) == 2
    with pytest.raises(DeviceError, match="expected 1"):
        devices.training_devices(0, shared=False)


def test_a_device_is_named_with_what_it_is(machine: Any) -> None:
    machine(cuda=2)
    assert devices.described(torch.device("cuda")) == "cuda:0 (GPU 0)"
    assert devices.described(torch.device("cuda:1")) == "cuda:1 (GPU 1)"
    assert devices.described(torch.device("cpu")).startswith("cpu (")
    assert devices.described(torch.device("mps")) == "mps"
