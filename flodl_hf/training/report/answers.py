"""HTML pages of predictions, and of vectors as points in two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from flodl.files import write_atomically

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 880px; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 system-ui, sans-serif; }}
section {{ padding: .8rem 0; border-bottom: 1px solid #8884; overflow-x: auto; }}
td, th {{ padding: .1rem .8rem .1rem 0; font-variant-numeric: tabular-nums; }}
h1 {{ font-size: 1.4rem; overflow-wrap: anywhere; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def map_page(vectors: Any, texts: Sequence[str]) -> str:
    """Return vectors as points in two dimensions, each with its text as a tooltip.

    The plane contains the first two principal components of the vectors,
    so points that are close may be distant in other dimensions; the caption states the explained share of the variance.

    Args:
        vectors: ``(n, size)``.
        texts: the text of each vector.
    """
    points = np.asarray(vectors, np.float64)
    centred = points - points.mean(0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    plane = centred @ directions[:2].T
    if plane.shape[1] < 2:
        plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))
    kept = float((sizes[:2] ** 2).sum() / max(float((sizes**2).sum()), 1e-30))
    reach = float(np.abs(plane).max()) or 1.0
    dots = "".join(
        f'<circle cx="{320 + 290 * x / reach:.1f}" cy="{220 - 200 * y / reach:.1f}" r="4" fill="#4a90d9" '
        f'fill-opacity=".75"><title>{escape(text[:200])}</title></circle>'
        for (x, y), text in zip(plane.tolist(), texts, strict=True)
    )
    return (
        f'<svg viewBox="0 0 640 440" width="640" role="img" aria-label="{len(texts)} vectors as points">'
        f'<rect width="640" height="440" fill="#8881"/>{dots}</svg>'
        f"<div>{len(texts):,} vectors; the plane explains {kept:.0%} of the variance</div>"
    )


def write_page(path: Path, title: str, answers: Sequence[tuple[str, Any]]) -> None:
    """Write predictions as an HTML page without scripts or external resources.

    Args:
        path: the file; replaced atomically.
        title: of the page, such as the model's name.
        answers: texts, each with a result, or with the numbers of its vector.
    """
    if answers and all(isinstance(found, list) and found and isinstance(found[0], float) for _, found in answers):
        body = map_page([found for _, found in answers], [text for text, _ in answers])
    else:
        drawn = [getattr(found, "_repr_html_", None) for _, found in answers]
        parts = [
            draw() if draw is not None else f"<pre>{escape(repr(found))}</pre>"
            for draw, (_, found) in zip(drawn, answers, strict=True)
        ]
        body = "\n".join(f"<section>{part}</section>" for part in parts)
    write_atomically(path, [_PAGE.format(title=escape(title), body=body).encode()])
