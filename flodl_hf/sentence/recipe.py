"""Folders of sentence-transformers: what their small files say about pooling.

``modules.json`` lists a transformer, a pooling, and perhaps dense layers and a normalisation; or SPLADE's two modules;
or a transformer and the dense layers of token vectors, as PyLate and MultiVectorEncoder have them. Queries and
documents may have routes of their own through poolings and dense layers (Router, formerly Asym), behind one transformer
or each behind its own.
Anything else would change vectors and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flodl.errors import nearest, printable, shown
from flodl_hf.decode.activations import stored_activation
from flodl_hf.errors import PredictError
from flodl_hf.sentence.dense import Dense, read_dense
from flodl_hf.sentence.multivector import LateRecipe, m3_layer, multivector_recipe, pylate_recipe
from flodl_hf.sentence.routing import Modules, kind_of, routing_of, transformer_folder
from flodl_hf.sentence.small_files import bytes_of, place_in, settings_in, wrong
from flodl_hf.sentence.sparse import SpladePooling
from flodl_hf.weights.checkpoint.members import is_entry
from flodl_hf.weights.file_names import BOUNDS, CONFIG_NAME

__all__ = ["POOLINGS", "SentenceRecipe", "read_recipe", "recipe_on"]

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
_LEAST_TOKENS = 3  # two special ones and one of the text


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
        transformer: where routes have transformers of their own, the folder of this one's, from the root; else "".
        truncate_dim: how many features of a vector are kept where a call does not say; None for all.
        kind: class of sentence-transformers that the folder was saved by ("CrossEncoder"); None if it is not stated.
        activation: path of the activation that makes scores of a cross-encoder's logits; None for other kinds.
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
    transformer: str = ""
    truncate_dim: int | None = None
    kind: str | None = None
    activation: str | None = None

    def kept(self, asked: int | None) -> int | None:
        """Return how many features of a vector are kept, of which a call says ``asked``; None for all."""
        return self.truncate_dim if asked is None else asked

    def width(self, hidden_size: int) -> int:
        """Return how many features a vector has before any are left out, of states of ``hidden_size``."""
        return self.dense[-1].size if self.dense else len(self.pooling) * hidden_size

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
            raise PredictError(f"route: this model has no default route; expected one of {', '.join(names)}")
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

    def resolve_prompt(self, method: str, prompt: str | None, name: str | None) -> str:
        """Return the prompt as sentence-transformers resolves it: ``prompt`` itself, else by name, else the default.

        Args:
            method: the method that was called, for the message.
            prompt: a text, which is used as it is.
            name: the name of a prompt; models of vectors always have "query" and "document", empty if not stored.

        Raises:
            PredictError: there is no prompt of this name.
        """
        if prompt is not None:
            return prompt
        if name is None:
            return self.prompts.get(self.default_prompt or "", "")
        prompts = self.prompts if self.kind == "CrossEncoder" else {"query": "", "document": "", **self.prompts}
        if name not in prompts:
            known = ", ".join(map(printable, prompts)) or "none: the folder stores no prompts"
            raise PredictError(
                f"{method}: found prompt_name={name!r}{nearest(name, prompts)}, expected one of {known}. "
                "Give the text itself as prompt=.",
                found=name,
            )
        return prompts[name]


def recipe_on(recipe: SentenceRecipe | None, route: str | None) -> SentenceRecipe | None:
    """Return what a folder's recipe says of the texts of one route; None where it says nothing.

    Raises:
        PredictError: there is no such route.
    """
    if recipe is None and route is None:
        return None
    return (recipe or SentenceRecipe()).on(route)


def read_recipe(root: Path) -> SentenceRecipe | None:
    """Return what ``modules.json`` says, or None where there is none.

    Raises:
        ConfigError: a module that is not understood, or files that are damaged.
    """
    if not is_entry(root, "modules.json"):
        return None
    routing = routing_of(root)
    folders = routing.transformers(root)
    several = len(set(folders.values())) > 1
    found = {
        name: replace(_recipe(root, way, folders[name], keep=several), transformer=folders[name] if several else "")
        for name, way in routing.ways.items()
    }
    usual = found[routing.first]
    if not routing.files:
        return usual
    if late := [name for name, own in found.items() if own.late is not None or own.splade is not None]:
        raise wrong(
            root / routing.files[0], f"the route {printable(late[0])} gives sparse vectors, or one for each token",
            "routes that give one vector for each text",
        )  # fmt: skip
    files = {name: data for own in found.values() for name, data in own.files.items()}
    if files:
        files |= {name: bytes_of(root, name) for name in routing.files}
    ways = {name: replace(own, files={}) for name, own in found.items()}
    return replace(usual, files=files, routes=ways, usual_route=routing.usual, kinds=routing.kinds)


def _recipe(root: Path, modules: Modules, transformer: str, *, keep: bool) -> SentenceRecipe:
    """Return what the modules of one route say, with their files where weights lie at the root, or are to be kept."""
    pooling: tuple[Any, ...] = ("mean",)
    normalize = False
    kept = keep or transformer_folder(root) == root
    places = dict.fromkeys([(root / transformer).relative_to(root), Path()])
    known = [(place / name).as_posix() for place in places for name in BOUNDS]
    bounds = next((name for name in known if is_entry(root, name)), BOUNDS[0])
    said_in = "config_sentence_transformers.json"
    read = ["modules.json", bounds, said_in]
    dense: list[Dense] = []
    more: dict[str, bytes] = {}
    splade: SpladePooling | None = None
    mask: dict[str, Any] | None = None
    included = True
    for module in modules:
        kind = kind_of(module)
        if kind == "Pooling":
            inside = place_in(root, module.get("path"))
            if not inside.is_dir():
                found = f"names {printable(str(module.get('path')), 80)} for the pooling, which is no folder here"
                raise wrong(root / "modules.json", found, "the folder with its config.json")
            place = (inside / "config.json").relative_to(root).as_posix()
            pooling = _pooling(root, place)
            included = settings_in(root, place).get("include_prompt") is not False
            read.append(place)
        elif kind == "Dense":
            part = place_in(root, module.get("path")).relative_to(root).as_posix()
            layer, held = read_dense(root, part)
            dense.append(layer)
            more |= held
        elif kind == "SpladePooling":
            place = (place_in(root, module.get("path")) / "config.json").relative_to(root).as_posix()
            splade = _splade(root, place)
            read.append(place)
        elif kind == "MultiVectorMask":
            place = (place_in(root, module.get("path")) / "config.json").relative_to(root).as_posix()
            mask = settings_in(root, place) if is_entry(root, place) else {}
            read.append(place)
        elif kind == "Normalize":
            normalize = True
            if (settings_of := module.get("path")) and mask is not None:
                read.append((place_in(root, settings_of) / "config.json").relative_to(root).as_posix())
    settings = settings_in(root, bounds) if is_entry(root, bounds) else {}
    length, lower = settings.get("max_seq_length"), settings.get("do_lower_case")
    if length is not None and (type(length) is not int or length < _LEAST_TOKENS):
        found = f"max_seq_length is {shown(length, 60)}"
        raise wrong(root / bounds, found, f"an integer from {_LEAST_TOKENS}, or null")
    if lower is not None and not isinstance(lower, bool):
        raise wrong(root / bounds, f"do_lower_case is {shown(lower, 60)}", "true or false")
    said = settings_in(root, said_in) if is_entry(root, said_in) else {}
    late = None
    if mask is not None:
        late, dense, normalize = multivector_recipe(said, settings, mask, dense, str(root)), [], False
    elif dense and not any(kind_of(module) == "Pooling" for module in modules):
        late, dense = pylate_recipe(said, dense, str(root / said_in)), []
    lexical = None
    if is_entry(root, "sparse_linear.pt"):
        lexical, more["sparse_linear.pt"] = m3_layer(root, "sparse_linear.pt")
    if is_entry(root, "colbert_linear.pt"):
        layer, more["colbert_linear.pt"] = m3_layer(root, "colbert_linear.pt")
        late = LateRecipe((layer,), first=False, beside=True)
    files = {name: bytes_of(root, name) for name in read if is_entry(root, name)} | more
    prompts, usual = _prompts(said, root / said_in)
    return SentenceRecipe(
        pooling, normalize, length, lower is True, files if kept else {}, tuple(dense), prompts, usual, included,
        splade, lexical, late, truncate_dim=_features_kept(said, root / said_in), kind=said.get("model_type"),
        activation=_activation(said, root),
    )  # fmt: skip


def _activation(said: Mapping[str, Any], root: Path) -> str | None:
    """Return the path of a cross-encoder's activation, by the rules of sentence-transformers; None for other kinds."""
    if said.get("model_type") != "CrossEncoder":
        return None
    config = settings_in(root, CONFIG_NAME) if is_entry(root, CONFIG_NAME) else {}
    labels = len(config.get("id2label") or range(config.get("num_labels", 2)))
    usual = "torch.nn.modules.activation.Sigmoid" if labels == 1 else "torch.nn.modules.linear.Identity"
    return str(said.get("activation_fn") or stored_activation(config) or usual)


