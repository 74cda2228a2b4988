"""Vectors of texts beyond one pooled state each: dense layers behind a pooling, one a token, one over a vocabulary.

Decides how a folder's recipe (`flodl_hf.checkpoints.sentence.recipe`) becomes calls of the runtime. The
computations are in `flodl_hf.checkpoints.sentence.steps`, `flodl_hf.checkpoints.sentence.vectors` and
`flodl_hf.checkpoints.sentence.vectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flodl_hf.checkpoints.keywords import accept_keywords
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig, recipe_on
from flodl_hf.checkpoints.sentence.steps import Layer
from flodl_hf.checkpoints.sentence.vectors import MultiVectorConfig, SparseVectors, from_tokens, marker_id
from flodl_hf.errors import PredictError
from flodl_hf.heads.prediction_keywords import LEXICAL
from flodl_hf.inference.batch import Pending, Pooled, States, Work
from flodl_hf.inference.classes import mean_over_windows
from flodl_hf.inference.inputs import Encoded, as_text_list, encode
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.pooling import finish_embeddings, pool_padded
from flodl_hf.inference.token_table import table_of
from flodl_hf.inference.vectors import Vectors
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.layout import Padded

USUAL_BATCH = 32
"""Texts of a batch in sentence-transformers, where vectors depend on padding."""
BATCH: ContextVar[int] = ContextVar("texts of a padded batch", default=USUAL_BATCH)
QUERIES = 32
"""Filled queries of a batch."""


def most_sentence_tokens(model: EncoderModel) -> int | None:
    """Return the length in tokens that texts are truncated to for vectors: ``max_seq_length`` of the folder."""
    recipe = model.sentence_recipe
    return model._most_tokens(recipe.max_tokens if recipe else None)


def keywords_for(kind: str, model: EncoderModel, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return default keywords of `BaseModel.encode` for queries or documents, without those of the call.

    Args:
        kind: "query" or "document".
        model: the model; its folder may have prompts, routes or task adapters.
        keywords: keywords of the call.
    """
    recipe, found = model.sentence_recipe, dict(keywords)
    if found.get("prompt") is None and found.get("prompt_name") is None and recipe is not None:
        # The library has an empty prompt of either name where the folder has none, so its usual one is never put there.
        found["prompt"] = recipe.prompts.get(kind, "")
    if found.get("task") is None and found.get("route") is None:
        names = ("query",) if kind == "query" else ("passage", "document")
        tasks = getattr(model.config.encoder, "tasks", ())
        adapter = next((task for name in names if (task := f"retrieval.{name}") in tasks), None)
        if recipe is not None and recipe.routes:
            found["route"] = kind
        elif adapter is not None:
            found["task"] = adapter
    return found


@contextmanager
def batches_of(size: int | None) -> Iterator[None]:
    """Have calls inside read padded batches of so many texts."""
    token = BATCH.set(size or USUAL_BATCH)
    try:
        yield
    finally:
        BATCH.reset(token)


