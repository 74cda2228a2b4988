"""Folders of sentence-transformers: what their small files say about pooling.

``modules.json`` lists a transformer, a pooling, and perhaps dense layers and a normalisation; or SPLADE's two modules;
or a transformer and the dense layers of token vectors, as PyLate and MultiVectorEncoder have them. Queries and
documents may have routes of their own through poolings and dense layers behind one transformer (Router, formerly Asym).
Anything else would change vectors and is refused.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from flodl.errors import ConfigError, nearest, printable, shown
from flodl_hf.errors import PredictError
from flodl_hf.late import LateRecipe, m3_layer, multivector_recipe, pylate_recipe
from flodl_hf.sentence.dense import Dense, read_dense
from flodl_hf.sentence.sparse import SpladePooling
from flodl_hf.weights.checkpoint.members import is_entry, read_member

__all__ = ["POOLINGS", "SentenceRecipe", "read_recipe", "recipe_on", "transformer_folder"]

POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}
_NEWPOOLINGS = {
    "lasttoken": "last_token",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_LIMIT = 1_000_000
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "MLMTransformer", "SpladePooling", "MultiVectorMask")
_ROUTERS = ("Router", "Asym")
_LEAST_TOKENS = 3  # two special ones and one of the text
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


@dataclass(frozen=True)
class SentenceRecipe:
    """How a folder makes a vector of a text.

    Attributes:
        pooling: the poolings whose results are joined, in order.
        normalize: whether vectors are scaled to length 1.
        max_tokens: most tokens that are read, or None.
        lower_case: whether texts are lower-cased first.
        files: the small files as read, by name, to be written back unchanged.
        dense: what is applied to a pooled vector, one after another, before it is scaled.
        prompts: what is put before texts, by name.
        default_prompt: the prompt of those that say none.
        include_prompt: whether tokens of a prompt are pooled too.
        splade: how word scores become sparse vectors, or None.
        lexical: what gives each token its weight for sparse vectors (bge-m3), or None.
        late: how tokens get vectors of their own, or None.
        routes: where texts of several kinds have modules of their own ("query", "document"), each kind's recipe by its
            name; the fields above are then those of the usual one, or of the first where none is.
        usual_route: the route of texts of which nothing is said; None where it has to be said.
        kinds: further names of routes, as the folder maps what texts are for to them.
    """

    pooling: tuple[Any, ...] = ("mean",)
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    splade: SpladePooling | None = None
    lexical: Dense | None = None
    late: LateRecipe | None = None
    routes: Mapping[str, SentenceRecipe] = field(default_factory=dict)
    usual_route: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)

    def route_of(self, asked: str | None) -> str | None:
        """Return the route that texts take; None where the folder has none.

        Args:
            asked: the name of a route, or what texts are for; None for the usual one.

        Raises:
            PredictError: there is no such route, or none is usual and none was asked for.
        """
        if not self.routes:
            if asked is None:
                return None
            raise PredictError(f"route={asked!r}: this model has no routes; all texts go one way. Leave it out")
        found = self.usual_route if asked is None else self.kinds.get(asked, asked)
        if found is not None and found in self.routes:
            return found
        names = list(dict.fromkeys((*self.routes, *self.kinds)))
        if asked is None:
            raise PredictError(
                f"route: none is usual in this model, so it has to be said; expected one of {', '.join(names)}"
            )
        raise PredictError(
            f"route={asked!r}: this model has no such route{nearest(asked, names)}; expected one of {', '.join(names)}"
        )

    def on(self, asked: str | None = None) -> SentenceRecipe:
        """Return the recipe of the texts of one route, this one where there are no routes; see `route_of`."""
        name = self.route_of(asked)
        return self if name is None else self.routes[name]

    def prompt_for(self, given: str | None) -> str:
        """Return what is put before texts: a prompt by its name, the default one, or ``given`` as it is."""
        if given is None:
            return self.prompts.get(self.default_prompt or "", "")
        return self.prompts.get(given, given)


def recipe_on(recipe: SentenceRecipe | None, route: str | None) -> SentenceRecipe | None:
    """Return what a folder's recipe says of the texts of one route; None where it says nothing.

    Raises:
        PredictError: there is no such route.
    """
    if recipe is None and route is None:
        return None
    return (recipe or SentenceRecipe()).on(route)


Modules = list[dict[str, Any]]


class _Routing(NamedTuple):
    """The modules that texts go through: by route, of which there is one without a name where there is no router."""

    ways: dict[str, Modules]
    usual: str | None = None
    kinds: Mapping[str, str] = {}
    files: tuple[str, ...] = ()


def _routing(root: Path) -> _Routing:
    value = _read(root, "modules.json")
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in value):
        raise _wrong(root / "modules.json", f"found {shown(value, 60)}", "a list of modules with their types")
    places = [place for place, module in enumerate(value) if _kind(module) in _ROUTERS]
    if not places:
        return _Routing({"": _checked(root, value)})
    at = places[0]
    if len(places) > 1:
        raise _wrong(root / "modules.json", f"found {len(places)} routers", "at most one")
    inside = _inside(root, value[at].get("path")).relative_to(root)
    file = (inside / "router_config.json").as_posix()
    if not is_entry(root, file):  # as older releases wrote it
        file = (inside / "config.json").as_posix()
    said = _settings(root, file)
    types, structure, settings = (said.get(key) or {} for key in ("types", "structure", "parameters"))
    sound = all(isinstance(part, dict) for part in (types, structure, settings)) and len(structure) > 0
    sound = sound and all(isinstance(part, str) for part in types.values())
    sound = sound and all(isinstance(way, list) for way in structure.values())
    if not sound or any(not isinstance(part, str) or part not in types for way in structure.values() for part in way):
        raise _wrong(root / file, f"found {shown(said, 80)}", "types, and the structure of one route or more")
    ways = {
        route: _checked(root, [
            *value[:at],
            *({"type": types[part], "path": (inside / part).as_posix()} for part in way),
            *value[at + 1 :],
        ])
        for route, way in structure.items()
    }  # fmt: skip
    firsts = dict.fromkeys(str(way[0].get("path")) for way in ways.values())
    if len(firsts) > 1:
        raise ConfigError(
            f"{root / file}: the routes {', '.join(map(printable, ways))} have transformers of their own "
            f"({', '.join(map(printable, firsts))}); expected one that all share. Load one of these folders by itself, "
            "and say how it pools: embed(pooling=...).",
            where=str(root / file),
            problems=list(firsts),
        )
    usual = settings.get("default_route")
    if usual is None and settings.get("allow_empty_key", True):
        usual = next(iter(ways))
    kinds, anything = _kinds_of_texts(settings.get("route_mappings") or {}, ways, root / file)
    usual = anything or ("text" if "text" in ways else usual)
    if usual is not None and usual not in ways:
        raise _wrong(root / file, f"default_route is {shown(usual, 60)}", f"one of {', '.join(map(printable, ways))}")
    return _Routing(ways, usual, kinds, (file,))


def _kinds_of_texts(said: Any, ways: Mapping[str, Any], where: Path) -> tuple[dict[str, str], str | None]:
    """Return which route texts take by what they are for, and that of all others; None where no mapping says it."""
    found: dict[tuple[Any, Any], str] = {}
    for key, route in said.items() if isinstance(said, dict) else [(said, None)]:
        try:
            task, modality = ast.literal_eval(key)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            task, modality = (), ()
        if not isinstance(task, str | None) or not isinstance(route, str) or route not in ways:
            expected = f"pairs such as \"('query', 'text')\", each with one of {', '.join(map(printable, ways))}"
            raise _wrong(where, f"route_mappings has {shown({str(key): route}, 80)}", expected)
        if modality in ("text", None):
            found.setdefault((task, modality), route)
    # As the library looks them up: what names both, what names the task, then what names any task, then routes.
    exact = {task: found.get((task, "text"), found.get((task, None), "")) for task, _ in found if task is not None}
    anything = found.get((None, "text"), found.get((None, None)))
    return ({} if anything is None else dict.fromkeys(ways, anything)) | exact, anything


def _checked(root: Path, value: Modules) -> Modules:
    """Return the modules of one route, of kinds and in an order that is understood."""
    kinds = [_kind(module) for module in value]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown:
        raise ConfigError(
            f"{root / 'modules.json'}: module {printable(unknown[0], 80)} is not supported; expected Transformer, "
            "Pooling, Dense and Normalize, a Router of these, or MLMTransformer and SpladePooling. Load the "
            "transformer's own folder to use it without.",
            where=str(root / "modules.json"),
            problems=unknown,
        )
    if "MultiVectorMask" in kinds:
        dense = len(kinds) - 3
        if dense < 1 or kinds != ["Transformer", *["Dense"] * dense, "MultiVectorMask", "Normalize"]:
            raise _wrong(
                root / "modules.json", f"found the modules {', '.join(kinds[:6])}",
                "for vectors of tokens Transformer, Dense, MultiVectorMask and Normalize",
            )  # fmt: skip
        return value
    places = [_KNOWN.index(kind) for kind in kinds]
    dense = "Dense" in kinds and "Pooling" not in kinds and "Normalize" not in kinds
    late = dense and all(_of_tokens(root, module) for module in value if _kind(module) == "Dense")
    several = any(kinds.count(kind) > 1 for kind in _KNOWN if kind not in ("Dense", "Normalize"))
    splade = kinds == ["MLMTransformer", "SpladePooling"]
    mixed = "MLMTransformer" in kinds or "SpladePooling" in kinds or (dense and not late)
    if not splade and (places[:1] != [0] or places != sorted(places) or several or mixed):
        found = ", ".join(kinds[:6]) or "none"
        raise _wrong(
            root / "modules.json", f"found the modules {found}",
            "one Transformer, one Pooling, then Dense and Normalize; or MLMTransformer, SpladePooling",
        )  # fmt: skip
    return value


def _of_tokens(root: Path, module: Mapping[str, Any]) -> bool:
    """Return whether a dense layer stands behind each token rather than behind a pooling."""
    if module["type"].startswith("pylate."):
        return True
    place = _inside(root, module.get("path"))
    return (place / "config.json").is_file() and (
        _settings(root, (place / "config.json").relative_to(root).as_posix()).get("module_output_name")
        == "token_embeddings"
    )


def _kind(module: Mapping[str, Any]) -> str:
    return module["type"].rsplit(".", 1)[-1]


def _wrong(path: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{path}: {found}; expected {expected}. Fetch the file again or correct it.",
        where=str(path),
        problems=[path.name],
    )


def _read(root: Path, name: str) -> Any:
    path = root / name
    try:
        return json.loads(_bytes(root, name).decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise _wrong(path, f"cannot be read as JSON ({reason})", "JSON in UTF-8") from None


def _settings(root: Path, name: str) -> dict[str, Any]:
    value = _read(root, name)
    if not isinstance(value, dict):
        raise _wrong(root / name, f"holds a JSON {type(value).__name__}", "an object with settings")
    return value


def _bytes(root: Path, name: str) -> bytes:
    return read_member(root, name, _LIMIT, ConfigError)


def _inside(root: Path, part: object) -> Path:
    place = root / str(part or "")
    try:
        inside = place.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):  # a name that cannot be, or a link that leads to itself
        inside = False
    if not inside:
        found = f"the path {printable(str(part), 80)} leads out of the folder, or nowhere"
        raise _wrong(root / "modules.json", found, "the name of a folder inside")
    return place


def transformer_folder(root: Path) -> Path:
    """Return the folder that holds the weights: ``root``, or what its ``modules.json`` names.

    Raises:
        ConfigError: ``modules.json`` is damaged, or names a folder beside weights at the root.
    """
    if not is_entry(root, "modules.json"):
        return root
    place = _inside(root, next(iter(_routing(root).ways.values()))[0].get("path"))
    if place == root or place.resolve() == root.resolve():
        return root
    if any(is_entry(root, name) for name in _WEIGHTS):
        found = f"names {printable(place.name, 80)} for the transformer, and the folder above holds weights too"
        raise _wrong(root / "modules.json", found, "one of them")
    if not is_entry(place, "config.json"):
        found = f"names {printable(place.name, 80)} for the transformer, which holds no config.json"
        raise _wrong(root / "modules.json", found, "the folder of a transformer")
    return place


def read_recipe(root: Path) -> SentenceRecipe | None:
    """Return what ``modules.json`` says, or None where there is none.

    Raises:
        ConfigError: a module that is not understood, or files that are damaged.
    """
    if not is_entry(root, "modules.json"):
        return None
    routing = _routing(root)
    found = {name: _recipe(root, way) for name, way in routing.ways.items()}
    usual = found[routing.usual or next(iter(found))]
    if not routing.files:
        return usual
    if late := [name for name, own in found.items() if own.late is not None or own.splade is not None]:
        raise _wrong(
            root / routing.files[0], f"the route {printable(late[0])} gives sparse vectors, or one for each token",
            "routes that give one vector for each text",
        )  # fmt: skip
    files = {name: data for own in found.values() for name, data in own.files.items()}
    if files:
        files |= {name: _bytes(root, name) for name in routing.files}
    ways = {name: replace(own, files={}) for name, own in found.items()}
    return replace(usual, files=files, routes=ways, usual_route=routing.usual, kinds=routing.kinds)


def _recipe(root: Path, modules: Modules) -> SentenceRecipe:
    """Return what the modules of one route say."""
    pooling: tuple[Any, ...] = ("mean",)
    normalize = False
    folder = transformer_folder(root)
    at_root = folder == root
    beside = (folder / "sentence_bert_config.json").relative_to(root).as_posix()
    bounds = beside if is_entry(root, beside) else "sentence_bert_config.json"
    said_in = "config_sentence_transformers.json"
    read = ["modules.json", bounds, said_in]
    dense: list[Dense] = []
    more: dict[str, bytes] = {}
    splade: SpladePooling | None = None
    mask: dict[str, Any] | None = None
    included = True
    for module in modules:
        kind = _kind(module)
        if kind == "Pooling":
            inside = _inside(root, module.get("path"))
            if not inside.is_dir():
                found = f"names {printable(str(module.get('path')), 80)} for the pooling, which is no folder here"
                raise _wrong(root / "modules.json", found, "the folder with its config.json")
            place = (inside / "config.json").relative_to(root).as_posix()
            pooling = _pooling(root, place)
            included = _settings(root, place).get("include_prompt") is not False
            read.append(place)
        elif kind == "Dense":
            part = _inside(root, module.get("path")).relative_to(root).as_posix()
            layer, held = read_dense(root, part)
            dense.append(layer)
            more |= held
        elif kind == "SpladePooling":
            place = (_inside(root, module.get("path")) / "config.json").relative_to(root).as_posix()
            splade = _splade(root, place)
            read.append(place)
        elif kind == "MultiVectorMask":
            place = (_inside(root, module.get("path")) / "config.json").relative_to(root).as_posix()
            mask = _settings(root, place) if is_entry(root, place) else {}
            read.append(place)
        elif kind == "Normalize":
            normalize = True
            if (settings_of := module.get("path")) and mask is not None:
                read.append((_inside(root, settings_of) / "config.json").relative_to(root).as_posix())
    settings = _settings(root, bounds) if is_entry(root, bounds) else {}
    length, lower = settings.get("max_seq_length"), settings.get("do_lower_case")
    if length is not None and (type(length) is not int or length < _LEAST_TOKENS):
        found = f"max_seq_length is {shown(length, 60)}"
        raise _wrong(root / bounds, found, f"a whole number from {_LEAST_TOKENS}, or null")
    if lower is not None and not isinstance(lower, bool):
        raise _wrong(root / bounds, f"do_lower_case is {shown(lower, 60)}", "true or false")
    said = _settings(root, said_in) if is_entry(root, said_in) else {}
    late = None
    if mask is not None:
        late, dense, normalize = multivector_recipe(said, settings, mask, dense, str(root)), [], False
    elif dense and not any(_kind(module) == "Pooling" for module in modules):
        late, dense = pylate_recipe(said, dense, str(root / said_in)), []
    lexical = None
    if is_entry(root, "sparse_linear.pt"):
        lexical, more["sparse_linear.pt"] = m3_layer(root, "sparse_linear.pt")
    if is_entry(root, "colbert_linear.pt"):
        layer, more["colbert_linear.pt"] = m3_layer(root, "colbert_linear.pt")
        late = LateRecipe((layer,), first=False)
    files = {name: _bytes(root, name) for name in read if is_entry(root, name)} | more
    prompts, usual = _prompts(said, root / said_in)
    return SentenceRecipe(
        pooling, normalize, length, lower is True, files if at_root else {}, tuple(dense), prompts, usual, included,
        splade, lexical, late,
    )  # fmt: skip


def _prompts(said: Mapping[str, Any], where: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a folder by name, and the name of the one that is usual."""
    prompts, usual = said.get("prompts") or {}, said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise _wrong(where, f"prompts is {shown(prompts, 60)}", "texts by name")
    if usual is not None and (not isinstance(usual, str) or usual not in prompts):
        raise _wrong(
            where,
            f"default_prompt_name is {shown(usual, 60)}",
            f"one of {', '.join(map(printable, prompts)) or 'no prompts'}",
        )
    return prompts, usual


