"""Targets of adapters: the projections of a model, by our names and by transformers' module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from flodl.errors import ConfigError, capped, nearest
from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.models.adapters.settings import ALL_LINEAR, IA3, Lora, fits
from flodl_hf.nn.layers.parts import as_whole, part_of

TABLES = "encoder.embeddings."
"""Modules with tables indexed by ids; other tables contain relative positions and are read whole."""


@dataclass(frozen=True)
class Site:
    """A projection or embedding table of transformers' model, and our modules that it contains.

    Attributes:
        theirs: the module's path in transformers' model.
        paths: our paths; several if one matrix contains several projections.
        marks: the slice of the matrix for each path, as in a key row; empty for the whole matrix.
        bias_apart: whether transformers adds the bias outside the module, so that scales do not apply to it.
        is_table: whether it is an embedding table.
    """

    theirs: str
    paths: tuple[str, ...]
    marks: tuple[str, ...] = ()
    bias_apart: bool = False
    is_table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All paths."""
        return (self.theirs, *self.paths)


class Names:
    """The names of a model's tensors as transformers' modules have them, both ways.

    Args:
        model: the model to search.
    """

    def __init__(self, model: GraphModel) -> None:
        self._key_map = model.config.family.key_map(model.config.encoder, model.head)
        self._bare = model.config.family.base_prefix + "." if model.head == "base" else ""

    def theirs(self, name: str) -> str:
        """Return the name of our tensor; with a mark if it is a part of transformers' tensor."""
        # Where files and modules have different names, the further ones are the modules'.
        others = self._key_map.also(name)
        return (others[0] if others else self._key_map.theirs(name)).removeprefix(self._bare)


def sites_of(model: GraphModel) -> dict[str, Site]:
    """Return every projection and every table of token embeddings, by transformers' path, in the order of the graph."""
    names = Names(model)
    found: dict[str, list[tuple[str, str]]] = {}
    apart: set[str] = set()
    tables: set[str] = set()
    for path, module in model.graph.named_modules():
        if isinstance(module, nn.Linear):
            marked = names.theirs(f"{path}.weight")
            whole = as_whole(marked)
            mark = "" if whole == marked else marked
            place = whole.rpartition(".")[0]
            found.setdefault(place, []).append((path, mark))
            if (part := part_of(marked)) is not None and part.groups > 1:
                apart.add(place)  # where parts alternate by head, biases stand beside the module
        elif isinstance(module, nn.Embedding) and path.startswith(TABLES):
            place = names.theirs(f"{path}.weight").rpartition(".")[0]
            found.setdefault(place, []).append((path, ""))
            tables.add(place)
    return {
        theirs: Site(
            theirs,
            tuple(path for path, _ in parts),
            tuple(mark for _, mark in parts if mark),
            theirs in apart,
            theirs in tables,
        )
        for theirs, parts in found.items()
    }


def chosen(model: GraphModel, settings: Lora | IA3, kept: Sequence[str]) -> list[Site]:
    """Return the projections that an adapter goes to.

    Args:
        model: the model to search.
        settings: the adapter's settings.
        kept: our names of tensors that the adapter stores whole; they are no targets.

    Raises:
        ConfigError: a target names no projection, or one of several that are one matrix in the files.
    """
    held = {name.rpartition(".")[0] for name in kept}
    everywhere = sites_of(model)
    if isinstance(settings, IA3):
        everywhere = {theirs: site for theirs, site in everywhere.items() if not site.is_table}
    sites = {theirs: site for theirs, site in everywhere.items() if not held & set(site.paths)}
    usual = not settings.wanted
    found: dict[str, Site] = {}
    problems: list[str] = []
    for wanted in settings.wanted or settings.usual:
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
    partly = {} if usual else _partly(found, settings.wanted)
    problems += [f"{', '.join(paths)}: one matrix with others ({theirs})" for theirs, paths in partly.items()]
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


def _partly(found: Mapping[str, Site], wanted: Sequence[str]) -> dict[str, list[str]]:
    """Return matrices of which some projections were named and others not."""
    partly: dict[str, list[str]] = {}
    for theirs, site in found.items():
        if len(site.paths) == 1 or any(w == ALL_LINEAR or fits(w, theirs) for w in wanted):
            continue
        named = [path for path in site.paths if any(fits(w, path) for w in wanted)]
        if len(named) < len(site.paths):
            partly[theirs] = named
    return partly


def _ends(sites: Mapping[str, Site]) -> set[str]:
    """Return the last parts of all paths."""
    return {name.rpartition(".")[2] for site in sites.values() for name in site.names}
