"""Networks that make prompts and prefixes while these learn: trained, written as what they made, as peft's; its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import moved  # pyright: ignore[reportMissingImports]

from flodl.errors import ConfigError
from flodl_hf import AutoModelForSequenceClassification, load
from flodl_hf.models.adapters import Prefix, Prompt
from flodl_hf.nn.prompts import BiLstmEncoder
from flodl_hf.training import demo, finetune

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 9, 10, 3]])
KINDS: dict[str, Any] = {"lstm": Prompt(3, encoder=8, kind="lstm"), "prefix": Prefix(3, encoder=8)}
ROWS = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:16]]


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.filterwarnings("ignore:prediction. .* run on torch's own operations")
@pytest.mark.parametrize("kind", KINDS)
def test_they_learn_and_their_folders_hold_what_they_made(base: Path, kind: str, tmp_path: Path) -> None:
    result = finetune(
        base, train=ROWS, out=tmp_path / "out", adapter=KINDS[kind], max_steps=2, batch_size=8, lr=1e-2, report=False
    )
    torch.manual_seed(42)
    start: Any = AutoModelForSequenceClassification.from_pretrained(base).add_adapter(KINDS[kind])
    drawn = dict(start.named_parameters())
    learned = {name: p for name, p in result.model.named_parameters() if p.requires_grad}
    network = [name for name in learned if ".encoder." in name.removeprefix("network.encoder") or ".maker." in name]
    assert network
    assert all(p.shape == drawn[name].shape for name, p in learned.items())
    found: Any = load(tmp_path / "out")
    assert found.adapters["default"] == KINDS[kind]
    assert torch.equal(logits(found), logits(result.model.to("cpu")))
    assert not any(".maker." in name or ".prompt.encoder" in name for name, _ in found.named_parameters())
    start.train()(IDS).logits.sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for name, p in drawn.items() if name in network)


def test_an_lstm_of_plain_operations_is_torchs() -> None:
    torch.manual_seed(0)
    network, vectors = BiLstmEncoder(6, 5), torch.randn(4, 6)
    parameters = list(network.reader.parameters())
    right, found = network.head(network.reader(vectors)[0]), network(vectors)
    assert torch.allclose(found, right, rtol=0, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(right.square().sum(), parameters),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused(base: Path) -> None:
    for call, said in (
        (lambda: Prompt(3, encoder=8, kind="gru"), "mlp or lstm"),
        (lambda: Prefix(3, encoder=0), "encoder 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # of transformers, which peft calls by older names
@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways_between_peft_and_these(base: Path, kind: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification as Theirs

    ours: Any = AutoModelForSequenceClassification.from_pretrained(base)
    moved(ours.add_adapter(KINDS[kind])).save_pretrained(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(Theirs.from_pretrained(base), tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, logits(ours))
    given: dict[str, Any] = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3, "encoder_hidden_size": 8}
    settings = (
        peft.PromptEncoderConfig(encoder_reparameterization_type="LSTM", **given)
        if kind == "lstm"
        else peft.PrefixTuningConfig(prefix_projection=True, **given)
    )
    made = peft.get_peft_model(Theirs.from_pretrained(base), settings).eval()
    made.save_pretrained(tmp_path / "theirs")
    read: Any = AutoModelForSequenceClassification.from_pretrained(base, adapter=tmp_path / "theirs")
    assert read.adapters["default"] == KINDS[kind]
    again = read.save_pretrained(tmp_path / "again") / "adapter_config.json"
    assert json.loads(again.read_text())["encoder_hidden_size"] == 8
    with torch.no_grad():
        right = made(IDS).logits
    assert torch.allclose(logits(read), right, rtol=0, atol=1e-6)