def _splade(root: Path, name: str) -> SpladePooling:
    settings = _settings(root, name) if is_entry(root, name) else {}
    found = SpladePooling(settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu"))
    if found.strategy not in ("max", "sum") or found.activation not in ("relu", "log1p_relu"):
        raise _wrong(
            root / name, f"found {shown(settings, 80)}", "the strategy max or sum, the activation relu or log1p_relu"
        )
    return found


def _pooling(root: Path, name: str) -> tuple[Any, ...]:
    settings = _settings(root, name)
    stated = settings.get("pooling_mode")
    if isinstance(stated, str):
        stated = [stated]
    if stated is not None and not (isinstance(stated, list) and all(isinstance(part, str) for part in stated)):
        found = f"pooling_mode is {shown(stated, 60)}"
        raise _wrong(root / name, found, "the name of a pooling, or a list of names")
    for key in POOLINGS:
        if not isinstance(settings.get(key, False), bool):
            raise _wrong(root / name, f"{key} is {shown(settings[key], 60)}", "true or false")
    if stated:
        named = tuple(_NEWPOOLINGS.get(name, name) for name in stated)
        unknown = [name for name in named if name not in POOLINGS.values()]
        if unknown:
            known = ", ".join(POOLINGS.values())
            raise _wrong(root / name, f"pooling_mode names {printable(unknown[0], 60)}", f"one or more of {known}")
        return named
    chosen = tuple(name for key, name in POOLINGS.items() if settings.get(key) is True)
    return chosen or ("mean",)
