"""Options that several commands take: of a file of texts, and of how a model runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flodl_hf.cli.choices import FaultChoice, FormatChoice, PrecisionChoice, WeightsChoice


def file_option(*names: str, says: str, **more: Any) -> Any:
    """Return an option in the help section for files of texts."""
    return typer.Option(*names, help=says, rich_help_panel="A file of texts", **more)


def running_option(*names: str, says: str, **more: Any) -> Any:
    """Return an option in the help section for running a model."""
    return typer.Option(*names, help=says, rich_help_panel="How it runs", **more)


TextColumn = Annotated[str | None, file_option("--text-column", says="Column of texts.")]
Format = Annotated[FormatChoice | None, file_option("--format", says="By default by the suffix of the file.")]
OnError = Annotated[
    FaultChoice, file_option("--on-error", says="Rows that cannot be answered; null writes no answer and the reason.")
]
PartRows = Annotated[
    int | None, file_option("--part-rows", says="Rows in a part; 2,048 on a CPU, 32,768 on CUDA.", min=1)
]
Restart = Annotated[bool, file_option("--restart", says="Restart: discard parts and output of an earlier run.")]
Devices = Annotated[
    str | None,
    file_option("--devices", says="How many processes, or their devices: 2, cuda:0,cuda:1, or auto for all."),
]
Windows = Annotated[
    bool,
    running_option(
        "--windows", says="Vectors: read all of a long text and average its windows; by default it is truncated."
    ),
]
Precision = Annotated[PrecisionChoice | None, running_option("--precision", says="Default: the dtype of the weights.")]
Weights = Annotated[
    WeightsChoice | None,
    running_option(
        "--weights",
        says="disk leaves them in their files and reads layer by layer; the default if memory is too small.",
    ),
]
Device = Annotated[
    str, running_option("--device", says="cpu, cuda, cuda:1, mps, or auto for the best device there is.")
]
