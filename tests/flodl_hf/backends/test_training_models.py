"""Models of every family train by the training table as they do by torch's operations, in every layout.

Kernels run on a CUDA device, or anywhere in Triton's interpreter (``TRITON_INTERPRET=1``); elsewhere skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_training_kernels import DEVICE, DTYPES, distance, runs, tables
from torch import Tensor

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.backends import choose
from flodl_hf.nn.backends.choose import arrange_training
from flodl_hf.nn.backends.cuda_training import TrainingTable
from flodl_hf.nn.buckets import Buffer, bucket_of
from flodl_hf.nn.disentangled import attention as attention_module
from flodl_hf.nn.layout import Layout, Packed, Padded
from flodl_hf.nn.positions import PairedRotary

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 160, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TYPES: dict[str, Any] = {"type_vocab_size": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES | TYPES,
    "roberta": SIZES | TYPES,
    "xlm-roberta": SIZES | TYPES,
    "albert": SIZES | TYPES | {"embedding_size": 16, "classifier_dropout_prob": 0.0},
    "distilbert": {
        "vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 160,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
    },
    "roformer": SIZES | TYPES | {"embedding_size": 16, "rotary_value": True, "initializer_range": 0.2},
    "deberta-v2": SIZES
    | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "position_buckets": 16}
    | {"type_vocab_size": 0, "norm_rel_ebd": "layer_norm", "max_relative_positions": 64},
}  # fmt: skip
LENGTHS = {"short": (9, 1, 30, 5), "long": (9, 140, 3)}


def batch(kind: str) -> tuple[Tensor, Layout, Tensor]:
    """Return ids, their layout, and which of the flat states belong to texts."""
    lengths = np.array(LENGTHS["long" if kind == "long" else "short"])
    total = int(lengths.sum())
    ids = torch.randint(5, 60, (total,), dtype=torch.int32)
    if kind == "padded":
        rows = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
        mask = torch.arange(rows.shape[1]) < torch.from_numpy(lengths)[:, None]
        rows[mask] = ids.long()
        return rows.to(DEVICE), Padded(mask.to(DEVICE)), mask.flatten().to(DEVICE)
    if kind == "packed":
        return ids.long().to(DEVICE), Packed.of(lengths.tolist(), DEVICE), torch.ones(total, dtype=torch.bool)
    buffer = Buffer(bucket_of(lengths), types=False)
    buffer.write(ids.numpy(), None, lengths)
    there, _, layout = buffer.on(buffer.packed.to(DEVICE))
    return there, layout, (torch.arange(buffer.bucket.tokens) < total).to(DEVICE)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["padded", "packed", "short", "long"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_plain_layers(
    family: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention_module, "has_kernel", lambda *_: True)
        monkeypatch.setattr(choose, "trusted", lambda *_: True)
    torch.manual_seed(0)
    model = head_named("token_classification").model.from_config(ModelConfig.for_model(family, **FAMILIES[family]))
    for module in model.modules():
        if isinstance(module, PairedRotary) and module.table is not None:
            module.take(module.table + torch.randn_like(module.table) * 0.2)
    graph = model.graph.to(DEVICE).train()
    ids, layout, real = batch(kind)
    results: list[dict[str, Tensor]] = []
    ran: list[str] = []
    attends = TrainingTable.attend

    def noted(self: Any, *args: Any) -> Any:
        ran.append(self.name)
        return attends(self, *args)

    monkeypatch.setattr(TrainingTable, "attend", noted)
    for way in ("plain", "fused"):
        undo = arrange_training(graph, dtype, anywhere=True)[0] if way == "fused" else None
        graph.zero_grad(set_to_none=True)
        # In float32 the plain layers are the measure.
        with torch.autocast(DEVICE.type, dtype, enabled=way == "fused"):
            scores = graph(ids, token_type_ids=None, layout=layout)
        scores = scores.float().flatten(0, -2)[real.to(DEVICE)]
        scores.square().sum().backward()
        grads = {name: p.grad for name, p in graph.named_parameters() if p.grad is not None}
        results.append({"scores": scores.detach()} | grads)
        if undo is not None:
            assert set(tables(graph)) == {"cuda-training"}
            assert len(ran) == 2  # layers, of which one may be there twice
            undo()
    bound = {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert list(results[0]) == list(results[1])
    # Weights hardly change with what is added to all keys: their bias has a gradient of rounding errors.
    apart = {name: distance(results[1][name], right) for name, right in results[0].items() if "key.bias" not in name}
    # The table of distances is read by attention's own kernels; so early its gradient is small beside their rounding.
    assert {name: x for name, x in apart.items() if x >= bound * (6 if "relative" in name else 1)} == {}
