"""Entities from token classification logits, at the characters where they stand.

This file decides how the distributions of a word's tokens become one label, how labelled words join into
entities, and what an entity is. It leaves tags to ``labels.py``, windows to ``windows.py``, words to
``words.py``, and the habits of other libraries to ``compat/``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from flodl.errors import PredictError
from flodl_hf.decode.constrained import best_paths
from flodl_hf.decode.labels import BEGIN, END, OUT, SINGLE, TagScheme
from flodl_hf.decode.rows import Logits, Rows, flat_logits, owners_of
from flodl_hf.decode.windows import TokenStream, merge_windows
from flodl_hf.decode.words import Words, trimmed, words_of

__all__ = ["Aggregation", "Entity", "decode_entities", "decode_entities_batch"]

Aggregation: TypeAlias = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled piece of a text.

    Attributes:
        label: the entity's name without prefix (``PER``); the full label (``B-PER``) where nothing is
            aggregated.
        score: mean of the probabilities of the words' labels, from 0 to 1.
        start: first character.
        end: character after the last one.
        word: exactly ``text[start:end]``, never empty, without outer white space.
        words: first word index and the one after the last, as the tokenizer counts words; for pre-split input
            these are places in the caller's list. -1 where the tokenizer has no words.
        tokens: first token and the one after the last, in the token stream of the whole text, specials not
            counted.
    """

    label: str
    score: float
    start: int
    end: int
    word: str
    words: tuple[int, int]
    tokens: tuple[int, int]

    def byte_span(self, text: str, encoding: str = "utf-8") -> tuple[int, int]:
        """Return start and end counted in bytes of ``text`` in ``encoding``; lone surrogates count too."""
        start = len(text[: self.start].encode(encoding, "surrogatepass"))
        return start, start + len(self.word.encode(encoding, "surrogatepass"))


def decode_entities(
    logits: Logits,
    rows: Rows,
    text: str,
    scheme: TagScheme,
    *,
    aggregation: Aggregation = "first",
    ignore_labels: Collection[str] = ("O",),
    constrained: bool = False,
    word_spans: Sequence[tuple[int, int]] | None = None,
) -> list[Entity]:
    """Return the entities of one text, in order: ``decode_entities_batch`` with that text alone."""
    return decode_entities_batch(
        logits,
        rows,
        [text],
        scheme,
        owners=[0] * len(rows),
        aggregation=aggregation,
        ignore_labels=ignore_labels,
        constrained=constrained,
        word_spans=None if word_spans is None else [word_spans],
    )[0]


def decode_entities_batch(
    logits: Logits,
    rows: Rows,
    texts: Sequence[str],
    scheme: TagScheme,
    *,
    owners: Sequence[int] | np.ndarray | None = None,
    aggregation: Aggregation = "first",
    ignore_labels: Collection[str] = ("O",),
    constrained: bool = False,
    word_spans: Sequence[Sequence[tuple[int, int]] | None] | None = None,
) -> list[list[Entity]]:
    """Return for each text its entities, sorted and disjoint (with ``"none"``: one per token).

    A text in several windows is decoded once: each token's logits come from the window where it has most
        context,
    so no entity is lost, doubled or cut at a seam.

    ``aggregation`` says what carries a label. ``"first"``, the default, gives each word the distribution of
    its first token, which is the token that models are trained on when the others are masked in the loss;
    ``"average"`` the mean over its tokens, ``"max"`` that of its surest token. With ``"simple"`` each token
    carries its own, so an entity may end inside a word. Labelled pieces then join as the scheme says.
    ``"none"`` joins nothing.

    Args:
        logits: ``(rows, seq, labels)`` padded, ``(tokens, labels)`` packed, or one array per row.
        rows: the windows.
        texts: the texts that the offsets refer to; for pre-split input the words joined (``join_words``).
        scheme: the label set read as tags.
        owners: index of the text of each row; without it row ``i`` is text ``i``, or all belong to the only
            text.
        aggregation: see above.
        ignore_labels: full labels or entity names that are left out.
        constrained: take the most probable label sequence that the scheme allows instead of each unit's best
            label. Not for models trained on IOB1 tags, where an entity begins with ``I-``.
        word_spans: for pre-split input whose offsets count from the beginning of each word: where the words
            stand in the joined text. Words are then never parted at punctuation.

    Raises:
        PredictError: logits, rows, texts and labels do not fit each other, or logits are not finite.
    """
    if aggregation not in get_args(Aggregation):
        raise PredictError(
            f"entities: aggregation {aggregation!r} is unknown; expected one of {', '.join(get_args(Aggregation))}",
            aggregation=aggregation,
        )
    flat, row_starts = flat_logits(logits, rows, trailing=1)
    owner = owners_of(owners, len(rows), len(texts))
    answers: list[list[Entity]] = [[] for _ in texts]
    stream = merge_windows(rows, owner)
    if len(stream) == 0:
        return answers
    if flat.shape[1] != len(scheme.labels):
        raise PredictError(
            f"entities: logits have {flat.shape[1]} labels, the scheme {len(scheme.labels)}; "
            "pass the scheme detected from this model's labels",
            logits=int(flat.shape[1]),
            labels=len(scheme.labels),
        )
    presplit = word_spans is not None and any(spans is not None for spans in word_spans)
    if word_spans is not None and presplit:
        stream = _shifted(stream, word_spans)
    place = torch.from_numpy(row_starts[stream.row] + stream.column).to(flat.device)
    probabilities = torch.softmax(flat.index_select(0, place).float(), -1).cpu().numpy()
    if not bool(np.isfinite(probabilities).all()):
        raise PredictError(
            "entities: the logits are not finite; expected numbers; half precision may have overflowed, "
            "so predict in float32 or bfloat16"
        )
    words = words_of(stream, texts, whole=aggregation not in ("none", "simple"), split_punctuation=not presplit)
    if aggregation == "none":
        words = _each_token(stream)
    scores = _unit_scores(probabilities, words, aggregation)
    text_of = stream.text[words.first]
    rows_of = np.bincount(text_of, minlength=len(texts))
    labels = best_paths(scores, rows_of, scheme) if constrained else scores.argmax(1)
    score = np.take_along_axis(scores, labels[:, None], 1)[:, 0].astype(np.float64)
    ignored = np.array(
        [label in ignore_labels or scheme.entity_names[e] in ignore_labels for label, e in _pairs(scheme)]
    )
    if aggregation == "none":
        names, heads = scheme.labels, np.arange(len(labels))
    else:
        names, heads = tuple(scheme.entity_names[e] for e in scheme.entities), _heads(labels, text_of, scheme)
    tails = np.append(heads[1:], len(labels))
    means = np.add.reduceat(score, heads) / (tails - heads)
    # A mean of probabilities may round to just above its largest member.
    means = np.minimum(means, 1.0)
    chosen = np.flatnonzero(~ignored[labels[heads]])
    head, tail = heads[chosen], tails[chosen] - 1
    first, last = words.first[head], words.last[tail] - 1
    columns: tuple[Any, ...] = (
        text_of[head], labels[head], means[chosen], words.start[head], words.end[tail],
        stream.word_ids[first], stream.word_ids[last] + 1, stream.position[first], stream.position[last] + 1,
    )  # fmt: skip
    # Python's share is one short round for each entity; what it needs was gathered for all of them above.
    for place, label, mean, low, high, *spans in zip(*(column.tolist() for column in columns), strict=True):
        text: str = texts[int(place)]
        start, end = trimmed(text, low, high)
        if start != end:
            word = text[start:end]
            answers[place].append(
                Entity(names[label], mean, start, end, word, (spans[0], spans[1]), (spans[2], spans[3]))
            )
    return answers


