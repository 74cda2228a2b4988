"""From recorded steps to nodes: what each verb means, and the faults that only its place in the chain shows.

Wiring goes on after a fault, so that one `build()` reports them all. Rules that need the finished set of
nodes (cycles, keyword arguments, labels, names) stand in `check`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flodl.errors import nearest
from flodl.graph.control import Gate, MapRows, MapSlices, MapWhole, Switch
from flodl.graph.function import Function
from flodl.graph.loops import ForLoop, UntilLoop, WhileLoop
from flodl.graph.nodes import Fault, Input, Reference, VerbCall, kind_of

__all__ = ["Draft", "DraftNode", "wire"]


@dataclass
class DraftNode:
    """A node while its references and tags may still grow; fields as in `nodes.Node`."""

    index: int
    id: str
    kind: str
    inputs: list[int] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    module: nn.Module | None = None
    given_name: str | None = None
    position: int = 0
    verb: str = ""
    mode: str = ""

    @property
    def name(self) -> str:
        """The child's name: given, else the first tag, else the id; empty without a module."""
        if self.module is None:
            return ""
        return self.given_name or (self.tags[0] if self.tags else self.id)


@dataclass
class Draft:
    """A wired chain: nodes, names and the faults met on the way."""

    nodes: list[DraftNode] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    memory: list[str] = field(default_factory=list)
    internal: dict[str, int] = field(default_factory=dict)
    label: str | None = None
    output: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by child name, in the order of recording."""
        return {node.name: node.module for node in self.nodes if node.module is not None}


def wire(steps: Sequence[VerbCall], entry: str) -> Draft:
    """Return the nodes that the steps describe, with every fault found on the way."""
    return _Wiring(steps, entry).run()


class _Wiring:
    """The cursors of a chain while its steps are read."""

    def __init__(self, steps: Sequence[VerbCall], entry: str) -> None:
        self.steps = steps
        self.draft = Draft()
        self.counter = 0
        self.current: list[int] = []
        self.targets: list[int] = []
        self.fork: int | None = None
        self.body: VerbCall | None = None
        self.awaited: dict[str, VerbCall] = {}
        # Inputs are there from the start of a call, so a reference may stand before their declaration.
        self.later_inputs = {
            name for step in steps if step.verb == "input" for name in step.args["names"] if isinstance(name, str)
        }
        self.waiting: list[tuple[DraftNode, int, str]] = []
        self.step = steps[0]
        if not isinstance(entry, str) or not entry.isidentifier():
            self._fault(f"the entry is called {entry!r}, which cannot be an argument's name")
            entry = "input"
        self._append("entry", entry)
        self.draft.inputs.append(Input(entry, 0))

    def run(self) -> Draft:
        """Read every step in order and close what stays open."""
        for step in self.steps:
            self.step = step
            if self.body is not None and step.verb not in _ENDINGS[self.body.verb]:
                self._unfinished()
            getattr(self, f"_{step.verb}")(**step.args)
        if self.body is not None:
            self._unfinished()
        draft = self.draft
        for node, slot, tag in self.waiting:
            if tag in draft.tags:
                old = node.references[slot]
                node.references[slot] = Reference(old.keyword, tag, draft.tags[tag])
        for tag, step in self.awaited.items():
            hint = nearest(tag, draft.tags)
            self._fault(
                f"refers to {tag!r}, which no step tags{hint}; tag it or declare it with input({tag!r})",
                step=step,
            )
        draft.memory = [t for t in draft.memory if t in draft.tags]
        if len(self.current) > 1:
            self._fault(
                f"the graph ends with {len(self.current)} open streams; close them with merge()",
                step=self.steps[-1],
            )
        draft.output = self.current[0]
        return draft

    # verbs, named as in the builder

    def _from_(self, module: nn.Module | None, name: str | None) -> None:
        if module is None:
            self.current = [self._node("identity", [0]).index]
        else:
            node = self._module_node(module, [0], name)
            self.current, self.targets = [node.index], [node.index]

    def _through(self, module: nn.Module, name: str | None) -> None:
        node = self._module_node(module, self._stream(), name)
        self._advance([node.index], [node.index])

    def _fork(self, module: nn.Module, name: str | None) -> None:
        node = self._module_node(module, self._stream(), name)
        self.targets, self.fork = [node.index], node.index

    def _also(self, module: nn.Module, name: str | None) -> None:
        stream = self._stream()
        node = self._module_node(module, stream, name)
        total = self._node("add", [stream[0], node.index])
        self._advance([total.index], [node.index])

    def _also_with(self, skip: nn.Module, main: nn.Module, name: str | None, skip_name: str | None) -> None:
        stream = self._stream()
        side = self._module_node(skip, stream, skip_name)
        node = self._module_node(main, stream, name)
        total = self._node("add", [side.index, node.index])
        self._advance([total.index], [node.index])

    def _split(self, modules: tuple[nn.Module, ...], names: Any) -> None:
        stream = self._stream()
        if len(modules) < 2:
            self._fault(f"{len(modules)} modules given; a split needs at least two, one for each stream")
        if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
            self._fault(f"the names are {names!r}; give a list with one name for each module")
            names = None
        if names is not None and len(names) != len(modules):
            self._fault(f"{len(names)} names given for {len(modules)} modules")
            names = None
        made = [self._module_node(m, stream, names[i] if names else None).index for i, m in enumerate(modules)]
        if made:
            self._advance(made, list(made))

    def _merge(self, how: Any, dim: Any, name: str | None) -> None:
        if len(self.current) < 2:
            self._fault("there is one stream; merge closes the streams that split opened")
        if not isinstance(how, str) and callable(how):
            node = self._module_node(how, list(self.current), name)
        else:
            if not isinstance(how, str) or how not in ("add", "mean", "concat"):
                self._fault(f"cannot merge by {how!r}; give 'add', 'mean', 'concat', a function or an nn.Module")
            if not isinstance(dim, int) or isinstance(dim, bool) or (dim != -1 and how != "concat"):
                self._fault(f"found dim={dim!r} with {how!r}; expected an int, and only with 'concat'")
            if name is not None:
                self._fault(f"found name={name!r} with {how!r}; expected a name only for a function or an nn.Module")
            node = self._node("merge", list(self.current), mode=f"concat {dim}" if how == "concat" else str(how))
        self._advance([node.index], [node.index])

    def _tag(self, tag: str) -> None:
        if self.fork is not None:
            index, self.fork = self.fork, None
        elif len(self.current) > 1:
            self._fault(f"{len(self.current)} streams are open; name them with tag_group({tag!r}), or merge() first")
            return
        else:
            index = self.current[0]
        self._name(tag, index)

    def _tag_group(self, tag: str) -> None:
        self.fork = None
        draft = self.draft
        if not self._is_name(tag):
            return
        if len(self.current) < 2:
            self._fault(f"there is one stream; name it with tag({tag!r})")
            return
        if tag in draft.groups:
            self._fault(f"the tag group {tag!r} exists already")
            return
        if tag in draft.tags:
            self._fault(f"the tag group {tag!r} has the name of a tag")
            return
        members = tuple(f"{tag}_{i}" for i in range(len(self.current)))
        for member, index in zip(members, self.current, strict=True):
            self._name(member, index)
        draft.groups[tag] = members

    def _input(self, names: tuple[str, ...], required: bool, default: Any) -> None:
        if not required and not _is_constant(default):
            self._fault(f"the default {default!r} is not None, a bool, an int, a finite float or a string")
            default = None
        if not names:
            self._fault("names no argument; give at least one name")
        for name in names:
            taken = {declared.name for declared in self.draft.inputs}
            if name in self.draft.tags or name in taken or name in self.draft.groups:
                self._fault(f"{name!r} is taken already; an input needs a name that no tag, group or input has")
                continue
            if name in ("outputs", "self"):
                self._fault(f"an input cannot be called {name!r}, which a graph's call uses itself")
                continue
            node = self._node("input", [], id_=f"input_{name}")
            if self._name(name, node.index):
                self.draft.inputs.append(Input(name, node.index, required, default))

    def _using(self, pairs: tuple[tuple[str, str], ...]) -> None:
        if not pairs:
            return
        nodes = [self.draft.nodes[i] for i in self.targets]
        if not nodes:
            self._fault("there is nothing to feed; put it right after a step that holds a module")
            return
        if nodes[0].module is None:
            self._fault("a merge takes no references; put it after the step whose module reads them", node=nodes[0])
            return
        for keyword, tag in pairs:
            if not self._is_name(tag):
                continue
            source = self._source(tag)
            for node in nodes:
                if any(r.keyword == keyword for r in node.references):
                    self._fault(f"the keyword {keyword!r} is given twice", node=node)
                    continue
                if source is None:
                    self.waiting.append((node, len(node.references), tag))
                node.references.append(Reference(keyword, tag, 0 if source is None else source))

    def _loop_body(self, body: nn.Module, name: str | None) -> None:
        self.body = self.step

    def _for_n(self, count: int) -> None:
        self._loop(ForLoop, count, None)

    def _while_cond(self, condition: nn.Module, count: int) -> None:
        self._loop(WhileLoop, count, condition)

    def _until_cond(self, condition: nn.Module, count: int) -> None:
        self._loop(UntilLoop, count, condition)

    def _loop(self, kind: Any, count: int, condition: nn.Module | None) -> None:
        begun = self._begun()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            self._fault(f"the number of iterations is {count!r}; it has to be an int of at least 1")
            count = 1
        body = self._checked(begun.args["body"], "body")
        if kind is not ForLoop:
            condition = self._checked(condition, "condition")
        self._composite("loop", kind(body, count, condition), self._stream(), begun.args["name"])

    def _gate(self, router: nn.Module, modules: tuple[nn.Module, ...], name: str | None) -> None:
        if len(modules) < 2:
            self._fault(f"{len(modules)} experts given; a gate needs at least two")
        experts = [self._checked(m, f"expert {i}") for i, m in enumerate(modules)]
        self._composite("gate", Gate(self._checked(router, "router"), experts), self._stream(), name)

    def _switch(self, router: nn.Module, modules: tuple[nn.Module, ...], name: str | None) -> None:
        if len(modules) < 2:
            self._fault(f"{len(modules)} branches given; a switch needs at least two")
        branches = [self._checked(m, f"branch {i}") for i, m in enumerate(modules)]
        self._composite("switch", Switch(self._checked(router, "router"), branches), self._stream(), name)

    def _map(self, body: nn.Module, name: str | None) -> None:
        self.body = self.step

    def _each(self, batched: bool) -> None:
        begun = self._begun()
        body = self._checked(begun.args["body"], "body")
        self._composite("map", MapWhole(body) if batched else MapRows(body), self._stream(), begun.args["name"])

    def _over(self, tag: str, batched: bool) -> None:
        begun = self._begun()
        body = self._checked(begun.args["body"], "body")
        stream = self._stream()
        if not self._is_name(tag):
            pass
        elif tag in self.draft.tags:
            stream = [self.draft.tags[tag]]
        else:
            self._fault(f"goes over {tag!r}, which no earlier step tags{nearest(str(tag), self.draft.tags)}")
        self._composite("map", MapWhole(body) if batched else MapRows(body), stream, begun.args["name"])

    def _slices(self, count: int) -> None:
        begun = self._begun()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            self._fault(f"the number of slices is {count!r}; it has to be an int of at least 1")
            count = 1
        body = self._checked(begun.args["body"], "body")
        self._composite("map", MapSlices(body, count), self._stream(), begun.args["name"])

    def _label(self, label: str) -> None:
        if not isinstance(label, str) or not label:
            self._fault(f"the label is {label!r}; give a non-empty string")
            return
        self.draft.label = label

    def _internal(self, tags: tuple[str, ...]) -> None:
        for tag in tags:
            if isinstance(tag, str):
                self.draft.internal.setdefault(tag, self.step.position)
            else:
                self._fault(f"{tag!r} cannot be a tag; give the name of one")

    # building blocks

    def _fault(self, problem: str, *, node: DraftNode | None = None, step: VerbCall | None = None) -> None:
        step = step or self.step
        self.draft.faults.append(Fault(step.position, step.verb.rstrip("_"), node.id if node else "", problem))

    def _append(self, kind: str, id_: str, **fields: Any) -> DraftNode:
        node = DraftNode(len(self.draft.nodes), id_, kind, position=self.step.position, verb=self.step.verb, **fields)
        self.draft.nodes.append(node)
        return node

    def _node(self, kind: str, inputs: list[int], *, id_: str | None = None, **fields: Any) -> DraftNode:
        self.counter += 1
        return self._append(kind, f"{id_ or kind}_{self.counter}", inputs=inputs, **fields)

    def _module_node(self, module: Any, inputs: list[int], name: str | None) -> DraftNode:
        checked = self._checked(module, "module")
        return self._node(kind_of(checked), list(inputs), module=checked, given_name=name)

    def _composite(self, kind: str, module: nn.Module, inputs: list[int], name: str | None) -> None:
        node = self._node(kind, list(inputs), module=module, given_name=name)
        self._advance([node.index], [node.index])

    def _checked(self, module: Any, role: str) -> nn.Module:
        if isinstance(module, nn.Module):
            return module
        if isinstance(module, type) and issubclass(module, nn.Module):
            self._fault(f"the {role} is the class {module.__name__}; give an instance, {module.__name__}(...)")
        elif callable(module):
            return Function(module)
        else:
            self._fault(f"the {role} is {type(module).__name__}; it has to be an nn.Module or a function")
        return Function(_stand_in)

    def _stream(self) -> list[int]:
        if len(self.current) > 1:
            self._fault(f"{len(self.current)} streams are open; close them with merge() first")
        return self.current[:1]

    def _advance(self, current: list[int], targets: list[int]) -> None:
        self.current, self.targets, self.fork = current, targets, None

    def _is_name(self, tag: Any) -> bool:
        if isinstance(tag, str) and tag and "." not in tag:
            return True
        self._fault(f"{tag!r} cannot be a tag; give a non-empty string without dots")
        return False

    def _name(self, tag: str, index: int) -> bool:
        if not self._is_name(tag):
            return False
        if tag in self.draft.tags or tag in self.draft.groups:
            kind = "tag" if tag in self.draft.tags else "tag group"
            self._fault(f"the {kind} {tag!r} exists already; give each value a name of its own")
            return False
        self.draft.tags[tag] = index
        self.draft.nodes[index].tags.append(tag)
        if self.awaited.pop(tag, None) is not None:
            self.draft.memory.append(tag)
        return True

    def _source(self, tag: str) -> int | None:
        """Return the node that provides a tag, a reader of its last value, or None for a later input."""
        if tag in self.draft.tags:
            return self.draft.tags[tag]
        if tag in self.later_inputs:
            return None
        self.awaited.setdefault(tag, self.step)
        return self._node("state_read", [], id_=f"state_read_{tag}", mode=tag).index

    def _begun(self) -> VerbCall:
        begun, self.body = self.body, None
        assert begun is not None, "the terminators are reachable only through loop_body() and map()"
        return begun

    def _unfinished(self) -> None:
        begun, self.body = self.body, None
        assert begun is not None
        wanted = ", ".join(f"{ending}()" for ending in _ENDINGS[begun.verb])
        self._fault(f"was begun and never ended; end it with one of {wanted}", step=begun)


_ENDINGS = {"loop_body": ("for_n", "while_cond", "until_cond"), "map": ("each", "over", "slices")}


def _stand_in(stream: Any, *others: Any, **named: Any) -> Any:
    """Take the place of a part that is a fault, so that it causes no further faults."""
    return stream


def _is_constant(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))
