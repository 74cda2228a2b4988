"""Where adapters go: the projections of a model, by our names and by those that transformers gives its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from flodl.errors import ConfigError, capped, nearest
from flodl_hf.adapters.settings import ALL_LINEAR, IA3, Lora, fits
from flodl_hf.graph_model.model import GraphModel
from flodl_hf.layers.parts import as_whole, part_of

__all__ = ["Names", "Site", "chosen", "sites_of"]


@dataclass(frozen=True)
class Site:
    """A projection of transformers' model, and those of ours that it holds.

    Attributes:
        theirs: the module's path in transformers' model.
        paths: ours; several where one matrix holds several projections.
        marks: which part of the matrix each is, as a key row says; empty where it is the whole.
        bias_apart: whether a bias of theirs stands beside the module rather than in it, so that scales spare it.
    """

    theirs: str
    paths: tuple[str, ...]
    marks: tuple[str, ...] = ()
    bias_apart: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All paths."""
        return (self.theirs, *self.paths)


class Names:
    """The names of a model's tensors as transformers' modules have them, both ways.

    Args:
        model: whose.
    """

    def __init__(self, model: GraphModel) -> None:
        self._key_map = model.config.family.key_map(model.config.encoder, model.head)
        self._bare = model.config.family.base_prefix + "." if model.head == "base" else ""

    def theirs(self, name: str) -> str:
        """Return the name that a tensor of ours has; with a mark where it is a part of theirs."""
        # Where files and modules have different names, the further ones are the modules'.
        others = self._key_map.also(name)
        return (others[0] if others else self._key_map.theirs(name)).removeprefix(self._bare)


def sites_of(model: GraphModel) -> dict[str, Site]:
    """Return every projection of a model, by transformers' path, in the order of the graph."""
    names = Names(model)
    found: dict[str, list[tuple[str, str]]] = {}
    apart: set[str] = set()
    for path, module in model.graph.named_modules():
        if isinstance(module, nn.Linear):
            marked = names.theirs(f"{path}.weight")
            whole = as_whole(marked)
            mark = "" if whole == marked else marked
            place = whole.rpartition(".")[0]
            found.setdefault(place, []).append((path, mark))
            if (part := part_of(marked)) is not None and part.groups > 1:
                apart.add(place)  # where parts alternate by head, biases stand beside the module
    return {
        theirs: Site(
            theirs, tuple(path for path, _ in parts), tuple(mark for _, mark in parts if mark), theirs in apart
        )
        for theirs, parts in found.items()
    }


def chosen(model: GraphModel, settings: Lora | IA3, kept: Sequence[str]) -> list[Site]:
    """Return the projections that an adapter goes to.

    Args:
        model: whose.
        settings: what was asked for.
        kept: our names of tensors that the adapter holds whole, which no part goes to.

    Raises:
        ConfigError: a target names no projection, or one of several that are one matrix in the files.
    """
    held = {name.rpartition(".")[0] for name in kept}
    everywhere = sites_of(model)
    sites = {theirs: site for theirs, site in everywhere.items() if not held & set(site.paths)}
    usual = not settings.wanted
    found: dict[str, Site] = {}
    problems: list[str] = []
    for wanted in settings.wanted or settings.usual:
        if wanted == ALL_LINEAR:
            found |= {theirs: site for theirs, site in sites.items() if not site.paths[0].startswith("head.")}
            continue
        fitting = {theirs: site for theirs, site in sites.items() if any(fits(wanted, name) for name in site.names)}
        if not fitting:
            inside = any(any(fits(wanted, name) for name in site.names) for site in everywhere.values())
            why = " is part of the head, which the adapter holds whole" if inside else nearest(wanted, _ends(sites))
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
    return [site for theirs, site in sites.items() if theirs in found]


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
