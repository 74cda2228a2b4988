"""What is trained: small networks, most of them as graphs; ResNet-20 both by hand and as a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.ddp.data import SEQ
from flodl import FlowBuilder, Graph

__all__ = ["ResNet20", "char_rnn", "conv_ae", "gpt_nano", "lenet", "logistic", "mlp", "resnet", "resnet_graph", "small"]


def logistic(_data: Any) -> Graph:
    return FlowBuilder(nn.Flatten()).through(nn.Linear(784, 10)).build()


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


def small(_data: Any) -> Graph:
    """Return a graph without dropout and BatchNorm, whose step is the same however a batch is cut."""
    flow = FlowBuilder(nn.Flatten()).through(nn.Linear(784, 1024)).through(nn.GELU())
    return flow.through(nn.Linear(1024, 1024)).through(nn.GELU()).through(nn.Linear(1024, 10)).build()


# ---- text ------------------------------------------------------------------------------------------------


class Recurrent(nn.LSTM):
    """An LSTM that gives its outputs alone."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0]


def char_rnn(data: Any) -> Graph:
    words = len(data.vocabulary)
    flow = FlowBuilder(nn.Embedding(words, 128)).through(Recurrent(128, 256, num_layers=2, batch_first=True))
    return flow.through(nn.Dropout(0.2)).through(nn.Linear(256, words)).build()


class Places(nn.Module):
    """Characters and their places."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        nn.init.normal_(self.word.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word(ids) + self.place.weight[: ids.shape[1]]


class Attention(nn.Module):
    """Each place looks at itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.inner(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        share = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=share, is_causal=True)
        return self.outer(mixed.transpose(1, 2).reshape(rows, length, width))


def gpt_nano(data: Any, *, width: int = 128, blocks: int = 4, heads: int = 4, dropout: float = 0.1) -> Graph:
    """Return a decoder that foretells characters: norms before their parts, learned places."""
    flow = FlowBuilder(Places(len(data.vocabulary), SEQ, width)).through(nn.Dropout(dropout))
    for _ in range(blocks):
        flow.also(nn.Sequential(nn.LayerNorm(width), Attention(width, heads, dropout), nn.Dropout(dropout)))
        wide = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        flow.also(nn.Sequential(*wide, nn.Dropout(dropout)))
    return flow.through(nn.LayerNorm(width)).through(nn.Linear(width, len(data.vocabulary))).build()


# ---- photographs -----------------------------------------------------------------------------------------

STAGES = ((16, 1), (32, 2), (64, 2))
"""Width and stride of ResNet-20's stages, of three blocks each (He et al. 2015, section 4.2)."""


def _inside(wide_in: int, wide_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU(),
        nn.Conv2d(wide_out, wide_out, 3, 1, 1, bias=False), nn.BatchNorm2d(wide_out),
    )  # fmt: skip


def _across(wide_in: int, wide_out: int, stride: int) -> nn.Module:
    if wide_in == wide_out and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(wide_in, wide_out, 1, stride, bias=False), nn.BatchNorm2d(wide_out))


def _blocks() -> list[tuple[int, int, int]]:
    found, wide_in = [], 16
    for wide_out, stride in STAGES:
        for number in range(3):
            found.append((wide_in, wide_out, stride if not number else 1))
            wide_in = wide_out
    return found


class ResNet20(nn.Module):
    """ResNet-20 for images of 32 x 32, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.inside = nn.ModuleList(_inside(*block) for block in _blocks())
        self.across = nn.ModuleList(_across(*block) for block in _blocks())
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inside, across in zip(self.inside, self.across, strict=True):
            x = F.relu(across(x) + inside(x))
        return self.last(x.mean((2, 3)))


class Mean(nn.Module):
    """The mean of an image's places."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet(_data: Any) -> ResNet20:
    return _kaiming(ResNet20())


def resnet_graph(_data: Any) -> Graph:
    """Return the same network as a graph."""
    flow = FlowBuilder(nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()))
    for block in _blocks():
        across, inside = _across(*block), _inside(*block)
        flow = flow.also(inside) if isinstance(across, nn.Identity) else flow.also_with(across, inside)
        flow.through(nn.ReLU())
    return _kaiming(flow.through(Mean()).through(nn.Linear(64, 10)).build())


def _kaiming(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return model


def changed(images: Tensor, pad: int = 4) -> Tensor:
    """Return each image shifted by at most ``pad`` places, with zeros around, and half of them mirrored."""
    count, _, size, _ = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    offsets = torch.randint(0, 2 * pad + 1, (2, count, 1), device=images.device)
    lines = torch.arange(size, device=images.device)
    rows, columns = offsets[0] + lines, offsets[1] + lines
    mirrored = torch.rand(count, 1, device=images.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
