"""Small tables for each task, made from the demo's sentences."""

from __future__ import annotations

from typing import Any

import pytest

from flodl_hf.training import demo, finetune, training


def finetune_with(*args: Any, capture: bool = True, fused: bool = True, **options: Any) -> Any:
    """Fine-tune, on request without captured steps or fused kernels."""
    make_builder = training.make_builder
    with pytest.MonkeyPatch.context() as patch:
        if not capture:
            patch.setattr(training, "make_builder", lambda *job: make_builder(*job).set(capture=False))
        if not fused:
            patch.setattr(training, "_arrangement", lambda job: None)
        return finetune(*args, **options)


def sentences() -> list[str]:
    return [text for text, _ in demo.sentences()]


def labelled(count: int = 96) -> list[dict[str, Any]]:
    return [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:count]]


def tagged(count: int = 64) -> list[dict[str, Any]]:
    words = [text.rstrip(".").split() for text in sentences()[:count]]
    return [{"words": line, "tags": ["B-LONG" if len(w) > 5 else "O" for w in line]} for line in words]


def spanned(count: int = 64) -> list[dict[str, Any]]:
    rows = []
    for text in sentences()[:count]:
        spans, at = [], 0
        for word in text.rstrip(".").split():
            at = text.index(word, at)
            if len(word) > 5:
                spans.append({"start": at, "end": at + len(word), "label": "LONG"})
            at += len(word)
        rows.append({"text": text, "spans": spans})
    return rows


def questions(count: int = 48) -> list[dict[str, Any]]:
    texts, rows = sentences(), []
    for i, text in enumerate(texts[:count]):
        answer = max(text.rstrip(".").split(), key=len)
        rows.append(
            {
                "id": str(i),
                "question": "Which word is longest?",
                "context": text + " " + texts[(7 * i) % len(texts)],
                "answers": {"text": [answer], "answer_start": [text.index(answer)]},
            }
        )
    return rows


def lines(count: int = 64) -> list[dict[str, Any]]:
    return [{"text": text} for text in sentences()[:count]]


TABLES = {
    "sequence_classification": labelled,
    "token_classification": tagged,
    "question_answering": questions,
    "masked_lm": lines,
}
