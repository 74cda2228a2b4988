"""Folders of sentence-transformers: what their small files specify about vectors and scores.

``modules.json`` lists a transformer, a pooling, and perhaps modules that change vectors of tokens before it and vectors
of texts after it (`flodl_hf.checkpoints.sentence.steps`); or SPLADE's two modules; or a transformer and the dense
layers of token vectors, as PyLate and MultiVectorEncoder have them. Queries and documents may have separate routes
through poolings and later modules (Router, formerly Asym), after one transformer or each after a separate one.
Anything else would change vectors and is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flodl.errors import nearest, printable, shown
from flodl_hf.checkpoints.config.file import stored_activation
from flodl_hf.checkpoints.folders import BOUNDS, CONFIG_NAME, is_entry
from flodl_hf.checkpoints.sentence.settings import (
    Modules,
    TransformerSettings,
    bytes_of,
    folder_of,
    kind_of,
    layer_number,
    refuse_setting,
    routing_of,
    settings_in,
    transformer_folder,
    transformer_settings,
    warn_of_unknown,
    wrong,
)
from flodl_hf.checkpoints.sentence.steps import STEPS, Dense, Layer, Step, read_step
from flodl_hf.checkpoints.sentence.vectors import (
    MultiVectorConfig,
    SpladePooling,
    m3_layer,
    multivector_recipe,
    pylate_recipe,
)
from flodl_hf.errors import PredictError

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
_MODULE_KEYS = ("idx", "name", "path", "type", "kwargs")
_POOLING_KEYS = ("embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *POOLINGS)
_SPLADE_KEYS = (
    "pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension", "chunk_size",
)  # fmt: skip
_MASK_KEYS = ("skiplist_words", "skiplist_tasks", "keep_only_token_ids")
_MODEL_KEYS = (
    "__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim",
    "max_active_dims", "activation_fn", "keep_in_fp32_modules", "requirements", "query_prefix", "document_prefix",
    "query_length", "document_length", "query_expansion", "do_query_expansion", "attend_to_expansion_tokens",
    "attend_to_mask_tokens", "skiplist_words", "mask_punctuation", "token_pooling",
)  # fmt: skip


@dataclass(frozen=True)
class SentenceTransformerConfig:
    """How a folder makes a vector of a text.

    Attributes:
        pooling: the poolings whose results are joined, in order.
        normalize: whether vectors are scaled to length 1.
        max_tokens: most tokens that are read, or None.
        lower_case: whether texts are lower-cased first.
        files: the small files as read, by name, to be written back unchanged.
        dense: layers applied in order to a pooled vector, before it is scaled.
        tokens: layers applied in order to the states of a text's tokens, before pooling.
        layers: weights of the hidden states for a weighted mean, read instead of the last state; None for the last.
        layer: number of the hidden state that is read instead of the last; None for the last.
        prompts: texts prepended to inputs, by name.
        default_prompt: the prompt of calls without a prompt.
        include_prompt: whether tokens of a prompt are pooled too.
        splade: how word scores become sparse vectors, or None.
        lexical: layer that gives each token its weight for sparse vectors (bge-m3), or None.
        late: settings for one vector per token, or None.
        routes: if kinds of texts have separate modules ("query", "document"), each kind's recipe by
            name; the fields above are then those of the usual route, or of the first if none is usual.
        usual_route: the route of calls without a route; None if calls must name one.
        kinds: further names of routes, as the folder maps tasks to them.
        transformer: if routes have separate transformers, the folder of this route's, from the root; else "".
        truncate_dim: default number of features to keep of a vector; None for all.
        kind: class of sentence-transformers that saved the folder ("CrossEncoder"); None if it is not stated.
        activation: path of the activation that makes scores of a cross-encoder's logits; None for other kinds.
        most_words: most words of a sparse vector; None for all above zero.
        transformer_settings: how the transformer is loaded.
    """

    pooling: tuple[Any, ...] = ("mean",)
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    dense: tuple[Layer, ...] = ()
    tokens: tuple[Layer, ...] = ()
    layers: Step | None = None
    layer: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    splade: SpladePooling | None = None
    lexical: Dense | None = None
    late: MultiVectorConfig | None = None
    routes: Mapping[str, SentenceTransformerConfig] = field(default_factory=dict)
    usual_route: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    transformer: str = ""
    truncate_dim: int | None = None
    kind: str | None = None
    activation: str | None = None
    most_words: int | None = None
    transformer_settings: TransformerSettings = field(default_factory=TransformerSettings)

    @property
    def changes_states(self) -> bool:
        """Whether vectors use other values than the last states, which the runtime's forward passes pool."""
        return bool(self.tokens) or self.layers is not None or self.layer is not None

    @property
    def reads_padding(self) -> bool:
        """Whether vectors depend on the padding of a batch, which convolutions read."""
        return any(step.kind == "CNN" for step in self.tokens)

    @property
    def scorer(self) -> Dense | None:
        """The dense layer that makes a cross-encoder's scores of pooled vectors; None if there is none."""
        last = self.dense[-1] if self.dense else None
        if isinstance(last, Dense) and (last.source or {}).get("module_output_name") == "scores":
            return last
        return None

    def shares(self, layers: int, folder: str) -> tuple[tuple[int, float], ...]:
        """Return the numbers of the hidden states that are read and their shares; nothing for the last state alone.

        Args:
            layers: of the model.
            folder: the folder, for messages.

        Raises:
            ConfigError: the model has other hidden states.
        """
        if self.layers is not None:
            found = self.layers.shares()
            layer_number(found[-1][0], layers, folder)
            return found
        return () if self.layer is None else ((layer_number(self.layer, layers, folder), 1.0),)

    def kept(self, requested: int | None) -> int | None:
        """Return how many features of a vector to keep, given the call's ``requested``; None for all."""
        return self.truncate_dim if requested is None else requested

    def width(self, hidden_size: int) -> int:
        """Return how many features a vector has before any are left out, of states of ``hidden_size``."""
        sizes = [step.size for step in (*self.tokens, *self.dense) if step.size is not None]
        own = [step.size for step in self.dense if step.size is not None]
        return own[-1] if own else len(self.pooling) * (sizes[-1] if sizes else hidden_size)

    def route_of(self, route: str | None) -> str | None:
        """Return the route of texts; None if the folder has none.

        Args:
            route: the name of a route or of a task; None for the usual one.

        Raises:
            PredictError: the route does not exist, or none is usual and none was requested.
        """
        if not self.routes:
            if route is None:
                return None
            raise PredictError(f"route={route!r}: this model has no routes; all texts go one way. Leave it out")
        found = self.usual_route if route is None else self.kinds.get(route, route)
        if found is not None and found in self.routes:
            return found
        names = list(dict.fromkeys((*self.routes, *self.kinds)))
        hint = "" if route is None else nearest(route, names)
        raise PredictError(f"route={route!r}: this model has no such route{hint}; expected one of {', '.join(names)}")

    def on(self, route: str | None = None) -> SentenceTransformerConfig:
        """Return the recipe of the texts of one route, this one where there are no routes; see `route_of`."""
        name = self.route_of(route)
        return self if name is None else self.routes[name]

    def resolve_prompt(self, method: str, prompt: str | None = None, name: str | None = None) -> str:
        """Return the prompt as sentence-transformers resolves it: ``prompt`` itself, else ``name``, else the default.

        One warning if ``prompt`` is the name of a prompt, because it is used as text.

        Args:
            method: the method that was called, for the message.
            prompt: a text, used unchanged.
            name: the name of a prompt; models of vectors always have "query" and "document", empty if not stored.

        Raises:
            PredictError: no prompt has this name.
        """
        if prompt is not None:
            if self.prompts.get(prompt, prompt) != prompt:
                warnings.warn(
                    f"{method}: found prompt={prompt!r}, which is used as text and is also the name of a prompt of the "
                    f"folder. Pass prompt_name={prompt!r} for that prompt.",
                    UserWarning,
                    stacklevel=3,
                )
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


