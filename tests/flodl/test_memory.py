"""What memory is taken, as far as it can be known, and whether devices compute."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flodl import devices
from flodl.devices import hardware_summary, probe_device, usable_devices
from flodl.errors import DeviceError
from flodl.memory import device_memory, live_tensors, process_memory

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_processor_computes_and_has_no_memory_of_its_own():
    assert probe_device("cpu") is None
    assert device_memory("cpu") is None
    assert usable_devices()


def test_a_device_that_is_not_there_is_no_device_that_computes(monkeypatch):
    monkeypatch.setattr(devices, "cuda_count", lambda: 0)
    assert "is not available" in probe_device("cuda:0")
    with pytest.raises(DeviceError):
        device_memory("cuda:0")
    assert "core" in hardware_summary()
    assert torch.__version__.partition("+")[0] in hardware_summary()


def test_a_device_that_fails_is_left_out(monkeypatch):
    there = [torch.device("cpu"), torch.device("meta")]
    monkeypatch.setattr(devices, "all_devices", lambda: there)
    assert probe_device("meta") is not None  # nothing can be read from it
    assert usable_devices() == [torch.device("cpu")]
    monkeypatch.setattr(devices, "probe_device", lambda device: "it is broken")
    assert usable_devices() == [torch.device("cpu")]


def test_a_device_with_wrong_results_is_reported(monkeypatch):
    plain, calls = torch.allclose, []
    monkeypatch.setattr(
        torch, "allclose", lambda *args, **kwargs: calls.append(plain(*args, **kwargs)) is None and False
    )
    assert "differ by" in probe_device("cpu")
    assert calls == [True]


def test_a_process_has_current_and_peak_memory():
    before = process_memory()
    if before is None:
        pytest.skip("unknown on this system")
    kept = torch.ones(16 << 20)  # 64 MiB: malloc maps blocks above 32 MiB anew, it does not reuse freed pages
    held, most = process_memory()
    assert most >= held > 1 << 20
    assert held >= before[0] + (32 << 20)
    del kept


def test_tensors_that_live_are_counted_and_storages_once():
    before, held = live_tensors("cpu")
    kept = torch.zeros(1000, dtype=torch.float64)
    views = [kept[:10], kept[10:]]
    count, now = live_tensors("cpu")
    assert count - before == 3
    assert now - held == 8000
    del views
    assert live_tensors()[0] >= live_tensors("cpu")[0]
    count, _ = live_tensors("meta")
    kept = torch.zeros(4, device="meta")
    assert live_tensors("meta")[0] == count + kept.is_meta
    with FakeTensorMode():
        traced = torch.zeros(4)
    before = live_tensors()
    del traced
    assert live_tensors() == before


@CUDA
def test_memory_of_a_gpu():
    torch.cuda.reset_peak_memory_stats()
    before = device_memory("cuda")
    kept = torch.empty(1 << 24, device="cuda")
    now = device_memory("cuda")
    assert now.allocated - before.allocated == kept.nbytes
    assert now.peak >= now.allocated
    assert 0 < now.free < now.total
    del kept
    torch.cuda.empty_cache()
    assert device_memory("cuda").allocated == before.allocated
    assert usable_devices()[0].type == "cuda"
    assert probe_device("cuda") is None
