"""The forward pass as Python source: straight-line, locals only, each value let go after its last use.

The text is generated from a plan and compiled here; a pickle holds the plan and never the text. The text is
registered with `linecache`, so a traceback shows the line of the step that failed.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from flodl.errors import GraphError
from flodl.graph.nodes import Node, Plan

__all__ = ["Missing", "compile_forward", "forward_source"]


class Missing:
    """Stands for an argument that a call left out."""


def missing_inputs(**given: Any) -> GraphError:
    """Return the error that names the arguments a call left out."""
    absent = [name for name, value in given.items() if value is Missing]
    return GraphError(
        f"graph call: missing {', '.join(map(repr, absent))}; give every required input, by name or in "
        f"the order {', '.join(given)}",
        missing=absent,
    )


_GLOBALS = {
    "_Missing": Missing,
    "_missing_inputs": missing_inputs,
    "_zeros_like": torch.zeros_like,
    "_cat": torch.cat,
}


def forward_source(plan: Plan, captured: Iterable[str] = ()) -> str:
    """Return the text of the forward pass.

    Args:
        plan: the graph.
        captured: tags whose values are returned beside the result, ``(result, {tag: value})``; without
            them the text is that of the ordinary forward pass.
    """
    return _Writer(plan, tuple(sorted(captured))).text()


_functions: WeakValueDictionary[str, Callable[..., Any]] = WeakValueDictionary()


def compile_forward(source: str) -> Callable[..., Any]:
    """Return the function that a generated text defines; equal texts share one function."""
    function = _functions.get(source)
    if function is None:
        filename = f"<flodl graph {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        namespace = dict(_GLOBALS)
        exec(compile(source, filename, "exec"), namespace)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        function = namespace["forward"]
        _functions[source] = function
    return function


@dataclass
class _Writer:
    """The state of writing one function."""

    plan: Plan
    captured: tuple[str, ...]
    taken: set[str] = field(default_factory=set)
    values: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    caught: str = ""

    def text(self) -> str:
        plan = self.plan
        self.taken = {"self", "outputs", *_GLOBALS}
        # A captured function is called by the ordinary one, with every argument in place.
        signature = []
        for declared in plan.inputs:
            name = self._fresh(declared.name)
            assert name == declared.name, "input names are checked before a plan is made"
            self.values[declared.node] = name
            default = "" if self.captured else f"={'_Missing' if declared.required else repr(declared.default)}"
            signature.append(f"{name}{default}")
        if self.captured:
            self.lines.append(f"def forward(self, {', '.join(signature)}):")
        else:
            self._opening(signature)
        steps = {node.index: self._fresh(node.name) for node in plan.calls}
        if steps:
            self._line(f"{_unpacked(steps.values())} = self._steps")
        kept, self.caught = self._fresh("memory"), self._fresh("captured")
        memory = [self._fresh(f"old_{tag}") for tag in plan.memory]
        if memory:
            self._line(f"{kept} = self._memory")
            self._line(f"{_unpacked(memory)} = {kept}")
        if self.captured:
            self._line(f"{self.caught} = {{}}")
        for node in plan.nodes:
            if node.role == "state_read":
                self.values[node.index] = memory[plan.memory.index(node.mode)]
        self._body(steps)
        for slot, tag in enumerate(plan.memory):
            self._line(f"{kept}[{slot}] = {self.values[self._source(plan.tags[tag])]}")
        result = self.values[self._source(plan.output)]
        self._line(f"return {result}, {self.caught}" if self.captured else f"return {result}")
        return "\n".join(self.lines) + "\n"

    def _opening(self, signature: list[str]) -> None:
        inputs = self.plan.inputs
        required = [i.name for i in inputs if i.required]
        self.lines.append(f"def forward(self, {', '.join(signature)}, *, outputs=None):")
        if required:
            self._line(f"if {' or '.join(f'{name} is _Missing' for name in required)}:")
            self._line(f"    raise _missing_inputs({', '.join(f'{name}={name}' for name in required)})")
        self._line("if outputs is not None or self._watched:")
        self._line(f"    return self._observed_forward(outputs, {', '.join(i.name for i in inputs)})")

    def _body(self, steps: dict[int, str]) -> None:
        plan = self.plan
        last = self._last_uses()
        inline = self._inlined()
        free: list[str] = []
        owned: dict[int, str] = {}
        pending: list[int] = []
        place_of = {index: place for place, index in enumerate(plan.order)}
        capture = [(name, self._captured_source(name)) for name in self.captured]
        for tag, source in capture:
            if source in self.values:
                self._line(f"{self.caught}[{tag!r}] = {self.values[source]}")
        for place, index in enumerate(plan.order):
            node = plan.nodes[index]
            if node.role in ("entry", "input", "identity", "state_read"):
                continue
            if index in inline:
                pending.append(index)
                continue
            expression = self._expression(node, steps, inline)
            # Values that only this statement (or what is written into it) still reads end here.
            places = {place, *(place_of[i] for i in pending)}
            pending.clear()
            dying = [i for i in owned if last[i] in places]
            freed = [owned.pop(i) for i in dying]
            if freed:
                target = freed.pop(0)
            elif free:
                target = free.pop(0)
            else:
                target = self._fresh("x")
            self._line(f"{target} = {expression}")
            if freed:
                self._line(f"del {', '.join(freed)}")
                free.extend(freed)
            self.values[index] = target
            owned[index] = target
            for tag, source in capture:
                if source == index:
                    self._line(f"{self.caught}[{tag!r}] = {target}")
            if index not in last:
                # Nobody reads it: it was run for its effects, such as traces or running statistics.
                self._line(f"del {target}")
                free.append(owned.pop(index))

    def _expression(self, node: Node, steps: dict[int, str], inline: set[int]) -> str:
        operands = [
            self._expression(self.plan.nodes[i], steps, inline) if i in inline else self.values[i]
            for i in map(self._source, node.inputs)
        ]
        if node.role == "add" or (node.role == "merge" and node.mode == "add"):
            return " + ".join(operands)
        if node.role == "merge" and node.mode.startswith("concat"):
            return f"_cat(({', '.join(operands)}), {node.mode.removeprefix('concat ')})"
        if node.role == "merge":
            return f"({' + '.join(operands)}) * (1 / {len(operands)})"
        arguments = list(operands)
        for reference in node.references:
            assert reference.keyword.isidentifier(), "keywords are checked before a plan is made"
            value = self.values[self._source(reference.source)]
            if self.plan.nodes[reference.source].role == "state_read":
                value = f"_zeros_like({operands[0]}) if {value} is None else {value}"
            arguments.append(f"{reference.keyword}={value}")
        return f"{steps[node.index]}({', '.join(arguments)})"

    def _captured_source(self, name: str) -> int:
        index = self.plan.value_of(name)
        assert index is not None, "names to capture are checked before a variant is written"
        return self._source(index)

    def _source(self, index: int) -> int:
        node = self.plan.nodes[index]
        while node.role == "identity":
            node = self.plan.nodes[node.inputs[0]]
        return node.index

    def _last_uses(self) -> dict[int, int]:
        """Return, for every value that is read, the place in the order of its last reader."""
        plan = self.plan
        last: dict[int, int] = {}
        for place, index in enumerate(plan.order):
            node = plan.nodes[index]
            if node.role == "identity":
                continue
            for source in node.sources:
                last[self._source(source)] = place
        for index in (plan.output, *(plan.tags[tag] for tag in plan.memory)):
            last[self._source(index)] = len(plan.order)
        return last

    def _inlined(self) -> set[int]:
        """Return the module nodes that are written into the sum which alone reads them, order kept."""
        plan = self.plan
        readers: dict[int, int] = {}
        for node in plan.nodes:
            if node.role != "identity":
                for source in node.sources:
                    readers[self._source(source)] = readers.get(self._source(source), 0) + 1
        for index in (plan.output, *map(self._captured_source, self.captured)):
            readers[self._source(index)] = readers.get(self._source(index), 0) + 1
        for tag in plan.memory:
            readers[self._source(plan.tags[tag])] = readers.get(self._source(plan.tags[tag]), 0) + 1
        running = [i for i in plan.order if plan.nodes[i].role not in ("entry", "input", "identity", "state_read")]
        inline: set[int] = set()
        for place, index in enumerate(running):
            node = plan.nodes[index]
            if node.role not in ("add", "merge"):
                continue
            # Walking back from the sum keeps the planned order: operands are computed left to right.
            before = place - 1
            for operand in reversed([self._source(i) for i in node.inputs]):
                if before < 0 or running[before] != operand or readers[operand] != 1 or not plan.nodes[operand].name:
                    break
                inline.add(operand)
                before -= 1
        return inline

    def _fresh(self, wanted: str) -> str:
        name = re.sub(r"\W", "_", wanted)
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"_{name}"
        unique, n = name, 1
        while unique in self.taken:
            n += 1
            unique = f"{name}_{n}"
        self.taken.add(unique)
        return unique

    def _line(self, text: str) -> None:
        self.lines.append(f"    {text}")


def _unpacked(names: Iterable[str]) -> str:
    """Return the left side of an unpacking."""
    listed = list(names)
    return f"({listed[0]},)" if len(listed) == 1 else ", ".join(listed)
