"""A device is made ready for the layers that come, beside the reading of weights, and loading waits for it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flodl_hf.heads.auto import load
from flodl_hf.inference import cuda_warmup
from flodl_hf.inference.cuda_warmup import Warming
from flodl_hf.models import pretrained
from flodl_hf.nn.backends import choose, self_tests
from flodl_hf.nn.backends.self_tests import LayerSizes
from flodl_hf.nn.kernels import self_test as trust
from flodl_hf.training import demo

CUDA = torch.device("cuda", 0)


def test_kernels_are_tried_at_the_models_sizes_after_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    gate = threading.Event()
    monkeypatch.setattr(cuda_warmup, "_identify_triton", lambda: gate.wait(20) and seen.append("triton"))
    monkeypatch.setattr(cuda_warmup, "_make_handles", lambda device: seen.append(device))
    monkeypatch.setattr(trust, "trusted", lambda *given, rehearse: bool(seen.append((*given, rehearse))))
    large = threading.Event()
    monkeypatch.setattr(cuda_warmup, "_load_products", lambda *given: large.set())
    warming = Warming(CUDA)
    warming.layers(demo.demo_model(demo.learn_vocabulary()).graph, torch.bfloat16)
    gate.set()
    warming.wait()
    assert seen[:2] == [CUDA, "triton"]
    kinds = [(kind, dtype, rehearse) for kind, _, dtype, _, _, rehearse in seen[2:]]
    assert kinds == [("prediction", torch.bfloat16, True), ("buckets", torch.bfloat16, True)]
    assert isinstance(seen[2][3], LayerSizes)
    assert large.wait(20)


def test_other_precisions_load_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_warmup, "_identify_triton", lambda: None)
    monkeypatch.setattr(cuda_warmup, "_make_handles", lambda device: None)
    warming = Warming(CUDA)
    warming.layers(demo.demo_model(demo.learn_vocabulary()).graph, torch.float64)
    warming.wait()
    assert len(warming._threads) == 2


def test_float32_tries_its_products_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cuda_warmup, "_identify_triton", lambda: None)
    monkeypatch.setattr(cuda_warmup, "_make_handles", lambda device: None)
    monkeypatch.setattr(cuda_warmup, "_load_products", lambda *given: None)
    monkeypatch.setattr(choose, "splits", lambda device, sizes, *, rehearse: seen.append((device, rehearse)))
    warming = Warming(CUDA)
    warming.layers(demo.demo_model(demo.learn_vocabulary()).graph, torch.float32)
    warming.wait()
    assert seen == [(CUDA, True)]


@pytest.mark.parametrize(("free", "times"), [(16, len(cuda_warmup.LARGE)), (4, 0)])
def test_products_of_large_batches_are_tried_where_there_is_room(
    free: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(self_tests, "multiply", lambda device, dtype, tokens, sizes: tried.append(tokens))
    before = threading.Thread(target=int)
    before.start()
    cuda_warmup._load_products(demo.demo_model(demo.learn_vocabulary()).graph, CUDA, torch.bfloat16, before)
    assert len(tried) == times


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_products_that_are_tried_can_be_computed(dtype: torch.dtype) -> None:
    self_tests.multiply(torch.device("cpu"), dtype, 3, LayerSizes(activation="relu"))
    self_tests.multiply(torch.device("cpu"), dtype, 3, LayerSizes(bias=False))


def test_loading_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = demo.demo_model(demo.learn_vocabulary())
    model._mark_untrained(())
    folder = model.half().save_pretrained(tmp_path / "model")
    told: list[Any] = []

    class Watched:
        def layers(self, graph: Any, dtype: torch.dtype) -> None:
            told.append(dtype)

        def wait(self) -> None:
            told.append("waited")

    assert pretrained._warming("cpu") is None
    monkeypatch.setattr(pretrained, "_warming", lambda device: Watched())
    load(folder, device="cpu")
    assert told == [torch.float16, "waited"]


def test_a_first_prediction_is_imported_while_something_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(cuda_warmup, "_identify_triton", lambda: gate.wait(20))
    monkeypatch.setattr(cuda_warmup, "_make_handles", lambda device: None)
    seen: list[str] = []

    def imported(name: str) -> None:
        seen.append(name)
        if len(seen) == 2:
            gate.set()
            warming._threads[0].join()

    warming = Warming(CUDA)
    monkeypatch.setattr(cuda_warmup, "import_module", imported)
    warming.wait()
    assert seen == list(cuda_warmup._IMPORTED[:2])
