"""Results as HTML for notebooks: highlighted entities, labels with bars, answers in their context.

Colours are chosen by label, the same in every cell; texts are escaped. No script, no style sheet, nothing from outside.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


SHOWN = 20
"""Most results of a list that a page shows."""
MOST_TEXT = 2000
"""Most characters of one text that a page shows."""


def page_of(result: Any) -> str:
    """Return the results of one text as a piece of HTML, in the form for its kind of records."""
    if result.empty and not result:
        return f"<div>{_shown(result.source) or '&nbsp;'} <i>(empty)</i></div>"
    draw = _PAGES.get(result.called)
    return f"<pre>{escape(repr(result))}</pre>" if draw is None else draw(result)


def list_page(results: Sequence[Any]) -> str:
    """Return the results of several texts as a piece of HTML."""
    parts = [page_of(one) if hasattr(one, "called") else escape(repr(one)) for one in results[:SHOWN]]
    if len(results) > SHOWN:
        parts.append(f"<div>... {len(results) - SHOWN:,} more</div>")
    return "".join(f'<div style="margin:0 0 .8em">{part}</div>' for part in parts)


def colour(label: str) -> str:
    """Return the background of a label, light enough for black letters on it."""
    return f"hsl({zlib.crc32(label.encode()) % 360},70%,82%)"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return rows of cells, which are HTML already."""
    top = "".join(f'<th style="text-align:left">{cell}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " <b>|</b> ".join(_shown(part) for part in value)
    text = str(value)
    return escape(text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " ...")


def _bar(score: float) -> str:
    wide = 100 * min(1.0, max(0.0, score))
    return (
        f'<span style="display:inline-block;width:8em;background:#8882"><span style="display:inline-block;height:.8em;'
        f'width:{wide:.1f}%;background:#4a90d9"></span></span> {score:.4f}'
    )


def _labels(result: Any) -> str:
    rows = [(escape(one.label), _bar(one.score)) for one in result[:SHOWN]]
    return f"<div>{_shown(result.source)}</div>{table(rows)}"


def marked(text: str, spans: Iterable[tuple[int, int, str, str]]) -> str:
    """Return a text with spans highlighted; of overlapping ones the first is shown.

    Args:
        text: the text.
        spans: ``(start, end, label, title)``.
    """
    parts: list[str] = []
    at = 0
    for start, end, label, title in sorted(spans):
        if start < at:
            continue
        parts.append(escape(text[at:start]))
        parts.append(
            f'<mark style="background:{colour(label)};color:#000;padding:.1em .25em;border-radius:.25em" '
            f'title="{escape(title)}">{escape(text[start:end])} <small><b>{escape(label)}</b></small></mark>'
        )
        at = end
    return f'<div style="line-height:1.9">{"".join(parts)}{escape(text[at:])}</div>'


def _entities(result: Any) -> str:
    return marked(str(result.source), [(e.start, e.end, e.label, f"{e.label} {e.score:.4f}") for e in result])


def _answers(result: Any) -> str:
    question, context = result.source
    best = result[0] if len(result) else None
    asked = f"<div><b>{_shown(question)}</b></div>"
    if best is None or best.no_answer:
        said = f"<i>no answer</i> {best.score:.4f}" if best is not None else "<i>no answer</i>"
        return f"{asked}<div>{said}</div><div>{_shown(context)}</div>"
    rows = [(escape(one.text) or "<i>no answer</i>", _bar(one.score)) for one in result[:SHOWN]]
    start, end = best.start, best.end
    if len(context) > MOST_TEXT:
        first = max(0, start - MOST_TEXT // 2)
        context, start, end = context[first : first + MOST_TEXT], start - first, end - first
    return f"{asked}{table(rows)}{marked(context, [(start, end, 'answer', f'{best.score:.4f}')])}"


def _fills(result: Any) -> str:
    masks = []
    for number, fills in enumerate(result, 1):
        rows = [(f"<b>{escape(fill.token)}</b>", _bar(fill.score), escape(fill.sequence)) for fill in fills[:SHOWN]]
        masks.append((f"<div>mask {number}</div>" if len(result) > 1 else "") + table(rows))
    return f"<div>{_shown(result.source)}</div>{''.join(masks)}"


def _ranking(result: Any) -> str:
    rows = [(str(n), f"{one.score:.4f}", _shown(one.text)) for n, one in enumerate(result[:SHOWN], 1)]
    return f"<div><b>{_shown(result.source)}</b></div>{table(rows, ('', 'score', 'document'))}"


_PAGES: dict[str, Callable[[Any], str]] = {
    "labels": _labels,
    "entities": _entities,
    "answers": _answers,
    "masks": _fills,
    "documents": _ranking,
}


def similarity_page(values: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Return similarities as a table with darker cells for larger values.

    Args:
        values: ``(rows, columns)``.
        rows: a name for each row; none numbers them.
        columns: a name for each column; none numbers them.
    """
    high, wide = (min(SHOWN, size) for size in values.shape)
    lines = []
    for place in range(high):
        cells = [escape(rows[place][:60]) if rows else str(place)]
        for value in values[place, :wide].tolist():
            share = min(1.0, max(0.0, value))
            cells.append(f'<span style="background:hsla(210,70%,55%,{share:.2f});padding:.2em .4em">{value:.3f}</span>')
        lines.append(cells)
    head = ["", *(escape(columns[place][:30]) if columns else str(place) for place in range(wide))]
    cut = "" if (high, wide) == values.shape else f"<div>{high} x {wide} of {values.shape[0]} x {values.shape[1]}</div>"
    return table(lines, head) + cut
