"""`finetune(shard="fsdp")`: the training of one device, and folders that read back, of whole models and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import labelled

from flodl_hf import load
from flodl_hf.finetuning import finetune

ROWS = labelled(28)
OPTIONS: dict[str, Any] = {
    "epochs": 1, "batch_size": 8, "lr": 5e-3, "max_length": 24, "metric": "eval_loss", "dropout": 0.0, "seed": 3,
    "report": False, "max_grad_norm": 0.5, "micro_batch_size": 3,
}  # fmt: skip


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.graph.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, 2])
def test_two_ranks_with_shards_train_as_one_and_write_the_same_folder(
    lora: int | None, base: Path, tmp_path: Path
) -> None:
    own = {} if lora is None else {"lora": lora}
    alone = finetune(base, train=ROWS[:20], eval=ROWS[20:], devices="cpu", **own, **OPTIONS)
    out = tmp_path / "out"
    shared = finetune(
        base, train=ROWS[:20], eval=ROWS[20:], devices=["cpu", "cpu"], shard="fsdp", out=out, **own, **OPTIONS
    )
    one, other = weights(alone.model), weights(shared.model)
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4
    assert shared.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-4)
    texts = [row["text"] for row in ROWS]
    assert load(out).predict(texts) == shared.model.predict(texts)
    assert not any(hasattr(parameter, "full_tensor") for parameter in shared.model.parameters())


@pytest.mark.slow
@pytest.mark.transformers
def test_what_shards_wrote_is_what_transformers_reads(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    parted = tmp_path / "parted"
    load(base, head="seqcls").save_pretrained(parted, max_shard_size=20_000)
    out = tmp_path / "out"
    trained = finetune(
        parted, train=ROWS[:20], devices=["cpu", "cpu"], shard="fsdp", out=out, **OPTIONS | {"metric": None}
    )
    assert len(list(out.glob("model-*.safetensors"))) > 1
    theirs = AutoModelForSequenceClassification.from_pretrained(out).state_dict()
    ours = load(out, mapped=False)
    assert trained.model.predict(["a text"]) == ours.predict(["a text"])
    names = ours.config.family.key_map(ours.config.encoder, ours.head).names(list(dict(ours.graph.named_parameters())))
    assert set(names.values()) == set(theirs)
    for name, parameter in ours.graph.named_parameters():
        assert torch.equal(parameter.detach(), theirs[names[name]]), name
