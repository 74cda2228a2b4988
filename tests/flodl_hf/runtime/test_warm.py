"""A device is made ready for the layers that come, beside the reading of weights, and loading waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from flodl_hf import demo
from flodl_hf.auto import load
from flodl_hf.kernels import trust
from flodl_hf.runtime import warm
from flodl_hf.runtime.warm import Warming
from flodl_hf.tables.trials import LayerSizes
from flodl_hf.weights import pretrained

CUDA = torch.device("cuda", 0)


def test_kernels_are_tried_at_the_models_sizes_after_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    gate = threading.Event()
    monkeypatch.setattr(warm, "_identify_triton", lambda: gate.wait(20) and seen.append("triton"))
    monkeypatch.setattr(warm, "_make_handles", lambda device: seen.append(device))
    monkeypatch.setattr(trust, "trusted", lambda *given, rehearse: bool(seen.append((*given, rehearse))))
    warming = Warming(CUDA)
    warming.layers(demo.demo_model(demo.learn_vocabulary()).graph, torch.bfloat16)
    gate.set()
    warming.wait()
    assert seen[:2] == [CUDA, "triton"]
    kinds = [(kind, dtype, rehearse) for kind, _, dtype, _, _, rehearse in seen[2:]]
    assert kinds == [("prediction", torch.bfloat16, True), ("buckets", torch.bfloat16, True)]
    assert isinstance(seen[2][3], LayerSizes)


def test_other_precisions_load_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_identify_triton", lambda: None)
    monkeypatch.setattr(warm, "_make_handles", lambda device: None)
    warming = Warming(CUDA)
    warming.layers(demo.demo_model(demo.learn_vocabulary()).graph, torch.float32)
    warming.wait()
    assert len(warming._threads) == 2


def test_loading_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = demo.demo_model(demo.learn_vocabulary())
    model.mark_untrained(())
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
    monkeypatch.setattr(warm, "_identify_triton", lambda: gate.wait(20))
    monkeypatch.setattr(warm, "_make_handles", lambda device: None)
    seen: list[str] = []

    def imported(name: str) -> None:
        seen.append(name)
        if len(seen) == 2:
            gate.set()
            warming._threads[0].join()

    warming = Warming(CUDA)
    monkeypatch.setattr(warm, "import_module", imported)
    warming.wait()
    assert seen == list(warm._IMPORTED[:2])
