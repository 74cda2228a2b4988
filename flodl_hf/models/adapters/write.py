"""Write an adapter as peft reads it, with its head and the names of its labels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flodl_hf.checkpoints.folders import ADAPTER_CONFIG as CONFIG
from flodl_hf.checkpoints.saving.state import FilePlan, WritePlan
from flodl_hf.checkpoints.sentence.writing import pylate_files, recipe_files
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.models.adapters.folder import ENDS, HEAD, VIRTUAL, WEIGHTS, prefix_of
from flodl_hf.models.adapters.fresh import Adapter, Site, their_names
from flodl_hf.models.adapters.peft_file import FIELDS
from flodl_hf.models.adapters.settings import IA3, Prefix, Prompt, fits
from flodl_hf.models.saving import Contents, model_contents
from flodl_hf.nn.adapter_layers import RowsPart
from flodl_hf.nn.joined_tensors import join, joined, part_of
from flodl_hf.nn.prompts import WORDS, PrefixPart, PromptPart


def stored_adapter(model: GraphModel, adapter: Adapter) -> dict[str, Tensor]:
    """Return every tensor of an adapter under the name it gets in the file, in the order of the names."""
    names, prefix = their_names(model), prefix_of(adapter.settings)
    found: dict[str, Tensor] = {}
    if (virtual := _virtual(adapter)) is not None:
        found[VIRTUAL] = virtual
    for site in adapter.sites.values():
        parts: list[Any] = [adapter.parts[path] for path in site.paths]
        on_input = getattr(parts[0], "on_input", False)
        for name, end in ENDS[type(parts[0])].items():
            tensors = [tensor.detach() for part in parts if (tensor := getattr(part, name)) is not None]
            if tensors:
                whole = tensors[0] if name == "down" or on_input else join(tensors, site.groups)
                if name == "scales":
                    whole = whole.view((1, -1) if on_input else (-1, 1))
                found[prefix + site.theirs + end] = whole
    for theirs, value in joined({names[ours]: value.detach() for ours, value in adapter.kept.items()}).items():
        module, _, leaf = theirs.rpartition(".")
        # peft wraps a projection that has a part, and finds its bias only under the name of the inner module.
        found[f"{prefix}{module}.base_layer.{leaf}" if module in adapter.sites else prefix + theirs] = value
    return dict(sorted(found.items()))


def _virtual(adapter: Adapter) -> Tensor | None:
    """Return what virtual tokens are in a file, ``(tokens, ...)``; None for other adapters."""
    found: list[Tensor] = []
    for part in adapter.parts.values():
        if isinstance(part, PromptPart):
            found.append(part.virtual_tokens().detach())
        elif isinstance(part, PrefixPart):
            found += [one.detach() for one in part.keys_and_values()]
    return torch.cat(found, 1) if found else None


def contents_of(model: GraphModel) -> Contents:
    """Return the contents of a model's folder: the active unmerged adapter, else the whole model."""
    held = cast("Any", model)._held_adapters
    if held.active is None or held.merged:
        return model_contents(model)
    return adapter_contents(model, held.known[held.active])


def adapter_contents(model: GraphModel, adapter: Adapter) -> Contents:
    """Return the contents of the folder of an adapter."""
    tensors = stored_adapter(model, adapter)
    values = {CONFIG: _settings(model, adapter), HEAD: _head(model, adapter)}
    others = {name: (json.dumps(v, indent=2, ensure_ascii=False) + "\n").encode() for name, v in values.items()}
    others |= _recipe(model, adapter)
    return Contents({"": WritePlan((FilePlan(WEIGHTS, tuple(tensors), {"format": "pt"}),), tensors, None)}, others)


def _recipe(model: GraphModel, adapter: Adapter) -> dict[str, bytes]:
    """Return the settings of vectors, which training may have changed."""
    held = cast("Any", model)._held_adapters
    active = held.active is not None and held.known[held.active] is adapter
    without = model.sentence_recipe if held.before is None else held.before.recipe
    recipe = model.sentence_recipe if active else adapter.recipe or without
    if recipe is None or model.head not in ("base", "masked_lm"):
        return {}
    if recipe.late is not None and "modules.json" not in recipe.files:
        return pylate_files(recipe.late)  # ColBERT's class has its projection among the base's weights
    return dict(recipe.files) or recipe_files(recipe, model.config.encoder.hidden_size)


def _settings(model: GraphModel, adapter: Adapter) -> dict[str, Any]:
    """Return all entries of ``adapter_config.json``, sorted by name."""
    if adapter.stored:
        return dict(adapter.stored)
    names, source = their_names(model), model.source
    # A bias without its weight is trained because of `Lora.bias`, not because its module is saved whole.
    whole = [name for name in adapter.kept if not name.endswith(".bias") or f"{name[:-4]}weight" in adapter.kept]
    common = {
        "auto_mapping": None,
        "base_model_name_or_path": None if source is None else source.name,
        "inference_mode": True,
        "modules_to_save": _modules(model, [names[ours] for ours in whole]) or None,
        "revision": None,
        "task_type": task_named(model.head).peft,
    }
    return dict(sorted({**_of_kind(model, adapter), **common}.items()))


