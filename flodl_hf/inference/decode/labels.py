"""Label names, and the tagging scheme that they spell.

This file decides how ``id2label`` becomes an ordered tuple, which scheme a label set uses (``B-PER`` is a
tag, ``credit-card`` is a name), and which label may follow which. It leaves grouping to ``entities.py`` and
the search for the best allowed sequence to ``entities.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import numpy as np

from flodl.errors import ConfigError

SchemeName: TypeAlias = Literal["BIO", "BIOES", "BILOU", "BMES", "IO", "plain", "tags"]

OUTSIDE = "O"

# Codes of a label's position in an entity, the same for all schemes.
OUT, BEGIN, INSIDE, END, SINGLE = range(5)

_CODES = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}


@dataclass(frozen=True, slots=True, eq=False)
class TagScheme:
    """A label set read as tags: for each id its part of an entity and the entity's name.

    Schemes are detected from the labels alone: ``IO`` (``I-PER``), ``BIO`` (``B-``, ``I-``), ``BIOES``
        (also
    ``E-``, ``S-``), ``BILOU`` (``L-``, ``U-``), ``BMES`` (``M-``), ``plain`` (names such as ``PER`` or
    ``credit-card`` with an outside label) and ``tags`` (names without an outside label, as in part-of-speech
    tagging, where every word stands for itself).

    Attributes:
        name: the scheme.
        labels: label names by id.
        parts: code per id, ``(labels,)``: 0 outside, 1 begin, 2 inside, 3 end, 4 single.
        entities: index into ``entity_names`` per id, ``(labels,)``.
        entity_names: names without their prefix, the outside label included.
        allowed: whether label ``j`` may follow label ``i``, ``(labels, labels)``.
        may_start: whether a text may begin with the label, ``(labels,)``.
        may_end: whether a text may end with the label, ``(labels,)``.
    """

    name: SchemeName
    labels: tuple[str, ...]
    parts: np.ndarray
    entities: np.ndarray
    entity_names: tuple[str, ...]
    allowed: np.ndarray
    may_start: np.ndarray
    may_end: np.ndarray

    @classmethod
    def detect(cls, labels: Sequence[str], name: SchemeName | None = None) -> TagScheme:
        """Return the scheme that ``labels`` (names by id) spell; the same object for the same labels.

        Args:
            labels: label names in the order of their ids.
            name: the scheme, where the labels alone would mislead; ``"plain"`` reads every label as a whole
                name.

        Raises:
            ConfigError: ``name`` is no scheme.
        """
        if name is not None and name not in get_args(SchemeName):
            raise ConfigError(
                f"tag scheme: found {name!r}, expected one of {', '.join(get_args(SchemeName))}",
                problems=[name],
            )
        return _detected(tuple(labels), name)


@lru_cache(maxsize=64)
def _detected(labels: tuple[str, ...], name: SchemeName | None) -> TagScheme:
    split = [(None, label) if name in ("plain", "tags") else _split(label) for label in labels]
    split = _keep_real_prefixes(labels, split)
    found = name if name is not None else _scheme_of(labels, [letter for letter, _ in split if letter])
    parts = np.array(
        [
            OUT if label == OUTSIDE else SINGLE if found == "tags" else _CODES[letter] if letter else INSIDE
            for label, (letter, _) in zip(labels, split, strict=True)
        ],
        np.int8,
    )
    index = {entity: i for i, entity in enumerate(dict.fromkeys(entity for _, entity in split))}
    names = tuple(index)
    entities = np.array([index[entity] for _, entity in split], np.int64)
    allowed, may_start, may_end = _transitions(parts, entities)
    return TagScheme(found, tuple(labels), parts, entities, names, allowed, may_start, may_end)


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


def _scheme_of(labels: Sequence[str], letters: list[str]) -> SchemeName:
    used = set(letters)
    if not used:
        return "plain" if OUTSIDE in labels else "tags"
    if used & {"L", "U"}:
        return "BILOU"
    if "M" in used:
        return "BMES"
    if used & {"E", "S"}:
        return "BIOES"
    return "BIO" if "B" in used else "IO"


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