def _features_kept(said: Mapping[str, Any], where: Path) -> int | None:
    """Return how many features of a vector a folder keeps; None for all."""
    found = said.get("truncate_dim")
    if found is not None and (type(found) is not int or found < 1):
        raise wrong(where, f"truncate_dim is {shown(found, 60)}", "a number of features from 1, or null")
    return found


def _prompts(said: Mapping[str, Any], where: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a folder by name, and the name of the one that is usual."""
    prompts, usual = said.get("prompts") or {}, said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise wrong(where, f"prompts is {shown(prompts, 60)}", "texts by name")
    if usual is not None and (not isinstance(usual, str) or usual not in prompts):
        raise wrong(
            where,
            f"default_prompt_name is {shown(usual, 60)}",
            f"one of {', '.join(map(printable, prompts)) or 'no prompts'}",
        )
    return prompts, usual


def _splade(root: Path, name: str) -> SpladePooling:
    settings = settings_in(root, name) if is_entry(root, name) else {}
    found = SpladePooling(settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu"))
    if found.strategy not in ("max", "sum") or found.activation not in ("relu", "log1p_relu"):
        raise wrong(
            root / name, f"found {shown(settings, 80)}", "the strategy max or sum, the activation relu or log1p_relu"
        )
    return found


def _pooling(root: Path, name: str) -> tuple[Any, ...]:
    settings = settings_in(root, name)
    stated = settings.get("pooling_mode")
    if isinstance(stated, str):
        stated = [stated]
    if stated is not None and not (isinstance(stated, list) and all(isinstance(part, str) for part in stated)):
        found = f"pooling_mode is {shown(stated, 60)}"
        raise wrong(root / name, found, "the name of a pooling, or a list of names")
    for key in POOLINGS:
        if not isinstance(settings.get(key, False), bool):
            raise wrong(root / name, f"{key} is {shown(settings[key], 60)}", "true or false")
    if stated:
        named = tuple(_NEWPOOLINGS.get(name, name) for name in stated)
        unknown = [name for name in named if name not in POOLINGS.values()]
        if unknown:
            known = ", ".join(POOLINGS.values())
            raise wrong(root / name, f"pooling_mode names {printable(unknown[0], 60)}", f"one or more of {known}")
        return named
    chosen = tuple(name for key, name in POOLINGS.items() if settings.get(key) is True)
    return chosen or ("mean",)
