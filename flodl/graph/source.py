"""The forward pass as Python source: straight-line, local variables only, each value released after its last use.

The text is generated from a plan and compiled; a pickle contains the plan and never the text. `linecache` knows the
text, so a traceback shows the line that failed.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch

from flodl.errors import GraphError
from flodl.graph.nodes import Node, Plan


class Missing:
    """Default of required arguments."""


def missing_inputs(**inputs: Any) -> GraphError:
    """Return the error for arguments that are missing in a call."""
    absent = [name for name, value in inputs.items() if value is Missing]
    return GraphError(
        f"graph call: missing {', '.join(map(repr, absent))}. Pass every required input, as keyword or in "
        f"the order {', '.join(inputs)}.",
        missing=absent,
    )


_WITHOUT_STATEMENT = ("entry", "input", "identity", "state_read")

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
        captured: tags to return as well, ``(result, {tag: value})``; without them the result is the ordinary
            forward pass.
    """
    return _Writer(plan, tuple(sorted(captured))).text()


_functions: WeakValueDictionary[str, Callable[..., Any]] = WeakValueDictionary()


def compile_forward(source: str) -> Callable[..., Any]:
    """Return the function that a generated text defines; equal texts share a function."""
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
    """Writes one function."""

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
        uses = self._uses()
        capture = [(name, self._captured_source(name)) for name in self.captured]
        inline = self._inlined(uses, {source for _, source in capture})
        free: list[str] = []
        owned: dict[int, str] = {}
        places: set[int] = set()
        for tag, source in capture:
            if source in self.values:
                self._line(f"{self.caught}[{tag!r}] = {self.values[source]}")
        for place, index in enumerate(plan.order):
            node = plan.nodes[index]
            if node.role in _WITHOUT_STATEMENT:
                continue
            places.add(place)
            if index in inline:
                continue
            expression = self._expression(node, steps, inline)
            # Values with their last use in this statement, or in an expression inlined into it, are released here.
            freed = [owned.pop(i) for i in list(owned) if uses[i][-1] in places]
            places.clear()
            target = freed.pop(0) if freed else free.pop(0) if free else self._fresh("x")
            self._line(f"{target} = {expression}")
            if freed:
                self._line(f"del {', '.join(freed)}")
                free.extend(freed)
            self.values[index] = target
            owned[index] = target
            for tag, source in capture:
                if source == index:
                    self._line(f"{self.caught}[{tag!r}] = {target}")
            if index not in uses:
                # The value is not read; the module runs for its effects, such as traces or running statistics.
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

    def _uses(self) -> dict[int, list[int]]:
        """Return, for every value that is read, the places in the order of its readers."""
        plan, found = self.plan, dict[int, list[int]]()
        running = [(place, plan.nodes[index]) for place, index in enumerate(plan.order)]
        for place, sources in [(place, node.sources) for place, node in running if node.role != "identity"]:
            for source in sources:
                found.setdefault(self._source(source), []).append(place)
        for index in (plan.output, *(plan.tags[tag] for tag in plan.memory)):
            found.setdefault(self._source(index), []).append(len(plan.order))
        return found

    def _inlined(self, uses: dict[int, list[int]], captured: set[int]) -> set[int]:
        """Return the module nodes that are written as the last operand of the sum which alone reads them."""
        nodes = self.plan.nodes
        running = [index for index in self.plan.order if nodes[index].role not in _WITHOUT_STATEMENT]
        # Operands are computed left to right, so the last one may be computed in the sum if it directly precedes.
        return {
            before
            for before, index in pairwise(running)
            if nodes[index].role in ("add", "merge") and self._source(nodes[index].inputs[-1]) == before
            if nodes[before].name and len(uses[before]) == 1 and before not in captured
        }

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
