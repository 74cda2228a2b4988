"""What is trained: four small FlowBuilder graphs on real data, and a BERT of the base size on random tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl import FlowBuilder, Graph
from flodl.data import Mnist, Shakespeare, TensorRows
from flodl.train import Loss, OptimizerFactory, adamw

__all__ = ["CASES", "Case", "bert", "small"]

SEQ = 128
Split = tuple[Any, Any]


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
    """

    name: str
    make: Callable[[Any], nn.Module]
    optimizer: OptimizerFactory
    step: Callable[[nn.Module, Any], Loss]
    data: Callable[[Path | None], Split]
    epochs: int
    figure: str | None = "accuracy"

    def judge(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        """Return sums and counts of the held-out figures."""
        loss = self.step(model, batch)
        return {"eval_loss": tuple(loss.totals().unbind()), **loss.metrics}


# ---- data ------------------------------------------------------------------------------------------------


def digits(folder: Path | None) -> Split:
    """Return the 10,000 images of MNIST's second part: 8,000 to train on, 2,000 held out."""
    if folder is None:
        generator = torch.Generator().manual_seed(5)
        label = torch.randint(0, 10, (640,), generator=generator)
        shapes = torch.rand(10, 1, 28, 28, generator=generator)
        image = (shapes[label] * 255 * (0.5 + torch.rand(640, 1, 28, 28, generator=generator) / 2)).to(torch.uint8)
        return _images(image[:512], label[:512]), _images(image[512:], label[512:])
    place = folder / "mnist"
    whole = Mnist.parse(
        (place / "t10k-images-idx3-ubyte.gz").read_bytes(), (place / "t10k-labels-idx1-ubyte.gz").read_bytes()
    ).get_batch(range(10_000))
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    image, label = (whole["image"] * 255).round().to(torch.uint8)[order], whole["label"][order]
    return _images(image[:8000], label[:8000]), _images(image[8000:], label[8000:])


def _images(image: Tensor, label: Tensor) -> TensorRows:
    return TensorRows({"image": image.float() / 255, "label": label})


def text(folder: Path | None) -> Split:
    """Return windows of a text: the first nine tenths to train on, the rest held out."""
    if folder is None:
        whole = "the quick brown fox jumps over the lazy dog; " * 400
    else:
        whole = (folder / "shakespeare" / "input.txt").read_text("utf-8")
    cut = len(whole) * 9 // 10
    train = Shakespeare.parse(whole[:cut], SEQ, "".join(sorted(set(whole))))
    return train, Shakespeare.parse(whole[cut:], SEQ, train.vocabulary)


# ---- models ----------------------------------------------------------------------------------------------


def mlp(_data: Any) -> Graph:
    return FlowBuilder(nn.Flatten()).through(nn.Linear(784, 256)).through(nn.ReLU()).through(nn.Linear(256, 10)).build()


def lenet(_data: Any) -> Graph:
    flow = FlowBuilder()
    for wide_in, wide_out in ((1, 6), (6, 16)):
        flow.through(nn.Conv2d(wide_in, wide_out, 5)).through(nn.BatchNorm2d(wide_out)).through(nn.ReLU())
        flow.through(nn.MaxPool2d(2))
    flow.through(nn.Flatten()).through(nn.Linear(256, 120)).through(nn.ReLU())
    return flow.through(nn.Linear(120, 84)).through(nn.ReLU()).through(nn.Linear(84, 10)).build()


def conv_ae(_data: Any) -> Graph:
    flow = FlowBuilder(nn.Conv2d(1, 16, 3, stride=2, padding=1)).through(nn.ReLU())
    flow.through(nn.Conv2d(16, 32, 3, stride=2, padding=1)).through(nn.ReLU())
    flow.through(nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1)).through(nn.ReLU())
    flow.through(nn.ConvTranspose2d(16, 1, 3, stride=2, padding=1, output_padding=1))
    return flow.through(nn.Sigmoid()).build()


class Recurrent(nn.LSTM):
    """An LSTM that gives its outputs alone."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0]


def char_rnn(data: Any) -> Graph:
    words = len(data.vocabulary)
    flow = FlowBuilder(nn.Embedding(words, 128)).through(Recurrent(128, 256, num_layers=2, batch_first=True))
    return flow.through(nn.Dropout(0.2)).through(nn.Linear(256, words)).build()


def small(_data: Any) -> Graph:
    """Return a graph without dropout and BatchNorm, whose step is the same however a batch is cut."""
    flow = FlowBuilder(nn.Flatten()).through(nn.Linear(784, 1024)).through(nn.GELU())
    return flow.through(nn.Linear(1024, 1024)).through(nn.GELU()).through(nn.Linear(1024, 10)).build()


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

CASES = {
    case.name: case
    for case in (
        Case("mlp", mlp, ADAM, classify, digits, 5),
        Case("lenet", lenet, ADAM, classify, digits, 5),
        Case("conv-ae", conv_ae, ADAM, rebuild, digits, 5, None),
        Case("char-rnn", char_rnn, OptimizerFactory(torch.optim.RMSprop, {"lr": 2e-3}), foretell, text, 3),
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
    from flodl_hf.auto import head_named
    from flodl_hf.config import ModelConfig

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
