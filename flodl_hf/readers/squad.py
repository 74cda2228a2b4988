"""Questions of SQuAD JSON, versions 1.1 and 2.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flodl.errors import printable
from flodl_hf.readers.faults import Faults


def read_squad(content: Any, path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield ``{"id", "title", "question", "context", "answers", "is_impossible"}`` for each question.

    ``answers`` is ``{"text": [...], "answer_start": [...]}`` with character offsets into the context. Both lists are
    empty for a question without an answer.

    Args:
        content: the parsed file.
        path: name of the file in errors.

    Raises:
        DataError: a value is missing or of the wrong type, an answer is not at its place in the context, or an id is
            repeated. All faults are reported before a row is returned.
    """
    faults = Faults(path)
    rows: list[dict[str, Any]] = []
    ids: set[str] = set()
    for article, where in _items(content, "data", "", faults):
        for paragraph, spot in _items(article, "paragraphs", where, faults):
            context = _text(paragraph, "context", spot, faults)
            for question, here in _items(paragraph, "qas", spot, faults):
                text = _text(question, "question", here, faults)
                if context is None or text is None:
                    continue
                name = str(question.get("id", here))
                if name in ids:
                    faults.add(f"found the id {printable(name)} again, expected a unique id", place=here)
                ids.add(name)
                is_impossible = bool(question.get("is_impossible", False))
                rows.append(
                    {
                        "id": name,
                        "title": str(article.get("title", "")),
                        "question": text,
                        "context": context,
                        "answers": _answers({} if is_impossible else question, context, here, faults),
                        "is_impossible": is_impossible,
                    }
                )
    faults.check("Use the layout of SQuAD 1.1 or 2.0, with answer_start counted in characters.")
    yield from rows


def _answers(question: dict[str, Any], context: str, where: str, faults: Faults) -> dict[str, list[Any]]:
    texts: list[str] = []
    starts: list[int] = []
    for answer, here in _items(question, "answers", where, faults, required=False):
        text = _text(answer, "text", here, faults)
        start = answer.get("answer_start") if isinstance(answer, dict) else None
        if text is None:
            continue
        if not isinstance(start, int) or isinstance(start, bool):
            faults.add(f"found answer_start {start!r}, expected an integer", place=here)
        elif start < 0 or context[start : start + len(text)] != text:
            found = printable(context[max(start, 0) : max(start, 0) + len(text)], 40)
            faults.add(f"found {found} at character {start}, expected {printable(text, 40)}", place=here)
        else:
            texts.append(text)
            starts.append(start)
    return {"text": texts, "answer_start": starts}


def _items(record: Any, name: str, where: str, faults: Faults, *, required: bool = True) -> Iterator[tuple[Any, str]]:
    """Yield the items of the list ``record[name]``, each with its place."""
    value = record.get(name) if isinstance(record, dict) else None
    path = f"{where}.{name}" if where else name
    if isinstance(value, list):
        yield from ((item, f"{path}[{k}]") for k, item in enumerate(value))
    elif required or value is not None:
        faults.add(f"found {type(value).__name__}, expected a list", place=path)


def _text(record: Any, name: str, where: str, faults: Faults) -> str | None:
    value = record.get(name) if isinstance(record, dict) else None
    if isinstance(value, str):
        return value
    faults.add(f"found {type(value).__name__}, expected a text", place=f"{where}.{name}")
    return None
