"""Creation of an adapter for a model: its target modules, the initial values of its parts, and its head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flodl.errors import ConfigError
from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.models.adapters.attach import Adapter, Part
from flodl_hf.models.adapters.settings import IA3, Lora, Prefix, Prompt, Settings
from flodl_hf.models.adapters.targets import Site, chosen, sites_of, tables_of_tokens
from flodl_hf.nn.adapter_layers.lora import LoraPart
from flodl_hf.nn.adapter_layers.prompts import WORDS, BiLstmEncoder, PromptPart
from flodl_hf.nn.adapter_layers.scaled import ScalePart
from flodl_hf.nn.adapter_layers.tables import RowsPart, TablePart
from flodl_hf.nn.attention.prefixes import MadePrefixPart, PrefixMaker, PrefixPart, ShiftPart

PREFIX_STD = 0.02
POSITIONS = "encoder.embeddings.position"


def kept_names(model: GraphModel, settings: Settings | None = None) -> list[str]:
    """Return our names of the tensors that an adapter of this model contains whole.

    That is the head of a task, and what else is new and untrained behind the encoder: without them answers would be
    random. A masked-word head comes with its encoder, and stays with it.
    """
    graph = model.graph
    fresh = {name for name in model.untrained if not name.startswith("encoder.")}
    heads = model.head != "base" and not model.config.family.heads[model.head].ties
    biases = isinstance(settings, Lora) and settings.bias == "all"
    return [
        name
        for name, _ in graph.named_parameters()
        if (heads and name.startswith("head.")) or name in fresh or (biases and name.endswith(".bias"))
    ]


def new_adapter(model: GraphModel, settings: Settings) -> Adapter:
    """Return a fresh adapter with a copy of the model's head.

    LoRA and IA3 change nothing yet: ``down`` is drawn as peft draws it, ``up`` is zero, scales are one. A prompt begins
    as words; a prefix as small numbers.

    Raises:
        ConfigError: targets that the model does not have, or a model that takes no such adapter.
    """
    kept = kept_names(model, settings)
    graph = model.graph
    sites: list[Site] = []
    if isinstance(settings, Prompt):
        parts: dict[str, Part] = {WORDS: _prompt(model, settings)}
    elif isinstance(settings, Prefix):
        width, layers = _prefixed(model, settings.tokens)
        home = next(graph.parameters()).device
        if settings.encoder is None:
            drawn = torch.randn(settings.tokens, layers * 2 * width, device=home) * PREFIX_STD
            parts = prefix_parts(model, drawn)
        else:
            maker = PrefixMaker(settings.tokens, width, settings.encoder, layers).to(home)
            parts = {f"encoder.layers.{n}.attention": MadePrefixPart(maker, n) for n in range(layers)}
            parts[POSITIONS] = ShiftPart(settings.tokens)
    else:
        heads = [name for name in kept if not name.startswith("encoder.")]
        sites = chosen(model, settings, heads)
        parts = {}
        for site in sites:
            parts |= _beside(graph, site, settings)
        if isinstance(settings, Lora):
            sites += _rows(model, settings, parts)
            if settings.bias == "lora_only":
                names = [f"{path}.bias" for site in sites for path in site.paths]
                kept += [name for name, _ in graph.named_parameters() if name in names]
    fresh = set(model.untrained)
    held = {name: nn.Parameter(graph.get_parameter(name).detach().clone()) for name in kept}
    untrained = {name: held[name]._version for name in kept if name in fresh}
    return Adapter(settings, {site.theirs: site for site in sites}, parts, held, untrained)


def _beside(graph: nn.Module, site: Site, settings: Lora | IA3) -> dict[str, Part]:
    """Return the parts of the projections of one matrix."""
    if isinstance(settings, IA3):
        return {**_unscaled(graph, site, settings.on_input(*site.names))}
    rank, scale = settings.rank_of(*site.names), settings.scale_of(*site.names)
    if site.is_table:
        return {site.paths[0]: _table(graph.get_submodule(site.paths[0]), rank, scale, settings)}
    linears: list[Any] = [graph.get_submodule(path) for path in site.paths]
    home = linears[0].weight.device
    down = nn.Parameter(torch.empty(rank, linears[0].in_features))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    down.data = down.data.to(home)
    parts: dict[str, Part] = {}
    for path, linear in zip(site.paths, linears, strict=True):
        up = nn.Parameter(torch.zeros(linear.out_features, rank, device=home))
        magnitude = None
        if settings.dora:
            magnitude = nn.Parameter(torch.linalg.norm(linear.weight.detach().float(), dim=1))
        up_bias = nn.Parameter(torch.zeros(linear.out_features, device=home)) if settings.lora_bias else None
        parts[path] = LoraPart(down, up, scale, settings.dropout, magnitude, up_bias)
    return parts


def _table(table: Any, rank: int, scale: float, settings: Lora) -> TablePart:
    """Return the part of an embedding table: as in peft, ``down`` is zero and ``up`` is drawn."""
    weight = table.weight.detach()
    down = nn.Parameter(weight.new_zeros(rank, table.num_embeddings, dtype=torch.float32))
    up = nn.Parameter(torch.randn(table.embedding_dim, rank).to(weight.device))
    lengths = nn.Parameter(torch.linalg.norm(weight.float(), dim=0)) if settings.dora else None
    return TablePart(down, up, scale, lengths)


def _rows(model: GraphModel, settings: Lora, parts: dict[str, Part]) -> list[Site]:
    """Add the parts of ``trainable_token_indices``, and return their tables.

    Raises:
        ConfigError: the ids do not fit, or a table has a low-rank sum too.
    """
    everywhere, found = sites_of(model), []
    for theirs, ids in tables_of_tokens(model, settings.trainable_token_indices, everywhere).items():
        path = everywhere[theirs].paths[0]
        if path in parts:
            raise ConfigError(
                f"trainable_token_indices: found {theirs} in the targets too; expected one of the two. Remove it from "
                "the targets.",
                problems=["trainable_token_indices"],
            )
        places = torch.tensor(ids)
        weight = model.graph.get_parameter(f"{path}.weight").detach()
        parts[path] = RowsPart(nn.Parameter(weight[places.to(weight.device)].float()), places)
        found.append(everywhere[theirs])
    return found


def _prompt(model: GraphModel, settings: Prompt) -> PromptPart:
    table: Any = model.graph.get_submodule(WORDS)
    words = table.weight.detach()
    check_places(model, settings.tokens)
    if settings.text is None:
        ids = torch.randint(len(words), (settings.tokens,))
    else:
        if model.tokenizer is None:
            raise ConfigError(
                "Prompt: the model has no tokenizer to read the text with; add its tokenizer files to the folder, "
                "or leave text out",
                problems=["text"],
            )
        # With special tokens, as peft reads it.
        read = model.tokenizer.encode_rows([settings.text], max_tokens=None)[0][0].ids
        ids = torch.tensor((list(read) * (settings.tokens // len(read) + 1))[: settings.tokens])
    vectors = nn.Parameter(words[ids.to(words.device)].float().clone())
    if settings.encoder is None:
        return PromptPart(vectors)
    if settings.kind == "lstm":
        return PromptPart(vectors, BiLstmEncoder(words.shape[1], settings.encoder).to(words.device))
    return PromptPart(vectors, _encoder(words.shape[1], settings.encoder, words))


def _encoder(width: int, inner: int, like: Tensor) -> nn.Module:
    """Return the network of P-tuning, drawn as torch draws linear layers."""
    layers = [nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width)]
    return nn.Sequential(*layers).to(like.device)


def prefix_parts(model: GraphModel, whole: Tensor) -> dict[str, Part]:
    """Return the parts of a prefix by our paths.

    Args:
        model: that it is for.
        whole: keys and values of all layers side by side, ``(tokens, layers * 2 * width)``.

    Raises:
        ConfigError: the model takes none.
    """
    width, layers = _prefixed(model, len(whole))
    parts: dict[str, Part] = {}
    for number, (keys, values) in enumerate(whole.view(len(whole), layers, 2, width).permute(1, 2, 0, 3)):
        own = [nn.Parameter(each.contiguous()) for each in (keys, values)]
        parts[f"encoder.layers.{number}.attention"] = PrefixPart(*own)
    return parts | {POSITIONS: ShiftPart(len(whole))}


def _prefixed(model: GraphModel, tokens: int) -> tuple[int, int]:
    """Return the width of a layer's keys, and how many layers there are.

    Raises:
        ConfigError: the model takes no prefix.
    """
    family = model.config.family
    if not family.takes_prefix:
        raise ConfigError(
            f"Prefix: transformers' {family.class_prefix} models accept no keys and values of a prefix, so "
            "that peft has no prefix for them; expected a Prompt, a Lora or an IA3, which every family has",
            problems=["Prefix"],
        )
    check_places(model, tokens)
    encoder: Any = model.config.encoder
    return encoder.hidden_size, encoder.num_layers


def check_places(model: GraphModel, tokens: int) -> None:
    """Raise if so many virtual tokens leave no positions for a text.

    Raises:
        ConfigError: there is none.
    """
    most = model.config.max_tokens
    if most is not None and tokens > most // 2:
        raise ConfigError(
            f"found {tokens} virtual tokens, and the model has {most} places; expected at most {most // 2}",
            problems=["tokens"],
        )


def _unscaled(graph: nn.Module, site: Site, on_input: bool) -> dict[str, ScalePart]:
    """Return initial scales of one; projections of one matrix share the scales of inputs."""
    linears: list[Any] = [graph.get_submodule(path) for path in site.paths]
    home = linears[0].weight.device
    if on_input:
        shared = nn.Parameter(torch.ones(linears[0].in_features, device=home))
        return {path: ScalePart(shared, True) for path in site.paths}
    return {
        path: ScalePart(nn.Parameter(torch.ones(linear.out_features, device=home)), False, site.bias_apart)
        for path, linear in zip(site.paths, linears, strict=True)
    }
