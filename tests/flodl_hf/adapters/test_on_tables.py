"""Adapted layers on the tables of training steps: said where they run, and the same gradients on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import moved  # pyright: ignore[reportMissingImports]
from torch import Tensor

from flodl_hf import AutoModelForSequenceClassification, load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.models.adapters import Lora
from flodl_hf.nn.adapter_layers import LoraPart, beside
from flodl_hf.nn.backends.choose import arrange_training
from flodl_hf.training import finetune

GATED = {
    "model_type": "modernbert", "vocab_size": 600, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 2,
    "hidden_activation": "gelu",
}  # fmt: skip
DEBERTA = {
    "model_type": "deberta-v2", "vocab_size": 600, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"targets": "all-linear"}, None),
        ({"dora": True}, "its adapter has learned lengths (DoRA), which have no kernel"),
    ],
)
def test_training_says_what_runs_adapted_layers(adapted: Any, settings: dict[str, Any], reason: str | None) -> None:
    (group,) = adapted(**settings).explain("cuda", "bf16", training=True).groups
    assert (group.table, group.reason) == ("torch" if reason else "cuda-training", reason)


def test_debertas_positions_are_said_to_stand_in_the_way() -> None:
    model: Any = AutoModelForSequenceClassification.from_config(ModelConfig.from_dict(DEBERTA))
    model.add_adapter(Lora(targets=("query", "value")))
    (group,) = model.explain("cuda", "bf16", training=True).groups
    assert group.reason == "its attention computes positions by the projections that are adapted"
    model.remove_adapter()
    model.add_adapter(Lora(targets=("feed_forward.up", "feed_forward.down")))
    (group,) = model.explain("cuda", "bf16", training=True).groups
    assert group.table == "cuda-training"


def test_a_sum_in_few_products_has_the_gradients_of_the_plain_one() -> None:
    draw = torch.Generator().manual_seed(0)
    x, result, down, up = (
        torch.randn(shape, generator=draw).requires_grad_() for shape in ((9, 8), (9, 6), (3, 8), (6, 3))
    )
    part = LoraPart(torch.nn.Parameter(down.detach()), torch.nn.Parameter(up.detach()), 2.0, 0.0)
    direction = torch.randn(9, 6, generator=draw)
    found = beside(result, x, part, part.down.detach(), part.up.detach())
    plain = result + 2.0 * (x @ down.T) @ up.T
    assert torch.allclose(found, plain, atol=1e-5)
    mine = torch.autograd.grad(found, [result, x, part.down, part.up], direction)
    right = torch.autograd.grad(plain, [result, x, down, up], direction)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, right, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("targets", [("query", "value"), "all-linear"])
def test_the_training_table_gives_torchs_gradients(base: Path, family: str, targets: Any) -> None:
    wanted = "all-linear" if family == "modernbert" else targets
    if family == "bert":
        model: Any = load(base)
    else:
        model = AutoModelForSequenceClassification.from_config(ModelConfig.from_dict(GATED))
    moved(model.add_adapter(Lora(rank=4, alpha=8, targets=wanted))).to("cuda").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.randint(5, 90, (6, 24), generator=torch.Generator().manual_seed(0)).cuda()
    labels = torch.tensor([0, 1, 0, 1, 1, 0]).cuda()

    def gradients(dtype: torch.dtype | None) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            model(ids, labels=labels).loss.backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    right = gradients(None)
    plain = gradients(torch.bfloat16)
    undo, lacking = arrange_training(model.graph, torch.bfloat16)
    assert not lacking
    fused = gradients(torch.bfloat16)
    undo()

    def distance(found: dict[str, Tensor]) -> float:
        both = [torch.cat([t[n].float().flatten() for n in right]) for t in (found, right)]
        return float((both[0] - both[1]).norm() / both[1].norm())

    assert distance(fused) < max(2e-2, 2 * distance(plain))


@pytest.mark.gpu
def test_recorded_steps_train_adapters_as_launched_ones(base: Path) -> None:
    from flodl_hf.training import demo

    rows = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:96]]
    chosen: Any = {"lora": 4, "epochs": 3, "batch_size": 16, "precision": "bf16", "dropout": 0.0, "lr": 5e-3}
    recorded = finetune(base, train=rows, devices=["cuda:0"], **chosen)
    launched = finetune(
        base, train=rows, devices=["cuda:0"], **chosen
    )  # compared with plain steps in the tests of fine-tuning
    assert recorded.losses[-1] < recorded.losses[0]
    assert recorded.losses == pytest.approx(launched.losses, rel=5e-2)
    fixed = recorded.model._fixed_names()
    start = load(base).state_dict()
    state = recorded.model.state_dict()
    assert all(torch.equal(start[name], state[name].cpu()) for name in fixed if name in start)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_predictions_on_a_gpu_run_merged_weights(adapted: Any, precision: Any) -> None:
    model = adapted(targets="all-linear")
    texts = ["a good film", "bad", "neither good nor bad"] * 20
    right = [{a.label: a.score for a in found} for found in model.predict(texts, precision="exact")]
    found = model.to("cuda").predict(texts, precision=precision)
    assert {group.table for group in model.explain(None, precision).groups} == {"cuda"}
    for one, other in zip(found, right, strict=True):
        assert {a.label: a.score for a in one} == pytest.approx(other, abs=2e-2 if precision else 1e-4)
