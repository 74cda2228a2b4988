"""Entities from token classification logits, with their character positions.

This file decides which tagging scheme the labels spell (``B-PER`` is a tag, ``credit-card`` is a name), how the
distributions of a word's tokens become one label, and how labelled words join into entities. Windows are merged in
``rows.py``, words found in ``words.py``; ``compat/`` reproduces other libraries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import Placed
from flodl_hf.inference.results import Entity, build_records, not_finite
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.inference.words import TokenStream, Words, content_of, merge_windows, trimmed, words_of

OUTSIDE = "O"

# Codes of a label's position in an entity, the same for all schemes.
OUT, BEGIN, INSIDE, END, SINGLE = range(5)

_CODES = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}


@dataclass(frozen=True, slots=True, eq=False)
class TagScheme:
    """A label set read as tags: for each id its part of an entity and the entity's name.

    Schemes are detected from the labels alone: IO (``I-PER``), BIO (``B-``, ``I-``), BIOES (also ``E-``, ``S-``),
    BILOU (``L-``, ``U-``), BMES (``M-``), plain names (``PER`` or ``credit-card``) with an outside label, and names
    without an outside label, as in part-of-speech tagging, where every word is a span of its own.

    Attributes:
        labels: label names by id.
        parts: code per id, ``(labels,)``: 0 outside, 1 begin, 2 inside, 3 end, 4 single.
        entities: index into ``entity_names`` per id, ``(labels,)``.
        entity_names: names without their prefix, the outside label included.
        allowed: whether label ``j`` may follow label ``i``, ``(labels, labels)``.
        may_start: whether a text may begin with the label, ``(labels,)``.
        may_end: whether a text may end with the label, ``(labels,)``.
    """

    labels: tuple[str, ...]
    parts: np.ndarray
    entities: np.ndarray
    entity_names: tuple[str, ...]
    allowed: np.ndarray
    may_start: np.ndarray
    may_end: np.ndarray

    @classmethod
    def detect(cls, labels: Sequence[str]) -> TagScheme:
        """Return the scheme that labels, in the order of their ids, spell; the same object for the same labels."""
        return _detected(tuple(labels))


@lru_cache(maxsize=64)
def _detected(labels: tuple[str, ...]) -> TagScheme:
    split = _keep_real_prefixes(labels, [_split(label) for label in labels])
    untagged = INSIDE if OUTSIDE in labels or any(letter for letter, _ in split) else SINGLE
    parts = np.array(
        [
            OUT if label == OUTSIDE else _CODES[letter] if letter else untagged
            for label, (letter, _) in zip(labels, split, strict=True)
        ],
        np.int8,
    )
    index = {entity: i for i, entity in enumerate(dict.fromkeys(entity for _, entity in split))}
    names = tuple(index)
    entities = np.array([index[entity] for _, entity in split], np.int64)
    allowed, may_start, may_end = _transitions(parts, entities)
    return TagScheme(labels, parts, entities, names, allowed, may_start, may_end)


def _split(label: str) -> tuple[str | None, str]:
    """Return ``("B", "PER")`` for ``B-PER`` and ``B_PER``, ``(None, label)`` for anything else."""
    if len(label) > 2 and label[0] in _CODES and label[1] in "-_":
        return label[0], label[2:]
    return None, label


def _keep_real_prefixes(labels: Sequence[str], split: list[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    """Return the split with prefixes kept only where the label set as a whole uses them as tags.

    ``E-mail`` next to ``B-PER`` is a name, because neither ``B-mail`` nor ``I-mail`` exists. A label set in
    which some names have no prefix uses tags only if one entity appears under two of them.
    ``S-LOC`` without ``B-LOC`` is a tag where other entities have ``S-`` and ``B-``.
    """
    letters_of: dict[str, set[str]] = {}
    for letter, entity in split:
        if letter:
            letters_of.setdefault(entity, set()).add(letter)
    everyone = all(letter or label == OUTSIDE for label, (letter, _) in zip(labels, split, strict=True))
    anchored = {entity for entity, letters in letters_of.items() if letters & {"B", "I"}}
    paired = any(len(letters_of[entity]) > 1 for entity in anchored)
    if not anchored or not (everyone or paired):
        return [(None, label) for label in labels]
    tag_letters = {letter for entity in anchored for letter in letters_of[entity]}
    return [
        (letter, entity) if letter and (entity in anchored or letter in tag_letters) else (None, label)
        for label, (letter, entity) in zip(labels, split, strict=True)
    ]


def _transitions(parts: np.ndarray, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which label may follow which, may come first, may come last.

    The rules follow the tags that an entity has: an entity without a begin label may begin with inside, one
    without an end label may stop after begin or inside, one without a single label may stop after begin.
    """
    count = int(entities.max()) + 1 if len(entities) else 0
    has = np.zeros((5, count), bool)
    has[parts, entities] = True
    of = has[:, entities]
    opens = np.select(
        [parts == INSIDE, parts == END], [~of[BEGIN], ~of[BEGIN] & ~of[INSIDE] & ~of[SINGLE]], default=True
    )
    closes = np.select([parts == BEGIN, parts == INSIDE], [~of[END] | ~of[SINGLE], ~of[END]], default=True)
    leaves_open = (parts == BEGIN) | (parts == INSIDE)
    goes_on = (parts == INSIDE) | (parts == END)
    same = entities[:, None] == entities[None, :]
    allowed = (closes[:, None] & opens[None, :]) | (leaves_open[:, None] & goes_on[None, :] & same)
    return allowed, opens, closes