def _of_kind(model: GraphModel, adapter: Adapter) -> dict[str, Any]:
    """Return the settings that adapters of this kind have."""
    settings, sites = adapter.settings, adapter.sites
    if isinstance(settings, (Prompt, Prefix)):
        encoder: Any = model.config.encoder
        words: Any = model.graph.get_submodule(WORDS)
        found: dict[str, Any] = {
            "num_attention_heads": encoder.num_heads,
            "num_layers": encoder.num_layers,
            "num_transformer_submodules": 1,
            "num_virtual_tokens": settings.tokens,
            "token_dim": words.embedding_dim if isinstance(settings, Prompt) else encoder.hidden_size,
        }
        width = {"encoder_hidden_size": settings.encoder}
        if isinstance(settings, Prefix):
            return found | width | {"peft_type": "PREFIX_TUNING", "prefix_projection": settings.encoder is not None}
        if settings.encoder is None:
            return found | {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
        made = {"encoder_reparameterization_type": settings.kind.upper(), "encoder_dropout": 0.0}
        return found | width | made | {"peft_type": "P_TUNING", "encoder_num_layers": 2}
    if isinstance(settings, IA3):
        inside = {place: site for place, site in sites.items() if settings.on_input(*site.names)}
        ends = _ends(model, inside)
        rest = _ends(model, {place: site for place, site in sites.items() if place not in inside})
        return {
            "fan_in_fan_out": False,
            "feedforward_modules": ends,
            "init_ia3_weights": True,
            "peft_type": "IA3",
            "target_modules": sorted({*ends, *rest}),
        }
    sites = {theirs: site for theirs, site in sites.items() if not isinstance(adapter.parts[site.paths[0]], RowsPart)}
    usual, tokens = settings.alpha_of(), settings.trainable_token_indices
    ranks = {theirs: settings.rank_of(*site.names) for theirs, site in sites.items()}
    alphas = {theirs: settings.alpha_of(*site.names) for theirs, site in sites.items()}
    ids = {name: list(rows) for name, rows in tokens.items()} if isinstance(tokens, Mapping) else list(tokens)
    return {
        **{name: getattr(settings, ours) for name, ours in FIELDS.items()},
        "alpha_pattern": {theirs: _plain(alpha) for theirs, alpha in alphas.items() if alpha != usual},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _plain(usual),
        "peft_type": "LORA",
        "rank_pattern": {theirs: rank for theirs, rank in ranks.items() if rank != settings.rank},
        "target_modules": _ends(model, sites),
        "trainable_token_indices": ids or None,
    }


def _plain(number: float) -> float:
    return int(number) if number.is_integer() else number


def _head(model: GraphModel, adapter: Adapter) -> dict[str, Any]:
    config = model.config
    architecture = config.family.class_prefix + task_named(model.head).hf_suffix
    found: dict[str, Any] = {"architectures": [architecture], "task": model.head}
    if model.head in ("sequence_classification", "token_classification"):
        labels = adapter.labels or config.labels
        found["id2label"] = {str(i): label for i, label in enumerate(labels)}
        found["problem_type"] = adapter.problem_type or config.problem_type
        if activation := adapter.score_activation or config.score_activation:
            found["activation_fn"] = activation
    return found


def _ends(model: GraphModel, sites: Mapping[str, Site]) -> list[str]:
    """Return the shortest ends of paths that mean these projections and no other module."""
    others = {_module(theirs) for theirs in their_names(model).values()} - set(sites)
    found: dict[str, None] = {}
    for path in sites:
        pieces = path.split(".")
        ends = [".".join(pieces[-count:]) for count in range(1, len(pieces) + 1)]
        found[next((end for end in ends if not any(fits(end, other) for other in others)), path)] = None
    return sorted(found)


def _modules(model: GraphModel, tensors: Sequence[str]) -> list[str]:
    """Return the modules of these tensors: whole modules if all of their tensors are kept."""
    kept_whole = {_module(name) for name in tensors}
    rest = {_module(theirs) for theirs in their_names(model).values()} - kept_whole
    found: dict[str, None] = {}
    for module in sorted(kept_whole):
        pieces = module.split(".")
        # From the root down: the first module without other tensors.
        options = [".".join(pieces[:count]) for count in range(1, len(pieces) + 1)]
        found[next((o for o in options if not any(r == o or r.startswith(o + ".") for r in rest)), module)] = None
    return sorted(found)


def _module(tensor: str) -> str:
    part = part_of(tensor)
    return (tensor if part is None else part.whole).rpartition(".")[0]
