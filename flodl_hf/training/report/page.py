"""The report of a run: one page with the curves of the run, statistics of the evaluation data, and the
lengths.

The page has no script, no external resources (its policy forbids both) and no text of the data: it may be
published with the model.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from flodl_hf.training.report.charts import bars, heat_map, line_chart
from flodl_hf.training.report.figures import (
    SPAN_ERRORS,
    LabelTable,
    best_thresholds,
    calibration,
    label_table,
    precision_recall,
    span_errors,
)

MOST_CLASSES = 20
"""Most classes that a table of confusions shows: the most frequent."""


@dataclass(frozen=True)
class Run:
    """Contents of a report.

    Attributes:
        title: name of the model.
        task: the head's name.
        kind: kind of the loss: "single_label", "multi_label", "regression", "tokens", "spans" or "words".
        labels: names of classes, by id.
        metrics: figures of the model that was kept.
        best_step: its step.
        losses: mean training loss of every step.
        history: evaluations: ``step`` and figures.
        lengths: tokens of each training row.
        most: most tokens of a row; None for no bound.
        notes: notes for the user.
        predictions: predictions for evaluation examples; None without an evaluation.
        truth: of the same.
        held_out: name of the set they are of.
        thresholds: by label, where some were chosen on these examples and are kept with the model.
    """

    title: str
    task: str
    kind: str
    labels: Sequence[str]
    metrics: Mapping[str, float]
    best_step: int
    losses: Sequence[float]
    history: Sequence[Mapping[str, Any]]
    lengths: Any
    most: int | None
    notes: Sequence[str] = ()
    predictions: Any = None
    truth: Any = None
    held_out: str = ""
    thresholds: Mapping[str, float] | None = None


def report_page(run: Run) -> str:
    """Return the report as HTML."""
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    parts = [
        f"<h1>{escape(run.title)}</h1>",
        f'<p class="quiet">{escape(run.task.replace("_", " "))}; {len(run.losses):,} steps, kept is step '
        f"{run.best_step:,}</p>",
        _figures(run.metrics),
        _section("Training", [_losses(run), *_evaluations(run)]),
    ]
    if run.predictions is not None and len(run.predictions):
        where = f" of {run.held_out}" if run.held_out else ""
        title = f"Evaluation data: {len(run.predictions):,} example{'s' * (len(run.predictions) != 1)}{where}"
        parts.append(_section(title, _KINDS.get(run.kind, lambda run: [])(run)))
    parts.append(_section("Data", [_lengths(run)]))
    if run.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in run.notes) + "</ul>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.title)}: report</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


@cache
def _style() -> str:
    return files("flodl_hf.training.report").joinpath("style.css").read_text("utf-8")


def _section(title: str, charts: Sequence[str]) -> str:
    shown = [chart for chart in charts if chart]
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(shown)}</div>' if shown else ""


def _figure(title: str, picture: str, caption: str = "", table: str = "") -> str:
    if not picture:
        return ""
    said = f"<figcaption>{caption}</figcaption>" if caption else ""
    more = f"<details><summary>as a table</summary><div class=scroll>{table}</div></details>" if table else ""
    return f"<figure><h3>{escape(title)}</h3>{picture}{said}{more}</figure>"


def _figures(metrics: Mapping[str, float]) -> str:
    cards = "".join(f"<li><b>{value:.4g}</b><span>{escape(name)}</span></li>" for name, value in metrics.items())
    return f'<ul class="figures">{cards}</ul>' if cards else "<p>There was no evaluation data.</p>"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


# ---- the run ---------------------------------------------------------------------------------------------


def _losses(run: Run) -> str:
    losses = [(float(step), value) for step, value in enumerate(run.losses, 1) if math.isfinite(value)]
    if not losses:
        return ""
    window = max(1, len(losses) // 40)
    smooth = [
        (losses[at][0], math.fsum(v for _, v in losses[max(0, at - window + 1) : at + 1]) / min(window, at + 1))
        for at in range(len(losses))
    ]
    lines = {"training": losses} if window == 1 else {"training": losses, f"mean of {window} steps": smooth}
    held = [(float(row["step"]), float(row["eval_loss"])) for row in run.history if "eval_loss" in row]
    if held:
        lines["held out"] = held
    return _figure("Loss", line_chart(lines, title="Loss of each step", across="step", up="loss"))


def _evaluations(run: Run) -> list[str]:
    names = [name for name in run.metrics if not name.endswith(("eval_loss", "perplexity")) and "/" not in name]
    lines = {name: [(float(row["step"]), float(row[name])) for row in run.history if name in row] for name in names[:8]}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return []
    chart = line_chart(lines, title="Metrics of evaluation data", across="step", up="metric", dots=True)
    rows = [[str(row["step"]), *(_share(row.get(n, math.nan)) for n in lines)] for row in run.history]
    return [_figure("Metrics of evaluation data", chart, table=_table(["step", *lines], rows))]


def _lengths(run: Run) -> str:
    lengths = np.asarray(run.lengths)
    if not len(lengths):
        return ""
    top = int(lengths.max())
    width = max(1, -(-top // 24))
    counts = np.bincount((lengths - 1) // width)
    values = {f"{n * width + 1}-{(n + 1) * width}" if width > 1 else str(n + 1): float(c) for n, c in enumerate(counts)}
    full = int((lengths >= run.most).sum()) if run.most else 0
    caption = (
        f"{len(lengths):,} rows, {int(lengths.sum()):,} tokens; half are of {int(np.median(lengths))} tokens or fewer."
    )
    if run.most:
        caption += f" The maximum is {run.most:,} tokens; {full:,} rows have this length ({full / len(lengths):.1%})."
    return _figure("Tokens of training rows", bars(values, title="Lengths", across="tokens", up="rows"), caption)


# ---- evaluation data, by kind ----------------------------------------------------------------------------


def _softmax(scores: Any) -> Any:
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _single(run: Run) -> list[str]:
    scores, truth = _softmax(np.asarray(run.predictions, np.float64)), np.asarray(run.truth, np.int64)
    names = list(run.labels)
    found: Any = label_table("single_label", scores, truth, names)
    table, shown, kept = _most_frequent(found)
    predicted, count = np.asarray(found.confusion).sum(0), len(names)
    caption = "" if len(kept) == count else f"The {len(kept)} most frequent of {count} labels."
    rows = []
    for i in kept:
        row = found.rows[names[i]]
        counts = {"precision": predicted[i], "recall": row["support"], "f1": predicted[i] + row["support"]}
        shares = [row[name] if count else math.nan for name, count in counts.items()]
        rows.append([names[i], *map(_share, shares), f"{int(row['support']):,}"])
    by_label = _table(["label", "precision", "recall", "F1", "examples"], rows)
    cells = [[name, *map(str, row)] for name, row in zip(shown, table, strict=True)]
    frequent = [1] if count == 2 else np.argsort(-np.asarray(found.confusion).sum(1), kind="stable")[:6]
    threshold = ""
    if run.thresholds:
        name, value = list(run.thresholds.items())[-1]
        threshold = f"<figcaption>Stored threshold of {escape(name)}: {value:.3f}, with the best F1 here.</figcaption>"
    matrix = heat_map(table, shown, title="Predictions for each label")
    return [
        _figure("Confusion matrix", matrix, caption, _table(["", *shown], cells)),
        f'<figure><h3>By label</h3><div class="scroll">{by_label}</div>{threshold}</figure>',
        _reliability(scores.max(1), scores.argmax(1) == truth),
        _curves({names[i]: precision_recall(scores[:, i], truth == i) for i in frequent}),
    ]


def _multi(run: Run) -> list[str]:
    scores = 1 / (1 + np.exp(-np.asarray(run.predictions, np.float64)))
    truth = np.asarray(run.truth) > 0.5
    names, best = list(run.labels), best_thresholds(scores, truth)
    rows = []
    for i, name in enumerate(names):
        cells = [name, f"{int(truth[:, i].sum()):,}"]
        for threshold in (0.5, best[i]):
            said = scores[:, i] >= threshold
            both = 2 * int((said & truth[:, i]).sum())
            total = int(said.sum() + truth[:, i].sum())
            cells.append(f"{both / total:.4f}" if total else "")
        rows.append([*cells[:3], f"{best[i]:.3f}", cells[3]])
    by_label = _table(["label", "examples", "F1 at 0.5", "best threshold", "F1 there"], rows)
    frequent = np.argsort(-truth.sum(0), kind="stable")[:6]
    kept = " They are kept with the model." if run.thresholds else ""
    return [
        f'<figure><h3>By label</h3><div class="scroll">{by_label}</div><figcaption>Thresholds are chosen on these '
        f"examples, so their F1 is an upper bound.{kept}</figcaption></figure>",
        _reliability(np.where(scores >= 0.5, scores, 1 - scores).ravel(), ((scores >= 0.5) == truth).ravel()),
        _curves({names[i]: precision_recall(scores[:, i], truth[:, i]) for i in frequent}),
    ]


def _tokens(run: Run) -> list[str]:
    counts = span_errors(run.predictions, run.truth)
    table = _table(
        ["label", *(kind.replace("_", " ") for kind in SPAN_ERRORS)],
        [[label, *(str(row.get(kind, 0)) for kind in SPAN_ERRORS)] for label, row in counts.items()],
    )
    caption = "Each true span is counted once, with its best match; spurious spans match no true span."
    by_word: Any = label_table("tokens", run.predictions, run.truth, run.labels)
    words, names, _ = _most_frequent(by_word)
    return [
        f"<figure><h3>What became of spans</h3><div class=scroll>{table}</div>"
        f"<figcaption>{caption}</figcaption></figure>",
        _figure("Words, by label", heat_map(words, names, title="Words by label")),
    ]


def _most_frequent(table: LabelTable) -> tuple[list[list[int]], list[str], Any]:
    """Return the confusion matrix of the most frequent labels, their names, and their numbers."""
    counted = np.asarray(table.confusion)
    kept = np.sort(np.argsort(-counted.sum(1), kind="stable")[:MOST_CLASSES])
    return counted[np.ix_(kept, kept)].tolist(), [table.labels[i] for i in kept], kept


def _reliability(confidence: Any, hits: Any) -> str:
    found = calibration(confidence, hits)
    points = [(float(a), float(b)) for a, b in zip(found.sure, found.right, strict=True) if not math.isnan(a)]
    chart = line_chart(
        {"this model": points}, title="How often it is right, by how sure it is", across="how sure", up="share right",
        x=(0, 1), y=(0, 1), diagonal=True, dots=True,
    )  # fmt: skip
    caption = (
        f"Expected calibration error {found.error:.4f} over {len(found.counts)} bins; on the dashed line a model is as "
        "often right as it is sure."
    )
    rows = [
        [f"{a:.3f}", f"{b:.3f}", f"{n:,}"] for a, b, n in zip(found.sure, found.right, found.counts, strict=True) if n
    ]
    return _figure("Reliability", chart, caption, _table(["how sure", "share right", "examples"], rows))


def _curves(curves: Mapping[str, Any]) -> str:
    lines = {
        f"{name} ({curve.average:.3f})": list(zip(curve.recall.tolist(), curve.precision.tolist(), strict=True))
        for name, curve in curves.items()
        if not math.isnan(curve.average)
    }
    if not lines:
        return ""
    chart = line_chart(lines, title="Precision over recall", across="recall", up="precision", x=(0, 1), y=(0, 1))
    return _figure("Precision and recall", chart, f"Average precision: {escape(', '.join(lines))}.")


_KINDS: dict[str, Callable[[Run], list[str]]] = {
    "single_label": _single,
    "multi_label": _multi,
    "tokens": _tokens,
}
