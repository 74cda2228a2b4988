"""``flodl-hf docs``: entries of the API reference in the terminal. The site lists the same modules."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, nearest
from flodl_hf.cli.options import JSON, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, tell

_OF_LIBRARIES = re.compile(r"flodl_hf\.compat\.(?!pipelines$)")
"""Modules that import libraries that need not be installed: their entries are read from the source."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A class or function that is read from its source."""

    name: str
    kind: str
    signature: str
    description: str
    members: tuple[Parsed, ...] = ()


@reporting
@with_parameters((
    argument("name", str, "NAME", "finetune, Options or flodl.train.Trainer.", ""),
    option("listed", bool, "Print all public names.", "--list", default=False), JSON,
))  # fmt: skip
def command(name: str, listed: bool, json_output: bool) -> None:
    """Print the reference entry of a public name: signature, description, options and methods.

    Without NAME, or with --list, print all public names with the first line of their descriptions.
    """
    if listed or not name:
        found = [{"name": full, "summary": _doc(value).split("\n", 1)[0]} for full, value in public_names()]
        if json_output:
            emit_json(found)
            return
        for one in found:
            tell(f"{one['name']}\n    {one['summary']}")
        return
    entry = describe(name)
    if json_output:
        emit_json(entry)
        return
    tell(f"{entry['name']}{entry['signature']}", bold=True)
    tell(f"\n{entry['description']}")
    for title in ("options", "members"):
        if entry[title]:
            tell(f"\n{title.capitalize()}:", bold=True)
            for one in entry[title]:
                tell(f"  {one['name']}{one['default']}\n      {one['summary']}")


@cache
def public_modules() -> tuple[str, ...]:
    """Return the modules with an ``__all__`` by name, those of ``flodl_hf`` first; the names in it are documented."""
    found: list[str] = []
    for package in ("flodl_hf", "flodl"):
        root = _source(package).parent
        paths = (path for path in root.rglob("*.py") if re.search(r"^__all__\b", path.read_text("utf-8"), re.MULTILINE))
        names = (".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in paths)
        found += sorted(name.removesuffix(".__init__") for name in names)
    return tuple(found)


def public_names() -> Iterator[tuple[str, Any]]:
    """Yield the full name and object of each public name once; the first module that has an object documents it."""
    seen: list[Any] = []
    for module in public_modules():
        if _OF_LIBRARIES.match(module):
            yield from ((f"{module}.{name}", parsed(module, name)) for name in exported(module))
            continue
        try:
            found = import_module(module)
        except ImportError:  # a module of an extra that is not installed
            continue
        for name in found.__all__:
            value = getattr(found, name)
            if not any(value is other for other in seen):
                if inspect.isclass(value) or inspect.isfunction(value):
                    seen.append(value)
                yield f"{module}.{name}", value


def exported(module: str) -> list[str]:
    """Return the names in the ``__all__`` of a module, which is not imported."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def parsed(module: str, name: str) -> Parsed:
    """Return the class or function of a module, or of the module that it imports the name from."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return parsed(node.module or "", name)
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name == name:
            return _parsed(node)
    raise LookupError(f"{module}: found no class or function {name}")


def _source(module: str) -> Path:
    spec = find_spec(module)
    return Path(str(spec and spec.origin))


def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module).read_text("utf-8"))


def _parsed(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Parsed:
    functions = {part.name: part for part in node.body if isinstance(part, _FUNCTIONS)}
    made = functions.get("__init__") if isinstance(node, ast.ClassDef) else node
    signature = (
        "(**options)" if made is None else f"({ast.unparse(made.args).removeprefix('self, ').removeprefix('self')})"
    )
    if isinstance(node, _FUNCTIONS) and node.returns is not None:
        signature += f" -> {ast.unparse(node.returns)}"
    kind, inner = ("class", functions) if isinstance(node, ast.ClassDef) else ("function", {})
    members = tuple(_parsed(part) for part in inner.values() if not part.name.startswith("_"))
    return Parsed(node.name, kind, signature, ast.get_docstring(node) or "", members)


def describe(name: str) -> dict[str, Any]:
    """Return the entry of a public name, or of a method of one.

    Args:
        name: full name, or the last parts of it: ``finetune``, ``Trainer.fit``.

    Raises:
        ConfigError: there is no such name.
    """
    owner, _, member = name.rpartition(".")
    known = []
    for full, value in public_names():  # modules are imported one after another, so a match saves imports
        if f".{full}".endswith(f".{name}"):
            return _entry(full, value)
        if owner and f".{full}".endswith(f".{owner}"):
            members = {one.name: one for one in value.members} if isinstance(value, Parsed) else {}
            if member in members or (inspect.isclass(value) and hasattr(value, member)):
                return _entry(f"{full}.{member}", members.get(member) or getattr(value, member))
        known.append(full.rpartition(".")[2])
    raise ConfigError(
        f"docs: found {name!r}, expected a public name{nearest(name.rpartition('.')[2], known)} "
        "(flodl-hf docs --list prints all names)."
    )


def _entry(full: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Parsed):
        members = [{"name": one.name, "default": "", "summary": _doc(one).split("\n", 1)[0]} for one in value.members]
        return {**dataclasses.asdict(value), "name": full, "options": [], "members": members}
    options = list(options_of(value))
    try:
        signature = "(**options)" if options else str(inspect.signature(value)) if callable(value) else ""
    except ValueError:
        signature = ""
    return {
        "name": full,
        "kind": "class" if inspect.isclass(value) else "function" if callable(value) else "value",
        "signature": signature,
        "description": _doc(value),
        "options": options,
        "members": list(_members(value)) if inspect.isclass(value) else [],
    }


def options_of(value: Any) -> Iterator[dict[str, str]]:
    """Yield name, default and description of each field of a dataclass that describes its fields as options."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if "help" in field.metadata:
                known = field.default is not dataclasses.MISSING
                default = f" = {field.default!r}" if known else ""
                yield {"name": field.name, "default": default, "summary": field.metadata["help"]}


def _members(kind: type[Any]) -> Iterator[dict[str, str]]:
    described = {name for other in kind.__mro__ if other.__module__.startswith("flodl") for name in vars(other)}
    for name in sorted(name for name in described if not name.startswith("_")):
        member = inspect.getattr_static(kind, name)
        if callable(member) or isinstance(member, (property, classmethod, staticmethod)):
            yield {"name": name, "default": "", "summary": _doc(getattr(kind, name)).split("\n", 1)[0]}


def _doc(value: Any) -> str:
    if isinstance(value, Parsed):
        return value.description
    described = inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property)
    return (inspect.getdoc(value) or "") if described else f"{type(value).__name__}: {value!r}"[:200]
