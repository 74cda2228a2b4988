"""The commands put together, and what they share: options, errors, and where output goes."""

from __future__ import annotations

import typer

from flodl.verbosity import Verbosity, set_verbosity
from flodl_hf.cli import (
    config,
    convert,
    demo,
    doctor,
    encode,
    export,
    finetune,
    inspect,
    merge,
    mine,
    new,
    predict,
    runs,
    search,
    serve,
    verify,
    verify_endpoint,
    verify_export,
    verify_matrix,
)

__all__ = ["app"]

app = typer.Typer(
    name="flodl-hf",
    help="Hugging Face encoders both ways: load, predict, export, and prove it.\n\n"
    "MODEL is a local folder or a Hub name such as owner/name or owner/name@revision.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    version: bool = typer.Option(False, "--version", "-V", help="Show the version and leave."),
    more: int = typer.Option(
        0, "-v", "--verbose", count=True, help="Say more: -v checkpoints and meetings, -vv figures, -vvv every event."
    ),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Say nothing but results, warnings and errors."),
) -> None:
    """Hugging Face encoders both ways: load, predict, export, and prove it."""
    if more or quiet:
        set_verbosity(Verbosity.QUIET if quiet else min(Verbosity.NORMAL + more, Verbosity.TRACE))
    if version:
        from flodl_hf.version import own_version

        typer.echo(own_version())
        raise typer.Exit()


for module in (
    demo,
    new,
    predict,
    encode,
    search,
    mine,
    serve,
    finetune,
    inspect,
    export,
    verify,
    verify_endpoint,
    verify_export,
    verify_matrix,
    convert,
    merge,
    doctor,
):
    app.command(name=module.NAME, cls=getattr(module, "Command", None))(module.command)
app.add_typer(config.app, name=config.NAME)
app.add_typer(runs.app, name=runs.NAME)
