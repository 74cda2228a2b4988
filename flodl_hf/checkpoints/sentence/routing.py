"""Modules of each route, from ``modules.json`` and the configuration of a router.

Decides which kinds and orders of modules are supported, and which folders contain them. Pooling is in
`flodl_hf.checkpoints.sentence.recipe`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flodl.errors import ConfigError, printable, shown
from flodl_hf.checkpoints.sentence.module_files import folder_of, read_json, settings_in, wrong
from flodl_hf.checkpoints.weights.checkpoint.safe_open import is_entry
from flodl_hf.checkpoints.weights.file_names import WEIGHT_FILES

_KNOWN = (
    "Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize", "CNN", "WeightedLayerPooling",
    "MLMTransformer", "SpladePooling", "MultiVectorMask",
)  # fmt: skip
_ROUTERS = ("Router", "Asym")
Modules = list[dict[str, Any]]


class Routing(NamedTuple):
    """The modules that texts go through.

    Attributes:
        ways: modules by route; a single entry without a name if there is no router.
        usual: the route of calls without a route; None if calls must name one.
        kinds: further names of routes.
        files: router files in addition to ``modules.json``.
    """

    ways: dict[str, Modules]
    usual: str | None = None
    kinds: Mapping[str, str] = {}
    files: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The usual route, or the first where none is."""
        return next(iter(self.ways)) if self.usual is None else self.usual

    def transformers(self, root: Path) -> dict[str, str]:
        """Return by route the folder of its transformer, from the root."""
        return {route: folder_of(root, way[0]) for route, way in self.ways.items()}


def routing_of(root: Path) -> Routing:
    """Return the modules of a folder.

    Raises:
        ConfigError: ``modules.json`` or a router's file is damaged, or names unsupported modules.
    """
    value = read_json(root, "modules.json")
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in value):
        raise wrong(root / "modules.json", f"found {shown(value, 60)}", "a list of modules with their types")
    places = [place for place, module in enumerate(value) if kind_of(module) in _ROUTERS]
    if not places:
        return Routing({"": _checked(root, value)})
    at = places[0]
    if len(places) > 1:
        raise wrong(root / "modules.json", f"found {len(places)} routers", "at most one")
    inside = Path(folder_of(root, value[at]))
    file = (inside / "router_config.json").as_posix()
    if not is_entry(root, file):  # as older releases wrote it
        file = (inside / "config.json").as_posix()
    said = settings_in(root, file)
    types, structure, settings = (said.get(key) or {} for key in ("types", "structure", "parameters"))
    sound = all(isinstance(part, dict) for part in (types, structure, settings)) and len(structure) > 0
    sound = sound and all(isinstance(part, str) for part in types.values())
    sound = sound and all(isinstance(way, list) for way in structure.values())
    if not sound or any(not isinstance(part, str) or part not in types for way in structure.values() for part in way):
        raise wrong(root / file, f"found {shown(said, 80)}", "types, and the structure of one route or more")
    ways = {
        route: _checked(root, [
            *value[:at],
            *({"type": types[part], "path": (inside / part).as_posix()} for part in way),
            *value[at + 1 :],
        ])
        for route, way in structure.items()
    }  # fmt: skip
    usual = settings.get("default_route")
    if usual is None and settings.get("allow_empty_key", True):
        usual = next(iter(ways))
    kinds, anything = _kinds_of_texts(settings.get("route_mappings") or {}, ways, root / file)
    usual = anything or ("text" if "text" in ways else usual)
    if usual is not None and usual not in ways:
        raise wrong(root / file, f"default_route is {shown(usual, 60)}", f"one of {', '.join(map(printable, ways))}")
    return Routing(ways, usual, kinds, (file,))


