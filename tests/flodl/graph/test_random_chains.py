"""Random chains: each either builds and equals a simple interpreter of the verbs, or is refused.

The interpreter applies the verbs to values directly, without nodes, plan and generated source.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flodl import FlowBuilder, GraphBuildError, StateAdd

NAMES = ["a", "b", "c"]


class Affine(nn.Module):
    """Any number of references with different weights, so that no two wirings agree by accident."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.factor = 1.0 + seed / 7
        self.shift = seed / 3

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        for i, key in enumerate(sorted(references)):
            x = x + references[key] * (0.3 + 0.2 * i)
        return torch.sin(x * self.factor + self.shift)


class Row(Affine):
    """The body of a row map: its references come whole, so their mean over rows keeps the row's shape."""

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        return super().forward(x, **{key: value.mean(0, keepdim=True) for key, value in references.items()})


verbs = st.one_of(
    st.tuples(
        st.sampled_from(["through", "fork", "also", "also_with", "loop", "map", "gate", "merge", "mean", "each"])
    ),
    st.tuples(st.just("split"), st.integers(2, 3)),
    st.tuples(st.sampled_from(["tag", "tag_group", "input", "over"]), st.sampled_from(NAMES)),
    st.tuples(st.just("using"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)),
)


class Refused(Exception):
    """The interpreter found the chain meaningless."""


class Halves(nn.Module):
    """Equal weights for two experts."""

    def forward(self, x: Tensor, **references: Tensor) -> Tensor:
        total = x + sum(references.values())
        return torch.stack([torch.sigmoid(total.mean(-1)), torch.sigmoid(-total.mean(-1))], dim=-1)


class Naive:
    """Runs a chain verb by verb. A module waits for its references until the next verb that is not `using`."""

    def __init__(
        self, chain: list[tuple[Any, ...]], x: Tensor, inputs: dict[str, Tensor], memory: dict[str, Tensor]
    ) -> None:
        self.inputs, self.memory = inputs, memory
        self.all_inputs = {v[1] for v in chain if v[0] == "input"}
        self.all_tags = {v[1] for v in chain if v[0] == "tag"} | {
            f"{v[1]}_{i}" for v in chain if v[0] == "tag_group" for i in range(3)
        }
        self.tags: dict[str, Any] = {}
        self.groups: set[str] = set()
        self.kept: dict[str, Tensor] = {}
        self.streams: list[Any] = [x]
        self.fork: Any = None
        self.run(chain)

    def run(self, chain: list[tuple[Any, ...]]) -> None:
        # References follow their module in the chain and are needed to compute it, so they are looked up ahead.
        for place, verb in enumerate(chain):
            references: dict[str, Any] = {}
            late: set[str] = set()
            for later in chain[place + 1 :]:
                if later[0] == "using":
                    for tag in later[1]:
                        if tag in references:
                            raise Refused
                        if tag in late:
                            raise Refused  # a circle: the value is made from this very module
                        references[tag] = self.value(tag)
                elif later[0] in ("tag", "tag_group", "input"):
                    if later[0] == "input" and verb[0] in MODULE_VERBS:
                        continue
                    if later[0] == "tag" and verb[0] in MODULE_VERBS:
                        late.add(later[1])
                        continue
                    if later[0] == "tag_group" and verb[0] == "split":
                        continue
                    break
                else:
                    break
            getattr(self, f"do_{verb[0]}")(
                *verb[1:], references=references if verb[0] in MODULE_VERBS else {}, seed=place
            )

    def value(self, tag: str) -> Any:
        if tag in self.tags:
            return self.tags[tag]
        if tag in self.all_inputs:
            return self.inputs[tag]
        if tag in self.all_tags:
            return ("memory", tag)
        raise Refused

    def apply(self, seed: int, x: Tensor, references: dict[str, Any], module: nn.Module | None = None) -> Tensor:
        given = {}
        for tag, value in references.items():
            if isinstance(value, tuple):
                value = self.memory.get(tag, torch.zeros_like(x))
            given[tag] = value
        return (module or Affine(seed))(x, **given)

    def single(self) -> Tensor:
        if len(self.streams) != 1:
            raise Refused
        return self.streams[0]

    def advance(self, *streams: Tensor) -> None:
        self.streams, self.fork = list(streams), None

    def name(self, tag: str, value: Tensor) -> None:
        if tag in self.tags or tag in self.groups:
            raise Refused
        self.tags[tag] = self.kept[tag] = value

    def do_through(self, references: dict[str, Any], seed: int) -> None:
        self.advance(self.apply(seed, self.single(), references))

    def do_fork(self, references: dict[str, Any], seed: int) -> None:
        self.fork = self.apply(seed, self.single(), references)

    def do_also(self, references: dict[str, Any], seed: int) -> None:
        self.advance(self.single() + self.apply(seed, self.single(), references))

    def do_also_with(self, references: dict[str, Any], seed: int) -> None:
        x = self.single()
        self.advance(Affine(seed + 50)(x) + self.apply(seed, x, references))

    def fixed(self, x: Tensor, references: dict[str, Any]) -> dict[str, Any]:
        """Remembered values looked up once, for verbs that call their module several times."""
        return {
            t: self.memory.get(t, torch.zeros_like(x)) if isinstance(v, tuple) else v for t, v in references.items()
        }

    def do_loop(self, references: dict[str, Any], seed: int) -> None:
        x = self.single()
        fixed = self.fixed(x, references)
        for _ in range(2):
            x = self.apply(seed, x, fixed)
        self.advance(x)

    def do_map(self, references: dict[str, Any], seed: int) -> None:
        self.advance(self.apply(seed, self.single(), references))

    def do_each(self, references: dict[str, Any], seed: int) -> None:
        x = self.single()
        fixed = self.fixed(x, references)
        self.advance(torch.cat([self.apply(seed, row, fixed, Row(seed)) for row in x.split(1)]))

    def do_over(self, tag: str, references: dict[str, Any], seed: int) -> None:
        self.single()
        if tag not in self.tags:
            raise Refused
        self.advance(self.apply(seed, self.tags[tag], references))

    def do_gate(self, references: dict[str, Any], seed: int) -> None:
        x = self.single()
        weights = self.apply(seed, x, references, Halves())
        self.advance(Affine(seed)(x) * weights[:, :1] + Affine(seed + 1)(x) * weights[:, 1:])

    def do_split(self, count: int, references: dict[str, Any], seed: int) -> None:
        x = self.single()
        self.advance(*(self.apply(seed + i, x, references) for i in range(count)))

    def do_merge(self, references: dict[str, Any], seed: int) -> None:
        if len(self.streams) < 2:
            raise Refused
        total = self.streams[0]
        for stream in self.streams[1:]:
            total = total + stream
        self.advance(total)

    def do_mean(self, references: dict[str, Any], seed: int) -> None:
        count = len(self.streams)
        self.do_merge(references, seed)
        self.streams = [self.streams[0] * (1 / count)]

    def do_tag(self, tag: str, references: dict[str, Any], seed: int) -> None:
        if self.fork is not None:
            value, self.fork = self.fork, None
        else:
            value = self.single()
        self.name(tag, value)

    def do_tag_group(self, tag: str, references: dict[str, Any], seed: int) -> None:
        self.fork = None
        if len(self.streams) < 2 or tag in self.groups or tag in self.tags:
            raise Refused
        for i, stream in enumerate(self.streams):
            self.name(f"{tag}_{i}", stream)
        self.groups.add(tag)

    def do_input(self, tag: str, references: dict[str, Any], seed: int) -> None:
        if tag in self.tags or tag in self.groups:
            raise Refused
        self.tags[tag] = self.inputs[tag]

    def do_using(self, tags: list[str], references: dict[str, Any], seed: int) -> None:
        pass


