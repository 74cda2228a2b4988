"""How a trained model does on held-out data, as one page: figures, pictures, and nothing that needs a network.

`figures` counts, `charts` draws, `page` puts together; a model is asked by `flodl_hf.training.evaluation`.
"""

from __future__ import annotations

from flodl_hf.training.report.figures import (
    Calibration,
    Curve,
    LabelTable,
    SpanErrors,
    best_thresholds,
    calibration,
    confusion,
    label_table,
    precision_recall,
    span_errors,
)
from flodl_hf.training.report.page import Run, report_page

__all__ = [
    "Calibration",
    "Curve",
    "LabelTable",
    "Run",
    "SpanErrors",
    "best_thresholds",
    "calibration",
    "confusion",
    "label_table",
    "precision_recall",
    "report_page",
    "span_errors",
]
