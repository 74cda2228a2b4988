"""What a token takes is counted as often as layers are called; small batches say little of a device's pace."""

import time
from typing import Any

import pytest
import torch

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.backends import cpu
from flodl_hf.serving.batching import TokenRate
from flodl_hf.serving.tasks import measure_peak, operations_of_token

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "type_vocab_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(("family", "more", "projection"), [("bert", {}, 0), ("albert", {"embedding_size": 16}, 512)])
def test_operations_of_a_token(family: str, more: dict[str, Any], projection: int) -> None:
    """ALBERT's three layers are one module; its embeddings are brought to the layers' width."""
    model: Any = head_named("base").model.from_config(ModelConfig.for_model(family, **SIZES, **more))
    assert operations_of_token(model) == 2 * (3 * (4 * 32 * 32 + 2 * 32 * 64) + projection)


def test_the_peak_is_that_of_the_faster_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD's processors oneDNN multiplies twice as fast as torch's own product."""
    monkeypatch.setattr(cpu, "has_onednn", lambda dtype: True)
    monkeypatch.setattr(cpu, "OneDnnLinear", lambda weight, bias, at_once: lambda x: x)  # in no time
    monkeypatch.setattr(torch, "mm", lambda *matrices, out: time.sleep(0.005))
    at_most = 2 * 512**3 / 0.005
    assert measure_peak(torch.device("cpu"), torch.float32) > at_most
    monkeypatch.setattr(cpu, "has_onednn", lambda dtype: False)
    assert measure_peak(torch.device("cpu"), torch.float32) <= at_most


def test_the_pace_is_that_of_full_batches() -> None:
    pace = TokenRate()
    assert pace.now == 0.0
    pace.ran(10, 0.002, full=False)  # all that is known
    assert pace.now == pytest.approx(5000)
    for _ in range(60):
        pace.ran(16_000, 0.008, full=True)
    assert pace.now == pytest.approx(2e6, rel=0.01)
    known = pace.now
    for _ in range(1000):
        pace.ran(1300, 0.004, full=False)  # nothing else waits: a device could do more
    assert pace.now == known
    for _ in range(60):
        pace.ran(16_000, 0.016, full=True)  # it has become slower
    assert pace.now == pytest.approx(1e6, rel=0.01)
    pace.ran(16_000, 0.0, full=True)
    assert pace.now == pytest.approx(1e6, rel=0.01)