MODULE_VERBS = {"through", "fork", "also", "also_with", "loop", "map", "gate", "split", "over", "each"}


def built(chain: list[tuple[Any, ...]]) -> FlowBuilder:
    flow = FlowBuilder()
    for seed, (verb, *args) in enumerate(chain):
        match verb:
            case "through" | "fork" | "also":
                getattr(flow, verb)(Affine(seed), name=f"m{seed}")
            case "also_with":
                flow.also_with(Affine(seed + 50), Affine(seed), name=f"m{seed}", skip_name=f"s{seed}")
            case "loop":
                flow.loop_body(Affine(seed), name=f"m{seed}").for_n(2)
            case "map":
                flow.map(Affine(seed), name=f"m{seed}").batched().each()
            case "each":
                flow.map(Row(seed), name=f"m{seed}").each()
            case "over":
                flow.map(Affine(seed), name=f"m{seed}").batched().over(args[0])
            case "gate":
                flow.gate(Halves(), Affine(seed), Affine(seed + 1), name=f"m{seed}")
            case "split":
                flow.split([Affine(seed + i) for i in range(args[0])], names=[f"m{seed}_{i}" for i in range(args[0])])
            case "merge":
                flow.merge("add")
            case "mean":
                flow.merge("mean")
            case _:
                getattr(flow, verb)(*args)
    return flow


@settings(max_examples=400, deadline=None)
@given(chain=st.lists(verbs, max_size=9))
def test_a_chain_equals_its_meaning_or_is_refused(chain: list[tuple[Any, ...]]) -> None:
    try:
        graph = built(chain).build()
    except GraphBuildError:
        return
    torch.manual_seed(0)
    memory: dict[str, Tensor] = {}
    for _ in range(3):
        x = torch.randn(2, 3)
        inputs = {declared.name: torch.randn(2, 3) for declared in graph.plan.inputs[1:]}
        tags = [t for t in graph.plan.tags if t not in inputs]
        meant = Naive(chain, x, inputs, memory)
        result, values = graph(x, **inputs, outputs=tags)
        torch.testing.assert_close(result, meant.streams[0])
        for tag in tags:
            torch.testing.assert_close(values[tag], meant.kept[tag])
        memory = meant.kept
        clone = copy.deepcopy(graph)
        assert torch.equal(clone(x, **inputs), graph(x, **inputs, outputs=tags)[0])
        graph._memory[:] = [memory[tag] for tag in graph.plan.memory]


def test_the_interpreter_and_the_builder_agree_on_a_chain_with_everything() -> None:
    chain: list[tuple[Any, ...]] = [
        ("through",), ("using", ["a"]), ("input", "b"), ("also",), ("using", ["b"]), ("tag", "a"),
        ("fork",), ("tag", "c"), ("split", 3), ("using", ["a", "c"]), ("mean",), ("loop",), ("using", ["c"]), ("gate",), ("using", ["a"]), ("each",),
    ]  # fmt: skip
    graph = built(chain).build()
    x, b = torch.randn(2, 3), torch.randn(2, 3)
    first = Naive(chain, x, {"b": b}, {})
    torch.testing.assert_close(graph(x, b), first.streams[0])
    torch.testing.assert_close(graph(x, b), Naive(chain, x, {"b": b}, first.kept).streams[0])
    assert StateAdd()(x, y=b).equal(x + b)
