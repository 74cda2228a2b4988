"""``flodl-hf evaluate``: a model and labelled data in, metrics out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from flodl.errors import ConfigError
from flodl_hf.checkpoints.weights.prefetch import prefetching
from flodl_hf.cli.finetune import option_parameters, parameter, parse, train_data, with_parameters
from flodl_hf.cli.path_checks import check_places
from flodl_hf.cli.shared import emit_json, reporting, say, tell
from flodl_hf.training.options import EvaluateOptions

OPTIONS = {*EvaluateOptions.__annotations__, "devices"} - {"batch_size", "loss"}
REQUIRED = inspect.Parameter.empty


def run(model: str, data: Any, given: dict[str, Any], json_output: bool) -> None:
    """Evaluate the model and print the result."""
    devices = given.pop("devices")
    check_places("evaluation", {"model": model, "data": data})
    with prefetching(model, {"device": devices if isinstance(devices, str) else None}):
        from flodl_hf.training import evaluate

        chosen = {name: value for name, value in given.items() if value is not None}
        result = evaluate(model, data, devices=devices, **chosen)
    for note in result.notes:
        say(note)
    if json_output:
        emit_json(result.to_dict())
    else:
        tell(str(result))


def _command() -> Callable[..., None]:
    def command(**given: Any) -> None:
        positional, named, json_output = given.pop("file"), given.pop("data"), given.pop("json_output")
        model = given.pop("model")
        if (positional is None) == (named is None):
            found = f"{positional!r} and {named!r}" if named else "no data"
            raise ConfigError(f"evaluate: found {found}, expected one file: --data FILE", problems=["data"])
        options = {name: parse(name, value) for name, value in given.items()}
        run(model, train_data(positional if named is None else named), options, json_output)

    command.__doc__ = HELP
    parameters = [
        parameter("model", str, typer.Argument(metavar="MODEL", help="A local folder or a Hub name."), REQUIRED),
        parameter("file", str | None, typer.Argument(metavar="DATA", help="Labelled data, as of --data.")),
        parameter("data", str | None, typer.Option("--data", "-d", help="Labelled data: CSV, TSV, JSON lines, Parquet, "
                  "CoNLL, SQuAD JSON or text; or several as name=file,name=file.")),
        parameter("batch_size", int | None, typer.Option("--batch-size", "-b", min=1, help="Rows of a batch "
                  "(default 32).", show_default=False)),
        *option_parameters(OPTIONS),
        parameter("json_output", bool, typer.Option("--json", help="Print one JSON document instead of text."), False),
    ]  # fmt: skip
    return with_parameters(command, parameters)


HELP = (
    "Evaluate a model on labelled data, without training.\n\n"
    "Prints the metrics that finetune reports for --eval, with a table of labels and a confusion matrix. A folder that "
    "finetune wrote is evaluated with the task and the options of its recipe.yaml, unless they are given here."
)

command = reporting(_command())
