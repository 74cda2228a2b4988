"""What is prepared for a processor follows the model: its weights, its precision, its absence of bf16."""

from __future__ import annotations

import pytest
import torch

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import PredictError
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import cpu
from flodl_hf.inference.options import Precision
from flodl_hf.inference.prepared_graph import prepared
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.backends.cpu import has_int8, has_onednn
from flodl_hf.nn.layers import EncoderLayer
from flodl_hf.nn.layout import Packed

IDS = torch.arange(5, 19)
LAYOUT = Packed.of([8, 6])
PRECISIONS: list[Precision] = ["fp32", *(["int8"] if has_int8() else [])]  # type: ignore[list-item]


def made() -> EncoderModel:
    sizes = {
        "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 20, "type_vocab_size": 2,
    }  # fmt: skip
    model = head_named("token_classification").model.from_config(ModelConfig.for_model("bert", **sizes))
    with torch.no_grad():
        for name, parameter in model.graph.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model.eval()


def answer(model: EncoderModel, precision: Precision | None) -> torch.Tensor:
    with torch.inference_mode():
        return prepared(model, precision)(IDS, token_type_ids=torch.zeros_like(IDS), layout=LAYOUT).clone()


def reference(model: EncoderModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.graph(IDS, token_type_ids=torch.zeros_like(IDS), layout=LAYOUT).clone()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reordered", [False, True])
def test_answers_follow_weights_that_training_changes(
    precision: Precision, reordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reordered and not has_onednn(torch.float32):
        pytest.skip("this build of torch has no reordered products")
    monkeypatch.setattr(cpu, "_reorders", lambda: reordered)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    close = 1e-5 if precision == "fp32" else 0.06
    before = None
    for _ in range(3):
        for _ in range(3):
            found = answer(model, precision)
        wanted = reference(model)
        scale = float(wanted.max() - wanted.min())
        assert float((found - wanted).abs().max()) <= close * max(1.0, scale)
        assert before is None or float((found - before).abs().max()) > 2 * close * scale
        before = found
        model.graph(IDS, token_type_ids=torch.zeros_like(IDS), layout=LAYOUT).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_weight_that_is_replaced_or_written_by_hand_counts_at_once() -> None:
    model = made()
    answer(model, "fp32")
    with torch.no_grad():
        model.graph.get_parameter("encoder.layers.1.attention.value.weight").mul_(-2.0)
    assert answer(model, "fp32") == pytest.approx(reference(model), abs=1e-5)
    model.graph.get_submodule("encoder.layers.0.feed_forward").up = torch.nn.Linear(16, 24)  # type: ignore[assignment]
    assert answer(model, "fp32") == pytest.approx(reference(model), abs=1e-5)


def test_prediction_runs_the_table_of_the_processor_and_exact_does_not() -> None:
    model = made()
    for precision, name in ((None, "processor"), ("fp32", "processor"), ("exact", "torch")):
        layers = [m for m in prepared(model, precision).modules() if isinstance(m, EncoderLayer)]
        assert [layer.table.name for layer in layers] == [name] * 2
    assert torch.equal(answer(model, "exact"), reference(model))


def test_a_precision_the_processor_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: False)
    with pytest.raises(PredictError, match="bf16") as refused:
        prepared(made(), "bf16")
    assert refused.value.precision == "bf16"


def test_bf16_is_near_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    model = made()
    wanted = reference(model)
    found = answer(model, "bf16").float()
    assert float((found - wanted).abs().max()) <= 0.05 * float(wanted.max() - wanted.min())
    assert not torch.equal(found, wanted)
