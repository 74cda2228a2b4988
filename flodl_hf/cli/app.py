"""Assemble the commands, and handle shared options, errors and output streams."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer

from flodl.verbosity import Verbosity, set_verbosity
from flodl_hf.cli.duplicate_options import OnceCommand

if TYPE_CHECKING:
    app: typer.Typer

__all__ = ["app", "app_for"]

# In the order of the help. Each command is in the file of its name; groups of commands are last.
NAMES = (
    "demo",
    "new",
    "predict",
    "encode",
    "search",
    "mine",
    "serve",
    "finetune",
    "evaluate",
    "inspect",
    "export",
    "verify",
    "verify-endpoint",
    "verify-export",
    "verify-matrix",
    "convert",
    "merge",
    "docs",
    "doctor",
    "config",
    "runs",
    "run",
    "schema",
)


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
        help="Hugging Face encoders both ways: load, predict, export, and prove it.\n\n"
        "MODEL is a local folder or a Hub name such as owner/name or owner/name@revision.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(invoke_without_command=True)(options)
    for name in names:
        module = import_module(f"flodl_hf.cli.{name.replace('-', '_')}")
        if hasattr(module, "app"):
            made.add_typer(module.app, name=name)
        else:
            made.command(
                name=name,
                cls=getattr(module, "Command", OnceCommand),
                context_settings=getattr(module, "CONTEXT", None),
            )(module.command)
    return made


def options(
    version: bool = typer.Option(False, "--version", "-V", help="Show the version and leave."),
    more: int = typer.Option(
        0, "-v", "--verbose", count=True, help="-v checkpoints, averaging; -vv metrics; -vvv every event."
    ),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Print only results, warnings and errors."),
) -> None:
    """Hugging Face encoders both ways: load, predict, export, and prove it."""
    if more or quiet:
        set_verbosity(Verbosity.QUIET if quiet else min(Verbosity.NORMAL + more, Verbosity.TRACE))
    if version:
        from flodl_hf.checkpoints.version import own_version

        typer.echo(own_version())
        raise typer.Exit()
