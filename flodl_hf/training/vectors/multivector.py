"""``task="multivector"``: a vector for each token of a text, compared late, as ColBERT has them.

A run starts with the projection of the model's folder, or with a new one; the trained one is stored in the model's
recipe, with its small files.
"""

from __future__ import annotations

import io
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flodl.errors import ConfigError
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.checkpoints.sentence.steps import Dense, dense
from flodl_hf.checkpoints.sentence.vectors import MultiVectorConfig, marker_id
from flodl_hf.checkpoints.sentence.writing import pylate_files
from flodl_hf.inference.similarity import max_sim
from flodl_hf.training.evaluators import figures_of_found
from flodl_hf.training.losses import read_settings
from flodl_hf.training.rows import CollateRows, EncodedRows, Laid, RowBuilder
from flodl_hf.training.task import CHUNK, LengthLimits, Prepared
from flodl_hf.training.vectors.multivector_step import MULTIVECTOR_LOSSES, MULTIVECTOR_USUAL, CollateLate, LateObjective
from flodl_hf.training.vectors.step import PARTS, TextRows, rows_of_texts
from flodl_hf.training.vectors.tables import RETRIEVAL, VectorScorer, related_texts
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

SETTINGS: dict[str, Any] = {
    "size": 128, "query_length": 32, "document_length": 180, "query_marker": None, "document_marker": None,
    "expanded": True, "attended": False, "punctuation": False,
}  # fmt: skip
"""Settings of a new projection, with defaults."""
MARKERS = (("[Q]", "[D]"), ("[unused0]", "[unused1]"))
"""Markers of queries and documents; the first of which the tokenizer has both are taken."""
LEAST = {"size": 1, "query_length": 4, "document_length": 4}


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

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the layer as it is now, whose size is estimated before the training."""
        return self.learned().files(part)


def attach_projection(
    model: EncoderModel, settings: Mapping[str, Any] | None, max_length: int | None, seed: int
) -> list[str]:
    """Attach the projection to a model as a trained module, unless it has one; return notes for the user.

    Args:
        model: receives the projection.
        settings: settings of a new projection, as `SETTINGS`; None if none are given.
        max_length: most tokens of a document of a new one.
        seed: of a new one.

    Raises:
        ConfigError: settings for a model that has a projection, or that cannot be.
    """
    there: Any = model.beside
    if there is not None:
        return there.notes
    recipe, notes = model.sentence_recipe, []
    late = None if recipe is None else recipe.late
    if late is None:
        late, notes = _new_projection(model, settings or {}, max_length, seed)
        recipe = SentenceTransformerConfig(max_tokens=late.document_length, late=late, files=pylate_files(late))
    elif settings:
        raise ConfigError(
            "projection: the model to start from has one, which is trained further; leave the option out",
            problems=["projection"],
        )
    layers = [Learning(layer) for layer in late.projections]
    model.beside = beside = nn.ModuleList(layers)
    beside.__dict__["notes"] = notes
    assert recipe is not None
    model.sentence_recipe = replace(recipe, late=replace(late, projections=tuple(layers)))
    return notes


def _new_projection(
    model: EncoderModel, settings: Mapping[str, Any], max_length: int | None, seed: int
) -> tuple[MultiVectorConfig, list[str]]:
    """Return the recipe of a new projection, initialised as torch's linear layers, and notes."""
    tokenizer: Any = model.tokenizer
    found, problems = read_settings(settings, SETTINGS)
    given = {**SETTINGS, **found}
    for name, least in LEAST.items():
        if not isinstance(given[name], int) or given[name] < least:
            problems.append(f"{name}: found {given[name]!r}; expected an integer from {least}")
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
    bounds = [n for n in (max_length, model.max_tokens) if n]
    inside = model.config.encoder.hidden_size
    draw, bound = torch.Generator().manual_seed(seed), inside**-0.5
    weight = torch.empty(given["size"], inside).uniform_(-bound, bound, generator=draw)
    late = MultiVectorConfig(
        (Dense(weight),),
        markers[0] or None,
        markers[1] or None,
        min([given["query_length"], *([model.max_tokens] if model.max_tokens else [])]),
        min([max_length or given["document_length"], *bounds]),
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


def _projection_files(
    model: EncoderModel, recipe: SentenceTransformerConfig, late: MultiVectorConfig
) -> dict[str, bytes]:
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
            files |= layer.files(part)
        return files
    if any(name in carried for name in ("linear.weight", "module.linear.weight")):
        return files  # the class of ColBERT: the weight is part of the model's own tensors
    return pylate_files(late)


QUERIES = 64
"""Number of queries that are scored together."""


class LateScorer(VectorScorer):
    """Metrics of token vectors with MaxSim."""

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the vectors of one example, ``[(texts, tokens, size)]``; zeros mark missing vectors."""
        self.kept.update(example, [text[(text != 0).any(-1)].numpy() for text in scores[0]])

    def figures(self, vectors: Sequence[Any], texts: NDArray[np.int64], labels: Any) -> dict[str, float]:
        """Return the metrics of the vectors, texts and labels of examples."""
        tensors, form = [[torch.from_numpy(text.copy()) for text in row] for row in vectors], self.truth.form
        if form not in MULTIVECTOR_USUAL:
            return {}
        found = {} if form == "teacher_scores" else _retrieval(tensors, texts)
        return found if form == "pairs" else {**found, "triplet_accuracy": _triplets(tensors)}


def _retrieval(vectors: Sequence[Sequence[Tensor]], texts: NDArray[np.int64]) -> dict[str, float]:
    """Return how well queries find their documents among all documents, each distinct text once."""
    places, first, relevant = related_texts(texts)
    documents: list[Any] = [None] * (int(places.max()) + 1)
    for row, at in zip(vectors, places, strict=True):
        for vector, place in zip(row[1:], at.tolist(), strict=True):
            documents[place] = vector
    deepest = max(k for numbers in RETRIEVAL.values() for k in numbers)
    found = []
    for start in range(0, len(first), QUERIES):
        scores = max_sim([vectors[i][0] for i in first[start : start + QUERIES]], documents)
        found += scores.topk(min(deepest, len(documents)), dim=1).indices.tolist()
    return figures_of_found(found, relevant, RETRIEVAL)


def _triplets(vectors: Sequence[Sequence[Tensor]]) -> float:
    """Return how often a query is nearer to its first document than to each other one."""
    won = []
    for query, right, *others in vectors:
        scores = max_sim([query], [right, *others])[0]
        won.append((scores[0] > scores[1:]).double().mean().item())
    return float(np.mean(won))


@dataclass
class MultiVectorTask(EmbeddingTask):
    """Vectors of tokens; arguments as of `EmbeddingTask`, and of `CollateLate` once the model is known."""

    mask_id: int | None = None
    skipped: tuple[int, ...] = ()
    query_tokens: int | None = None

    name = "multivector"

    usual: ClassVar[Mapping[Any, str]] = MULTIVECTOR_USUAL
    evaluated: ClassVar[Mapping[Any, str]] = MULTIVECTOR_USUAL
    forms = tuple(form for form in EmbeddingTask.forms if form not in ("classes", "teacher_vectors"))
    table: ClassVar[Mapping[str, Any]] = MULTIVECTOR_LOSSES
    scores: ClassVar[Any] = LateScorer
    refused: ClassVar[tuple[str, ...]] = ("matryoshka", "pooling", "normalize", "guide")

    @property
    def start(self) -> Callable[[EncoderModel], list[str]]:
        """What puts the projection into a model, on every rank."""
        options = self.options
        return partial(attach_projection, settings=options.projection, max_length=options.max_length, seed=options.seed)

    def settle(self, model: EncoderModel) -> list[str]:
        """Configure token vectors as in the folder of the model, or new ones; return notes for the user."""
        notes = self.start(model)
        self.recipe, tokenizer = model.sentence_recipe, model.tokenizer
        late: MultiVectorConfig = self.recipe.late
        self.skipped = tuple(sorted({marker_id(tokenizer, word, None) for word in late.skipped} - {None}))
        self.mask_id = tokenizer.mask_token_id if tokenizer is not None and late.expanded else None
        self.query_tokens = min((n for n in (late.query_length, model.max_tokens) if n), default=None)
        return notes

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return the maximum number of tokens of a document."""
        return [self.recipe.late.document_length] if self.recipe.late.document_length else []

    def conclude(self, model: Any) -> None:
        """Store the trained projection in the model's recipe, and detach the module."""
        if model.beside is None:
            return
        layers, recipe = list(model.beside.children()), model.sentence_recipe
        model.beside = None
        late = replace(recipe.late, projections=tuple(layer.learned() for layer in layers))
        model.sentence_recipe = replace(recipe, late=late, files=_projection_files(model, recipe, late))

    def encode(
        self, rows: Sequence[Sequence[str]], tokenizer: Tokenizer, limits: LengthLimits
    ) -> tuple[EncodedRows, int]:
        """Return rows of tokens with the lengths of their texts, the first of each a query, and how many documents were
        cut.
        """
        late, width = self.recipe.late, len(rows[0])
        builder, lengths, cut = RowBuilder(limits.types), [], 0
        for start in range(0, len(rows), max(1, CHUNK // width)):
            part = rows[start : start + max(1, CHUNK // width)]
            asked = late.rows(tokenizer, [row[0] for row in part], self.query_tokens, query=True)
            found = [text for row in part for text in row[1:]]
            others = iter(late.rows(tokenizer, found, limits.max_tokens, query=False))
            for query in asked:
                documents = [next(others) for _ in range(width - 1)]
                for row in (query, *documents):
                    builder.add(row, len(lengths))
                    lengths.append(len(row.ids))
                cut += sum(row.truncated for row in documents)
        return rows_of_texts(builder, lengths, [width] * len(rows)), cut

    def laid(self, rows: TextRows) -> Laid:
        """Return the lengths of documents in a batch."""
        parts = [table.values[PARTS][:, 1:] for table in rows.tables]
        sums, widest = (np.concatenate([count(part, 1) for part in parts]) for count in (np.sum, np.max))
        return Laid(sums, widest, rows.width - 1)

    def collate(self, usual: CollateRows, rows: TextRows, batches: Any, accumulate: int) -> CollateLate:
        """Return the collate function, with separate queries and documents."""
        late = self.recipe.late
        return CollateLate.like(
            usual, lengths=not usual.settled, mask_id=self.mask_id, query_tokens=self.query_tokens,
            attended=late.attended, skipped=self.skipped, first=late.first,
        )  # fmt: skip

    def main_metric_of(self, held_out: Prepared) -> str:
        """Return the first metric of the form of the evaluation data; the loss for forms without metrics."""
        has_metrics = held_out.scorer().truth.form in MULTIVECTOR_USUAL
        return super().main_metric_of(held_out) if has_metrics else "-eval_loss"

    def _objective(self, losses: tuple[Any, ...], **further: Any) -> LateObjective:
        return LateObjective(losses, **further)
