"""Ten models, each written twice: by hand as an `nn.Module`, and as a FlowBuilder graph.

Both versions do the same arithmetic on the same layers in the same order, so what differs is what the graph costs.
Names, sizes and parameter counts are those of the throughput suite of the Rust flodl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise

import torch
from torch import Tensor, nn

from flodl import FlowBuilder, Graph, SoftmaxRouter

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """One line of the suite.

    Attributes:
        name: what it is called.
        parameters: the exact number of parameter elements.
        batch: rows of a batch in the published suite.
        hand: makes the hand-written module.
        flow: makes the graph.
        inputs: makes an input of so many rows.
        loss: gives the loss of an output against a fixed target.
        targets: makes what the published suite learns, for so many rows; None for the input itself.
        lr: learning rate of the published suite.
    """

    name: str
    parameters: int
    batch: int
    hand: Callable[[], nn.Module]
    flow: Callable[[], Graph]
    inputs: Callable[[int], Tensor]
    loss: Callable[[Tensor], Tensor] = lambda output: output.square().mean()
    targets: Callable[[int], Tensor] | None = None
    lr: float = 1e-3

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss that the published suite learns by: cross-entropy of classes, else squared error."""
        if target.is_floating_point():
            return nn.functional.mse_loss(output, target)
        return nn.functional.cross_entropy(output.view(-1, output.shape[-1]), target.view(-1))

    def batches(self, number: int, device: torch.device | str) -> list[tuple[Tensor, Tensor]]:
        """Return so many batches of inputs and targets on the device."""
        made = []
        for _ in range(number):
            x = self.inputs(self.batch).to(device)
            made.append((x, x if self.targets is None else self.targets(self.batch).to(device)))
        return made


# 1 mlp


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear0, self.norm0 = nn.Linear(1024, 2048), nn.LayerNorm(2048)
        self.linear1, self.norm1 = nn.Linear(2048, 2048), nn.LayerNorm(2048)
        self.linear2, self.norm2 = nn.Linear(2048, 2048), nn.LayerNorm(2048)
        self.linear3, self.norm3 = nn.Linear(2048, 2048), nn.LayerNorm(2048)
        self.act = nn.GELU()
        self.out = nn.Linear(2048, 1024)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.act(self.linear0(x)))
        x = self.norm1(self.act(self.linear1(x)))
        x = self.norm2(self.act(self.linear2(x)))
        x = self.norm3(self.act(self.linear3(x)))
        return self.out(x)


def mlp() -> Graph:
    flow = FlowBuilder(nn.Linear(1024, 2048)).through(nn.GELU()).through(nn.LayerNorm(2048))
    for _ in range(3):
        flow.through(nn.Linear(2048, 2048)).through(nn.GELU()).through(nn.LayerNorm(2048))
    return flow.through(nn.Linear(2048, 1024)).build()


# 2 convnet


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256, 512, 512]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.act, self.pool, self.average = nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
        self.flatten, self.out = nn.Flatten(), nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = self.act(norm(conv(x)))
            if i < 4:
                x = self.pool(x)
        return self.out(self.flatten(self.average(x)))


def convnet() -> Graph:
    flow = FlowBuilder()
    for a, b in [(3, 64), (64, 128), (128, 256), (256, 512)]:
        flow.through(nn.Conv2d(a, b, 3, padding=1)).through(nn.BatchNorm2d(b)).through(nn.ReLU()).through(
            nn.MaxPool2d(2)
        )
    flow.through(nn.Conv2d(512, 512, 3, padding=1)).through(nn.BatchNorm2d(512)).through(nn.ReLU())
    return flow.through(nn.AdaptiveAvgPool2d(1)).through(nn.Flatten()).through(nn.Linear(512, 100)).build()


# 3 gru_seq


class GruSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 512)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)


class ZeroState(nn.Module):
    """A zero state for each row of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.width)


class SequenceCell(nn.GRUCell):
    """A loop body: one time step further along the sequence at every iteration."""

    def reset(self) -> None:
        self.steps = count()

    def forward(self, h: Tensor, sequence: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(sequence[:, next(self.steps)], h)


def gru_seq() -> Graph:
    flow = FlowBuilder().tag("sequence").through(ZeroState(512))
    return flow.loop_body(SequenceCell(256, 512)).for_n(50).using("sequence").through(nn.Linear(512, 256)).build()


# 4 transformer


class TransformerLayer(nn.Module):
    need_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(512), nn.LayerNorm(512)
        self.up, self.act, self.down = nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x, need_weights=self.need_weights)[0])
        return self.norm2(x + self.down(self.act(self.up(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 512)
        self.positions = Positions()
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(4))
        self.out = nn.Linear(512, 8192)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Positions(nn.Module):
    """Learned positions, added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 128, 512))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class SelfAttention(nn.MultiheadAttention):
    """Attention of a stream to itself."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, x, x, need_weights=False)[0]


def transformer() -> Graph:
    flow = FlowBuilder(nn.Embedding(8192, 512)).through(Positions())
    for _ in range(4):
        feed_forward = FlowBuilder(nn.Linear(512, 2048)).through(nn.GELU()).through(nn.Linear(2048, 512)).build()
        layer = FlowBuilder().also(SelfAttention(512, 8, batch_first=True)).through(nn.LayerNorm(512))
        flow.through(layer.also(feed_forward).through(nn.LayerNorm(512)).build())
    return flow.through(nn.Linear(512, 8192)).build()


def token_loss(output: Tensor) -> Tensor:
    flat = output.reshape(-1, output.shape[-1])
    return nn.functional.cross_entropy(flat, torch.arange(flat.shape[0], device=flat.device) % flat.shape[1])


# 5 lstm_seq


class LstmSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class LastState(nn.LSTM):
    """An LSTM that gives the top layer's output of the last step."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0][:, -1]


