"""The report of a run: one page with the curves of the run, statistics of the evaluation data, and the
lengths.

The page has no script, no external resources (its policy forbids both) and no text of the data: it may be
published with the model.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from flodl_hf.training.evaluation import EvalPredictions
from flodl_hf.training.job import Job
from flodl_hf.training.report.charts import bars, heat_map, line_chart
from flodl_hf.training.report.figures import (
    SPAN_ERRORS,
    LabelTable,
    Tuned,
    best_thresholds,
    calibration,
    f1_at,
    label_table,
    precision_recall,
    sigmoid,
    span_errors,
)
from flodl_hf.training.result import FinetuneResult

MOST_CLASSES = 20
"""Most classes that a table of confusions shows: the most frequent."""


def report_page(title: str, job: Job, result: FinetuneResult, predictions: EvalPredictions | None = None) -> str:
    """Return the report as HTML.

    Args:
        title: name of the model.
        job: the planned run.
        result: the result of the run.
        predictions: predictions for the evaluation data; None without an evaluation.
    """
    style, title = files("flodl_hf.training.report").joinpath("style.css").read_text("utf-8"), escape(title)
    cards = "".join(f"<li><b>{v:.4g}</b><span>{escape(name)}</span></li>" for name, v in result.metrics.items())
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="quiet">{escape(result.task.replace("_", " "))}; {len(result.losses):,} steps, kept is step '
        f"{result.best_step:,}</p>",
        f'<ul class="figures">{cards}</ul>' if cards else "<p>There was no evaluation data.</p>",
        _section("Training", [_losses(result), *_evaluations(result)]),
    ]
    if predictions is not None and len(predictions.predictions):
        count, where = len(predictions.predictions), f" of {predictions.name}" if predictions.name else ""
        charts = {"single_label": _single, "multi_label": _multi, "tokens": _tokens}.get(job.task.kind)
        parts.append(
            _section(
                f"Evaluation data: {count:,} example{'s' * (count != 1)}{where}",
                [] if charts is None else charts(predictions, job.task.names or job.task.labels or (), result.tuned),
            )
        )
    parts.append(_section("Data", [_lengths(job.rows.lengths, job.options.max_length or job.model.max_tokens)]))
    if job.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in job.notes) + "</ul>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: report</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, charts: Sequence[str]) -> str:
    shown = [chart for chart in charts if chart]
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(shown)}</div>' if shown else ""


def _figure(title: str, picture: str, caption: str = "", table: str = "") -> str:
    if not picture:
        return ""
    said = f"<figcaption>{caption}</figcaption>" if caption else ""
    more = f"<details><summary>as a table</summary><div class=scroll>{table}</div></details>" if table else ""
    return f"<figure><h3>{escape(title)}</h3>{picture}{said}{more}</figure>"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


# ---- the run ---------------------------------------------------------------------------------------------


def _losses(result: FinetuneResult) -> str:
    losses = [(float(step), value) for step, value in enumerate(result.losses, 1) if math.isfinite(value)]
    if not losses:
        return ""
    window = max(1, len(losses) // 40)
    smooth = [
        (losses[at][0], math.fsum(v for _, v in losses[max(0, at - window + 1) : at + 1]) / min(window, at + 1))
        for at in range(len(losses))
    ]
    lines = {"training": losses} if window == 1 else {"training": losses, f"mean of {window} steps": smooth}
    held = [(float(row["step"]), float(row["eval_loss"])) for row in result.history if "eval_loss" in row]
    if held:
        lines["held out"] = held
    return _figure("Loss", line_chart(lines, title="Loss of each step", across="step", up="loss"))


def _evaluations(result: FinetuneResult) -> list[str]:
    names = [name for name in result.metrics if not name.endswith(("eval_loss", "perplexity")) and "/" not in name]
    lines = {
        name: [(float(row["step"]), float(row[name])) for row in result.history if name in row] for name in names[:8]
    }
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return []
    chart = line_chart(lines, title="Metrics of evaluation data", across="step", up="metric", dots=True)
    rows = [[str(row["step"]), *(_share(row.get(n, math.nan)) for n in lines)] for row in result.history]
    return [_figure("Metrics of evaluation data", chart, table=_table(["step", *lines], rows))]


def _lengths(lengths: Any, most: int | None) -> str:
    if not len(lengths):
        return ""
    top = int(lengths.max())
    width = max(1, -(-top // 24))
    counts = np.bincount((lengths - 1) // width)
    values = {f"{n * width + 1}-{(n + 1) * width}" if width > 1 else str(n + 1): float(c) for n, c in enumerate(counts)}
    full = int((lengths >= most).sum()) if most else 0
    caption = (
        f"{len(lengths):,} rows, {int(lengths.sum()):,} tokens; half are of {int(np.median(lengths))} tokens or fewer."
    )
    if most:
        caption += f" The maximum is {most:,} tokens; {full:,} rows have this length ({full / len(lengths):.1%})."
    return _figure("Tokens of training rows", bars(values, title="Lengths", across="tokens", up="rows"), caption)


# ---- evaluation data, by kind ----------------------------------------------------------------------------


def _softmax(scores: Any) -> Any:
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _single(seen: EvalPredictions, labels: Sequence[str], tuned: Tuned | None) -> list[str]:
    scores, truth = _softmax(np.asarray(seen.predictions, np.float64)), np.asarray(seen.truth, np.int64)
    names = list(labels)
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
    if tuned:
        name, value = list(tuned.thresholds.items())[-1]
        threshold = f"<figcaption>Stored threshold of {escape(name)}: {value:.3f}, with the best F1 here.</figcaption>"
    matrix = heat_map(table, shown, title="Predictions for each label")
    return [
        _figure("Confusion matrix", matrix, caption, _table(["", *shown], cells)),
        f'<figure><h3>By label</h3><div class="scroll">{by_label}</div>{threshold}</figure>',
        _reliability(scores.max(1), scores.argmax(1) == truth),
        _curves({names[i]: precision_recall(scores[:, i], truth == i) for i in frequent}),
    ]


def _multi(seen: EvalPredictions, labels: Sequence[str], tuned: Tuned | None) -> list[str]:
    scores, truth = sigmoid(np.asarray(seen.predictions, np.float64)), np.asarray(seen.truth) > 0.5
    names, best = list(labels), best_thresholds(scores, truth)
    usual, tuned_f1 = (["" if math.isnan(f1) else f"{f1:.4f}" for f1 in f1_at(scores, truth, at)] for at in (0.5, best))
    counts = [f"{count:,}" for count in truth.sum(0)]
    rows = list(zip(names, counts, usual, [f"{at:.3f}" for at in best], tuned_f1, strict=True))
    by_label = _table(["label", "examples", "F1 at 0.5", "best threshold", "F1 there"], rows)
    frequent = np.argsort(-truth.sum(0), kind="stable")[:6]
    kept = " They are kept with the model." if tuned else ""
    return [
        f'<figure><h3>By label</h3><div class="scroll">{by_label}</div><figcaption>Thresholds are chosen on these '
        f"examples, so their F1 is an upper bound.{kept}</figcaption></figure>",
        _reliability(np.where(scores >= 0.5, scores, 1 - scores).ravel(), ((scores >= 0.5) == truth).ravel()),
        _curves({names[i]: precision_recall(scores[:, i], truth[:, i]) for i in frequent}),
    ]


def _tokens(seen: EvalPredictions, labels: Sequence[str], _: Tuned | None) -> list[str]:
    counts = span_errors(seen.predictions, seen.truth)
    table = _table(
        ["label", *(kind.replace("_", " ") for kind in SPAN_ERRORS)],
        [[label, *(str(row.get(kind, 0)) for kind in SPAN_ERRORS)] for label, row in counts.items()],
    )
    caption = "Each true span is counted once, with its best match; spurious spans match no true span."
    by_word: Any = label_table("tokens", seen.predictions, seen.truth, labels)
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
