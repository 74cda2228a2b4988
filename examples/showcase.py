"""Every verb of the graph builder in one small graph, trained for a few seconds.

    python examples/showcase.py [FOLDER]

The graph is not a useful model; it shows the verbs and the values that a graph returns. Files (trends, drawings, a
checkpoint) are written to FOLDER, or to a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from flodl import (
    FlowBuilder,
    Graph,
    LearnedHalt,
    Reshape,
    SoftmaxRouter,
    StateAdd,
    ThresholdHalt,
)
from flodl.monitor import Monitor
from flodl.train.schedule import Cosine

BATCH, WIDTH = 2, 8


class ContextBlend(nn.Module):
    """Takes a tagged value as a keyword argument, as ``using`` requires."""

    def forward(self, x: Tensor, ctx: Tensor) -> Tensor:
        return x * torch.sigmoid(ctx / 2) + x


class Counter(nn.Module):
    """Returns its input and counts its calls; ``reset_state`` of the graph calls ``reset``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def reset(self) -> None:
        self.calls = 0


class SignSelector(nn.Module):
    """Selects branch 1 if the mean of the refined state is positive."""

    def forward(self, x: Tensor, refined: Tensor) -> Tensor:
        return (refined.mean() > 0).long().reshape(1)


class LogSoftmaxSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, dim=-1).sum(dim=-1, keepdim=True)


def block(label: str, *modules: nn.Module) -> Graph:
    """A labelled sub-graph; its parts have paths in the parent graph."""
    flow = FlowBuilder(modules[0])
    for module in modules[1:]:
        flow.through(module)
    return flow.tag("out").label(label).build()


