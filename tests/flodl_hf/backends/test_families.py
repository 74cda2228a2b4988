"""Every family of the package on the tables of a processor and of a CUDA device: they run it, and give the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_one_layer import LENGTHS, batch, real
from test_training_kernels import tables

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.inference import cpu
from flodl_hf.inference.cpu import missing
from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.nn.backends.choose import arrange_cuda, layers_of
from flodl_hf.nn.backends.cuda_training import TrainingTable
from flodl_hf.parity.cell import settings_of, variants_of

# What a processor or a CUDA device leaves to torch's operations, by family and path, with the reason.
LACKING: dict[str, str] = {}
TRAINING = LACKING | {
    "xlm-roberta-xl": "heads of 80 features are none of 16, 32, 64, 128",
}
CELLS = [(family.model_type, variant) for family in FAMILIES for variant in variants_of(family, "tiny")]
cells = pytest.mark.parametrize(("model_type", "variant"), CELLS)


def made(model_type: str, variant: str) -> Any:
    """Return a small model with spread-out weights and a head that reads every token."""
    torch.manual_seed(2)
    family = next(f for f in FAMILIES if f.model_type == model_type)
    settings = settings_of(family, "tiny", variant) | {"num_labels": 3}
    head = "tokcls" if "token_classification" in family.heads else "mlm"
    model = head_named(head).model.from_config(ModelConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@cells
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("int8", 0.12), ("bf16", 0.06)])
def test_a_processor_runs_it(model_type: str, variant: str, precision: Any, bound: float) -> None:
    if missing(precision):
        pytest.skip(str(missing(precision)))
    model = made(model_type, variant)
    graph = shadow(model.graph)
    if precision == "bf16":
        graph.to(torch.bfloat16)
    lacking = cpu.prepare_cpu(graph, precision)
    assert set(lacking.values()) <= {LACKING.get(model_type)}
    assert set(tables(graph)) == {"processor"} if not lacking else {"torch"}
    for kind in ("padded", "packed", "bucketed"):
        ids, layout = batch(kind)
        with torch.inference_mode():
            right = real(model.graph(ids, layout=batch(kind)[1]), kind, "token_classification")
            found = real(graph(ids, layout=layout), kind, "token_classification").float()
        assert found.shape[0] == sum(LENGTHS)
        assert float((found - right).abs().max()) <= bound * float(right.abs().max()), kind


@cells
def test_a_cuda_devices_table_runs_it(model_type: str, variant: str) -> None:
    model = made(model_type, variant)
    graph = shadow(model.graph)
    lacking = arrange_cuda(graph)
    assert set(lacking.values()) <= {LACKING.get(model_type)}
    for kind in ("padded", "packed", "bucketed"):
        ids, layout = batch(kind)
        with torch.inference_mode():
            right = real(model.graph(ids, layout=batch(kind)[1]), kind, "token_classification")
            found = real(graph(ids, layout=layout), kind, "token_classification")
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5 * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if family.real])
def test_training_steps_on_cuda_run_it_at_its_real_widths(model_type: str) -> None:
    family = next(f for f in FAMILIES if f.model_type == model_type)
    settings = settings_of(family, "real") | {"num_labels": 3}
    config = ModelConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        graph = family.encoder(config.encoder)
    table = TrainingTable(torch.bfloat16)
    reasons = {table.lacks(layer) for _, layer in layers_of(graph)}
    assert reasons == {TRAINING.get(model_type)}
