"""Assemble the commands, and handle shared options, errors and output streams."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer

from flodl.verbosity import Verbosity, set_verbosity
from flodl_hf.cli.command import StrictCommand

if TYPE_CHECKING:
    app: typer.Typer


# In the order of the help. Each command is in the file of its name; groups of commands are last.
NAMES = {
    "demo": "Train, predict, export and verify a small model offline.",
    "new": "Write a project for fine-tuning.",
    "predict": "Predict from texts or from a file.",
    "encode": "Write the embeddings of the texts of a file.",
    "search": "Find the texts of a file that are most similar to a query.",
    "mine": "Find hard negatives for pairs of texts.",
    "serve": "Serve models over HTTP.",
    "finetune": "Train a model on your data.",
    "evaluate": "Evaluate a model on labelled data.",
    "inspect": "Show the contents of a checkpoint.",
    "export": "Write a model as a folder, ONNX or OpenVINO.",
    "verify": "Compare files with their checksums.",
    "verify-endpoint": "Compare a server with the model that it serves.",
    "verify-export": "Compare an export with its source.",
    "verify-matrix": "Compare every family and task with transformers.",
    "convert": "Write a .bin checkpoint as safetensors.",
    "merge": "Write a model with its adapter merged.",
    "docs": "Print the reference entry of a name.",
    "doctor": "Examine the machine, devices, kernels and caches.",
    "run": "Run a command of the project's flodl-hf.yaml.",
    "schema": "Print the JSON schema of options.",
    "config": "Show the values of a recipe with their origin.",
    "runs": "List and compare training runs.",
}


def __getattr__(name: str) -> Any:
    if name == "app":
        return globals().setdefault("app", app_of(*NAMES))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def app_for(words: list[str]) -> typer.Typer:
    """Return what runs a command line: the one command that it names, or all where it may be about any of them.

    Args:
        words: what follows ``flodl-hf``.
    """
    named = next((word for word in words if not re.fullmatch(r"-[vq]+|--verbose|--quiet", word)), None)
    if named in NAMES and not os.environ.get("_FLODL_HF_COMPLETE"):
        return app_of(named)
    return app_of(*NAMES)


def app_of(*names: str) -> typer.Typer:
    """Return the command line with these commands; only their files are imported."""
    made = typer.Typer(
        name="flodl-hf",
        help="Load, run, fine-tune, serve and export Hugging Face encoders.\n\n"
        "MODEL is a local folder or a Hub name such as owner/name or owner/name@revision.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(invoke_without_command=True)(options)
    for name in names:
        module = import_module(f"flodl_hf.cli.{name.replace('-', '_')}")
        if hasattr(module, "app"):
            made.add_typer(module.app, name=name, short_help=NAMES[name])
        else:
            made.command(
                name=name,
                short_help=NAMES[name],
                cls=getattr(module, "Command", StrictCommand),
                context_settings=getattr(module, "CONTEXT", None),
            )(module.command)
    return made


def options(
    version: bool = typer.Option(False, "--version", "-V", help="Print the version and exit."),
    more: int = typer.Option(
        0, "-v", "--verbose", count=True, help="-v checkpoints, averaging; -vv metrics; -vvv every event."
    ),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Print only results, warnings and errors."),
) -> None:
    """Load, run, fine-tune, serve and export Hugging Face encoders."""
    if more or quiet:
        set_verbosity(Verbosity.QUIET if quiet else min(Verbosity.NORMAL + more, Verbosity.TRACE))
    if version:
        from flodl_hf.checkpoints.system import own_version

        typer.echo(own_version())
        raise typer.Exit()
