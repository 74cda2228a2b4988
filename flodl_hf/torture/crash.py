"""What a folder may look like after a power loss: every state that the order of steps and syncs allows.

Decides what a disk promises. Contents of a file last once the file is synced, names in a folder once the folder is
synced; until then each may be lost by itself, contents also in part or as zeros. Nothing else is assumed, so the states
are more than any one file system shows. Names are moved in one step or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flodl_hf.torture.disk import Step

__all__ = ["CrashState", "Replay", "Tree", "lay_out", "tree_of"]

Tree = dict[str, bytes | None]
"""Files by relative path, and folders as None."""


def tree_of(folder: Path) -> Tree:
    """Return what is in a folder: the contents of files by relative path, None for folders."""
    found: Tree = {}
    for root, folders, files in os.walk(folder):
        base = os.path.relpath(root, folder)
        for name in folders:
            found[os.path.normpath(os.path.join(base, name))] = None
        for name in files:
            found[os.path.normpath(os.path.join(base, name))] = Path(root, name).read_bytes()
    return found


@dataclass
class _Node:
    """A file's bytes, or a folder's names."""

    names: dict[str, _Node] | None = None
    data: bytes = b""


@dataclass(frozen=True)
class _Op:
    """A step whose names were followed to nodes when it was done."""

    kind: str
    node: _Node
    folder: _Node | None = None
    name: str = ""
    target: _Node | None = None
    target_name: str = ""
    other: _Node | None = None
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class CrashState:
    """One state after a power loss.

    Attributes:
        after: how many steps had been done.
        lost: the steps that left no trace.
        harmed: writes that left another trace: "lost", "half" or "zeros".
    """

    after: int
    lost: frozenset[int]
    harmed: tuple[tuple[int, str], ...]


def lay_out(tree: Tree, folder: Path) -> None:
    """Make a folder that looks so."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(tree):
        data = tree[path]
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def _choices(names: Sequence[int], contents: Sequence[int]) -> Iterator[tuple[set[int], dict[int, str]]]:
    """Yield which names are lost, and what becomes of which contents."""
    everything: dict[int, str] = {}
    nothing = dict.fromkeys(contents, "lost")
    lots = [set(), set(names), *(set(names[kept:]) for kept in range(1, len(names))), *({name} for name in names)]
    for lost in lots:
        yield lost, everything
        yield lost, nothing
    for place in contents:
        for word in ("lost", "half", "zeros"):
            yield set(), {place: word}


