"""Options with a fixed set of words: shells complete them, help lists them, and another word is wrong usage."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from flodl.errors import ConfigError
from flodl_hf.families.schema.tasks import HEADS, WORDS, task_named


class PrecisionChoice(StrEnum):
    """The names of `flodl_hf.inference.Precision`."""

    exact = "exact"
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"


class DtypeChoice(StrEnum):
    """What weights are cast to."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float64 = "float64"


class AggregationChoice(StrEnum):
    """What carries an entity's label."""

    first = "first"
    average = "average"
    max = "max"
    simple = "simple"
    none = "none"


class StyleWord(StrEnum):
    """Interfaces of endpoints, as in `flodl_hf.parity.endpoint_checks`."""

    auto = "auto"
    tei = "tei"
    openai = "openai"
    hf = "hf"


class FormatChoice(StrEnum):
    """Formats of files of texts."""

    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"
    text = "text"
    parquet = "parquet"
    arrow = "arrow"


class EngineWord(StrEnum):
    """What `flodl-hf export` writes: weights for this family of libraries, or a model for another engine."""

    safetensors = "safetensors"
    onnx = "onnx"
    torch_export = "torch-export"


class FaultChoice(StrEnum):
    """What becomes of a row that cannot be answered."""

    stop = "stop"
    skip = "skip"
    null = "null"


class WeightsChoice(StrEnum):
    """Where weights stay while a model predicts."""

    memory = "memory"
    disk = "disk"


class SizeChoice(StrEnum):
    """Sizes of the matrix's models."""

    tiny = "tiny"
    real = "real"


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


Head = Annotated[
    str,
    typer.Option(
        "--head",
        metavar="auto|" + "|".join(head.short for head in HEADS[:5]),
        parser=task_word,
        autocompletion=complete_task,
        help="The task, by any of its names; auto is the task of the file.",
    ),
]


def choice(name: str, words: tuple[str, ...]) -> Any:
    """Return a type with these words as values."""
    return StrEnum(name, {word: word for word in words})


def words_of(value: Any) -> Any:
    """Return chosen words as plain texts, in lists too."""
    if isinstance(value, StrEnum):
        return value.value
    return [words_of(part) for part in value] if isinstance(value, list) else value
