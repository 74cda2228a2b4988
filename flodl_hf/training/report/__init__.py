"""The report of a trained model as one HTML page, without external resources.

`figures` computes, `charts` draws, `page` combines; `flodl_hf.training.evaluation` collects the predictions.
"""

from __future__ import annotations

from flodl_hf.training.report.page import Run, report_page

__all__ = ["Run", "report_page"]