class Replay:
    """Steps done again to what was there before, with some of them left out.

    Args:
        before: the folder beforehand, all of it on disk.
        steps: what was done to it, in order.
    """

    def __init__(self, before: Tree, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.root = _grown(before)
        self._start: dict[int, tuple[_Node, dict[str, _Node] | None, bytes]] = {}
        self._remember(self.root)
        self.ops = [self._followed(step) for step in steps]
        self._lasting = self._synced()

    def states(self) -> Iterator[CrashState]:
        """Yield every distinct pair of a moment and a state that a power loss at that moment may leave.

        Names: all of them, none that is not synced, each prefix of those, all but one. Contents: all, none that is
        not synced, and each write by itself not, by half or as zeros.
        """
        for moment in range(len(self.steps) + 1):
            names, contents = self._pending(moment)
            seen: set[int] = set()
            for lost, harmed in _choices(names, contents):
                state = CrashState(moment, frozenset(lost), tuple(harmed.items()))
                key = hash(frozenset(self.tree(state).items()))
                if key not in seen:
                    seen.add(key)
                    yield state

    def tree(self, state: CrashState) -> Tree:
        """Return what the folder looks like in a state."""
        self._reset()
        harmed = dict(state.harmed)
        for i in range(state.after):
            if i not in state.lost and self.ops[i].kind != "sync":
                self._do(self.ops[i], harmed.get(i, ""))
        found: Tree = {}
        _listed(self.root, "", found)
        return found

    def final(self) -> Tree:
        """Return what all steps make of the folder, none of them lost."""
        return self.tree(CrashState(len(self.steps), frozenset(), ()))

    def told(self, state: CrashState) -> str:
        """Return a state in words."""
        last = str(self.steps[state.after - 1]) if state.after else "nothing"
        words = [f"lost: {self.steps[i]}" for i in sorted(state.lost)]
        words += [f"{word}: {self.steps[i]}" for i, word in state.harmed]
        return f"after step {state.after} ({last}){': ' if words else ''}{'; '.join(words)}"

    def _remember(self, node: _Node) -> None:
        self._start[id(node)] = (node, None if node.names is None else dict(node.names), node.data)
        for inner in (node.names or {}).values():
            self._remember(inner)

    def _reset(self) -> None:
        for node, names, data in self._start.values():
            node.names, node.data = None if names is None else dict(names), data

    def _at(self, path: str) -> _Node:
        node = self.root
        for part in [] if path == "." else path.split(os.sep):
            node = (node.names or {})[part]
        return node

    def _followed(self, step: Step) -> _Op:
        head, name = os.path.split(step.path)
        folder = self._at(head or ".")
        if step.kind in ("create", "mkdir"):
            made = _Node({} if step.kind == "mkdir" else None)
            self._start[id(made)] = (made, None if made.names is None else {}, b"")
            op = _Op(step.kind, made, folder, name)
        elif step.kind in ("rename", "exchange"):
            other_head, other_name = os.path.split(step.other)
            target = self._at(other_head or ".")
            op = _Op(step.kind, self._at(step.path), folder, name, target, other_name,
                     (target.names or {}).get(other_name))  # fmt: skip
        elif step.kind in ("unlink", "rmdir"):
            op = _Op(step.kind, self._at(step.path), folder, name)
        else:
            op = _Op(step.kind, self._at(step.path), offset=step.offset, data=step.data)
        self._do(op)
        return op

    def _do(self, op: _Op, how: str = "") -> None:
        if op.kind in ("write", "cut"):
            self._change(op, how)
            return
        if op.folder is None or op.folder.names is None:
            return
        if op.kind in ("create", "mkdir"):
            op.folder.names[op.name] = op.node
        elif op.kind in ("unlink", "rmdir"):
            if op.folder.names.get(op.name) is op.node:
                del op.folder.names[op.name]
        elif op.target is not None and op.target.names is not None:
            if op.folder.names.get(op.name) is op.node:
                del op.folder.names[op.name]
            if op.kind == "exchange" and op.other is not None:
                op.folder.names[op.name] = op.other
            op.target.names[op.target_name] = op.node

    @staticmethod
    def _change(op: _Op, how: str) -> None:
        data = op.node.data
        if op.kind == "cut":
            op.node.data = data[: op.offset].ljust(op.offset, b"\0")
            return
        written = {"": op.data, "lost": b"", "half": op.data[: len(op.data) // 2], "zeros": bytes(len(op.data))}[how]
        if written:
            start = data[: op.offset].ljust(op.offset, b"\0")
            op.node.data = start + written + data[op.offset + len(written) :]

    def _pending(self, moment: int) -> tuple[list[int], list[int]]:
        """Return the steps before a moment that change names, and those that change contents, not yet synced."""
        left = [i for i in range(moment) if self.ops[i].kind != "sync" and self._lasting[i] >= moment]
        contents = [i for i in left if self.ops[i].kind in ("write", "cut")]
        return [i for i in left if self.ops[i].kind not in ("write", "cut")], contents

    def _synced(self) -> list[int]:
        """Return for each step the step that makes it last, or more than there are."""
        never, found = len(self.ops), [0] * len(self.ops)
        synced: dict[int, int] = {}
        for i in reversed(range(never)):
            op = self.ops[i]
            where = op.node if op.kind in ("write", "cut", "sync") else op.target or op.folder
            if op.kind == "sync":
                synced[id(where)] = i
            found[i] = synced.get(id(where), never)
        return found


def _grown(tree: Tree) -> _Node:
    root = _Node({})
    for path in sorted(tree):
        node = root
        *above, name = path.split(os.sep)
        for part in above:
            assert node.names is not None
            node = node.names.setdefault(part, _Node({}))
        assert node.names is not None
        data = tree[path]
        node.names[name] = _Node({}) if data is None else _Node(None, data)
    return root


def _listed(node: _Node, base: str, found: Tree) -> None:
    for name, inner in (node.names or {}).items():
        path = os.path.join(base, name)
        found[path] = None if inner.names is not None else inner.data
        _listed(inner, path, found)
