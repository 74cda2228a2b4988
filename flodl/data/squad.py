"""Questions out of SQuAD JSON, versions 1.1 and 2.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flodl.data.faults import Faults
from flodl.errors import printable

__all__ = ["read_squad"]


def read_squad(content: Any, path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield ``{"id", "title", "question", "context", "answers", "is_impossible"}`` for each question.

    ``answers`` is ``{"text": [...], "answer_start": [...]}`` with character offsets into the context, both
    empty for a question without an answer.

    Args:
        content: the parsed file.
        path: what to call it in errors.

    Raises:
        DataError: something is missing or of the wrong type, an answer is not at its place in the context,
            or an id comes twice; every fault is named before a row is given.
    """
    faults = Faults(path)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    articles = content.get("data") if isinstance(content, dict) else None
    if not isinstance(articles, list):
        raise faults.fail("no list 'data'", "SQuAD JSON: {'data': [...]}", "check the format of the file")
    for a, article in enumerate(articles):
        where = f"data[{a}]"
        for p, paragraph in enumerate(_list(article, "paragraphs", where, faults)):
            spot = f"{where}.paragraphs[{p}]"
            context = _text(paragraph, "context", spot, faults)
            for q, question in enumerate(_list(paragraph, "qas", spot, faults)):
                here = f"{spot}.qas[{q}]"
                text = _text(question, "question", here, faults)
                if context is None or text is None:
                    continue
                name = str(question.get("id", here))
                if name in seen:
                    faults.add(f"the id {printable(name)} again", "an id of its own", column=here)
                seen.add(name)
                rows.append(
                    {
                        "id": name,
                        "title": str(article.get("title", "")),
                        "question": text,
                        "context": context,
                        "answers": _answers(question, context, here, faults),
                        "is_impossible": bool(question.get("is_impossible", False)),
                    }
                )
    faults.check("expected the layout of SQuAD 1.1 or 2.0, with answer_start counted in characters")
    yield from rows


def _answers(question: dict[str, Any], context: str, where: str, faults: Faults) -> dict[str, list[Any]]:
    texts: list[str] = []
    starts: list[int] = []
    if question.get("is_impossible"):
        return {"text": texts, "answer_start": starts}
    for k, answer in enumerate(_list(question, "answers", where, faults, needed=False)):
        text = _text(answer, "text", f"{where}.answers[{k}]", faults)
        start = answer.get("answer_start") if isinstance(answer, dict) else None
        if text is None:
            continue
        if not isinstance(start, int) or isinstance(start, bool):
            faults.add(f"answer_start {start!r}", "an integer", column=f"{where}.answers[{k}]")
        elif start < 0 or context[start : start + len(text)] != text:
            found = printable(context[max(start, 0) : max(start, 0) + len(text)], 40)
            place = f"{where}.answers[{k}]"
            faults.add(f"{found} at character {start}", printable(text, 40), column=place)
        else:
            texts.append(text)
            starts.append(start)
    return {"text": texts, "answer_start": starts}


def _list(holder: Any, name: str, where: str, faults: Faults, *, needed: bool = True) -> list[Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(value, list):
        return value
    if needed or value is not None:
        faults.add(f"{name} is {type(value).__name__}", "a list", column=where)
    return []


def _text(holder: Any, name: str, where: str, faults: Faults) -> str | None:
    value = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(value, str):
        return value
    faults.add(f"{name} is {type(value).__name__}", "a text", column=where)
    return None
