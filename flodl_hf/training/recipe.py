"""Recipes: YAML files with options, with inheritance, overlays per environment, and the origin of each value.

A recipe is a map. ``inherit-from`` names one or several base recipes. In the environment ``ci``, ``run.ci.yaml``
overrides ``run.yaml``. Layers are merged from the base upwards: maps merge key by key, other values
replace, and ``null`` removes the inherited value, so that the default applies. The caller
defines the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError

INHERIT = "inherit-from"
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Origin:
    """Where a value was written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Recipe:
    """Merged options.

    Attributes:
        values: the options.
        origins: origin of each value; keys are dotted paths, with brackets around keys that contain dots.
        files: the files that were merged, from the ground up.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, Any, Origin]]:
        """Yield path, value and origin of every value that is no map, in order."""
        yield from self._rows(self.values, "")

    def _rows(self, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Origin]]:
        for key, value in values.items():
            path = _join(prefix, key)
            if isinstance(value, Mapping) and value:
                yield from self._rows(value, path)
            else:
                yield path, value, self.origins[path]


@dataclass(frozen=True)
class _Value:
    """A value that is no map, with its place."""

    value: Any
    origin: Origin


def load_recipe(path: str | Path, env: str | None = None) -> Recipe:
    """Return the recipe in ``path``, with the recipes that it inherits and the overlay of ``env``.

    Args:
        path: a YAML or JSON file.
        env: name of the environment; ``run.<env>.yaml`` must exist next to ``run.yaml``.

    Raises:
        ConfigError: a file is absent, is no map, contains a key twice or unsupported values, or files
            inherit from each other in a circle.
    """
    top = Path(path)
    layers = _chain(top, ())
    if env is not None:
        layers += _chain(overlay_path(top, env), ())
    merged: dict[str, Any] = {}
    for _, tree in layers:
        _merge(merged, tree)
    recipe = Recipe(files=list(dict.fromkeys(file for file, _ in layers)))
    recipe.values = _plain(merged, "", recipe.origins)
    return recipe


def overlay_path(path: Path, env: str) -> Path:
    """Return the overlay of a recipe for an environment.

    Raises:
        ConfigError: it does not exist; the message lists the existing ones.
    """
    name = f"{path.stem}.{env}{path.suffix}"
    place = path.parent / name
    if Path(name).name != name or not env or not place.is_file():
        known = sorted(
            p.name[len(path.stem) + 1 : -len(path.suffix)] for p in path.parent.glob(f"{path.stem}.*{path.suffix}")
        )
        raise _fault(
            place,
            f"no such overlay of {path}; expected a file of that name for the environment {env!r}. There are overlays "
            f"for: {', '.join(known) or 'none'}",
        )
    return place


def _fault(source: str | Path, text: str, *problems: str) -> ConfigError:
    return ConfigError(f"{source}: {text}", where=str(source), problems=list(problems or [text]))


def _chain(path: Path, above: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the layers of a file: the recipes that it inherits, then itself."""
    place = path.resolve()
    if place in above:
        circle = [*above[above.index(place) :], place]
        names = [p.name for p in circle]
        text = f"recipes inherit from each other in a circle: {' -> '.join(names)}; remove one {INHERIT}"
        raise _fault(above[-1], text, *names)
    tree = _read(path, asked_by=above[-1] if above else None)
    named = tree.pop(INHERIT, None)
    layers = []
    for parent in _parents(named, path):
        layers += _chain(place.parent / parent, (*above, place))
    return [*layers, (path, tree)]


def _parents(named: Any, path: Path) -> list[str]:
    value = named.value if isinstance(named, _Value) else named
    parents = [value] if isinstance(value, str) else value or []
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise _fault(path, f"{INHERIT} is {value!r}; expected the name of a recipe, or a list of names")
    return parents


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict):
            beneath = below.get(key)
            if not isinstance(beneath, dict):
                # the map takes its place in the order of the layer that wrote it first
                below[key] = beneath = {}
            _merge(beneath, value)
        elif value.value is None:
            below.pop(key, None)
        else:
            below[key] = value


def _plain(tree: Mapping[str, Any], prefix: str, origins: dict[str, Origin]) -> dict[str, Any]:
    values = {}
    for key, entry in tree.items():
        path = _join(prefix, key)
        if not isinstance(entry, dict):
            values[key], origins[path] = entry.value, entry.origin
            continue
        inner: dict[str, Origin] = {}
        if found := _plain(entry, path, inner):
            values[key] = found
            origins |= {path: next(iter(inner.values())), **inner}
    return values


def _join(prefix: str, key: str) -> str:
    if "." in key:
        return f"{prefix}[{key}]"
    return f"{prefix}.{key}" if prefix else key


# ---- reading ---------------------------------------------------------------------------------------------


def _read(path: Path, asked_by: Path | None) -> dict[str, Any]:
    """Return the file's map, each value that is no map with its origin."""
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as fault:
        by = f", which {asked_by} inherits from" if asked_by else ""
        reason = getattr(fault, "strerror", None) or fault
        raise _fault(path, f"cannot be read ({reason}){by}; expected a recipe") from None
    if len(data) > MAX_BYTES:
        raise _fault(path, f"more than {MAX_BYTES} bytes; expected a recipe of at most that")
    problems: list[str] = []
    try:
        loader = yaml.SafeLoader(data.decode("utf-8-sig"))
        try:
            node = loader.get_single_node()
            tree = _tree(loader, node, path.name, problems) if node is not None else {}
        finally:
            loader.dispose()
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as fault:
        mark = getattr(fault, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        what = getattr(fault, "problem", None) or (str(fault) or type(fault).__name__).splitlines()[0]
        raise _fault(where, f"{what}; expected YAML with plain values") from None
    if not isinstance(tree, dict):
        problems.append("its top level is no map")
    if problems:
        raise _fault(path, f"{'; '.join(problems)}; expected a map of options")
    assert isinstance(tree, dict)
    return tree


def _tree(loader: Any, node: Any, file: str, problems: list[str]) -> Any:
    import yaml

    origin = Origin(file, node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        return _Value(loader.construct_object(node, deep=True), origin)
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key, (str, int, float, bool)):
            problems.append(f"line {line}: the key {key!r} is no plain text")
            continue
        # yes, no and numbers are read as other things than the words they were written as
        name = key_node.value
        if name in tree:
            problems.append(f"line {line}: the key {name!r} occurs twice")
            continue
        entry = _tree(loader, value_node, file, problems)
        tree[name] = _Value(entry.value, Origin(file, line)) if isinstance(entry, _Value) else entry
        if isinstance(value_node, yaml.MappingNode) and not value_node.value:
            tree[name] = {}
    return tree
