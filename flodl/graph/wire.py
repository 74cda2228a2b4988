"""Nodes from recorded verbs, and the faults that only the order of the verbs shows.

Wiring continues after a fault, so that one `build()` reports all of them. Rules that need the finished set of
nodes (cycles, keyword arguments, labels, names) are in `flow`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from flodl.errors import nearest
from flodl.graph.control import ForLoop, Gate, MapRows, MapSlices, MapWhole, Switch, UntilLoop, WhileLoop
from flodl.graph.nodes import Fault, Function, Input, Node, Plan, Reference, VerbCall

_ENDINGS = {"loop_body": ("for_n", "while_cond", "until_cond"), "map": ("each", "over", "slices")}
_LOOPS = {"for_n": ForLoop, "while_cond": WhileLoop, "until_cond": UntilLoop}


class Draft:
    """The nodes of a chain, wired verb by verb.

    Args:
        steps: the recorded verbs.
        entry: name of the graph's first argument.

    Attributes:
        faults: everything that was found wrong.
        modules: modules by node index.
    """

    def __init__(self, steps: Sequence[VerbCall], entry: str) -> None:
        self.nodes: list[Node] = []
        self.modules: dict[int, nn.Module] = {}
        self.inputs: list[Input] = []
        self.tags: dict[str, int] = {}
        self.groups: dict[str, tuple[str, ...]] = {}
        self.memory: list[str] = []
        self.internal: dict[str, int] = {}
        self.label: str | None = None
        self.faults: list[Fault] = []
        self._current: list[int] = []
        self._targets: list[int] = []
        self._pending_fork: int | None = None
        self._open: VerbCall | None = None
        self._awaited: dict[str, VerbCall] = {}
        # Inputs exist from the start of a call, so a reference may come before their declaration.
        self._later_inputs = {
            name for step in steps if step.verb == "input" for name in step.args["names"] if isinstance(name, str)
        }
        self._step = steps[0]
        if not isinstance(entry, str) or not entry.isidentifier():
            self._fault(f"the entry is called {entry!r}, expected a valid argument name")
            entry = "input"
        self._node("entry", []).id = entry
        self.inputs.append(Input(entry, 0))
        for step in steps:
            self._step = step
            if self._open is not None and step.verb not in _ENDINGS[self._open.verb]:
                self._report_open()
            getattr(self, f"_{step.verb}")(**step.args)
        self._finish()

    @property
    def output(self) -> int:
        """Index of the returned node."""
        return self._current[0]

    def plan(self, order: list[int]) -> Plan:
        """Return the plan of a draft without faults."""
        internal = {member for tag in self.internal for member in self.groups.get(tag, (tag,))}
        internal |= {tag for tag in self.tags if tag.startswith("_")}
        return Plan(
            nodes=tuple(self.nodes),
            order=tuple(order),
            inputs=tuple(self.inputs),
            output=self.output,
            tags=self.tags,
            groups=self.groups,
            memory=tuple(self.memory),
            internal=frozenset(internal),
            label=self.label,
        )

    def _finish(self) -> None:
        if self._open is not None:
            self._report_open()
        for node in self.nodes:
            if node.index in self.modules:
                node.name = node.name or (node.tags[0] if node.tags else node.id)
            node.role = "module" if node.name else node.kind
            # References to inputs that were declared later get their node now.
            node.references = tuple(
                Reference(r.keyword, r.tag, self.tags.get(r.tag, 0)) if r.source < 0 else r for r in node.references
            )
        for tag, step in self._awaited.items():
            hint = nearest(tag, self.tags)
            self._fault(
                f"refers to {tag!r}, which no step tags{hint}. Tag it or declare it by input({tag!r})", step=step
            )
        if len(self._current) > 1:
            self._fault(f"the graph ends with {len(self._current)} open streams. Close them with merge()")

    # verbs, named as in the builder

    def _from_(self, module: nn.Module | None, name: str | None) -> None:
        if module is None:
            self._current = [self._node("identity", [0]).index]
        else:
            self._single(self._module_node(module, [0], name))

    def _through(self, module: nn.Module, name: str | None) -> None:
        self._single(self._module_node(module, self._stream(), name))

    def _fork(self, module: nn.Module, name: str | None) -> None:
        node = self._module_node(module, self._stream(), name)
        self._targets, self._pending_fork = [node.index], node.index

    def _also(self, module: nn.Module, name: str | None) -> None:
        stream = self._stream()
        node = self._module_node(module, stream, name)
        self._single(self._node("add", [stream[0], node.index]), target=node)

    def _also_with(self, skip: nn.Module, main: nn.Module, name: str | None, skip_name: str | None) -> None:
        stream = self._stream()
        side = self._module_node(skip, stream, skip_name)
        node = self._module_node(main, stream, name)
        self._single(self._node("add", [side.index, node.index]), target=node)

    def _split(self, modules: tuple[nn.Module, ...], names: Any) -> None:
        stream = self._stream()
        if len(modules) < 2:
            self._fault(f"found {len(modules)} modules, expected at least two, one for each stream")
        given = list(names) if isinstance(names, Sequence) and not isinstance(names, str) else None
        if names is not None and (given is None or len(given) != len(modules)):
            found = names if given is None else f"{len(given)} names"
            self._fault(f"found {found!r} for {len(modules)} modules, expected a list of one name for each")
            given = None
        made = [self._module_node(m, stream, given[i] if given else None).index for i, m in enumerate(modules)]
        if made:
            self._current, self._targets, self._pending_fork = made, list(made), None

    def _merge(self, how: Any, dim: Any, name: str | None) -> None:
        if len(self._current) < 2:
            self._fault("found one stream, expected several. merge closes the streams that split opened")
        if not isinstance(how, str) and callable(how):
            node = self._module_node(how, self._current, name)
        else:
            if not isinstance(how, str) or how not in ("add", "mean", "concat"):
                self._fault(f"found {how!r}, expected 'add', 'mean', 'concat', a function or an nn.Module")
            if not isinstance(dim, int) or isinstance(dim, bool) or (dim != -1 and how != "concat"):
                self._fault(f"found dim={dim!r} with {how!r}, expected an int, and only with 'concat'")
            if name is not None:
                self._fault(f"found name={name!r} with {how!r}, expected a name only for a function or an nn.Module")
            node = self._node("merge", self._current, mode=f"concat {dim}" if how == "concat" else str(how))
        self._single(node)

    def _tag(self, tag: str) -> None:
        if self._pending_fork is not None:
            index, self._pending_fork = self._pending_fork, None
        elif len(self._current) > 1:
            self._fault(f"found {len(self._current)} open streams. Use tag_group({tag!r}), or merge() first")
            return
        else:
            index = self._current[0]
        self._name(tag, index)

    def _tag_group(self, tag: str) -> None:
        self._pending_fork = None
        if len(self._current) < 2:
            self._fault(f"found one stream, expected several. Use tag({tag!r})")
        elif self._is_new_name(tag):
            members = tuple(f"{tag}_{i}" for i in range(len(self._current)))
            for member, index in zip(members, self._current, strict=True):
                self._name(member, index)
            self.groups[tag] = members

    def _input(self, names: tuple[str, ...], required: bool, default: Any) -> None:
        if not required and not _is_constant(default):
            self._fault(f"found default {default!r}, expected None, a bool, an int, a finite float or a string")
            default = None
        if not names:
            self._fault("found no argument, expected at least one name")
        for name in names:
            if name in ("outputs", "self") or name in [declared.name for declared in self.inputs]:
                self._fault(f"the name {name!r} is taken already. Choose another")
                continue
            node = self._node("input", [], prefix=f"input_{name}")
            if self._name(name, node.index):
                self.inputs.append(Input(name, node.index, required, default))

    def _using(self, pairs: tuple[tuple[str, str], ...]) -> None:
        if not pairs:
            return
        nodes = [self.nodes[i] for i in self._targets]
        if not nodes:
            self._fault("there is nothing to feed. Use it directly after a step with a module")
            return
        if nodes[0].index not in self.modules:
            self._fault("a merge takes no references. Use it after the step that reads them", node=nodes[0])
            return
        for keyword, tag in pairs:
            if not self._is_name(tag):
                continue
            source = self._source(tag)
            for node in nodes:
                if any(r.keyword == keyword for r in node.references):
                    self._fault(f"the keyword {keyword!r} is given twice", node=node)
                else:
                    node.references += (Reference(keyword, tag, source),)

    def _loop_body(self, body: nn.Module, name: str | None) -> None:
        self._open = self._step

    _map = _loop_body

    def _loop(self, count: int, condition: nn.Module | None = None) -> None:
        kind = _LOOPS[self._step.verb]
        body, name = self._closed()
        count = self._at_least_one(count, "iterations")
        if kind is not ForLoop:
            condition = self._checked(condition, "condition")
        self._single(self._module_node(kind(body, count, condition), self._stream(), name, "loop"))

    _for_n = _while_cond = _until_cond = _loop

    def _routed(self, router: nn.Module, modules: tuple[nn.Module, ...], name: str | None) -> None:
        verb = self._step.verb
        kind, one, several = (Gate, "expert", "experts") if verb == "gate" else (Switch, "branch", "branches")
        if len(modules) < 2:
            self._fault(f"found {len(modules)} {several}, expected at least two")
        members = [self._checked(module, f"{one} {i}") for i, module in enumerate(modules)]
        module = kind(self._checked(router, "router"), members)
        self._single(self._module_node(module, self._stream(), name, verb))

    _gate = _switch = _routed

    def _each(self, batched: bool) -> None:
        self._mapped(MapWhole if batched else MapRows, self._stream())

    def _over(self, tag: str, batched: bool) -> None:
        stream = self._stream()
        if self._is_name(tag) and tag not in self.tags:
            self._fault(f"found {tag!r}, which no earlier step tags{nearest(tag, self.tags)}")
        elif isinstance(tag, str):
            stream = [self.tags.get(tag, stream[0])]
        self._mapped(MapWhole if batched else MapRows, stream)

    def _slices(self, count: int) -> None:
        count = self._at_least_one(count, "slices")
        self._mapped(lambda body: MapSlices(body, count), self._stream())

    def _mapped(self, kind: Any, stream: list[int]) -> None:
        body, name = self._closed()
        self._single(self._module_node(kind(body), stream, name, "map"))

    def _label(self, label: str) -> None:
        if isinstance(label, str) and label:
            self.label = label
        else:
            self._fault(f"found label {label!r}, expected a non-empty string")

    def _internal(self, tags: tuple[str, ...]) -> None:
        for tag in tags:
            if self._is_name(tag):
                self.internal.setdefault(tag, self._step.position)

    # building blocks

    def _fault(self, problem: str, *, node: Node | None = None, step: VerbCall | None = None) -> None:
        step = step or self._step
        self.faults.append(Fault(step.position, step.verb.rstrip("_"), node.id if node else "", problem))

    def _node(self, kind: str, inputs: Sequence[int], *, prefix: str = "", mode: str = "") -> Node:
        step, index = self._step, len(self.nodes)
        node = Node(index, f"{prefix or kind}_{index}", kind, inputs=tuple(inputs), mode=mode)
        node.position, node.verb = step.position, step.verb.rstrip("_")
        self.nodes.append(node)
        return node

    def _module_node(self, module: Any, inputs: list[int], name: str | None, kind: str = "") -> Node:
        module = self._checked(module, "module")
        node = self._node(kind or _kind_of(module), inputs)
        node.name = name or ""
        self.modules[node.index] = module
        return node

    def _checked(self, module: Any, role: str) -> nn.Module:
        if isinstance(module, nn.Module):
            return module
        if isinstance(module, type) and issubclass(module, nn.Module):
            self._fault(f"the {role} is the class {module.__name__}, expected an instance: {module.__name__}(...)")
        elif callable(module):
            return Function(module)
        else:
            self._fault(f"the {role} is {type(module).__name__}, expected an nn.Module or a function")
        return Function(_accept_anything)

    def _at_least_one(self, count: Any, what: str) -> int:
        if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
            return count
        self._fault(f"found {count!r} {what}, expected an int of at least 1")
        return 1

    def _stream(self) -> list[int]:
        if len(self._current) > 1:
            self._fault(f"found {len(self._current)} streams, expected one. Close them with merge() first")
        return self._current[:1]

    def _single(self, node: Node, target: Node | None = None) -> None:
        """Continue with one stream; ``target`` is the node that `using` feeds."""
        self._current, self._targets, self._pending_fork = [node.index], [(target or node).index], None

    def _is_name(self, tag: Any) -> bool:
        if isinstance(tag, str) and tag and "." not in tag:
            return True
        self._fault(f"found tag {tag!r}, expected a non-empty string without dots")
        return False

    def _is_new_name(self, tag: Any) -> bool:
        if not self._is_name(tag):
            return False
        if tag in self.tags or tag in self.groups:
            self._fault(f"the tag {tag!r} exists already. Choose another name")
            return False
        return True

    def _name(self, tag: str, index: int) -> bool:
        if not self._is_new_name(tag):
            return False
        self.tags[tag] = index
        self.nodes[index].tags += (tag,)
        if self._awaited.pop(tag, None) is not None:
            self.memory.append(tag)
        return True

    def _source(self, tag: str) -> int:
        """Return the node that provides a tag, a reader of its previous value, or -1 for a later input."""
        if tag in self.tags:
            return self.tags[tag]
        if tag in self._later_inputs:
            return -1
        self._awaited.setdefault(tag, self._step)
        return self._node("state_read", [], prefix=f"state_read_{tag}", mode=tag).index

    def _closed(self) -> tuple[nn.Module, str | None]:
        """Close the open loop or map and return its body and name."""
        opened, self._open = self._open, None
        assert opened is not None, "only loop_body() and map() return the verbs that close them"
        return self._checked(opened.args["body"], "body"), opened.args["name"]

    def _report_open(self) -> None:
        opened, self._open = self._open, None
        assert opened is not None
        endings = ", ".join(f"{ending}()" for ending in _ENDINGS[opened.verb])
        self._fault(f"was never ended. End it with one of {endings}", step=opened)


def _kind_of(module: nn.Module) -> str:
    """Return the prefix of a module's node id: its ``flodl_name``, else its class name in lower case."""
    given = getattr(module, "flodl_name", None)
    name = given if isinstance(given, str) else type(module).__name__
    return "".join(c if c.isalnum() else "_" for c in name.lower()) or "module"


def _accept_anything(stream: Any, *others: Any, **named: Any) -> Any:
    """Replace a faulty part, so that it causes no further faults."""
    return stream


def _is_constant(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))
