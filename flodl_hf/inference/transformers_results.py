"""The results of transformers' pipelines, key by key, for callers who depend on them.

Text and token classification, zero-shot and fill-mask follow the pipelines of transformers 5, in numpy's float32.
Question answering follows the pipeline that transformers shipped up to 4.57: each window is normalised alone, equal
answers add up, and the null answer is the smallest of the windows'. The decoders beside this file have other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.classes import activation_for, scores_of

if TYPE_CHECKING:
    from flodl_hf.tokenization.cuts import Row
    from flodl_hf.tokenization.tokenizer import Tokenizer


def _array(logits: Tensor | np.ndarray) -> np.ndarray:
    return torch.as_tensor(logits).detach().float().cpu().numpy()


def text_classification(
    logits: Tensor | np.ndarray,
    labels: Sequence[str],
    *,
    problem_type: str | None = None,
    function_to_apply: str | None = None,
    top_k: int | None = 1,
) -> list[Any]:
    """Return the pipeline's result for each row: ``{"label", "score"}`` dictionaries.

    Args:
        logits: ``(rows, labels)``.
        labels: names in the order of their ids.
        problem_type: as in the model's configuration.
        function_to_apply: as given to the pipeline.
        top_k: as given to the pipeline; ``None`` for all labels.
    """
    values = scores_of(_array(logits), activation_for(problem_type, len(labels), function_to_apply))
    order = np.argsort(-values, axis=-1, kind="stable")[:, :top_k]
    return [
        [{"label": labels[int(i)], "score": float(row[i])} for i in ranks]
        for ranks, row in zip(order, values, strict=True)
    ]


def zero_shot_classification(
    logits: Tensor | np.ndarray,
    sequences: Sequence[str],
    candidates: Sequence[str],
    labels: Sequence[str],
    *,
    multi_label: bool = False,
) -> list[dict[str, Any]]:
    """Return for each text ``{"sequence", "labels", "scores"}``, best first.

    Where no label begins with "entail" the last one is taken for entailment, as the pipeline does.

    Args:
        logits: ``(texts × candidates, NLI labels)``, all candidates of a text together.
        sequences: the texts.
        candidates: the candidate labels, the same for each text.
        labels: the model's own label names in the order of their ids.
        multi_label: as given to the pipeline.
    """
    values = _array(logits).reshape(len(sequences), len(candidates), -1)
    entailment = next((i for i, name in enumerate(labels) if name.lower().startswith("entail")), -1)
    if multi_label or len(candidates) == 1:
        contradiction = -1 if entailment == 0 else 0
        powers = np.exp(values[..., [contradiction, entailment]])
        scores = (powers / powers.sum(-1, keepdims=True))[..., 1]
    else:
        powers = np.exp(values[..., entailment])
        scores = powers / powers.sum(-1, keepdims=True)
    results = []
    for sequence, row in zip(sequences, scores, strict=True):
        order = row.argsort()[::-1]
        names = [candidates[int(i)] for i in order]
        results.append({"sequence": sequence, "labels": names, "scores": row[order].tolist()})
    return results


def fill_mask(
    logits: Tensor | np.ndarray,
    ids: Sequence[int],
    *,
    mask_id: int,
    pad_id: int | None,
    decode: Callable[[list[int], bool], str],
    top_k: int = 5,
    targets: Sequence[int] | None = None,
) -> list[Any]:
    """Return ``{"score", "token", "token_str", "sequence"}`` per proposal; a list per mask if there are
    several.

    Args:
        logits: vocabulary logits of one text's masks in order, ``(masks, vocabulary)``.
        ids: the text's token ids, specials included.
        mask_id: id of the mask token.
        pad_id: id of the padding token, which is left out of the sequence.
        decode: token ids and "leave out special tokens" to text.
        top_k: proposals per mask.
        targets: token ids to choose from. They lose their order and repetitions, as there.

    Raises:
        PredictError: the text has no mask, or not as many as there are logits.
    """
    places = [place for place, token in enumerate(ids) if token == mask_id]
    values = torch.as_tensor(logits).detach()
    if not places or len(places) != len(values):
        raise PredictError(
            f"fill-mask: the text has {len(places)} masks and there are logits for {len(values)}; "
            "expected the logits of each mask, and at least one mask",
            masks=len(places),
            logits=len(values),
        )
    probabilities = values.softmax(dim=-1)
    chosen: list[int] | None = None
    if targets is not None:
        # The pipeline converts targets to a set, and the set's order decides between equal scores.
        chosen = list(set(targets))
        probabilities = probabilities[..., torch.tensor(chosen)]
        top_k = min(top_k, len(chosen))
    scores, index = probabilities.topk(top_k)
    single = len(places) == 1
    result = []
    for place, row_scores, row_index in zip(places, scores.tolist(), index.tolist(), strict=True):
        row = []
        for score, at in zip(row_scores, row_index, strict=True):
            token = at if chosen is None else chosen[at]
            filled = [token if i == place else other for i, other in enumerate(ids)]
            sequence = decode([t for t in filled if t != pad_id], single)
            row.append({"score": score, "token": token, "token_str": decode([token], False), "sequence": sequence})
        result.append(row)
    return result[0] if single else result


_BARRED = -10000.0


def question_answering(
    logits: Sequence[torch.Tensor],
    rows: Sequence[Row],
    context: str,
    *,
    cls_id: int | None,
    top_k: int = 1,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return ``{"score", "start", "end", "answer"}``, or a list of them if there is not exactly one.

    Args:
        logits: of each window of one question and context, as starts and as ends, ``(tokens, 2)``.
        rows: the windows.
        context: the text that the offsets refer to.
        cls_id: id of the classification token, which is included in the normalisation.
        top_k: most answers.
        max_answer_len: most tokens of an answer.
        handle_impossible_answer: whether the empty answer is a candidate.
        align_to_words: widen answers to whole words.

    Raises:
        PredictError: an option is below 1.
    """
    if top_k < 1 or max_answer_len < 1:
        raise PredictError(
            f"question answering: top_k={top_k}, max_answer_len={max_answer_len}; expected both at least 1",
            top_k=top_k,
            max_answer_len=max_answer_len,
        )
    # Some candidates coincide once they are widened to words.
    candidates = top_k * 2 + 10 if align_to_words else top_k
    null_score: float = 1000000
    answers: list[dict[str, Any]] = []
    by_text: dict[str, dict[str, Any]] = {}
    for row, values in zip(rows, logits, strict=True):
        allowed = np.array([s == 1 or i == cls_id for s, i in zip(row.sequence_ids, row.ids, strict=True)])
        start, end = (_normalised(side, allowed) for side in values.unbind(-1))
        if handle_impossible_answer:
            null_score = min(null_score, (start[0] * end[0]).item())
        start[0] = end[0] = 0.0
        for first, last, score in _candidates(start, end, candidates, max_answer_len, allowed):
            low, high = _characters(row, first, last, align_to_words)
            text = context[low:high]
            known = by_text.get(text.lower())
            if known is not None:
                known["score"] += score
                continue
            by_text[text.lower()] = {"score": score, "start": low, "end": high, "answer": text}
            answers.append(by_text[text.lower()])
    if handle_impossible_answer:
        answers.append({"score": null_score, "start": 0, "end": 0, "answer": ""})
    answers = sorted(answers, key=lambda answer: answer["score"], reverse=True)[:top_k]
    return answers[0] if len(answers) == 1 else answers


