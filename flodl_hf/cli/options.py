"""Options as rows of tables, from which typer makes the options of a command; and the rows of several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flodl.errors import ConfigError
from flodl_hf.families.schema.tasks import HEADS, WORDS, task_named

Parameter = inspect.Parameter
REQUIRED = Parameter.empty


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


def option(name: str, kind: Any, text: str, *flags: str, default: Any = None, **more: Any) -> Parameter:
    """Return an option of a command.

    Args:
        name: name of the parameter.
        kind: type of its value, without None.
        text: its help.
        *flags: its names; if the first has two dashes it replaces ``--name``.
        default: the default value.
        **more: arguments of ``typer.Option``, and ``panel`` for the section of the help.
    """
    names = flags if flags and flags[0].startswith("--") else (f"--{name.replace('_', '-')}", *flags)
    found = typer.Option(*names, help=text, rich_help_panel=more.pop("panel", None), **more)
    return parameter(name, kind if default is not None else kind | None, found, default)


def parameter(name: str, kind: Any, option: Any, default: Any = None) -> Parameter:
    """Return a parameter of a command."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def argument(name: str, kind: Any, metavar: str, text: str, default: Any = REQUIRED) -> Parameter:
    """Return an argument of a command: a value without the name of an option."""
    return parameter(name, kind, typer.Argument(metavar=metavar, help=text), default)


def with_parameters(parameters: Iterable[Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command that takes these parameters."""
    listed = list(parameters)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in listed}
        return command

    return decorate


def chosen(values: dict[str, Any], rows: Iterable[Parameter]) -> dict[str, Any]:
    """Return the values of some options that differ from their defaults."""
    return {row.name: values[row.name] for row in rows if values[row.name] != row.default}


FILE, RUN = "A file of texts", "How it runs"
MODEL = argument("model", str, "MODEL", "A local folder or a Hub name: owner/name or owner/name@revision.")
HEAD = option("head", str, "The task, by any of its names; auto is the task of the file.", default="auto",
              metavar="auto|" + "|".join(head.short for head in HEADS[:5]), parser=task_word,
              autocompletion=complete_task)  # fmt: skip
OUT = option("out", Path, "The folder to write.", "--out", "-o", default=REQUIRED)
REPLACE = option("overwrite", bool, "Replace a folder that contains a model.", default=False)
REVISION = option("revision", str, "Branch, tag or commit on the Hub.")
LOCAL = option("local_files_only", bool, "Open no connection; use only local files.", default=False)
JSON = option("json_output", bool, "Print one JSON document instead of text.", "--json", default=False)
HELP_ALL = option("help_all", bool, "Show all options and exit.", default=False)
TIMING = option("timing", bool, "Print the seconds of each phase.", default=False)

_SOURCE = "CSV, TSV, JSON lines, Parquet, Arrow or text file (a row a line); - is standard input."
_ON_ERROR = "Rows that cannot be answered; null writes no answer and the reason."
_DEVICES = "How many processes, or their devices: 2, cuda:0,cuda:1, or auto for all."
_LONG_TEXTS = "How long texts are read; by default vectors truncate them, and other tasks read windows."
_WEIGHTS = "disk leaves them in their files and reads layer by layer; the default if memory is too small."
SOURCE = option("source", str, _SOURCE, "--in", "-i", default=REQUIRED, panel=FILE)
FORMAT = option("format", FORMATS, "By default by the suffix of the file.", panel=FILE)
TEXT_COLUMN = option("text_column", str, "Column of texts.", panel=FILE)
ON_ERRORS = option("on_error", ON_ERROR, _ON_ERROR, default="stop", panel=FILE)
PART_ROWS = option("part_rows", int, "Rows in a part; 2,048 on a CPU, 32,768 on CUDA.", min=1, panel=FILE)
OVERWRITE = option("overwrite", bool, "Start over: discard parts and output of an earlier run.", default=False,
                   panel=FILE)  # fmt: skip
DEVICES = option("devices", str, _DEVICES, panel=FILE)
BATCH_SIZE = option("batch_size", int, "Most texts of a batch; by default what suits the device.", min=1, panel=RUN)
LONG = option("long_texts", LONG_TEXTS, _LONG_TEXTS, panel=RUN)
PRECISION = option("precision", PRECISIONS, "Default: the dtype of the weights.", panel=RUN)
WEIGHT = option("weights", WEIGHTS, _WEIGHTS, panel=RUN)
DEVICE = option("device", str, "cpu, cuda, cuda:1, mps, or auto for the best device there is.", default="auto",
                panel=RUN)  # fmt: skip
ENCODER = (PRECISION, DEVICE, REVISION, LOCAL)
"""Options of a command that loads a model of vectors."""