def best_paths(probabilities: np.ndarray, lengths: np.ndarray, scheme: TagScheme) -> np.ndarray:
    """Return for each unit the label that the most probable allowed sequence of its text gives it.

    Args:
        probabilities: label distribution of each unit, texts one after another, ``(units, labels)``.
        lengths: number of units of each text, ``(texts,)``, summing to the units.
        scheme: which label may follow which, come first and come last.

    Returns:
        Label ids, ``(units,)``. Of equally probable sequences the one with the lowest ids from the end
        backwards.
    """
    total, labels = probabilities.shape
    lengths = lengths[lengths > 0]
    if total == 0:
        return np.zeros(0, np.int64)
    batch, longest = len(lengths), int(lengths.max())
    tiny = np.finfo(np.float64).tiny
    padded = np.zeros((batch, longest, labels))
    real = np.arange(longest) < lengths[:, None]
    padded[real] = np.log(np.maximum(probabilities.astype(np.float64), tiny))
    barred = np.where(scheme.allowed, 0.0, -np.inf)
    score = padded[:, 0] + np.where(scheme.may_start, 0.0, -np.inf)
    back = np.zeros((batch, longest, labels), np.int64)
    for step in range(1, longest):
        reach = score[:, :, None] + barred
        back[:, step] = reach.argmax(1)
        ahead = np.take_along_axis(reach, back[:, step][:, None, :], 1)[:, 0] + padded[:, step]
        # Finished texts keep their score, and the identity as their way back.
        live = real[:, step][:, None]
        score = np.where(live, ahead, score)
        back[:, step] = np.where(live, back[:, step], np.arange(labels))
    label = (score + np.where(scheme.may_end, 0.0, -np.inf)).argmax(1)
    path = np.zeros((batch, longest), np.int64)
    for step in range(longest - 1, -1, -1):
        path[:, step] = label
        label = np.take_along_axis(back[:, step], label[:, None], 1)[:, 0]
    return path[real]


Aggregation: TypeAlias = Literal["none", "simple", "first", "average", "max"]


def decode_entities_batch(
    logits: Placed,
    table: TokenTable,
    texts: Sequence[str],
    scheme: TagScheme,
    *,
    aggregation: Aggregation = "first",
    ignore_labels: Collection[str] = ("O",),
    constrained: bool = False,
    word_spans: Sequence[Sequence[tuple[int, int]] | None] | None = None,
) -> list[list[Entity]]:
    """Return for each text its entities, sorted and disjoint (with ``"none"``: one per token).

    A text in several windows is decoded once: each token's logits are taken from the window where it has most
        context,
    so no entity is lost, doubled or cut at a seam.

    ``aggregation`` selects the labelled units. ``"first"``, the default, gives each word the distribution of
    its first token, which is the token that models are trained on when the others are masked in the loss;
    ``"average"`` the mean over its tokens, ``"max"`` that of its best token. With ``"simple"`` each token
    has its own label, so an entity may end inside a word. Labelled pieces are then joined by the scheme.
    ``"none"`` joins nothing.

    Args:
        logits: of all tokens, ``(tokens, labels)``.
        table: the windows.
        texts: the texts that the offsets refer to; for pre-split input the words joined (``join_words``).
        scheme: the label set read as tags.
        aggregation: see above.
        ignore_labels: full labels or entity names that are left out.
        constrained: take the most probable label sequence that the scheme allows instead of each unit's best
            label. Not for models trained on IOB1 tags, where an entity begins with ``I-``.
        word_spans: for pre-split input with offsets that count from the beginning of each word: the positions
            of the words in the joined text. Words are then never split at punctuation.

    Raises:
        PredictError: the aggregation is unknown, or logits are not finite.
    """
    if aggregation not in get_args(Aggregation):
        raise PredictError(
            f"entities: aggregation {aggregation!r} is unknown; expected one of {', '.join(get_args(Aggregation))}",
            aggregation=aggregation,
        )
    stream = merge_windows(content_of(table), table.owners)
    if len(stream) == 0:
        return [[] for _ in texts]
    presplit = word_spans is not None and any(spans is not None for spans in word_spans)
    if word_spans is not None and presplit:
        stream = _shifted(stream, word_spans)
    probabilities = _softmax(logits.values, logits.starts[stream.row] + stream.column)
    if aggregation == "none":
        index = np.arange(len(stream))
        words = Words(index, index + 1, stream.offsets[:, 0], stream.offsets[:, 1], index)
    else:
        words = words_of(stream, texts, whole=aggregation != "simple", split_punctuation=not presplit)
    scores = _unit_scores(probabilities, words, aggregation)
    text_of = stream.text[words.first]
    rows_of = np.bincount(text_of, minlength=len(texts))
    labels, score = _best(scores)
    if constrained:
        labels = best_paths(scores.T, rows_of, scheme)
        score = scores[labels, np.arange(len(labels))].astype(np.float64)
    entities = tuple(scheme.entity_names[e] for e in scheme.entities)
    both = zip(scheme.labels, entities, strict=True)
    ignored = np.array([label in ignore_labels or entity in ignore_labels for label, entity in both])
    if aggregation == "none":
        names, heads = scheme.labels, np.arange(len(labels))
    else:
        names, heads = entities, _heads(labels, text_of, scheme)
    tails = np.append(heads[1:], len(labels))
    means = np.add.reduceat(score, heads) / (tails - heads)
    # A mean of probabilities may round to just above its largest member.
    means = np.minimum(means, 1.0)
    chosen = np.flatnonzero(~ignored[labels[heads]])
    head, tail = heads[chosen], tails[chosen] - 1
    first, last = words.first[head], words.last[tail] - 1
    spans = stream.word_ids[first], stream.word_ids[last] + 1, stream.position[first], stream.position[last] + 1
    label = np.array(names, object)[labels[head]].tolist()
    return _entities(texts, text_of[head], label, means[chosen], words.start[head], words.end[tail], spans)


