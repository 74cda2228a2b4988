"""Creation of an adapter for a model: its target modules by our names and by transformers', its parts, and its head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flodl.errors import ConfigError, capped, nearest
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.models.adapters.settings import ALL_LINEAR, IA3, Lora, Prefix, Prompt, Settings, fits, listed
from flodl_hf.nn.adapter_layers import LoraPart, RowsPart, ScalePart, TablePart
from flodl_hf.nn.joined_tensors import Part as Slice
from flodl_hf.nn.joined_tensors import join, part_of, split
from flodl_hf.nn.prompts import WORDS, BiLstmEncoder, MadePrefixPart, PrefixMaker, PrefixPart, PromptPart, ShiftPart

Part = LoraPart | TablePart | RowsPart | ScalePart | PromptPart | PrefixPart | ShiftPart
"""The parts of an adapter for one module."""
PREFIX_STD = 0.02
POSITIONS = "encoder.embeddings.position"


@dataclass(frozen=True)
class Site:
    """A projection or embedding table of transformers' model, and our modules that it contains.

    Attributes:
        theirs: the module's path in transformers' model.
        paths: our paths; several if one matrix contains several projections.
        slices: the slice of the matrix for each path; empty for the whole matrix.
        groups: in how many groups of rows the slices alternate, one for each head; where they do, transformers adds
            the bias outside the module, so that scales do not apply to it.
        is_table: whether it is an embedding table.
    """

    theirs: str
    paths: tuple[str, ...]
    slices: tuple[Slice, ...] = ()
    groups: int = 1
    is_table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All paths."""
        return (self.theirs, *self.paths)


@dataclass
class Adapter:
    """One adapter, in a model or not.

    Attributes:
        settings: the settings that it was created with.
        sites: where it goes, by transformers' path.
        parts: its parts by our path of the module.
        kept: tensors that it stores whole, by our name.
        untrained: names of the tensors in ``kept`` with random values, with their version counters.
        labels: names of the head's labels; None for the model's.
        problem_type: the problem type of the labels; None for the model's.
        stored: settings of the file that it was loaded from.
        recipe: how vectors are made with it; None for as the model makes them.
        score_activation: path of the activation that makes scores of a ranker's logits; None for the model's.
    """

    settings: Settings
    sites: dict[str, Site]
    parts: dict[str, Part]
    kept: dict[str, nn.Parameter]
    untrained: dict[str, int] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None
    stored: Mapping[str, Any] = field(default_factory=dict)
    recipe: SentenceTransformerConfig | None = None
    score_activation: str | None = None

    def parameters(self) -> Iterable[nn.Parameter]:
        """Yield all modules and tensors of the adapter."""
        for part in self.parts.values():
            yield from part.parameters()
        yield from self.kept.values()


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
            parts |= _fresh_parts(graph, site, settings)
        if isinstance(settings, Lora):
            sites += _rows(model, settings, parts)
            if settings.bias == "lora_only":
                names = [f"{path}.bias" for site in sites for path in site.paths]
                kept += [name for name, _ in graph.named_parameters() if name in names]
    fresh = set(model.untrained)
    held = {name: nn.Parameter(graph.get_parameter(name).detach().clone()) for name in kept}
    untrained = {name: held[name]._version for name in kept if name in fresh}
    return Adapter(settings, {site.theirs: site for site in sites}, parts, held, untrained)