def recipe_on(recipe: SentenceTransformerConfig | None, route: str | None) -> SentenceTransformerConfig | None:
    """Return the recipe for the texts of one route; None without a recipe.

    Raises:
        PredictError: the route does not exist.
    """
    if recipe is None and route is None:
        return None
    return (recipe or SentenceTransformerConfig()).on(route)


def read_recipe(root: Path) -> SentenceTransformerConfig | None:
    """Return the recipe in ``modules.json``, or None without that file.

    Raises:
        ConfigError: an unsupported module, or damaged files.
    """
    if not is_entry(root, "modules.json"):
        return None
    routing = routing_of(root)
    keys = {key: None for way in routing.ways.values() for module in way for key in module}
    warn_of_unknown(root / "modules.json", keys, _MODULE_KEYS)
    folders = routing.transformers(root)
    several = len(set(folders.values())) > 1
    found = {
        name: replace(_recipe(root, way, folders[name], keep=several), transformer=folders[name] if several else "")
        for name, way in routing.ways.items()
    }
    usual = found[routing.first]
    if not routing.files:
        return usual
    if any(own.late is not None or own.splade is not None for own in found.values()):
        expected = "routes that give one vector for each text"
        raise wrong(root / routing.files[0], "found routes with sparse vectors or vectors of tokens", expected)
    files = {name: data for own in found.values() for name, data in own.files.items()}
    if files:
        files |= {name: bytes_of(root, name) for name in routing.files}
    ways = {name: replace(own, files={}) for name, own in found.items()}
    return replace(usual, files=files, routes=ways, usual_route=routing.usual, kinds=routing.kinds)