def _entities(
    texts: Sequence[str], owners: np.ndarray, labels: list[str], means: np.ndarray, low: np.ndarray, high: np.ndarray,
    spans: tuple[np.ndarray, ...],
) -> list[list[Entity]]:  # fmt: skip
    """Return the entities of each text, given as columns in the order of the texts; empty ones are left out."""
    starts, ends = low.tolist(), high.tolist()
    surfaces: list[Any] = [
        texts[owner][start:end] for owner, start, end in zip(owners.tolist(), starts, ends, strict=True)
    ]
    bare = list(map(str.strip, surfaces))
    # Few have white space at their ends, and a string without any is its own strip.
    for i, word in enumerate(bare):
        if word is not surfaces[i] or not word:
            starts[i], ends[i] = trimmed(texts[int(owners[i])], starts[i], ends[i])
    words, tokens = (zip(first.tolist(), last.tolist(), strict=True) for first, last in (spans[:2], spans[2:]))
    found = build_records(Entity, labels, means.tolist(), starts, ends, bare, words, tokens)
    if "" in bare:
        there = np.fromiter(map(bool, bare), bool, len(bare))
        owners, found = owners[there], [entity for entity in found if entity.word]
    stops = np.searchsorted(owners, np.arange(len(texts)), side="right").tolist()
    return [found[a:b] for a, b in zip([0, *stops], stops, strict=False)]


def _softmax(logits: torch.Tensor, tokens: np.ndarray) -> np.ndarray:
    """Return the distributions of some tokens, one column each, ``(labels, tokens)``.

    Arrays, and labels first: sums along a short row are slow, and torch would wake a thread for every core.
    """
    chosen = logits.numpy()[tokens]
    if not bool(np.isfinite(chosen).all()):
        raise not_finite("entities")
    values = np.ascontiguousarray(chosen.T)
    values -= values.max(0)
    np.exp(values, out=values)
    # Label by label: numpy adds up a single column in another order than many, and a score must not depend on that.
    total = values[0].copy()
    for row in values[1:]:
        total += row
    values /= total
    return values


def _best(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's best label, the first of equal ones, and its score, ``(units,)``."""
    best = scores[0].copy()
    labels = np.zeros(len(best), np.int64)
    for label in range(1, len(scores)):
        better = scores[label] > best
        labels[better] = label
        np.maximum(best, scores[label], out=best)
    return labels, best.astype(np.float64)


def _shifted(stream: TokenStream, word_spans: Sequence[Sequence[tuple[int, int]] | None]) -> TokenStream:
    """Return the stream with offsets that count from each word's beginning made to count from the text's."""
    sizes = np.array([len(spans or ()) for spans in word_spans], np.int64)
    starts = np.array([start for spans in word_spans for start, _ in spans or ()] or [0], np.int64)
    base = np.cumsum(sizes) - sizes
    inside = (stream.word_ids >= 0) & (stream.word_ids < sizes[stream.text])
    shift = np.where(inside, starts[np.where(inside, base[stream.text] + stream.word_ids, 0)], 0)
    return replace(stream, offsets=stream.offsets + shift[:, None])


def _unit_scores(probabilities: np.ndarray, words: Words, aggregation: Aggregation) -> np.ndarray:
    """Return the label distribution of each unit, one column each, ``(labels, units)``."""
    if len(words.first) == probabilities.shape[1]:
        return probabilities
    if aggregation == "average":
        return np.add.reduceat(probabilities, words.first, axis=1) / (words.last - words.first)
    if aggregation == "max":
        best = probabilities.max(0)
        at_best = best == np.maximum.reduceat(best, words.first)[words.of_token]
        index = np.where(at_best, np.arange(len(best)), len(best))
        return probabilities[:, np.minimum.reduceat(index, words.first)]
    return probabilities[:, words.first]


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