def shapes_of(graph: nn.Module, site: Site, settings: Lora | IA3, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors for one matrix of transformers, by the attribute of the part."""
    modules: list[Any] = [graph.get_submodule(path) for path in site.paths]
    if site.is_table:
        out, into = modules[0].embedding_dim, modules[0].num_embeddings
    else:
        out, into = sum(linear.out_features for linear in modules), modules[0].in_features
    if isinstance(settings, IA3):
        return {"scales": (1, into) if settings.on_input(*site.names) else (out, 1)}
    shapes: dict[str, tuple[int, ...]] = {"down": (rank, into), "up": (out, rank)}
    if settings.dora:
        shapes["magnitude"] = (out,)
    if settings.lora_bias and not site.is_table:
        shapes["up_bias"] = (out,)
    return shapes


def parts_of(site: Site, tensors: Mapping[str, Tensor], settings: Lora | IA3, scale: float) -> dict[str, Part]:
    """Return the parts of one matrix by our path, cut from tensors of the whole matrix.

    Args:
        site: the matrix.
        tensors: in the shapes of `shapes_of`; projections share ``down``, and scales of inputs.
        settings: the adapter's settings.
        scale: factor of a low-rank sum.
    """
    on_input = isinstance(settings, IA3) and settings.on_input(*site.names)
    if isinstance(settings, IA3):
        tensors = {"scales": tensors["scales"].flatten()}
    shared = {name: nn.Parameter(tensor.contiguous()) for name, tensor in tensors.items() if name == "down" or on_input}
    parts: dict[str, Part] = {}
    for path, part in zip(site.paths, site.slices or [None], strict=True):
        own = shared | {
            name: nn.Parameter((tensor if part is None else split(tensor, part)).clone())
            for name, tensor in tensors.items()
            if name not in shared
        }
        if isinstance(settings, IA3):
            parts[path] = ScalePart(own["scales"], on_input, site.groups > 1)
        elif site.is_table:
            parts[path] = TablePart(scale=scale, **own)
        else:
            parts[path] = LoraPart(scale=scale, dropout=settings.dropout, **own)
    return parts


def _fresh_parts(graph: nn.Module, site: Site, settings: Lora | IA3) -> dict[str, Part]:
    """Return the parts of one matrix with their first values."""
    modules: list[Any] = [graph.get_submodule(path) for path in site.paths]
    rank, scale = 0, 1.0
    if isinstance(settings, Lora):
        rank, scale = settings.rank_of(*site.names), settings.scale_of(*site.names)
    shapes = shapes_of(graph, site, settings, rank)
    tensors = {name: torch.ones(shape) if name == "scales" else torch.zeros(shape) for name, shape in shapes.items()}
    if site.is_table:
        tensors["up"] = torch.randn(shapes["up"])
    elif "down" in tensors:
        nn.init.kaiming_uniform_(tensors["down"], a=math.sqrt(5))
    if "magnitude" in tensors:
        lengths = [torch.linalg.norm(m.weight.detach().float(), dim=0 if site.is_table else 1) for m in modules]
        tensors["magnitude"] = join(lengths, site.groups)
    home = modules[0].weight.device
    return parts_of(site, {name: tensor.to(home) for name, tensor in tensors.items()}, settings, scale)


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
    width, inner = words.shape[1], settings.encoder
    layers = [nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width)]
    return PromptPart(vectors, nn.Sequential(*layers).to(words.device))


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


TABLES = "encoder.embeddings."
"""Modules with tables indexed by ids; other tables contain relative positions and are read whole."""


PARTS = (".lora.", ".ia3.", ".prompt.", ".prefix.")
"""The modules that contain parts of adapters."""


def their_names(model: GraphModel) -> dict[str, str]:
    """Return the name of each of our tensors in transformers' modules, marked if it is a part of a tensor there."""
    key_map = model.config.family.key_map(model.config.encoder, model.head)
    bare = model.config.family.base_prefix + "." if model.head == "base" else ""
    found = {}
    for name, _ in model.graph.named_parameters(remove_duplicate=False):
        if not any(part in name for part in PARTS):
            # Where files and modules have different names, the further ones are the modules'. A row of the table for a
            # single tensor is already the module's name.
            others = [] if name in key_map.pairs else key_map.also(name)
            found[name] = (others[0] if others else key_map.theirs(name)).removeprefix(bare)
    return found


def sites_of(model: GraphModel) -> dict[str, Site]:
    """Return every projection and every table of token embeddings, by transformers' path, in the order of the graph."""
    names = their_names(model)
    found: dict[str, Site] = {}
    for path, module in model.graph.named_modules():
        is_table = isinstance(module, nn.Embedding) and path.startswith(TABLES)
        if not (is_table or isinstance(module, nn.Linear)):
            continue
        marked = names[f"{path}.weight"]
        part = None if is_table else part_of(marked)
        theirs = (marked if part is None else part.whole).rpartition(".")[0]
        site = found.get(theirs, Site(theirs, ()))
        slices = site.slices if part is None else (*site.slices, part)
        groups = 1 if part is None else part.groups
        found[theirs] = Site(theirs, (*site.paths, path), slices, groups, is_table)
    return found


def chosen(model: GraphModel, settings: Lora | IA3, stored: Sequence[str]) -> list[Site]:
    """Return the projections that an adapter goes to.

    Args:
        model: the model to search.
        settings: the adapter's settings.
        stored: our names of tensors that the adapter stores whole; they are no targets.

    Raises:
        ConfigError: a target names no projection, or one of several that are one matrix in the files.
    """
    held = {name.rpartition(".")[0] for name in stored}
    everywhere = sites_of(model)
    if isinstance(settings, IA3):
        everywhere = {theirs: site for theirs, site in everywhere.items() if not site.is_table}
    sites = {theirs: site for theirs, site in everywhere.items() if not held & set(site.paths)}
    named = listed(settings.targets)
    found: dict[str, Site] = {}
    problems: list[str] = []
    for wanted in named or settings.usual_targets:
        if wanted == ALL_LINEAR:
            linear = {theirs: site for theirs, site in sites.items() if not site.is_table}
            found |= {theirs: site for theirs, site in linear.items() if not site.paths[0].startswith("head.")}
            continue
        fitting = {
            theirs: site
            for theirs, site in sites.items()
            # Patterns mean projections; a table is named.
            if any(fits(wanted, name) for name in site.names) and not (site.is_table and "*" in wanted)
        }
        if not fitting:
            inside = any(any(fits(wanted, name) for name in site.names) for site in everywhere.values())
            why = " is part of the head, which the adapter stores whole" if inside else nearest(wanted, _ends(sites))
            problems.append(f"{wanted}{why}")
        found |= fitting
    for theirs, site in found.items():
        if named and not any(wanted == ALL_LINEAR or fits(wanted, theirs) for wanted in named):
            paths = [path for path in site.paths if any(fits(wanted, path) for wanted in named)]
            if len(site.paths) > max(1, len(paths)):
                problems.append(f"{', '.join(paths)}: one matrix with others ({theirs})")
    if problems:
        raise ConfigError(
            f"Lora: targets that are no projections of this model:\n{capped(problems)}\nexpected 'all-linear' or names "
            f"such as {', '.join(sorted(_ends(sites))[:12])}; projections of one matrix only together",
            problems=problems,
        )
    chosen_sites = [site for theirs, site in sites.items() if theirs in found]
    check_tables(model, [site.theirs for site in chosen_sites if site.is_table])
    return chosen_sites


def check_tables(model: GraphModel, tables: Sequence[str]) -> None:
    """Raise if a table that an adapter goes to is read by the head too.

    Raises:
        ConfigError: the head is tied to the table of words.
    """
    if tables and model.head != "base" and model.config.family.heads[model.head].ties:
        raise ConfigError(
            f"adapter: found {', '.join(tables)} with a head that shares the table of words; expected projections, or "
            "another head. Remove the table from the adapter.",
            problems=list(tables),
        )


def tables_of_tokens(
    model: GraphModel, tokens: Mapping[str, Sequence[int]] | Sequence[int], sites: Mapping[str, Site]
) -> dict[str, list[int]]:
    """Return the ids of trained rows, by transformers' path of the table.

    Args:
        model: the model of the adapter.
        tokens: ids of the table of words, or ids by the name of a table, as in peft's ``trainable_token_indices``.
        sites: from `sites_of`.

    Raises:
        ConfigError: a name that is not the name of one table, an id outside of the table, a repeated id.
    """
    words = next(theirs for theirs, site in sites.items() if f"{TABLES}word" in site.paths)
    wanted = tokens if isinstance(tokens, Mapping) else {words: tokens} if tokens else {}
    found: dict[str, list[int]] = {}
    problems = []
    for name, ids in wanted.items():
        fitting = [theirs for theirs, site in sites.items() if site.is_table and any(fits(name, n) for n in site.names)]
        if len(fitting) != 1:
            problems.append(f"{name}: the name of {len(fitting) or 'no'} tables")
            continue
        table: Any = model.graph.get_submodule(sites[fitting[0]].paths[0])
        outside = [i for i in ids if not 0 <= i < table.num_embeddings]
        if outside or len(set(ids)) < len(ids):
            problems.append(f"{name}: ids {outside or 'that are repeated'}, of {table.num_embeddings} rows")
        found[fitting[0]] = list(ids)
    if problems:
        raise ConfigError(
            f"trainable_token_indices: found {'; '.join(problems)}; expected ids of rows of one embedding table, each "
            "once. Correct the ids.",
            problems=["trainable_token_indices"],
        )
    check_tables(model, list(found))
    return found


def _ends(sites: Mapping[str, Site]) -> set[str]:
    """Return the last parts of all paths."""
    return {name.rpartition(".")[2] for site in sites.values() for name in site.names}
