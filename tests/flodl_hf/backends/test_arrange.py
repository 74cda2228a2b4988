"""Each layer is run by its device's table, gives what torch gives, and says why where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.nn.backends.choose import arrange_cuda
from flodl_hf.nn.layers import EncoderLayer
from flodl_hf.nn.layout import Packed
from flodl_hf.training import demo


def layers(graph: Any) -> list[EncoderLayer]:
    return [module for module in graph.modules() if isinstance(module, EncoderLayer)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:prediction on cpu")
def test_layers_of_a_cuda_device_give_the_reference_numbers(dtype: torch.dtype) -> None:
    model = demo.demo_model(demo.learn_vocabulary()).to(dtype).eval()
    graph = shadow(model.graph)
    assert arrange_cuda(graph) == {}
    found = layers(graph)
    assert [layer.table.name for layer in found] == ["cuda"] * len(layers(model.graph))
    assert [layer.first_only for layer in found] == [False] * (len(found) - 1) + [True]
    assert not any(layer.first_only for layer in layers(model.graph))
    ids, layout = torch.tensor([2, 5, 6, 3, 2, 7, 3]), Packed.of([4, 3])
    with torch.inference_mode():
        found, right = graph(ids, layout=layout), model.graph(ids, layout=layout)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_joined_weights_are_stored_once() -> None:
    model = demo.demo_model(demo.learn_vocabulary()).eval()
    graph = shadow(model.graph)
    arrange_cuda(graph)
    attention: Any = layers(graph)[0].attention
    width = attention.query.weight.element_size() * attention.query.weight.numel()
    assert attention.key.weight.data_ptr() == attention.query.weight.data_ptr() + width
    assert attention.key.weight.untyped_storage().data_ptr() == attention.value.weight.untyped_storage().data_ptr()


def test_a_watched_layer_is_left_alone_and_named() -> None:
    model = demo.demo_model(demo.learn_vocabulary()).eval()
    layers(model.graph)[0].attention.register_forward_hook(lambda *_: None)
    graph = shadow(model.graph)
    assert arrange_cuda(graph) == {"encoder.layers.0": "a hook watches its parts"}
    assert [layer.table.name for layer in layers(graph)] == ["torch"] + ["cuda"] * (len(layers(graph)) - 1)