def _recipe(root: Path, modules: Modules, transformer: str, *, keep: bool) -> SentenceTransformerConfig:
    """Return the recipe of one route, with its files if weights are at the root, or ``keep`` is set."""
    kept = keep or transformer_folder(root) == root
    known = [(Path(folder) / name).as_posix() for folder in (transformer, "") for name in BOUNDS]
    bounds = next((name for name in known if is_entry(root, name)), BOUNDS[0])
    said_in = "config_sentence_transformers.json"
    said = settings_in(root, said_in, _MODEL_KEYS, optional=True)
    read = ["modules.json", bounds, said_in]
    kinds = [kind_of(module) for module in modules]
    late = "MultiVectorMask" in kinds or (
        "Pooling" not in kinds and any(_is_of_tokens(root, m) for m in modules if kind_of(m) == "Dense")
    )
    stated = settings_in(root, bounds, optional=True)
    settings = transformer_settings(stated, root / bounds, several=keep, late=late)
    pooling: tuple[Any, ...] = ("pooler",) if settings.pooler else ("mean",)
    before: list[Layer] = []
    behind: list[Layer] = []
    steps = before if "Pooling" in kinds else behind
    more: dict[str, bytes] = {}
    splade: SpladePooling | None = None
    mask: dict[str, Any] = {}
    layers: Step | None = None
    included = True
    for module, kind in zip(modules, kinds, strict=True):
        folder = folder_of(root, module)
        place = (Path(folder) / CONFIG_NAME).as_posix()
        if kind == "Pooling":
            if not (root / folder).is_dir():
                found = f"names {printable(str(module.get('path')), 80)} for the pooling, which is no folder here"
                raise wrong(root / "modules.json", found, "the folder with its config.json")
            if settings.pooler:
                raise wrong(root / bounds, "found module_output_name sentence_embedding", "token_embeddings")
            pooling = _pooling(root, place)
            included = settings_in(root, place).get("include_prompt") is not False
            read.append(place)
            steps = behind
        elif kind in STEPS:
            step, files = read_step(root, kind, module)
            more |= files
            if kind == "WeightedLayerPooling" and isinstance(step, Step):
                layers = step
                continue
            if step.of_tokens != (steps is before) and not late:
                names = ("sentence_embedding", "token_embeddings")
                expected = f"{names[steps is before]} {'before' if steps is before else 'behind'} the pooling"
                raise refuse_setting(root / place, "module_input_name", names[step.of_tokens], expected)
            steps.append(step)
        elif kind == "SpladePooling":
            splade = _splade(root, place)
            read.append(place)
        elif kind == "MultiVectorMask":
            mask = settings_in(root, place, _MASK_KEYS, optional=True)
            read.append(place)
    config = settings_in(root / transformer, CONFIG_NAME, optional=True) if layers is not None else {}
    if {**config, **settings.config}.get("output_hidden_states") is not True:
        layers = None  # sentence-transformers then ignores the module
    normalize = bool(behind) and behind[-1].kind == "Normalize"
    while behind and behind[-1].kind == "Normalize":
        behind.pop()
    projections = [step for step in behind if isinstance(step, Dense)]
    tokens = None
    if "MultiVectorMask" in kinds:
        tokens = multivector_recipe(said, stated, mask, projections, root)
    elif late:
        tokens = pylate_recipe(said, projections, root / said_in)
    elif behind and "Pooling" not in kinds and not settings.pooler:
        raise wrong(root / "modules.json", f"found {behind[0].kind} without a pooling", "a Pooling before it")
    if tokens is not None:
        behind, normalize = [], False
    lexical = None
    if is_entry(root, "sparse_linear.pt"):
        lexical, more["sparse_linear.pt"] = m3_layer(root, "sparse_linear.pt")
    if is_entry(root, "colbert_linear.pt"):
        layer, more["colbert_linear.pt"] = m3_layer(root, "colbert_linear.pt")
        tokens = MultiVectorConfig((layer,), first=False, beside=True)
    files = {name: bytes_of(root, name) for name in read if is_entry(root, name)} | more
    prompts, usual = _prompts(said, root / said_in)
    return SentenceTransformerConfig(
        pooling=pooling, normalize=normalize, max_tokens=settings.max_tokens, lower_case=settings.lower_case,
        files=files if kept else {}, dense=tuple(behind), tokens=tuple(before), layers=layers, layer=settings.layer,
        prompts=prompts, default_prompt=usual, include_prompt=included, splade=splade, lexical=lexical, late=tokens,
        truncate_dim=_number_of(said, "truncate_dim", root / said_in), kind=said.get("model_type"),
        activation=_activation(said, root), most_words=_number_of(said, "max_active_dims", root / said_in),
        transformer_settings=settings,
    )  # fmt: skip


