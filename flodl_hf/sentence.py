"""Folders of sentence-transformers: what their small files say about pooling, read and written.

``modules.json`` lists a transformer, a pooling, and perhaps a normalisation; anything else (a dense
layer, say) would change the vectors and is refused when embeddings are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, printable, shown
from flodl_hf.checkpoint.members import is_entry, read_member
from flodl_hf.errors import PredictError

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
    """

    pooling: tuple[Any, ...] = ("mean",)
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)


def _modules(root: Path) -> list[dict[str, Any]]:
    value = _read(root, "modules.json")
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in value):
        raise ConfigError(
            f"{root / 'modules.json'}: expected a list of modules with their types", problems=["modules.json"]
        )
    return value


def _read(root: Path, name: str) -> Any:
    path = root / name
    try:
        return json.loads(_bytes(root, name).decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: cannot be read as JSON ({fault})", where=str(path), problems=[path.name]) from None


def _settings(root: Path, name: str) -> dict[str, Any]:
    value = _read(root, name)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{root / name}: holds a JSON {type(value).__name__}; expected an object with settings",
            where=str(root / name),
            problems=[name],
        )
    return value


def _bytes(root: Path, name: str) -> bytes:
    return read_member(root, name, _LIMIT, ConfigError)


def _inside(root: Path, part: object) -> Path:
    place = root / str(part or "")
    if not place.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"{root / 'modules.json'}: the path {printable(str(part))} leads out of the folder",
            problems=[str(part)],
        )
    return place


def transformer_folder(root: Path) -> Path:
    """Return the folder that holds the weights: ``root``, or what its ``modules.json`` names."""
    if is_entry(root, "config.json") or not is_entry(root, "modules.json"):
        return root
    modules = _modules(root)
    return _inside(root, modules[0].get("path")) if modules else root


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
    for module in _modules(root):
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            place = (_inside(root, module.get("path")) / "config.json").relative_to(root).as_posix()
            pooling = _pooling(root, place)
            read.append(place)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{root / 'modules.json'}: module {printable(module['type'])} is not supported; expected Transformer, "
                "Pooling and Normalize. Load the transformer's own folder to use it without.",
                problems=[module["type"]],
            )
    bounds = "sentence_bert_config.json"
    settings = _settings(root, bounds) if is_entry(root, bounds) else {}
    length = settings.get("max_seq_length")
    at_root = transformer_folder(root) == root
    return SentenceRecipe(
        pooling,
        normalize,
        length if isinstance(length, int) and length > 0 else None,
        settings.get("do_lower_case") is True,
        {name: _bytes(root, name) for name in read if is_entry(root, name)} if at_root else {},
    )


def _pooling(root: Path, name: str) -> tuple[Any, ...]:
    settings = _settings(root, name)
    stated = settings.get("pooling_mode")
    if isinstance(stated, str):
        stated = [stated]
    if stated is not None and not (isinstance(stated, list) and all(isinstance(part, str) for part in stated)):
        raise ConfigError(
            f"{root / name}: pooling_mode is {shown(stated, 60)}; expected the name of a pooling, or a list of names",
            where=str(root / name),
            problems=["pooling_mode"],
        )
    if stated:
        return tuple(_NEW_MODES.get(name, name) for name in stated)
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
    prefix = "sentence_transformers.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": prefix + "Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": prefix + "Pooling"},
    ]
    if recipe.normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": prefix + "Normalize"})
    pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size}
    pooling |= {key: name in recipe.pooling for key, name in _MODES.items()}
    files = {"modules.json": modules, "1_Pooling/config.json": pooling}
    if recipe.max_tokens is not None:
        files["sentence_bert_config.json"] = {
            "max_seq_length": recipe.max_tokens,
            "do_lower_case": recipe.lower_case,
        }
    return {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in files.items()}
