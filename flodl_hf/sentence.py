"""Folders of sentence-transformers: what their small files say about pooling, read and written.

``modules.json`` lists a transformer, a pooling, and perhaps dense layers and a normalisation; or SPLADE's two modules;
or a transformer and the dense layers of token vectors, as PyLate and MultiVectorEncoder have them. Anything else would
change vectors and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, printable, shown
from flodl_hf.checkpoint.members import is_entry, read_member
from flodl_hf.dense import Dense, dense_files, read_dense
from flodl_hf.errors import PredictError
from flodl_hf.late import LateRecipe, m3_layer, multivector_recipe, pylate_recipe
from flodl_hf.sparse import SpladePooling

if TYPE_CHECKING:
    from flodl_hf.decode.classes import Activation

__all__ = ["SentenceRecipe", "ranking_activation", "read_recipe", "recipe_files", "transformer_folder"]

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}
_NEW_MODES = {
    "lasttoken": "last_token",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_LIMIT = 1_000_000
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "MLMTransformer", "SpladePooling", "MultiVectorMask")
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_LEAST_TOKENS = 3  # two special ones and one of the text
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
_ACTIVATIONS: dict[str, Activation] = {"sigmoid": "sigmoid", "identity": "none", "none": "none"}


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

    def prompt_for(self, given: str | None) -> str:
        """Return what is put before texts: a prompt by its name, the default one, or ``given`` as it is."""
        if given is None:
            return self.prompts.get(self.default_prompt or "", "")
        return self.prompts.get(given, given)


def _modules(root: Path) -> list[dict[str, Any]]:
    value = _read(root, "modules.json")
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in value):
        raise _wrong(root / "modules.json", f"found {shown(value, 60)}", "a list of modules with their types")
    kinds = [_kind(module) for module in value]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown:
        raise ConfigError(
            f"{root / 'modules.json'}: module {printable(unknown[0], 80)} is not supported; expected Transformer, "
            "Pooling, Dense and Normalize, or MLMTransformer and SpladePooling. Load the transformer's own folder to "
            "use it without.",
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
    place = _inside(root, _modules(root)[0].get("path"))
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
    pooling: tuple[Any, ...] = ("mean",)
    normalize = False
    read = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    dense: list[Dense] = []
    more: dict[str, bytes] = {}
    splade: SpladePooling | None = None
    mask: dict[str, Any] | None = None
    included = True
    modules = _modules(root)
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
    bounds = "sentence_bert_config.json"
    settings = _settings(root, bounds) if is_entry(root, bounds) else {}
    length, lower = settings.get("max_seq_length"), settings.get("do_lower_case")
    if length is not None and (type(length) is not int or length < _LEAST_TOKENS):
        found = f"max_seq_length is {shown(length, 60)}"
        raise _wrong(root / bounds, found, f"a whole number from {_LEAST_TOKENS}, or null")
    if lower is not None and not isinstance(lower, bool):
        raise _wrong(root / bounds, f"do_lower_case is {shown(lower, 60)}", "true or false")
    at_root = transformer_folder(root) == root
    said = _settings(root, read[2]) if is_entry(root, read[2]) else {}
    late = None
    if mask is not None:
        late, dense, normalize = multivector_recipe(said, settings, mask, dense, str(root)), [], False
    elif dense and not any(_kind(module) == "Pooling" for module in modules):
        late, dense = pylate_recipe(said, dense, str(root / read[2])), []
    lexical = None
    if is_entry(root, "sparse_linear.pt"):
        lexical, more["sparse_linear.pt"] = m3_layer(root, "sparse_linear.pt")
    if is_entry(root, "colbert_linear.pt"):
        layer, more["colbert_linear.pt"] = m3_layer(root, "colbert_linear.pt")
        late = LateRecipe((layer,), first=False)
    files = {name: _bytes(root, name) for name in read if is_entry(root, name)} | more
    prompts, usual = _prompts(said, root / read[2])
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
    for key in _MODES:
        if not isinstance(settings.get(key, False), bool):
            raise _wrong(root / name, f"{key} is {shown(settings[key], 60)}", "true or false")
    if stated:
        named = tuple(_NEW_MODES.get(name, name) for name in stated)
        unknown = [name for name in named if name not in _MODES.values()]
        if unknown:
            known = ", ".join(_MODES.values())
            raise _wrong(root / name, f"pooling_mode names {printable(unknown[0], 60)}", f"one or more of {known}")
        return named
    chosen = tuple(name for key, name in _MODES.items() if settings.get(key) is True)
    return chosen or ("mean",)


def ranking_activation(config: Mapping[str, Any], given: str | None = None) -> Activation:
    """Return what makes scores of a cross-encoder's logits.

    Args:
        config: ``config.json``: new files name the activation in ``sentence_transformers``, older ones in
            ``sbert_ce_default_activation_function``.
        given: "sigmoid" or "none", instead of what the file says.

    Raises:
        PredictError: another activation than these two is asked for.
    """
    new = config.get("sentence_transformers")
    stated = new.get("activation_fn") if isinstance(new, Mapping) else None
    named = given or stated or config.get("sbert_ce_default_activation_function") or "sigmoid"
    found = _ACTIVATIONS.get(str(named).rpartition(".")[2].lower())
    if found is None:
        raise PredictError(
            f"rerank: the activation of scores is {printable(str(named))}; expected Sigmoid or Identity. "
            "Choose one: function_to_apply='sigmoid' or 'none'; both keep the order.",
            found=str(named),
        )
    return found


def recipe_files(recipe: SentenceRecipe, hidden_size: int) -> dict[str, bytes]:
    """Return the small files of a sentence-transformers folder whose weights lie at its root."""
    if recipe.splade is not None:
        return _sparse_files(recipe)
    prefix = "sentence_transformers.models."
    parts = ["Transformer", "Pooling", *("Dense" for _ in recipe.dense), *(["Normalize"] if recipe.normalize else [])]
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{part}" if place else "", "type": prefix + part}
        for place, part in enumerate(parts)
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size, "include_prompt": recipe.include_prompt}
    pooling |= {key: name in recipe.pooling for key, name in _MODES.items()}
    files: dict[str, Any] = {"modules.json": modules, "1_Pooling/config.json": pooling}
    if recipe.prompts:
        said = {"prompts": dict(recipe.prompts), "default_prompt_name": recipe.default_prompt}
        files["config_sentence_transformers.json"] = said
    if recipe.max_tokens is not None:
        files["sentence_bert_config.json"] = {
            "max_seq_length": recipe.max_tokens,
            "do_lower_case": recipe.lower_case,
        }
    found = {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in files.items()}
    for place, layer in enumerate(recipe.dense, 2):
        found |= dense_files(f"{place}_Dense", layer)
    return found


def _sparse_files(recipe: SentenceRecipe) -> dict[str, bytes]:
    """Return the small files of a SparseEncoder's folder."""
    assert recipe.splade is not None
    prefix = "sentence_transformers.sparse_encoder.models."
    names = (("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": prefix + kind} for i, (path, kind) in enumerate(names)]
    pooling = {"pooling_strategy": recipe.splade.strategy, "activation_function": recipe.splade.activation}
    said = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "default_prompt_name": None}
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_SpladePooling/config.json": pooling,
        "config_sentence_transformers.json": said | {"similarity_fn_name": "dot"},
        "sentence_bert_config.json": {"max_seq_length": recipe.max_tokens, "do_lower_case": False},
    }
    return {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in files.items()}