def _is_of_tokens(root: Path, module: Mapping[str, Any]) -> bool:
    """Return whether a dense layer changes token vectors rather than text vectors."""
    if module["type"].startswith("pylate."):
        return True
    settings = settings_in(root, f"{folder_of(root, module)}/{CONFIG_NAME}", optional=True)
    return settings.get("module_input_name") == "token_embeddings"


def _activation(settings: Mapping[str, Any], root: Path) -> str | None:
    """Return the path of a cross-encoder's activation, by the rules of sentence-transformers; None for other kinds."""
    if settings.get("model_type") != "CrossEncoder":
        return None
    config = settings_in(root, CONFIG_NAME, optional=True)
    labels = len(config.get("id2label") or range(config.get("num_labels", 2)))
    usual = "torch.nn.modules.activation.Sigmoid" if labels == 1 else "torch.nn.modules.linear.Identity"
    return str(settings.get("activation_fn") or stored_activation(config) or usual)


def _number_of(settings: Mapping[str, Any], key: str, path: Path) -> int | None:
    """Return how many features or words of a vector a folder keeps; None for all."""
    found = settings.get(key)
    if found is not None and (type(found) is not int or found < 1):
        raise wrong(path, f"{key} is {shown(found, 60)}", "a number from 1, or null")
    return found


def _prompts(settings: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a folder by name, and the name of the default one."""
    prompts, usual = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise wrong(path, f"prompts is {shown(prompts, 60)}", "a table of texts")
    if usual not in (None, *prompts):
        raise wrong(path, f"default_prompt_name is {shown(usual, 60)}", f"a name in {shown(list(prompts), 200)}")
    return prompts, usual


def _splade(root: Path, name: str) -> SpladePooling:
    settings = settings_in(root, name, _SPLADE_KEYS, optional=True)
    found = SpladePooling(settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu"))
    if found.strategy not in ("max", "sum") or found.activation not in ("relu", "log1p_relu"):
        expected = "the strategy max or sum, the activation relu or log1p_relu"
        raise wrong(root / name, f"found {shown(settings, 80)}", expected)
    return found


def _pooling(root: Path, name: str) -> tuple[Any, ...]:
    settings = settings_in(root, name, _POOLING_KEYS)
    for key in POOLINGS:
        if not isinstance(settings.get(key, False), bool):
            raise wrong(root / name, f"{key} is {shown(settings[key], 60)}", "true or false")
    stated = settings.get("pooling_mode") or [name for key, name in POOLINGS.items() if settings.get(key)] or ["mean"]
    names = stated if isinstance(stated, list) else [stated]
    found = tuple(_NEWPOOLINGS.get(name, name) if isinstance(name, str) else "" for name in names)
    if not set(found) <= set(POOLINGS.values()):
        raise wrong(root / name, f"the pooling is {shown(stated, 60)}", f"some of {', '.join(POOLINGS.values())}")
    return found