def padded_batches(
    model: EncoderModel,
    recipe: SentenceTransformerConfig,
    texts: Sequence[str],
    prompt: str,
    *,
    size: int,
    strict: bool = False,
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield the places of the texts of each batch, the states of their tokens, and the mask of padding.

    Batches are those of sentence-transformers: ``size`` texts of similar length, the longest first.
    """
    own: Any = model
    encoded = own._embeddable(list(texts), windows=False, strict=strict, prompt=prompt)
    whole = np.split(encoded.table.ids, np.cumsum(encoded.table.lengths)[:-1])
    rows = dict(zip(encoded.table.owners.tolist(), whole, strict=True))
    shares = recipe.shares(own.config.encoder.num_layers, "the folder")
    order = np.argsort([-len(text) for text in texts])
    for first in range(0, len(texts), size):
        places = order[first : first + size]
        batch = [torch.from_numpy(rows[place].astype(np.int64)) for place in places.tolist()]
        ids = pad_sequence(batch, batch_first=True, padding_value=own.tokenizer.pad_token_id or 0)
        mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
        with torch.inference_mode():
            given = {"attention_mask": mask.to(own.device), "output_hidden_states": bool(shares)}
            found = own(ids.to(own.device), **given)
            states = found.last_hidden_state
            if shares:
                states = torch.stack([share * found.hidden_states[number] for number, share in shares]).sum(0)
            yield places, changed_states(recipe, states.float().cpu()), mask


def convolved(
    model: EncoderModel, recipe: SentenceTransformerConfig, names: tuple[Any, ...], prompt: str, dense: Sequence[Layer],
    texts: Sequence[str], *, truncate_dim: int | None, normalize: bool, strict: bool,
) -> Tensor:  # fmt: skip
    """Return the vectors of texts in padded batches; arguments as of `pooled_beyond`."""
    skipped, places, found = prompt_tokens(model, recipe, prompt), [], []
    for at, states, mask in padded_batches(model, recipe, texts, prompt, size=BATCH.get(), strict=strict):
        mask[:, :skipped] = 0
        vectors = pool_padded(states, mask, list(names))
        for layer in dense:
            vectors = layer(vectors)
        places.append(at)
        found.append(finish_embeddings(vectors, truncate_dim=truncate_dim, normalize=normalize))
    return torch.cat(found)[np.argsort(np.concatenate(places))]


def prompt_tokens(model: EncoderModel, recipe: SentenceTransformerConfig, prompt: str) -> int:
    """Return how many first tokens of a text are not pooled, counted as sentence-transformers does."""
    if not prompt or recipe.include_prompt:
        return 0
    row = model._ready("embed").encode_rows([prompt], max_tokens=None, offsets=False)[0][0]
    return len(row.ids) - int(bool(row.special[-1]))


def pooled_beyond(
    model: EncoderModel, recipe: SentenceTransformerConfig, names: tuple[Any, ...], prompt: str,
    dense: Sequence[Layer], *, truncate_dim: int | None, normalize: bool, batch_invariant: bool = False,
) -> tuple[Work, Callable[[list[str], Encoded, Pending], Tensor]]:  # fmt: skip
    """Return how texts are pooled where dense layers follow, or where a prompt's tokens do not count.

    Args:
        model: which runs.
        recipe: of these texts.
        names: poolings.
        prompt: the prompt before the texts.
        dense: layers behind the pooling.
        truncate_dim: keep so many features.
        normalize: scale vectors to length 1.
        batch_invariant: compute each vector by itself, because products of several rows are summed in another order.
    """

    def finished(pooled: Tensor) -> Tensor:
        if batch_invariant and len(pooled) > 1:
            return torch.cat([finished(row) for row in pooled.split(1)])
        for layer in dense:
            pooled = layer(pooled)
        return finish_embeddings(pooled, truncate_dim=truncate_dim, normalize=normalize)

    if (recipe.include_prompt or not prompt) and not recipe.changes_states:
        vectors = Vectors(None, normalize=False)
        return Pooled(names), lambda texts, encoded, pending: finished(vectors.take(texts, encoded, pending))
    if "pooler" in names:
        raise PredictError(
            "embed: the pooler reads the first token of the last layer; the folder leaves out tokens of prompts, or "
            "reads other states. Choose another pooling."
        )
    skipped = prompt_tokens(model, recipe, prompt)

    def take(texts: list[str], encoded: Encoded, pending: Pending) -> Tensor:
        rows = [changed_states(recipe, states) for states in pending.placed().rows(encoded.table)]
        return finished(_without_prompt(rows, encoded, names, skipped, len(texts)))

    return read_states(model, recipe), take


def token_embeddings(
    model: EncoderModel,
    texts: str | list[str],
    output_value: str | None,
    *,
    prompt: str | None,
    route: str | None,
    untrained: bool,
    run: dict[str, Any],
) -> Any:
    """Return the vectors of each text's tokens, ``(tokens, size)``, as sentence-transformers pools them.

    Raises:
        PredictError: another output is requested.
    """
    if output_value != "token_embeddings":
        raise PredictError(
            f"encode: found output_value={output_value!r}, expected 'sentence_embedding' or 'token_embeddings'. Call "
            "the model itself for other outputs: model(**model.tokenizer(text, return_tensors='pt')).",
            output_value=output_value,
        )
    model._ready("encode", untrained=untrained)
    own = model.on_route(route)
    recipe = recipe_on(own.sentence_recipe, route if own is model else None)
    before = (recipe or SentenceTransformerConfig()).resolve_prompt("encode", prompt)
    found: Any = own
    if recipe is not None and recipe.reads_padding:
        given_texts, rows = [texts] if isinstance(texts, str) else texts, {}
        size = run.get("batch_size") or USUAL_BATCH
        for places, states, mask in padded_batches(own, recipe, given_texts, before, size=size):
            lengths = mask.sum(1).tolist()
            rows |= {place: one[:n] for place, one, n in zip(places.tolist(), states, lengths, strict=True)}
        return rows[0] if isinstance(texts, str) else [rows[place] for place in range(len(given_texts))]
    encode = partial(found._embeddable, windows=False, strict=False, prompt=before)

    def finish(chunk: list[str], encoded: Encoded, states: Pending) -> list[Tensor]:
        rows = dict(zip(encoded.table.owners.tolist(), states.placed().rows(encoded.table), strict=True))
        return [changed_states(recipe, rows[place]) for place in range(len(chunk))]

    given: Any = {name: value for name, value in run.items() if name != "batch_size"}  # which is a matter of speed
    session, single = Session(own, given), isinstance(texts, str)
    found = session.answer(texts, encode, read_states(own, recipe), finish, single=single, what="encode")
    return found if single else list(found)


def read_states(model: EncoderModel, recipe: SentenceTransformerConfig | None) -> States:
    """Return the pass that computes the states that a folder uses: the last layer's, or others."""
    if recipe is None or not recipe.changes_states:
        return States()
    return States(recipe.shares(model.config.encoder.num_layers, "the folder"))


def changed_states(recipe: SentenceTransformerConfig | None, states: Tensor) -> Tensor:
    """Return the states of one text's tokens, ``(tokens, size)``, after the modules between transformer and pooling."""
    for step in recipe.tokens if recipe is not None else ():
        states = step(states)
    return states


def _without_prompt(
    rows: Sequence[Tensor], encoded: Encoded, names: tuple[Any, ...], skipped: int, texts: int
) -> Tensor:
    """Return pooled vectors to which the first tokens of each text add nothing."""
    found, counts = [], []
    for states, window in zip(rows, encoded.table.window.tolist(), strict=True):
        mask = torch.ones(1, len(states), dtype=torch.long)
        if window == 0:
            mask[:, :skipped] = 0
        found.append(pool_padded(states[None], mask, list(names)))
        counts.append(int(mask.sum()))
    return mean_over_windows(torch.cat(found), encoded.table.owners, texts, counts)


def embed_tokens(
    self: EncoderModel,
    texts: str | Iterable[str],
    *,
    query: bool = False,
    untrained: bool = False,
    **run: Unpack[RunKeywords],
) -> Any:
    """Return a vector for each token of a text, ``(tokens, size)``, with the folder's settings; several in a list.

    Folders of ColBERT, PyLate, sentence-transformers' MultiVectorEncoder and bge-m3 do.

    `flodl_hf.inference.similarity.max_sim` compares them. Texts above the folder's maximum are cut, as its own
    library does.

    Args:
        texts: one text or several.
        query: the texts are queries: marked, cut and padded as queries rather than documents.
        untrained: embed although the model has random values.
        **run: how to run; see `flodl_hf.inference.RunOptions`.

    Raises:
        PredictError: the folder has no such vectors, or the model has no tokenizer.
    """
    tokenizer = self._ready("embed_tokens", untrained=untrained)
    late = None if self.sentence_recipe is None else self.sentence_recipe.late
    if late is None:
        raise PredictError(
            "embed_tokens: the folder has no settings for token vectors; expected ColBERT's class, PyLate's "
            "modules, or colbert_linear.pt next to the weights"
        )
    given = as_text_list(texts, "embed_tokens")
    asked = [given] if isinstance(given, str) else list(given)
    limit = min((n for n in (late.query_length if query else late.document_length, self.max_tokens) if n), default=None)

    def marked(chunk: list[str]) -> Encoded:
        rows = late.rows(tokenizer, chunk, limit, query=query)
        return Encoded(table_of(rows, range(len(rows)), offsets=False), len(rows), rows)

    if query and late.expanded:
        found = _expanded(self, late, marked(asked), limit) if asked else []
        return found[0] if isinstance(given, str) else found
    skipped = set() if query else {marker_id(tokenizer, word, None) for word in late.skipped} - {None}

    def finish(chunk: list[str], encoded: Encoded, states: Pending) -> list[Tensor]:
        vectors = []
        for row, own in zip(encoded.rows, states.placed().rows(encoded.table), strict=True):
            keep = torch.tensor([token not in skipped for token in row.ids])
            keep[0] &= late.first
            with torch.no_grad():  # a projection may be learning meanwhile
                vectors.append(late.vectors(own)[keep])
        return vectors

    session = Session(self, run)
    if isinstance(given, str):
        return session.answer(given, marked, States(), finish, single=True, what="embed_tokens")
    return list(session.answer(asked, marked, States(), finish, what="embed_tokens"))


def _expanded(model: EncoderModel, late: MultiVectorConfig, encoded: Encoded, width: int | None) -> list[Tensor]:
    """Return the vectors of queries that are filled up with mask tokens, in full precision.

    Mask tokens that others do not attend to need a mask, which rows without filling have no place for.
    """
    from flodl_hf.inference.prepared_graph import shadow

    tokenizer = model.tokenizer
    assert tokenizer is not None
    if tokenizer.mask_token_id is None or width is None:
        raise PredictError("embed_tokens: queries are filled up with mask tokens, and the tokenizer has none")
    encoder = shadow(model.graph).get_submodule("encoder")
    found: list[Tensor] = []
    for first in range(0, len(encoded.rows), QUERIES):
        rows = [list(row.ids) for row in encoded.rows[first : first + QUERIES]]
        ids = torch.full((len(rows), width), tokenizer.mask_token_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        if late.attended:
            mask[:] = 1
        with torch.inference_mode():
            states = encoder(ids.to(model.device), layout=Padded.of(mask.to(model.device)))
            found += late.vectors(states.float().cpu()).unbind(0)
    # Not of inference, so that they can be used in training too.
    return [vectors.clone() for vectors in found]


@accept_keywords(LEXICAL)
def embed_sparse(
    self: EncoderModel,
    texts: str | Iterable[str],
    *,
    windows: bool = False,
    strict: bool = False,
    untrained: bool = False,
    **run: Unpack[RunKeywords],
) -> SparseVectors:
    """Return a weight for each word of the vocabulary that a text contains, as bge-m3's folder specifies.

    Args:
        texts: one text or several.
        windows: read all of a long text in windows; a word has its largest weight. Otherwise it is truncated.
        strict: raise on a text that is too long.
        untrained: embed although the model has random values.
        **run: how to run; see `flodl_hf.inference.RunOptions`.

    Raises:
        PredictError: the folder has no such vectors, or the model has no tokenizer.
    """
    tokenizer = self._ready("embed_sparse", untrained=untrained)
    lexical = None if self.sentence_recipe is None else self.sentence_recipe.lexical
    if lexical is None:
        raise PredictError(
            "embed_sparse: this model has no sparse head; expected sparse_linear.pt next to the weights, or "
            "a masked-word head, which head='mlm' loads"
        )
    roles = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    left_out = [token for role in roles if (token := getattr(tokenizer, role, None)) is not None]

    alone = self.run_options.changed(dict(run)).batch_invariant

    def encoded(chunk: list[str]) -> Encoded:
        return encode(tokenizer, chunk, max_tokens=most_sentence_tokens(self), strict=strict, truncate=not windows)

    def weighed(values: Tensor) -> np.ndarray:
        return torch.relu(lexical(values))[:, 0].numpy()

    def finish(chunk: list[str], rows: Encoded, states: Pending) -> list[tuple[np.ndarray, np.ndarray]]:
        placed = states.placed()
        together = None if alone else weighed(placed.values)
        parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in chunk]
        at = np.cumsum(rows.table.lengths) - rows.table.lengths
        for row, owner in enumerate(rows.table.owners.tolist()):
            length, start = int(rows.table.lengths[row]), int(placed.starts[row])
            ids = rows.table.ids[at[row] : at[row] + length]
            mine = slice(start, start + length)
            parts[owner].append((ids, weighed(placed.values[mine]) if together is None else together[mine]))
        joined = [tuple(np.concatenate(side) for side in zip(*own, strict=True)) for own in parts]
        return [from_tokens(ids, own, left_out) for ids, own in joined]

    return sparse_vectors(self, texts, encoded, States(), finish, run, rows=1)


def sparse_vectors(
    model: EncoderModel, texts: Any, encode: Any, work: Work, finish: Any, run: RunKeywords, *, rows: int
) -> SparseVectors:
    """Return the sparse vectors of texts.

    Args:
        model: the model.
        texts: one text or several.
        encode: texts to token rows.
        work: what to compute of rows.
        finish: ids and weights of each text of a window, from its scores.
        run: how to run.
        rows: approximate number of rows per text.
    """
    given = as_text_list(texts, "embed_sparse")
    asked = [given] if isinstance(given, str) else list(given)
    limit = most_sentence_tokens(model)
    found = list(Session(model, run).answer(asked, encode, work, finish, rows=rows, what="embed_sparse", limit=limit))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    known = sorted({token for ids, _ in found for token in ids.tolist()})
    words = dict(zip(known, tokenizer.convert_ids_to_tokens(known), strict=True))
    size = model.config.encoder.vocab_size
    return SparseVectors([ids for ids, _ in found], [weights for _, weights in found], size, words)
