"""Recipes: YAML files with options, with inheritance, overlays per environment, and the origin of each value.

A recipe is a map. ``inherit-from`` names one or several base recipes. In the environment ``ci``, ``run.ci.yaml``
overrides ``run.yaml``. Layers are merged from the base upwards: maps merge key by key, other values
replace, and ``null`` removes the inherited value, so that the default applies. The caller
defines the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError

INHERIT = "inherit-from"
MAX_BYTES = 1_000_000


@dataclass
class Recipe:
    """Merged options.

    Attributes:
        values: the options.
        rows: path, value and origin (``file:line``) of every value that is no map; paths are dotted, with brackets
            around keys that contain dots.
        origins: origin of each path; that of a map is the origin of its first value.
        files: the files that were merged, from the ground up.
    """

    values: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, Any, str]] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


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
        overlay = top.with_name(f"{top.stem}.{env}{top.suffix}") if env and "/" not in env else top.parent
        if not overlay.is_file():
            overlays = top.parent.glob(f"{top.stem}.*{top.suffix}")
            known = sorted(found.name[len(top.stem) + 1 : -len(top.suffix)] for found in overlays)
            raise _fault(
                top,
                f"no overlay for the environment {env!r}; expected {top.stem}.{env}{top.suffix}. There are overlays "
                f"for: {', '.join(known) or 'none'}",
            )
        layers += _chain(overlay, ())
    merged: dict[str, Any] = {}
    for _, tree in layers:
        _merge(merged, tree)
    recipe = Recipe(files=list(dict.fromkeys(file for file, _ in layers)))
    recipe.values = _collect(merged, "", recipe)
    return recipe


def _fault(source: str | Path, text: str, *problems: str) -> ConfigError:
    return ConfigError(f"{source}: {text}", where=str(source), problems=list(problems or [text]))


def _chain(path: Path, above: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the layers of a file: the recipes that it inherits, then itself."""
    place = path.resolve()
    if place in above:
        names = [p.name for p in (*above[above.index(place) :], place)]
        text = f"recipes inherit from each other in a circle: {' -> '.join(names)}; remove one {INHERIT}"
        raise _fault(above[-1], text, *names)
    tree = _read(path, asked_by=above[-1] if above else None)
    named = tree.pop(INHERIT, ([], ""))
    value = named[0] if isinstance(named, tuple) else named
    parents = [value] if isinstance(value, str) else value or []
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise _fault(path, f"{INHERIT} is {value!r}; expected the name of a recipe, or a list of names")
    layers = [layer for parent in parents for layer in _chain(place.parent / parent, (*above, place))]
    return [*layers, (path, tree)]


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, entry in above.items():
        if isinstance(entry, dict):
            if not isinstance(below.get(key), dict):
                # the map takes its place in the order of the layer that wrote it first
                below[key] = {}
            _merge(below[key], entry)
        elif entry[0] is None:
            below.pop(key, None)
        else:
            below[key] = entry


def _collect(tree: dict[str, Any], prefix: str, recipe: Recipe) -> dict[str, Any]:
    """Return the values of a tree without empty maps, and add their rows and origins to the recipe."""
    values = {}
    for key, entry in tree.items():
        path = f"{prefix}[{key}]" if "." in key else f"{prefix}.{key}" if prefix else key
        first = len(recipe.rows)
        if not isinstance(entry, dict):
            values[key] = entry[0]
            recipe.rows.append((path, *entry))
        elif inner := _collect(entry, path, recipe):
            values[key] = inner
        if key in values:
            recipe.origins[path] = recipe.rows[first][2]
    return values


# ---- reading ---------------------------------------------------------------------------------------------


def _read(path: Path, asked_by: Path | None) -> dict[str, Any]:
    """Return the map of a file, with a tuple of value and origin for each value that is no map."""
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
    """Return a node as a map, or as a value with its origin."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True), f"{file}:{node.start_mark.line + 1}"
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        # yes, no and numbers are read as other things than the words they were written as
        name = key_node.value
        if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key, (str, int, float, bool)):
            problems.append(f"line {line}: the key {key!r} is no plain text")
        elif name in tree:
            problems.append(f"line {line}: the key {name!r} occurs twice")
        else:
            entry = _tree(loader, value_node, file, problems)
            tree[name] = (entry[0], f"{file}:{line}") if isinstance(entry, tuple) else entry
    return tree
