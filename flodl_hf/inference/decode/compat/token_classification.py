"""The dictionaries of transformers 5's token-classification pipeline, with all its aggregation strategies.

This file repeats what that pipeline takes for a sub-word, how it groups, and how it drops overlapping
entities of overlapping windows. ``entities.py`` does each of these by other rules. The tokenizer converts
ids to tokens and tokens to text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl_hf.errors import PredictError

if TYPE_CHECKING:
    from flodl_hf.tokenization.cuts import Row
    from flodl_hf.tokenization.tokenizer import Tokenizer

_STRATEGIES = ("none", "simple", "first", "average", "max")


@dataclass(slots=True)
class _Piece:
    """A token, or a word of several tokens, before its conversion to a dictionary."""

    word: str
    start: int
    end: int
    index: int
    continues: bool
    scores: np.ndarray
    label: int = -1
    score: Any = 0.0


def token_classification(
    logits: Sequence[torch.Tensor],
    rows: Sequence[Row],
    text: str,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    *,
    aggregation_strategy: str = "none",
    ignore_labels: Collection[str] = ("O",),
    word_spans: Sequence[tuple[int, int]] | None = None,
) -> list[dict[str, Any]]:
    """Return the pipeline's dictionaries for one text in one or several windows.

    Args:
        logits: of each of the text's windows, ``(tokens, labels)``.
        rows: the windows; offsets as the tokenizer gives them, not trimmed.
        text: the text, or pre-split words joined.
        labels: names in the order of their ids.
        tokenizer: the tokenizer functions.
        aggregation_strategy: ``none``, ``simple``, ``first``, ``average`` or ``max``.
        ignore_labels: as given to the pipeline.
        word_spans: for pre-split input with offsets that count from the beginning of each word: the positions
            of the words in ``text``.

    Raises:
        PredictError: the strategy is unknown.
    """
    if aggregation_strategy not in _STRATEGIES:
        raise PredictError(
            f"token classification: aggregation_strategy={aggregation_strategy!r}; "
            f"expected one of {', '.join(_STRATEGIES)}",
            aggregation_strategy=aggregation_strategy,
        )
    found: list[dict[str, Any]] = []
    for row, values in zip(rows, logits, strict=True):
        pieces = _pieces(_softmax(values), row, text, tokenizer, word_spans)
        if aggregation_strategy in ("none", "simple"):
            for piece in pieces:
                piece.label = int(piece.scores.argmax())
                piece.score = piece.scores[piece.label]
        else:
            pieces = [
                _word(group, aggregation_strategy, tokenizer)
                for group in _joined(pieces, lambda _, piece: piece.continues)
            ]
        if aggregation_strategy == "none":
            names = ("score", "index", "word", "start", "end")
            entities = [
                {"entity": labels[piece.label], **{name: getattr(piece, name) for name in names}} for piece in pieces
            ]
            found += [entity for entity in entities if entity["entity"] not in ignore_labels]
        else:
            groups = _joined(pieces, lambda before, piece: _continues(labels[before.label], labels[piece.label]))
            entities = [_entity(group, labels, tokenizer) for group in groups]
            found += [entity for entity in entities if entity["entity_group"] not in ignore_labels]
    return found if len(rows) == 1 else _longest_of_overlapping(found)


def _softmax(logits: torch.Tensor) -> np.ndarray:
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    values = logits.cpu().numpy()
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _pieces(
    scores: np.ndarray,
    row: Row,
    text: str,
    tokenizer: Tokenizer,
    word_spans: Sequence[tuple[int, int]] | None,
) -> list[_Piece]:
    pieces = []
    for index, (token_id, special, (start, end), word_id) in enumerate(
        zip(row.ids, row.special, row.offsets, row.word_ids, strict=True)
    ):
        if special:
            continue
        if word_spans is not None and word_id is not None:
            start, end = start + word_spans[word_id][0], end + word_spans[word_id][0]
        token, surface = tokenizer.convert_ids_to_tokens(token_id), text[start:end]
        if tokenizer.continuing_prefix is not None:
            continues = len(token) != len(surface)
        else:
            continues = start > 0 and " " not in text[start - 1 : start + 1]
        if token_id == tokenizer.unk_token_id:
            token, continues = surface, False
        pieces.append(_Piece(token, start, end, index, continues, scores[index]))
    return pieces


def _joined(pieces: list[_Piece], continues: Callable[[_Piece, _Piece], bool]) -> list[list[_Piece]]:
    """Return runs of pieces of which each continues the one before it."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        if runs and continues(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _word(pieces: list[_Piece], strategy: str, tokenizer: Tokenizer) -> _Piece:
    if strategy == "average":
        scores = np.nanmean(np.stack([piece.scores for piece in pieces]), axis=0)
    elif strategy == "max":
        scores = max(pieces, key=lambda piece: piece.scores.max()).scores
    else:
        scores = pieces[0].scores
    label = int(scores.argmax())
    text = tokenizer.convert_tokens_to_string([piece.word for piece in pieces])
    return _Piece(text, pieces[0].start, pieces[-1].end, 0, False, scores, label, scores[label])


def _continues(before: str, label: str) -> bool:
    """Return whether a label continues the entity of the label before it; labels without a tag do."""
    names = [name[2:] if name.startswith(("B-", "I-")) else name for name in (before, label)]
    return not label.startswith("B-") and names[0] == names[1]


def _entity(group: list[_Piece], labels: Sequence[str], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        # Everything after the first hyphen, with or without a tag before it: "credit-card" becomes
        # "card".
        "entity_group": labels[group[0].label].split("-", 1)[-1],
        "score": np.nanmean([piece.score for piece in group]),
        "word": tokenizer.convert_tokens_to_string([piece.word for piece in group]),
        "start": group[0].start,
        "end": group[-1].end,
    }


def _longest_of_overlapping(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entities by position; of overlapping ones the longest, then the best."""
    kept: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda entity: entity["start"]):
        if not kept or not kept[-1]["start"] <= entity["start"] < kept[-1]["end"]:
            kept.append(entity)
        elif _weight(entity) > _weight(kept[-1]):
            kept[-1] = entity
    return kept


def _weight(entity: dict[str, Any]) -> tuple[int, Any]:
    return entity["end"] - entity["start"], entity["score"]