def _normalised(logits: torch.Tensor, allowed: np.ndarray) -> np.ndarray:
    """Return the soft-max over one window, barred tokens pushed down first; float16 stays float16."""
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    values = np.where(allowed, logits.cpu().numpy(), _BARRED)
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def _candidates(
    start: np.ndarray, end: np.ndarray, count: int, longest: int, allowed: np.ndarray
) -> list[tuple[int, int, float]]:
    """Return the best spans as first token, last token, score.

    Equal products keep the order of numpy's partition, so the whole square is built and
    partitioned as in the pipeline. Position 0 is always a candidate, as there, with a score of 0.
    """
    square = np.tril(np.triu(np.outer(start, end)), longest - 1)
    flat = square.ravel()
    if count == 1:
        order = np.array([flat.argmax()])
    elif len(flat) < count:
        order = np.argsort(-flat)
    else:
        order = np.argpartition(-flat, count)[:count]
        order = order[np.argsort(-flat[order])]
    first, last = np.divmod(order, len(start))
    open_to = allowed.copy()
    open_to[0] = True
    kept = open_to[first] & open_to[last]
    return [(int(i), int(j), square[i, j].item()) for i, j in zip(first[kept], last[kept], strict=True)]


def _characters(row: Row, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Return the span of characters, widened to words if both ends are inside words of the context."""
    if align_to_words:
        low = _word_tokens(row, row.word_ids[first])
        high = _word_tokens(row, row.word_ids[last])
        if low and high:
            return row.offsets[low[0]][0], row.offsets[high[-1]][1]
    return row.offsets[first][0], row.offsets[last][1]


def _word_tokens(row: Row, word: int | None) -> list[int]:
    if word is None:
        return []
    pairs = zip(row.word_ids, row.sequence_ids, strict=True)
    return [place for place, (w, s) in enumerate(pairs) if w == word and s == 1]


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
