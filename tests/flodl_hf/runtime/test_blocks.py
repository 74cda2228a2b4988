"""A device's blocks stand where the shared ones stood, once each, and give what those gave."""

from __future__ import annotations

import pytest
import torch

from flodl_hf import demo
from flodl_hf.layout import Packed
from flodl_hf.runtime.blocks import replace_blocks
from flodl_hf.runtime.cuda import CudaBlock
from flodl_hf.runtime.prepared import shadow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_a_cuda_device_give_the_shared_ones_numbers(dtype: torch.dtype) -> None:
    model = demo.demo_model(demo.learn_vocabulary()).to(dtype).eval()
    graph = shadow(model.graph)
    replace_blocks(graph, CudaBlock)
    blocks = [module for module in graph.modules() if isinstance(module, CudaBlock)]
    assert len(blocks) == len(list(model.graph.get_submodule("encoder.layers").children())) > 1
    assert [block.first_only for block in blocks] == [False] * (len(blocks) - 1) + [True]
    ids, layout = torch.tensor([2, 5, 6, 3, 2, 7, 3]), Packed.of([4, 3])
    with torch.inference_mode():
        found, right = graph(ids, layout=layout), model.graph(ids, layout=layout)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_a_watched_block_is_left_alone() -> None:
    model = demo.demo_model(demo.learn_vocabulary()).eval()
    next(iter(model.graph.get_submodule("encoder.layers").children())).register_forward_hook(lambda *_: None)
    graph = shadow(model.graph)
    replace_blocks(graph, CudaBlock)
    assert sum(isinstance(module, CudaBlock) for module in graph.modules()) == 1