def lstm_seq() -> Graph:
    return FlowBuilder(LastState(256, 512, 2, batch_first=True)).through(nn.Linear(512, 256)).build()


# 6 conv_autoenc


class ConvAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        down = [3, 64, 128, 256, 512]
        up = [512, 256, 128, 64]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in pairwise(down))
        self.down_norms = nn.ModuleList(nn.BatchNorm2d(b) for b in down[1:])
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in pairwise(up))
        self.up_norms = nn.ModuleList(nn.BatchNorm2d(b) for b in up[1:])
        self.act, self.out, self.tanh = nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.down, self.down_norms, strict=True):
            x = self.act(norm(conv(x)))
        for conv, norm in zip(self.up, self.up_norms, strict=True):
            x = self.act(norm(conv(x)))
        return self.tanh(self.out(x))


def conv_autoenc() -> Graph:
    flow = FlowBuilder()
    for a, b in [(3, 64), (64, 128), (128, 256), (256, 512)]:
        flow.through(nn.Conv2d(a, b, 4, 2, 1)).through(nn.BatchNorm2d(b)).through(nn.ReLU())
    for a, b in [(512, 256), (256, 128), (128, 64)]:
        flow.through(nn.ConvTranspose2d(a, b, 4, 2, 1)).through(nn.BatchNorm2d(b)).through(nn.ReLU())
    return flow.through(nn.ConvTranspose2d(64, 3, 4, 2, 1)).through(nn.Tanh()).build()


# 7 residual_tower, 9 iterative_refine, 10 feedback_fixed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.linear(x)))


def block(width: int) -> Graph:
    return FlowBuilder(nn.Linear(width, width)).through(nn.GELU()).through(nn.LayerNorm(width)).build()


class ResidualTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        self.blocks = nn.ModuleList(Block(1024) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for inner in self.blocks:
            x = x + inner(x)
        return self.last(x)


def residual_tower() -> Graph:
    flow = FlowBuilder(nn.Linear(1024, 1024))
    for _ in range(12):
        flow.also(block(1024))
    return flow.through(nn.Linear(1024, 1024)).build()


class Refine(nn.Module):
    def __init__(self, width: int, iterations: int) -> None:
        super().__init__()
        self.first, self.act, self.norm = nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)
        self.block, self.last = Block(width), nn.Linear(width, width)
        self.iterations = iterations

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.act(self.first(x)))
        for _ in range(self.iterations):
            x = x + self.block(x)
        return self.last(x)


def refine(width: int, iterations: int) -> Graph:
    body = FlowBuilder().also(block(width)).build()
    flow = FlowBuilder(nn.Linear(width, width)).through(nn.GELU()).through(nn.LayerNorm(width))
    return flow.loop_body(body).for_n(iterations).through(nn.Linear(width, width)).build()


# 8 gated_routing


class GatedRouting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(512, 512), nn.GELU()
        self.router, self.last = nn.Linear(512, 8), nn.Linear(512, 512)
        self.experts = nn.ModuleList(Block(512) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        weights = torch.softmax(self.router(x), dim=-1)
        total: Tensor | None = None
        for weight, expert in zip(weights.split(1, dim=-1), self.experts, strict=True):
            weighted = expert(x) * weight
            total = weighted if total is None else total + weighted
        return self.last(total)


def gated_routing() -> Graph:
    flow = FlowBuilder(nn.Linear(512, 512)).through(nn.GELU())
    return flow.gate(SoftmaxRouter(512, 8), [block(512) for _ in range(8)]).through(nn.Linear(512, 512)).build()


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def words(batch: int) -> Tensor:
    return torch.randint(8192, (batch, 128))


MODELS: tuple[Model, ...] = (
    Model("mlp", 16_802_816, 256, Mlp, mlp, rows(1024), targets=rows(1024)),
    Model("convnet", 3_965_028, 128, ConvNet, convnet, rows(3, 64, 64), targets=rows(100)),
    Model("gru_seq", 1_314_048, 128, GruSequence, gru_seq, rows(50, 256), targets=rows(256)),
    Model("transformer", 21_071_872, 32, Transformer, transformer, words, token_loss, words, 1e-4),
    Model("lstm_seq", 3_809_536, 128, LstmSequence, lstm_seq, rows(50, 256), targets=rows(256)),
    Model("conv_autoenc", 5_515_395, 64, ConvAutoencoder, conv_autoenc, rows(3, 64, 64)),
    Model("residual_tower", 14_718_976, 256, ResidualTower, residual_tower, rows(1024), targets=rows(1024)),
    Model("gated_routing", 2_638_856, 256, GatedRouting, gated_routing, rows(512), targets=rows(512)),
    Model(
        "iterative_refine",
        3_152_896,
        256,
        lambda: Refine(1024, 8),
        lambda: refine(1024, 8),
        rows(1024),
        targets=rows(1024),
    ),
    Model(
        "feedback_fixed", 790_016, 128, lambda: Refine(512, 10), lambda: refine(512, 10), rows(512), targets=rows(512)
    ),
)
