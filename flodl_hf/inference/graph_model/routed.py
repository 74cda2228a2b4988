"""Encoders of routes with separate transformers, in addition to the default route's.

A folder of sentence-transformers may have a small model for queries and a large one for documents. The model that is
loaded is the usual route's; the others move, are cast and are written with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig


class Routed(nn.Module):
    """The other encoders of a folder.

    Args:
        models: models by folder, relative to the root.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.folders = tuple(models)
        self.models = nn.ModuleList(models.values())

    def at(self, folder: str) -> Any:
        """Return the model of a folder; None of the folder of the usual route."""
        return self.models[self.folders.index(folder)] if folder in self.folders else None

    def items(self) -> list[tuple[str, Any]]:
        """Return folders with their models."""
        return list(zip(self.folders, self.models, strict=True))


def recipe_behind(recipe: SentenceTransformerConfig, folder: str) -> SentenceTransformerConfig:
    """Return a folder's settings for texts of one of its transformers, in the form of a single model's."""
    own = {name: replace(way, transformer="") for name, way in recipe.routes.items() if way.transformer == folder}
    first = next(iter(own.values()))
    if len(own) == 1:
        return first
    kinds = {kind: route for kind, route in recipe.kinds.items() if route in own}
    return replace(first, routes=own, usual_route=next(iter(own)), kinds=kinds)


def route_within(recipe: SentenceTransformerConfig | None, route: str | None) -> str | None:
    """Return the recipe of a route's own encoder: empty unless another route shares that encoder."""
    return route if recipe is not None and recipe.routes else None
