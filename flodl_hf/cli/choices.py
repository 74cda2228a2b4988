"""Options with a fixed set of words: shells complete them, help lists them, and another word is wrong usage."""

from __future__ import annotations

from typing import Literal

import typer

from flodl.errors import ConfigError
from flodl_hf.families.schema.tasks import WORDS, task_named

PRECISIONS = Literal["exact", "fp32", "tf32", "bf16", "fp16", "int8"]
"""The names of `flodl_hf.inference.Precision`."""
DTYPES = Literal["float32", "float16", "bfloat16", "float64"]
AGGREGATIONS = Literal["first", "average", "max", "simple", "none"]
LONG_TEXTS = Literal["windows", "truncate", "error"]
STYLES = Literal["auto", "tei", "openai", "hf"]
"""Interfaces of endpoints, as in `flodl_hf.parity.endpoint_checks`."""
FORMATS = Literal["csv", "tsv", "jsonl", "text", "parquet", "arrow"]
"""Formats of files of texts."""
ENGINES = Literal["safetensors", "onnx", "torch-export"]
"""What `flodl-hf export` writes: weights for this family of libraries, or a model for another engine."""
ON_ERROR = Literal["stop", "skip", "null"]
"""What becomes of a row that cannot be answered."""
WEIGHTS = Literal["memory", "disk"]
"""Where weights stay while a model predicts."""
STORES = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
"""How the numbers of vectors are kept."""
SAMPLINGS = Literal["top", "random"]
"""Which of the texts found become negatives."""


def task_word(text: str) -> str:
    """Check a name of a task or "auto", and return it."""
    if text != "auto":
        try:
            task_named(text, "task")
        except ConfigError as fault:
            raise typer.BadParameter(str(fault)) from None
    return text


def complete_task(incomplete: str) -> list[str]:
    """Return the names of tasks that begin with a text."""
    return [word for word in WORDS if word.startswith(incomplete)]
