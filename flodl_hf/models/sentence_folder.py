"""Folders of sentence-transformers and ColBERT as models: their additions to the transformer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flodl.errors import ConfigError
from flodl_hf.checkpoints.config.file import patch_json
from flodl_hf.checkpoints.folders import BOUNDS, is_entry
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.inference.graph_model import Routed, recipe_behind
from flodl_hf.inference.pooling import pool, pool_padded
from flodl_hf.models.building import states_of
from flodl_hf.nn.layout import Layout, Padded

if TYPE_CHECKING:
    from flodl.graph import Graph
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.inference.graph_model import GraphModel


SETFIT = ("model_head.pkl", "config_setfit.json")


def with_overrides(
    config: ModelConfig, recipe: SentenceTransformerConfig, ignored: Sequence[str], *, strict_config: bool
) -> ModelConfig:
    """Return the configuration with overrides from the folder's other files: settings, and the activation of scores.

    Overridden settings are written into ``config.json`` when the model is saved.

    Raises:
        ConfigError: a value is not understood.
    """
    changes = dict(recipe.transformer_settings.config)
    dtype = recipe.transformer_settings.dtype
    if dtype not in (None, "auto"):
        changes["dtype"] = str(dtype).removeprefix("torch.")
    if changes:
        where = f"{config.where} with config_kwargs and model_kwargs of sentence_bert_config.json"
        text = patch_json(config.text or json.dumps(config.source), changes)
        config = config.from_text(text, where, ignored, strict_config=strict_config)
    if recipe.scorer is not None:
        config = config.changed(labels=[f"LABEL_{number}" for number in range(recipe.scorer.size)])
    return config if recipe.activation is None else config.changed(score_activation=recipe.activation)


def with_scores(graph: Graph, recipe: SentenceTransformerConfig) -> Graph:
    """Return the graph of an encoder with the folder's own score module after it."""
    flow = states_of(graph.get_submodule("encoder"))
    return flow.through(PooledScores(recipe), name="head").using("layout").build()


class PooledScores(nn.Module):
    """Scores of pooled states, as a folder of Transformer, Pooling and Dense makes them.

    Args:
        recipe: of the folder.
    """

    def __init__(self, recipe: SentenceTransformerConfig) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return ``(texts, labels)``."""
        names = self.recipe.pooling
        if isinstance(layout, Padded) and layout.mask is not None:
            found = pool_padded(hidden, layout.mask, names)
        else:
            found = pool(hidden, layout, names)
        for step in self.recipe.dense:
            found = step(found)
        return found


def with_length(recipe: SentenceTransformerConfig, length: int) -> SentenceTransformerConfig:
    """Return a folder's recipe with another length of texts in tokens, in its files too.

    Args:
        recipe: of the folder.
        length: most tokens of a text.
    """
    files = dict(recipe.files)
    for name in BOUNDS:
        if name not in files:
            continue
        stated = json.loads(files[name])
        for inside, key in (("processor_kwargs", "model_max_length"), ("tokenizer_args", "model_max_length")):
            stated.get(inside, {}).pop(key, None)
        for part in stated.get("processing_kwargs", {}).values():
            part.pop("max_length", None)
        files[name] = (json.dumps({**stated, "max_seq_length": length}, indent=2) + "\n").encode()
    stated = recipe.max_tokens is not None or any(name in files for name in BOUNDS)
    routes = {name: with_length(own, length) for name, own in recipe.routes.items()}
    return replace(recipe, max_tokens=length if stated else None, files=files, routes=routes)


def note_setfit(root: Path, head: str) -> None:
    """Warn about a folder of setfit: its classifier is a pickle, which is never read.

    Raises:
        ConfigError: a classifier was requested.
    """
    found = next(name for name in SETFIT if is_entry(root, name))
    if head == "sequence_classification":
        raise ConfigError(
            f"{root / found}: found a classifier of setfit, expected weights in config.json's own head. The classifier "
            "is a pickle (model_head.pkl), which is never executed. Load the encoder with head='base', and train a new "
            "classifier on its vectors.",
            where=str(root / found),
            problems=[found],
        )
    warnings.warn(
        f"{root / found}: the classifier of setfit (model_head.pkl) is a pickle and is not read; this is the encoder "
        "alone",
        UserWarning,
        stacklevel=2,
    )


def follow_routes(model: GraphModel, root: Path, load: Callable[[Path], GraphModel]) -> None:
    """Set the routes of a model, and add the encoders of routes with separate transformers."""
    recipe, source = model.sentence_recipe, model.source
    assert recipe is not None
    assert source is not None
    assert model.load_report is not None
    notes = model.load_report.notes
    usual = f"texts take {recipe.usual_route!r} by default" if recipe.usual_route else "a route is required"
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
    notes.append(f"routes have separate transformers; calls with ids use {recipe.transformer}")
