"""The small files of a sentence-transformers folder, written from what a model does with its states.

Used where a folder's own files cannot be kept as they were: its transformer lay in a folder of its own, or training
changed how vectors are made.
"""

from __future__ import annotations

import json
from typing import Any

from flodl_hf.sentence.dense import dense_files
from flodl_hf.sentence.recipe import POOLINGS, SentenceRecipe
from flodl_hf.sentence.sparse import splade_files

__all__ = ["recipe_files"]

Parts = list[tuple[str, str]]

_PREFIX = "sentence_transformers.models."


def recipe_files(recipe: SentenceRecipe, hidden_size: int) -> dict[str, bytes]:
    """Return the small files of a sentence-transformers folder whose weights lie at its root."""
    if recipe.splade is not None:
        return splade_files(recipe.splade, recipe.max_tokens)
    behind, files = _router_files(recipe, hidden_size) if recipe.routes else _behind(recipe, hidden_size)
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": _PREFIX + kind}
        for place, (kind, path) in enumerate([("Transformer", ""), *behind])
    ]
    said: dict[str, Any] = {"modules.json": modules}
    more: dict[str, Any] = {}
    if recipe.prompts:
        more = {"prompts": dict(recipe.prompts), "default_prompt_name": recipe.default_prompt}
    if recipe.truncate_dim is not None:
        more["truncate_dim"] = recipe.truncate_dim
    if more:
        said["config_sentence_transformers.json"] = more
    if recipe.max_tokens is not None:
        bounds = {"max_seq_length": recipe.max_tokens, "do_lower_case": recipe.lower_case}
        said["sentence_bert_config.json"] = bounds
    return {name: _json(value) for name, value in said.items()} | files


def _behind(recipe: SentenceRecipe, hidden_size: int, inside: str = "") -> tuple[Parts, dict[str, bytes]]:
    """Return kinds and folders of the modules behind a transformer, and their files."""
    kinds = ["Pooling", *("Dense" for _ in recipe.dense), *(["Normalize"] if recipe.normalize else [])]
    pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size, "include_prompt": recipe.include_prompt}
    pooling |= {key: name in recipe.pooling for key, name in POOLINGS.items()}
    files = {f"{inside}1_Pooling/config.json": _json(pooling)}
    for place, layer in enumerate(recipe.dense, 2):
        files |= dense_files(f"{inside}{place}_Dense", layer)
    return [(kind, f"{inside}{place}_{kind}") for place, kind in enumerate(kinds, 1)], files


def _router_files(recipe: SentenceRecipe, hidden_size: int) -> tuple[Parts, dict[str, bytes]]:
    """Return a router behind a transformer, and its files."""
    folder = "1_Router"
    types: dict[str, str] = {}
    structure: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    for place, (name, own) in enumerate(recipe.routes.items()):
        parts, held = _behind(own, hidden_size, f"{folder}/{name if name.isidentifier() else place}_")
        named = {path.removeprefix(folder + "/"): _PREFIX + kind for kind, path in parts}
        types |= named
        structure[name] = list(named)
        files |= held
    usual = recipe.usual_route
    settings = {
        "default_route": usual, "allow_empty_key": usual is not None,
        "route_mappings": {str((kind, None)): route for kind, route in recipe.kinds.items()},
    }  # fmt: skip
    said = {"types": types, "structure": structure, "parameters": settings}
    return [("Router", folder)], {f"{folder}/router_config.json": _json(said)} | files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