def _pairs(scheme: TagScheme) -> list[tuple[str, int]]:
    return list(zip(scheme.labels, scheme.entities.tolist(), strict=True))


def _shifted(stream: TokenStream, word_spans: Sequence[Sequence[tuple[int, int]] | None]) -> TokenStream:
    """Return the stream with offsets that count from each word's beginning made to count from the text's."""
    sizes = np.array([len(spans or ()) for spans in word_spans], np.int64)
    starts = np.array([start for spans in word_spans for start, _ in spans or ()] or [0], np.int64)
    base = np.cumsum(sizes) - sizes
    inside = (stream.word_ids >= 0) & (stream.word_ids < sizes[stream.text])
    shift = np.where(inside, starts[np.where(inside, base[stream.text] + stream.word_ids, 0)], 0)
    return TokenStream(
        stream.row,
        stream.column,
        stream.text,
        stream.position,
        stream.offsets + shift[:, None],
        stream.word_ids,
    )


def _each_token(stream: TokenStream) -> Words:
    index = np.arange(len(stream))
    return Words(index, index + 1, stream.offsets[:, 0], stream.offsets[:, 1], index)


def _unit_scores(probabilities: np.ndarray, words: Words, aggregation: Aggregation) -> np.ndarray:
    """Return the label distribution of each unit, ``(units, labels)``."""
    if len(words.first) == len(probabilities):
        return probabilities
    if aggregation == "average":
        return np.add.reduceat(probabilities, words.first) / (words.last - words.first)[:, None]
    if aggregation == "max":
        best = probabilities.max(1)
        at_best = best == np.maximum.reduceat(best, words.first)[words.of_token]
        index = np.where(at_best, np.arange(len(best)), len(best))
        return probabilities[np.minimum.reduceat(index, words.first)]
    return probabilities[words.first]


def _heads(labels: np.ndarray, text_of: np.ndarray, scheme: TagScheme) -> np.ndarray:
    """Return the units at which a new entity begins: the first, and each that does not continue its
    neighbour.

    A unit continues the one before it in the same text if both name the same entity, it does not begin one
    (B, S), and the other did not end one (E, S).
    """
    part, entity = scheme.parts[labels], scheme.entities[labels]
    starts = np.ones(len(labels), bool)
    begins = (part == BEGIN) | (part == SINGLE)
    ended = (part == END) | (part == SINGLE)
    outside = (part == OUT)[1:] & (part == OUT)[:-1]
    joins = (entity[1:] == entity[:-1]) & ~begins[1:] & ~ended[:-1] | outside
    starts[1:] = ~joins | (text_of[1:] != text_of[:-1])
    return np.flatnonzero(starts)
