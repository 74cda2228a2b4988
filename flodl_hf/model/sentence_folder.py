"""Folders of sentence-transformers and ColBERT as models: what they add to the model of their transformer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flodl_hf.graph_model.routed import Routed, recipe_behind
from flodl_hf.sentence.multivector import colbert_recipe
from flodl_hf.sentence.recipe import SentenceRecipe
from flodl_hf.weights.loading import class_of

if TYPE_CHECKING:
    from flodl_hf.config.model_config import ModelConfig
    from flodl_hf.graph_model.model import GraphModel

__all__ = ["colbert_of", "follow_routes"]


def colbert_of(folder: Path, config: ModelConfig) -> SentenceRecipe | None:
    """Return how a folder of ColBERT's class makes vectors; None of any other."""
    if class_of(config.source.get("architectures")) != "HF_ColBERT" or "HF_ColBERT" not in config.family.pretraining:
        return None
    late, files = colbert_recipe(folder)
    return SentenceRecipe(normalize=True, late=late, files=files)


def follow_routes(model: GraphModel, root: Path, load: Callable[[Path], GraphModel]) -> None:
    """Say which routes a model has, and put beside it the encoders of those that have their own."""
    recipe, source = model.sentence_recipe, model.source
    assert recipe is not None
    assert source is not None
    assert model.load_report is not None
    notes = model.load_report.notes
    usual = f"texts take {recipe.usual_route!r} where no route is said" if recipe.usual_route else "one has to be said"
    folders = dict.fromkeys(way.transformer for way in recipe.routes.values())
    own = folders.keys() - {recipe.transformer}
    if own and model.head != "base":
        model.sentence_recipe = recipe_behind(recipe, recipe.transformer)
        notes.append(f"routes: {recipe.transformer} alone is read; the transformers of other routes are not")
        return
    notes.append(f"routes: {', '.join(recipe.routes)}; {usual}")
    if not own:
        return
    others = {}
    for folder in folders:
        if folder in own:
            others[folder] = beside = load(root / folder)
            assert beside.source is not None
            assert beside.load_report is not None
            beside.source.name, beside.source.commit = f"{source.name}/{folder}", source.commit
            beside.sentence_recipe = recipe_behind(recipe, folder)
            notes.extend(f"{folder}: {note}" for note in beside.load_report.notes if note not in notes)
    model.routed = Routed(others)
    notes.append(f"routes have transformers of their own; calls with ids go through {recipe.transformer}")