def build() -> Graph:
    """Return the graph: ``(2, 2)`` and a context ``(2, 8)`` in, ``(2, 2)`` out."""
    return (
        FlowBuilder.from_(nn.Linear(2, WIDTH), entry="x")
        .label("showcase")
        .input("ctx")
        .tag("input")
        .through(nn.GELU())
        .through(nn.LayerNorm(WIDTH))
        .through(nn.RMSNorm(WIDTH))
        .through(ContextBlend())
        .using("ctx")
        # A side branch; `internal` hides its tag from parent graphs.
        .fork(block("spectrum", nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        .tag("spectral")
        .internal("spectral")
        .split(
            [
                block("left", nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
                block("right", nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
            ]
        )
        .merge("mean")
        .also(nn.Linear(WIDTH, WIDTH), name="residual")
        .also_with(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH))
        .through(nn.Dropout(0.1))
        .through(nn.SiLU())
        .through(nn.Tanh())
        .map(block("slice", nn.Linear(2, 2), nn.LayerNorm(2)))
        .slices(4)
        .through(Reshape(4, 4))
        .map(nn.Linear(4, 4))
        .each()
        .tag("halves")
        .map(nn.Linear(4, 4))
        .over("halves")
        .map(nn.Linear(4, 4))
        .batched()
        .each()
        .through(Reshape(BATCH, WIDTH))
        .through(nn.Softplus())
        .through(Counter(), name="counter")
        .loop_body(block("refine", nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.BatchNorm1d(WIDTH)))
        .for_n(2)
        .tag("refined")
        .gate(SoftmaxRouter(WIDTH, 2), [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        .using("input")
        .switch(SignSelector(), [nn.Linear(WIDTH, WIDTH), block("other", nn.Linear(WIDTH, WIDTH), nn.ReLU())])
        .using("refined")
        # Used before it is tagged: the value of the previous call, zeros in the first call.
        .through(StateAdd())
        .using("memory")
        .tag("memory")
        .loop_body(nn.Linear(WIDTH, WIDTH))
        .while_cond(ThresholdHalt(100.0), 5)
        .loop_body(nn.Linear(WIDTH, WIDTH))
        .until_cond(LearnedHalt(WIDTH), 7)
        .through(LogSoftmaxSum())
        .through(nn.Linear(1, WIDTH))
        .split([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        .tag_group("final_heads")
        .merge("add")
        .through(nn.Linear(WIDTH, 2))
        .tag("output")
        .build()
    )


def train(graph: Graph, monitor: Monitor, *, epochs: int = 5, steps: int = 4) -> None:
    """Fit random targets; report steps and epochs to the graph, and epochs to the monitor."""
    schedule = Cosine(base=1e-2, floor=1e-4, total=epochs * steps)
    optimizer = torch.optim.Adam(graph.parameters(), lr=schedule.lr(0))
    graph.watch("final_heads")
    graph.train()
    for epoch in range(epochs):
        began = perf_counter()
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr(graph.step_count())
            optimizer.zero_grad()
            loss = (graph(torch.randn(BATCH, 2), ctx=torch.randn(BATCH, WIDTH)) - 1).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(graph.parameters(), 1.0)
            optimizer.step()
            graph.record_scalar("loss", loss)
            graph.record_scalar("lr", optimizer.param_groups[0]["lr"])
            graph.observe.collect_with("final_heads", reduce="mean")
            graph.end_step()
        graph.reset_state()
        graph.end_epoch()
        monitor.log(epoch, perf_counter() - began, graph)


def main(arguments: list[str]) -> int:
    """Build, run, train, draw, save and load."""
    folder = Path(arguments[0] if arguments else tempfile.mkdtemp(prefix="showcase-"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    graph = build()
    digest, count = graph.structural_hash()[:8], sum(p.numel() for p in graph.parameters())
    print(f"built {graph.label} [{digest}], {count} parameters\n")
    print(graph.tree_summary())

    graph.eval()
    x, ctx = torch.randn(BATCH, 2), torch.randn(BATCH, WIDTH)
    first, second = graph(x, ctx=ctx), graph(x, ctx=ctx)
    graph.reset_state()
    again = graph(x, ctx=ctx)
    print(f"\nthe second call remembers the first: {not torch.equal(first, second)}")
    print(f"after reset_state it is as the first: {torch.equal(first, again)}")
    _, values = graph(x, ctx=ctx, outputs=["refined", "left.out"])
    print(f"values on request: { ({name: tuple(value.shape) for name, value in values.items()}) }")

    graph.reset_state()
    graph.freeze("left")
    print(f"\nfrozen by path: left {graph.is_frozen('left')}, right {graph.is_frozen('right')}")
    graph.thaw("left")
    graph.observe.enable_profiling()
    monitor = Monitor(5)
    monitor.save_html(folder / "run.html")
    train(graph, monitor)
    monitor.finish()
    monitor.export_csv(folder / "run.csv")
    trend = graph.trend("loss")
    print(f"loss over {len(trend)} epochs: slope {trend.slope():.4f}, improving {trend.improving()}")

    profile = graph.observe.profile()
    if profile is not None:
        slowest = max(profile.nodes, key=lambda node: node.seconds)
        print(f"slowest node: {slowest.id}, {slowest.seconds * 1e6:.0f} of {profile.total_s * 1e6:.0f} µs")
    graph.observe.export_trends(folder / "trends.csv")
    graph.observe.plot_html(folder / "trends.html")
    graph.observe.write_log(folder / "trends.log", 5)
    (folder / "graph.dot").write_text(graph.dot(profiled=True), encoding="utf-8")
    graph.svg(folder / "graph.svg", profiled=True)

    graph.save_checkpoint(folder / "showcase.safetensors")
    twin = build()
    report = twin.load_checkpoint(folder / "showcase.safetensors")
    for one in (graph, twin):
        one.eval()
        one.reset_state()
    with torch.no_grad():
        same = torch.equal(graph(x, ctx=ctx), twin(x, ctx=ctx))
    print(f"\nloaded {len(report.loaded)} tensors into a new graph; it answers the same: {same}")
    print(f"files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
