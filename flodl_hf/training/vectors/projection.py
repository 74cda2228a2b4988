"""The projection of token vectors as a trained module: attached for the run, and detached after it.

A run starts with the projection of the model's folder, or with a new one; the trained one is stored in the model's
recipe, with its small files.
"""

from __future__ import annotations

import io
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flodl.errors import ConfigError, nearest
from flodl_hf.checkpoints.sentence.dense import Dense, dense, dense_files
from flodl_hf.checkpoints.sentence.multivector import LateRecipe, marker_id, pylate_files
from flodl_hf.checkpoints.sentence.recipe import SentenceRecipe

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["LateStart", "take_out"]

SETTINGS: dict[str, Any] = {
    "size": 128, "query_length": 32, "document_length": 180, "query_marker": None, "document_marker": None,
    "expanded": True, "attended": False, "punctuation": False,
}  # fmt: skip
"""Settings of a new projection, with defaults."""
MARKERS = (("[Q]", "[D]"), ("[unused0]", "[unused1]"))
"""Markers of queries and documents; the first of which the tokenizer has both are taken."""
LEAST_LENGTH = 4


class Learning(nn.Module):
    """A dense layer with a trained weight.

    Args:
        layer: the initial layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone().float())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone().float())
        self.activation, self.source = layer.activation, layer.source

    def forward(self, values: Tensor) -> Tensor:
        """Return ``(..., out)`` of ``(..., in)``, in float32."""
        return dense(values, self.weight, self.bias, self.activation)

    def learned(self) -> Dense:
        """Return the layer as it is now, on the CPU."""
        bias = None if self.bias is None else self.bias.detach().cpu().clone()
        return Dense(self.weight.detach().cpu().clone(), bias, self.activation, self.source)


class Projections(nn.ModuleList):
    """The layers of a projection while they learn.

    Args:
        layers: one after another.
        notes: notes for the user.
    """

    def __init__(self, layers: Sequence[Learning], notes: Sequence[str]) -> None:
        super().__init__(layers)
        self.notes = list(notes)


@dataclass(frozen=True)
class LateStart:
    """Attach the projection to a model as a trained module, unless it has one.

    Args:
        settings: settings of a new projection, as `SETTINGS`; None if none are given.
        max_length: most tokens of a document of a new one.
        seed: of a new one.
    """

    settings: Mapping[str, Any] | None
    max_length: int | None
    seed: int

    def __call__(self, model: EncoderModel) -> list[str]:
        """Attach it; return notes for the user.

        Raises:
            ConfigError: settings for a model that has a projection, or that cannot be.
        """
        there: Any = model.beside
        if there is not None:
            return there.notes
        recipe, notes = model.sentence_recipe, []
        late = None if recipe is None else recipe.late
        if late is None:
            late, notes = self._new(model)
            recipe = SentenceRecipe(max_tokens=late.document_length, late=late, files=pylate_files(late))
        elif self.settings:
            raise ConfigError(
                "projection: the model to start from has one, which is trained further; leave the option out",
                problems=["projection"],
            )
        layers = [Learning(layer) for layer in late.projections]
        model.beside = Projections(layers, notes)
        assert recipe is not None
        model.sentence_recipe = replace(recipe, late=replace(late, projections=tuple(layers)))
        return notes

    def _new(self, model: EncoderModel) -> tuple[LateRecipe, list[str]]:
        """Return the recipe of a new projection, initialised as torch's linear layers, and notes."""
        tokenizer: Any = model.tokenizer
        given, problems = _settings(self.settings or {})
        markers = given["query_marker"], given["document_marker"]
        if markers == (None, None):
            known = (pair for pair in MARKERS if all(marker_id(tokenizer, one, None) is not None for one in pair))
            markers = next(known, (None, None))
        for name, marker in zip(("query_marker", "document_marker"), markers, strict=True):
            if marker and marker_id(tokenizer, marker, None) is None:
                problems.append(f"{name}: the tokenizer has no token {marker!r}; expected one of its vocabulary")
        if problems:
            raise ConfigError(f"projection: {'; '.join(problems)}", problems=problems)
        expanded = given["expanded"] and tokenizer.mask_token_id is not None
        bounds = [n for n in (self.max_length, model.max_tokens) if n]
        inside = model.config.encoder.hidden_size
        draw, bound = torch.Generator().manual_seed(self.seed), inside**-0.5
        weight = torch.empty(given["size"], inside).uniform_(-bound, bound, generator=draw)
        late = LateRecipe(
            (Dense(weight),),
            markers[0] or None,
            markers[1] or None,
            min([given["query_length"], *([model.max_tokens] if model.max_tokens else [])]),
            min([self.max_length or given["document_length"], *bounds]),
            expanded=expanded,
            attended=given["attended"],
            skipped=tuple(string.punctuation) if given["punctuation"] else (),
        )
        how = " and ".join(filter(None, markers)) or "no markers"
        filled = "filled up with mask tokens" if expanded else "as long as they are"
        return late, [
            f"the start has no vectors of tokens: a new projection of {inside} to {given['size']} features is drawn; "
            f"{how}, queries of {late.query_length} tokens, {filled}, documents of {late.document_length}"
        ]


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return all settings as numbers, words and booleans, and their problems."""
    found, problems = dict(SETTINGS), []
    for name, value in given.items():
        if name not in SETTINGS:
            problems.append(f"{name}: it has none{nearest(name, SETTINGS)}; expected {', '.join(SETTINGS)}")
            continue
        usual = SETTINGS[name]
        if isinstance(usual, bool):
            words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
            if str(value).lower() not in words:
                problems.append(f"{name}: found {value!r}; expected yes or no")
            found[name] = words.get(str(value).lower(), usual)
        elif isinstance(usual, int):
            least = 1 if name == "size" else LEAST_LENGTH
            if not str(value).isdecimal() or int(value) < least:
                problems.append(f"{name}: found {value!r}; expected an integer from {least}")
            else:
                found[name] = int(value)
        elif not isinstance(value, str):
            problems.append(f"{name}: found {value!r}; expected a token, or an empty text for none")
        else:
            found[name] = value
    return found, problems


def take_out(model: EncoderModel) -> None:
    """Store the trained projection in the model's recipe, and detach the module."""
    if model.beside is None:
        return
    layers: Any = list(model.beside.children())
    model.beside = None
    recipe = model.sentence_recipe
    assert recipe is not None
    assert recipe.late is not None
    late = replace(recipe.late, projections=tuple(layer.learned() for layer in layers))
    model.sentence_recipe = replace(recipe, late=late, files=_files(model, recipe, late))


def _files(model: EncoderModel, recipe: SentenceRecipe, late: LateRecipe) -> dict[str, bytes]:
    """Return the small files with the learned projection, in the layout that the folder had."""
    layers: Any = late.projections
    files = dict(recipe.files)
    carried = {} if model.source is None else model.source.carried
    if "colbert_linear.pt" in files:  # bge-m3 has further kinds of vectors
        room = io.BytesIO()
        values = {"weight": layers[0].weight, "bias": layers[0].bias}
        torch.save({name: value for name, value in values.items() if value is not None}, room)
        return files | {"colbert_linear.pt": room.getvalue()}
    if "modules.json" in files:
        parts = [module["path"] for module in json.loads(files["modules.json"]) if module["type"].endswith(".Dense")]
        for part, layer in zip(parts, layers, strict=True):
            files = {name: data for name, data in files.items() if not name.startswith(f"{part}/")}
            files |= dense_files(part, layer)
        return files
    if any(name in carried for name in ("linear.weight", "module.linear.weight")):
        return files  # the class of ColBERT: the weight is part of the model's own tensors
    return pylate_files(late)
