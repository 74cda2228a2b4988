"""What is measured: eight small networks with their data, optimisers and rates, and a BERT of the base size."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.ddp import models
from benchmarks.ddp.builtin import normalize_cifar10
from benchmarks.ddp.data import Split, digits, photographs, text
from benchmarks.ddp.models import changed, small
from flodl.data import TensorRows
from flodl.train import Loss, adamw
from flodl.train.optim.optimizers import OptimizerFactory
from flodl.train.schedule import Cosine, MultiStep, Warmup

__all__ = ["CASES", "Case", "bert", "small"]


@dataclass(frozen=True)
class Case:
    """One thing to train.

    Attributes:
        name: as given to ``--models``.
        make: makes the model from its training data.
        optimizer: makes the optimiser.
        step: the loss of a batch, with what is judged as metrics.
        data: gives training and held-out rows of a folder; made up where the folder is None.
        epochs: passes over the data.
        figure: the held-out figure that is shown, besides the loss.
        rates: makes learning rates from the number of steps of a run; the optimiser's own rate where None.
        reference: what is published of it: accuracy, or loss where there is no accuracy.
    """

    name: str
    make: Callable[[Any], nn.Module]
    optimizer: OptimizerFactory
    step: Callable[[nn.Module, Any], Loss]
    data: Callable[[Path | None], Split]
    epochs: int
    figure: str | None = "accuracy"
    rates: Callable[[int], Any] | None = None
    reference: float | None = None

    def judge(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        """Return sums and counts of the held-out figures."""
        loss = self.step(model, batch)
        return {"eval_loss": tuple(loss.totals().unbind()), **loss.metrics}


# ---- steps -----------------------------------------------------------------------------------------------


def classify(model: nn.Module, batch: Any) -> Loss:
    scores, label = model(batch["image"]), batch["label"]
    right = (scores.detach().argmax(1) == label).sum()
    return Loss(F.cross_entropy(scores, label, reduction="sum"), len(label), {"accuracy": (right, len(label))})


def rebuild(model: nn.Module, batch: Any) -> Loss:
    image = batch["image"]
    return Loss(F.mse_loss(model(image), image, reduction="sum") / image[0].numel(), len(image))


def foretell(model: nn.Module, batch: Any) -> Loss:
    scores, target = model(batch["input"]).flatten(0, 1), batch["target"].flatten()
    right = (scores.detach().argmax(1) == target).sum()
    count = target.numel()
    return Loss(F.cross_entropy(scores, target, reduction="sum"), count, {"accuracy": (right, count)})


ADAM = OptimizerFactory(torch.optim.Adam, {"lr": 1e-3})


def recognise(model: nn.Module, batch: Any) -> Loss:
    """Return the loss of photographs, which are shifted and mirrored, each on its own, while the model learns."""
    image, label = normalize_cifar10(batch["image"]), batch["label"]
    scores = model(changed(image) if model.training else image)
    right = (scores.detach().argmax(1) == label).sum()
    return Loss(F.cross_entropy(scores, label, reduction="sum"), len(label), {"accuracy": (right, len(label))})


def steps_down(steps: int) -> MultiStep:
    """Return a tenth of the rate after half of the steps, and again after three quarters."""
    return MultiStep(0.1, tuple(sorted({max(1, steps // 2), max(2, steps * 3 // 4)})))


def rise_and_fall(steps: int) -> Warmup:
    """Return a rise over a fifth of the steps and half a cosine over the rest."""
    rise = max(1, steps // 5)
    return Warmup(Cosine(3e-4, 1e-5, max(1, steps - rise)), 3e-4, rise)


SGD = OptimizerFactory(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4})
RMSPROP = OptimizerFactory(torch.optim.RMSprop, {"lr": 2e-3})
SLOW_ADAM = OptimizerFactory(torch.optim.Adam, {"lr": 3e-4})

CASES = {
    case.name: case
    for case in (
        Case("logistic", models.logistic, ADAM, classify, digits, 5, reference=0.92),
        Case("mlp", models.mlp, ADAM, classify, digits, 5, reference=0.975),
        Case("lenet", models.lenet, ADAM, classify, digits, 5, reference=0.99),
        Case("conv-ae", models.conv_ae, ADAM, rebuild, digits, 5, None),
        Case("char-rnn", models.char_rnn, RMSPROP, foretell, text, 3),
        Case("gpt-nano", models.gpt_nano, SLOW_ADAM, foretell, text, 50, rates=rise_and_fall),
        Case("resnet", models.resnet, SGD, recognise, photographs, 200, rates=steps_down, reference=0.9125),
        Case("resnet-graph", models.resnet_graph, SGD, recognise, photographs, 200, rates=steps_down, reference=0.9125),
    )
}


# ---- a BERT, for what large models cost ------------------------------------------------------------------


BASE = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
TINY = {
    "vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
_MADE: dict[Any, nn.Module] = {}


def bert(rows: int, *, tiny: bool = False, seq: int = 128) -> Case:
    """Return BERT (base size, no dropout) with a classification head, on random tokens and labels."""
    sizes = BASE if not tiny else BASE | TINY

    def data(_folder: Path | None) -> Split:
        generator = torch.Generator().manual_seed(9)
        ids = torch.randint(5, sizes["vocab_size"], (rows, seq), generator=generator)
        # a label that can be learnt from the tokens, so that the loss moves
        train = TensorRows({"ids": ids, "label": (ids[:, 1] > sizes["vocab_size"] // 2).long()})
        return train, None

    return Case("bert", partial(_make_bert, sizes), adamw(2e-5), read, data, 3, None)


def _make_bert(sizes: dict[str, int], _data: Any) -> nn.Module:
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.auto import head_named

    key = tuple(sizes.items())
    if key not in _MADE:  # drawing a hundred million numbers takes seconds, copying them does not
        config = ModelConfig.for_model(
            "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, labels=["no", "yes"], **sizes
        )
        torch.manual_seed(0)
        _MADE[key] = head_named("sequence_classification").model.from_config(config)
    return deepcopy(_MADE[key])


def read(model: Any, batch: Any) -> Loss:
    ids = batch["ids"]
    scores = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return Loss(F.cross_entropy(scores, batch["label"], reduction="sum"), len(ids))
