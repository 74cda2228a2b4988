"""The small files of a sentence-transformers folder, written from a model's settings for vectors.

Used if a folder's own files cannot be copied: its transformer is in a subfolder, or training changed how vectors are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flodl_hf.checkpoints.sentence.recipe import POOLINGS, SentenceTransformerConfig
from flodl_hf.checkpoints.sentence.settings import json_bytes
from flodl_hf.checkpoints.sentence.vectors import MultiVectorConfig, SpladePooling

Parts = list[tuple[str, str]]
PYLATE_DENSE = "pylate.models.Dense.Dense"
_PREFIX = "sentence_transformers.models."


def recipe_files(recipe: SentenceTransformerConfig, hidden_size: int) -> dict[str, bytes]:
    """Return the small files of a sentence-transformers folder with weights at its root."""
    if recipe.splade is not None:
        return splade_files(recipe.splade, recipe.max_tokens, model_settings(recipe))
    if recipe.activation is not None and recipe.scorer is None:
        behind, files = [], {}  # the head of a cross-encoder lies among the weights
    else:
        behind, files = _router_files(recipe, hidden_size) if recipe.routes else _behind(recipe, hidden_size)
    modules = [(_PREFIX + kind, path) for kind, path in [("Transformer", ""), *behind]]
    return folder_files(modules, model_settings(recipe), bounds_of(recipe)) | files


def model_settings(recipe: SentenceTransformerConfig) -> dict[str, Any]:
    """Return the contents of ``config_sentence_transformers.json`` for a model."""
    found: dict[str, Any] = {}
    if recipe.prompts:
        found = {"prompts": dict(recipe.prompts), "default_prompt_name": recipe.default_prompt}
    stated = {
        "truncate_dim": recipe.truncate_dim, "max_active_dims": recipe.most_words, "model_type": recipe.kind,
        "activation_fn": recipe.activation,
    }  # fmt: skip
    return found | {key: value for key, value in stated.items() if value is not None}


def bounds_of(recipe: SentenceTransformerConfig) -> dict[str, Any]:
    """Return the contents of ``sentence_bert_config.json``: lengths, and the model output that is read.

    Overrides of ``config.json`` and ``tokenizer_config.json`` are omitted: those files now have their values.
    """
    overrides = ("model_kwargs", "model_args", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args")
    stated = recipe.transformer_settings.stated
    found = {key: value for key, value in stated.items() if key not in (*overrides, "processing_kwargs")}
    if recipe.max_tokens is not None:
        found |= {"max_seq_length": recipe.max_tokens, "do_lower_case": recipe.lower_case}
    return found


def _behind(recipe: SentenceTransformerConfig, hidden_size: int, inside: str = "") -> tuple[Parts, dict[str, bytes]]:
    """Return kinds and folders of the modules behind a transformer, and their files."""
    parts: Parts = []
    files: dict[str, bytes] = {}

    def add(kind: str, made: Callable[[str], dict[str, bytes]]) -> None:
        parts.append((kind, f"{inside}{len(parts) + 1}_{kind}"))
        files.update(made(parts[-1][1]))

    if recipe.layers is not None:
        add("WeightedLayerPooling", recipe.layers.files)
    for step in recipe.tokens:
        add(step.kind, step.files)
    if recipe.pooling != ("pooler",):
        sizes = [step.size for step in recipe.tokens if step.size is not None]
        size = sizes[-1] if sizes else hidden_size
        pooling: dict[str, Any] = {"word_embedding_dimension": size, "include_prompt": recipe.include_prompt}
        pooling |= {key: name in recipe.pooling for key, name in POOLINGS.items()}
        add("Pooling", lambda part: {f"{part}/config.json": json_bytes(pooling)})
    for step in recipe.dense:
        add(step.kind, step.files)
    if recipe.normalize:
        add("Normalize", lambda part: {})
    return parts, files


def _router_files(recipe: SentenceTransformerConfig, hidden_size: int) -> tuple[Parts, dict[str, bytes]]:
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
    return [("Router", folder)], {f"{folder}/router_config.json": json_bytes(said)} | files


def splade_files(
    pooling: SpladePooling, max_tokens: int | None, settings: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return the small files of a SparseEncoder's folder.

    Args:
        pooling: how weights are made.
        max_tokens: most tokens of a text.
        settings: further contents of ``config_sentence_transformers.json``: prompts, ``max_active_dims``.
    """
    prefix = "sentence_transformers.sparse_encoder.models."
    said = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "default_prompt_name": None}
    files = folder_files(
        [(f"{prefix}MLMTransformer", ""), (f"{prefix}SpladePooling", "1_SpladePooling")],
        said | {"similarity_fn_name": "dot"} | dict(settings or {}),
        {"max_seq_length": max_tokens, "do_lower_case": False},
    )
    own = {"pooling_strategy": pooling.strategy, "activation_function": pooling.activation}
    return files | {"1_SpladePooling/config.json": json_bytes(own)}


def pylate_files(late: MultiVectorConfig) -> dict[str, bytes]:
    """Return the small files of a folder with weights at its root, as PyLate writes them.

    sentence-transformers' MultiVectorEncoder reads them too.

    Args:
        late: the recipe; its projections are `Dense`.
    """
    layers: Any = late.projections  # of the class `Dense`
    kinds = [("sentence_transformers.models.Transformer", "")]
    kinds += [(PYLATE_DENSE, f"{place}_Dense") for place in range(1, len(layers) + 1)]
    said = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": late.query_marker or "",
        "document_prefix": late.document_marker or "",
        "query_length": late.query_length,
        "document_length": late.document_length,
        "do_query_expansion": late.expanded,
        "attend_to_expansion_tokens": late.attended,
        "skiplist_words": list(late.skipped),
    }
    bounds = {"max_seq_length": late.document_length, "do_lower_case": False}
    files = folder_files(kinds, said, bounds)
    for (_, part), layer in zip(kinds[1:], layers, strict=True):
        files |= layer.files(part)
    return files


def folder_files(
    modules: Sequence[tuple[str, str]], settings: Mapping[str, Any], bounds: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the small files at the root of a folder of sentence-transformers.

    Args:
        modules: type and folder of each module.
        settings: of ``config_sentence_transformers.json``; empty for none.
        bounds: of ``sentence_bert_config.json``; empty for none.
    """
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    said = {
        "modules.json": listed, "config_sentence_transformers.json": settings, "sentence_bert_config.json": bounds,
    }  # fmt: skip
    return {name: json_bytes(value) for name, value in said.items() if value}
