"""Draw the picture of the README: our speed beside transformers', from the figures of `docs/performance.md`.

    python -m docs.draw_speed        # writes docs/pictures/speed.svg

The figures stand here once more, with the heading of the table that they are from; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["BARS", "Bar", "draw"]

PICTURE = Path(__file__).with_name("pictures") / "speed.svg"
WIDTH, LEFT, RIGHT, ROW, TOP = 860, 330, 120, 44, 54
OURS, THEIRS = "#0f766e", "#9ca3af"


@dataclass(frozen=True)
class Bar:
    """One comparison.

    Attributes:
        what: what is done, on what.
        ours: our figure.
        theirs: transformers' (or its Trainer's, or sentence-transformers').
        unit: of both.
        source: heading of the table in `docs/performance.md`.
    """

    what: str
    ours: float
    theirs: float
    unit: str
    source: str

    @property
    def ratio(self) -> float:
        """How many times as fast we are."""
        return self.ours / self.theirs


BARS = (
    Bar("label texts, BERT-base, one H200", 2579, 122.8, "ktok/s", "Raw text to answers on one GPU"),
    Bar("find entities, BERT-base, one H200", 1528, 41.6, "ktok/s", "Raw text to answers on one GPU"),
    Bar("fine-tune BERT-base, batch 32, one H200", 227.1, 37.0, "steps/s", "Fine-tuning BERT-base on one GPU"),
    Bar("label texts, BERT-base, two cores, fp32", 3.82, 1.0, "times", "Prediction on a processor"),
    Bar("label texts, BERT-base, two cores, int8", 6.52, 1.0, "times", "Prediction on a processor"),
)


def draw(bars: tuple[Bar, ...] = BARS) -> str:
    """Return an SVG: for each row a bar of ours, with transformers' as its first part."""
    height = TOP + ROW * len(bars) + 34
    longest = max(bar.ratio for bar in bars)
    scale = (WIDTH - LEFT - RIGHT) / longest
    title = "Times as fast as transformers"
    told = "; ".join(f"{bar.what}: {bar.ratio:.1f} times" for bar in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="15">',
        f"<title>{escape(title)}</title><desc>{escape(told)}</desc>",
        # A ground of its own: pages are light or dark.
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
        f'<text x="24" y="32" font-size="18" font-weight="600" fill="#111827">{escape(title)}</text>',
    ]
    for place, bar in enumerate(bars):
        y = TOP + ROW * place
        length = bar.ratio * scale
        parts += [
            f'<text x="{LEFT - 14}" y="{y + 21}" text-anchor="end" fill="#374151">{escape(bar.what)}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{length:.1f}" height="25" rx="4" fill="{OURS}"/>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{scale:.1f}" height="25" rx="4" fill="{THEIRS}"/>',
            f'<text x="{LEFT + length + 10:.1f}" y="{y + 22}" font-weight="600" fill="#111827">{bar.ratio:.1f}x</text>',
        ]
    legend = height - 16
    parts += [
        f'<rect x="{LEFT}" y="{legend - 11}" width="13" height="13" rx="3" fill="{THEIRS}"/>',
        f'<text x="{LEFT + 20}" y="{legend}" font-size="13" fill="#374151">transformers (pipeline, Trainer)</text>',
        f'<rect x="{LEFT + 250}" y="{legend - 11}" width="13" height="13" rx="3" fill="{OURS}"/>',
        f'<text x="{LEFT + 270}" y="{legend}" font-size="13" fill="#374151">flodl-hf</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)
