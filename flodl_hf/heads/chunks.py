"""Late chunking: one long pass over a text, then a vector for each of its parts, with the context of the others.

Günther et al. 2024 (arXiv 2409.04701). Decides which tokens a part has and which pass a token's state is
taken from if a text needs several. A part's vector is the mean of its own tokens: special tokens, and the tokens
of a prompt, are excluded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor

from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig, recipe_on
from flodl_hf.errors import PredictError
from flodl_hf.heads.vectors import changed_states, most_sentence_tokens, read_states
from flodl_hf.inference.batch import Pending
from flodl_hf.inference.graph_model import route_within
from flodl_hf.inference.inputs import Encoded, as_text_list
from flodl_hf.inference.options import RunKeywords
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.pooling import finish_embeddings
from flodl_hf.inference.token_table import table_of
from flodl_hf.models.encoder_model import EncoderModel

Span = tuple[int, int]
_END = re.compile(r"[.!?…]+[\"'”’)\]]*\s+|[。！？]+[」』”]*\s*|\n\s*\n\s*")


@dataclass(frozen=True, eq=False)
class Chunks:
    """The parts of one text.

    Attributes:
        text: the text.
        spans: position of each part in the text, ``(start, end)`` in characters.
        vectors: one for each, ``(parts, size)``, float32.
    """

    text: str
    spans: list[Span]
    vectors: Tensor

    @property
    def parts(self) -> list[str]:
        """The parts themselves."""
        return [self.text[start:end] for start, end in self.spans]


def sentence_spans(text: str) -> list[Span]:
    """Return the spans of the sentences of a text, split at end marks and empty lines; none is blank."""
    borders = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    found = []
    for start, end in pairwise(borders):
        part = text[start:end]
        if part.strip():
            found.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
    return found


def embed_chunks(
    self: EncoderModel,
    texts: str | Iterable[str],
    *,
    chunks: str | int = "sentences",
    spans: Sequence[Any] | None = None,
    overlap: int | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    normalize: bool | None = None,
    truncate_dim: int | None = None,
    route: str | None = None,
    untrained: bool = False,
    **run: Unpack[RunKeywords],
) -> Any:
    """Return vectors of parts of a text, computed in one long pass over it (late chunking).

    A part's vector is the mean of its tokens' states, finished as by `embed`. A text that does not fit into one
    pass is read in several overlapping passes; a token's state comes from the pass with more context around it.

    Args:
        texts: one text or several.
        chunks: "sentences", or how many tokens a part has.
        spans: the parts instead: for each text ``(start, end)`` in characters; they may overlap.
        overlap: tokens that neighbouring passes share; None for a quarter of a pass.
        prompt: as in `embed`; it is read, and is in no part.
        prompt_name: as in `embed`.
        normalize: scale vectors to length 1; None uses the folder's setting, else True.
        truncate_dim: keep this many features.
        route: as in `embed`.
        untrained: embed although the model has random values.
        **run: how to run; see `flodl_hf.inference.RunOptions`.

    Returns:
        `flodl_hf.heads.chunks.Chunks` (``spans``, ``vectors``, ``parts``); several in a list.

    Raises:
        PredictError: spans are outside of their text or contain no token, or an option is invalid.
    """
    model = self.on_route(route)
    if model is not self:
        route = route_within(model.sentence_recipe, route)
    tokenizer = model._ready("embed_chunks", untrained=untrained)
    recipe = recipe_on(model.sentence_recipe, route)
    given = as_text_list(texts, "embed_chunks")
    single = isinstance(given, str)
    asked = [given] if isinstance(given, str) else list(given)
    wanted = _wanted(asked, [spans] if single and spans is not None else spans, chunks)
    limit = most_sentence_tokens(model)
    shared = overlap if overlap is not None else 0 if limit is None else limit // 4
    if shared < 0 or (limit is not None and shared >= limit - 8):
        raise PredictError(
            f"embed_chunks: overlap={overlap}; expected 0 or more, and fewer than a pass takes ({limit})"
        )
    before = (recipe or SentenceTransformerConfig()).resolve_prompt("embed_chunks", prompt, prompt_name)
    lower = recipe is not None and recipe.lower_case
    scaled = normalize if normalize is not None else (recipe.normalize if recipe else True)
    truncate_dim = recipe.kept(truncate_dim) if recipe else truncate_dim

    def encode(items: list[tuple[str, Any]]) -> Encoded:
        read = [text for text, _ in items]
        if lower:  # each sign in its place
            read = ["".join(s if len(s := sign.lower()) == 1 else sign for sign in text) for text in read]
        read = [before + text for text in read]
        groups = tokenizer.encode_rows(read, max_tokens=limit, stride=shared)
        owners = [owner for owner, group in enumerate(groups) for _ in group]
        rows = [row for group in groups for row in group]
        return Encoded(table_of(rows, owners, offsets=False), len(items), rows)

    def finish(items: list[tuple[str, Any]], encoded: Encoded, pending: Pending) -> list[Chunks]:
        windows: list[list[tuple[Any, Tensor]]] = [[] for _ in items]
        of_rows = pending.placed().rows(encoded.table)
        for row, states, owner in zip(encoded.rows, of_rows, encoded.table.owners.tolist(), strict=True):
            windows[owner].append((row, changed_states(recipe, states)))
        found = []
        for (text, own), group in zip(items, windows, strict=True):
            states, places = _one_pass(group, len(before))
            at = own if own is not None else _by_tokens(places, int(chunks))
            parts = [((places[:, 0] < end) & (places[:, 1] > start)).nonzero().flatten() for start, end in at]
            if spans is not None and (empty := [span for span, part in zip(at, parts, strict=True) if not len(part)]):
                raise PredictError(
                    f"embed_chunks: there are no tokens in {empty[:5]}; give other spans", problems=empty
                )
            kept = [(span, part) for span, part in zip(at, parts, strict=True) if len(part)]
            vectors = (
                torch.stack([states[part].mean(0) for _, part in kept])
                if kept
                else states.new_zeros(0, states.shape[1])
            )
            for layer in recipe.dense if recipe else ():
                vectors = layer(vectors)
            vectors = finish_embeddings(vectors, truncate_dim=truncate_dim, normalize=scaled)
            found.append(Chunks(text, [span for span, _ in kept], vectors))
        return found

    items = list(zip(asked, wanted, strict=True))
    work, session = read_states(model, recipe), Session(model, run)
    found = list(session.answer(items, encode, work, finish, what="embed_chunks")) if items else []
    return found[0] if single else found


def _wanted(texts: Sequence[str], spans: Any, chunks: str | int) -> list[list[Span] | None]:
    """Return the spans of each text; None where its tokens have to be known first."""
    if spans is None:
        if chunks == "sentences":
            return [sentence_spans(text) for text in texts]
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise PredictError(f"embed_chunks: chunks={chunks!r}; expected 'sentences', or a number of tokens")
        return [None] * len(texts)
    found = [[(int(start), int(end)) for start, end in own] for own in spans]
    if len(found) != len(texts):
        raise PredictError(f"embed_chunks: spans of {len(found)} texts for {len(texts)}; expected a list for each")
    wrong = [
        f"text {place}: ({start}, {end}) of {len(text)} characters"
        for place, (text, own) in enumerate(zip(texts, found, strict=True))
        for start, end in own
        if not 0 <= start < end <= len(text)
    ]
    if wrong:
        raise PredictError(f"embed_chunks: spans outside of their text: {', '.join(wrong[:5])}", problems=wrong)
    return list(found)


def _one_pass(group: Sequence[tuple[Any, Tensor]], before: int) -> tuple[Tensor, Tensor]:
    """Return the states of a text's own tokens, and their positions in the text.

    Args:
        group: the passes over it, in order. Of the tokens that two of them share, the first half is taken from
            the first and the rest from the second, which has seen more around them.
        before: number of characters before the text.
    """
    owns = [[i for i, special in enumerate(row.special) if not special] for row, _ in group]
    starts = [row.first_token for row, _ in group]
    ends = [start + len(own) for start, own in zip(starts, owns, strict=True)]
    borders = [0, *((start + end + 1) // 2 for start, end in zip(starts[1:], ends, strict=False)), ends[-1]]
    states, places = [], []
    for number, (row, found) in enumerate(group):
        taken = owns[number][borders[number] - starts[number] : borders[number + 1] - starts[number]]
        states.append(found[taken])
        places += [(row.offsets[i][0] - before, row.offsets[i][1] - before) for i in taken]
    return torch.cat(states), torch.tensor(places, dtype=torch.int64).view(-1, 2)


def _by_tokens(places: Tensor, size: int) -> list[Span]:
    """Return spans of so many tokens each, without the tokens of a prompt."""
    own = [(start, end) for start, end in places.tolist() if end > max(start, 0)]
    groups = [own[at : at + size] for at in range(0, len(own), size)]
    return [(max(0, group[0][0]), group[-1][1]) for group in groups]
