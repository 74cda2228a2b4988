"""Text classification from a data frame: train, evaluate, confusion matrix, predict.

    python examples/classification.py [MODEL]

MODEL is a folder or a Hub name; by default a small model that this program writes. Without pandas, the table is a
dictionary of columns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flodl_hf import evaluate, finetune
from flodl_hf.training.demo import sentences, write_demo


def table() -> Any:
    """Return texts and labels as a data frame, or as a dictionary of columns without pandas."""
    examples = sentences()[:200]
    columns = {"text": [text for text, _ in examples], "label": [("negative", "positive")[at] for _, at in examples]}
    try:
        from pandas import DataFrame
    except ImportError:
        return columns
    return DataFrame(columns)


def main(model: str | None = None) -> None:
    """Train and print the metrics and the confusion matrix."""
    if model is None:
        model = str(write_demo("demo-model")) if not Path("demo-model").exists() else "demo-model"
    rows = table()
    options = {"epochs": 2, "batch_size": 16, "out": "classifier", "overwrite": True, "progress": False}
    result = finetune(model, train=rows, eval=0.2, **options)
    print({name: round(value, 3) for name, value in result.metrics.items()})
    found = evaluate("classifier", rows)
    print(f"accuracy on all rows: {found.metrics['accuracy']:.3f}")
    for label, counts in zip(found.labels, found.confusion, strict=True):
        print(f"{label:10} predicted as {dict(zip(found.labels, counts, strict=True))}")
    print(result.model.predict("The staff were friendly and the room was clean."))


if __name__ == "__main__":
    main(*sys.argv[1:])