def _kinds_of_texts(mappings: Any, ways: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    """Return the route of each kind of text, and the route of all others; None without a mapping."""
    found: dict[tuple[Any, Any], str] = {}
    for key, route in mappings.items() if isinstance(mappings, dict) else [(mappings, None)]:
        try:
            task, modality = ast.literal_eval(key)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            task, modality = (), ()
        if not isinstance(task, str | None) or not isinstance(route, str) or route not in ways:
            expected = f"pairs such as \"('query', 'text')\", each with one of {', '.join(map(printable, ways))}"
            raise wrong(path, f"route_mappings has {shown({str(key): route}, 80)}", expected)
        if modality in ("text", None):
            found.setdefault((task, modality), route)
    # As the library looks them up: what names both, what names the task, then what names any task, then routes.
    exact = {task: found.get((task, "text"), found.get((task, None), "")) for task, _ in found if task is not None}
    anything = found.get((None, "text"), found.get((None, None)))
    return ({} if anything is None else dict.fromkeys(ways, anything)) | exact, anything


def _checked(root: Path, value: Modules) -> Modules:
    """Return the modules of one route, of kinds and in an order that is understood."""
    kinds = [kind_of(module) for module in value]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown:
        raise ConfigError(
            f"{root / 'modules.json'}: found the module {printable(unknown[0], 80)}, which is not supported; expected "
            f"{', '.join(_KNOWN)}, or a Router of these. Load the transformer's own folder to use it without.",
            where=str(root / "modules.json"),
            problems=unknown,
        )
    first, behind = kinds[:1], kinds[1:]
    if "MultiVectorMask" in kinds:
        sound = behind[:-2] == ["Dense"] * (len(kinds) - 3) != [] and behind[-2:] == ["MultiVectorMask", "Normalize"]
        expected = "for vectors of tokens Transformer, Dense, MultiVectorMask and Normalize"
    elif "SpladePooling" in kinds or first == ["MLMTransformer"]:
        sound, expected = behind == ["SpladePooling"], "for sparse vectors Transformer and SpladePooling"
    else:
        at = behind.index("Pooling") if "Pooling" in behind else 0
        sound = behind.count("Pooling") < 2 and "WeightedLayerPooling" not in behind[1:]
        sound = sound and not {"LayerNorm", "Dropout"} & set(behind[:at]) and "CNN" not in behind[at:]
        sound = sound and not {"Transformer", "MLMTransformer"} & set(behind)
        expected = (
            "one Transformer, one Pooling, and Dense, LayerNorm, Dropout and Normalize behind it; "
            "WeightedLayerPooling, CNN and Dense for vectors of tokens before it; or Transformer and SpladePooling"
        )
    if first not in (["Transformer"], ["MLMTransformer"]) or not sound:
        raise wrong(root / "modules.json", f"found the modules {', '.join(kinds[:8]) or 'none'}", expected)
    return value


def kind_of(module: Mapping[str, Any]) -> str:
    """Return the kind of a module: the last component of its type."""
    return module["type"].rsplit(".", 1)[-1]


def transformer_folder(root: Path) -> Path:
    """Return the folder of the weights: ``root``, or the one that its ``modules.json`` names.

    Raises:
        ConfigError: ``modules.json`` is damaged, or names a folder although the root has weights.
    """
    if not is_entry(root, "modules.json"):
        return root
    routing = routing_of(root)
    place = root / folder_of(root, routing.ways[routing.first][0])
    if place == root or place.resolve() == root.resolve():
        return root
    if any(is_entry(root, name) for name in WEIGHT_FILES):
        found = f"names {printable(place.name, 80)} for the transformer, and the folder above contains weights too"
        raise wrong(root / "modules.json", found, "one of them")
    if not is_entry(place, "config.json"):
        found = f"names {printable(place.name, 80)} for the transformer, which contains no config.json"
        raise wrong(root / "modules.json", found, "the folder of a transformer")
    return place


def transformer_folders(root: Path) -> list[str]:
    """Return the weight folders from the root, "" for the root itself: one for each transformer.

    Raises:
        ConfigError: as of `routing_of`.
    """
    if not is_entry(root, "modules.json"):
        return [""]
    found = dict.fromkeys(routing_of(root).transformers(root).values())
    return ["" if folder == "." else folder for folder in found]


def module_folders(root: Path) -> dict[str, bool]:
    """Return the module folders below ``root``, and whether each has a transformer; none without modules.json.

    Only ``modules.json`` and routers' files must be present.
    """
    if not is_entry(root, "modules.json"):
        return {}
    routing = routing_of(root)
    modules = [module for way in routing.ways.values() for module in way]
    found = {folder_of(root, module): "Transformer" in kind_of(module) for module in modules}
    return {folder: holds for folder, holds in found.items() if folder != "."}
