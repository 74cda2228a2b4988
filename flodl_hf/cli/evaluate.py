"""``flodl-hf evaluate``: a model and labelled data in, metrics out."""

from __future__ import annotations

from typing import Any

from flodl.errors import ConfigError
from flodl_hf.checkpoints.weights.prefetch import prefetching
from flodl_hf.cli.finetune import option_parameters, parse, train_data
from flodl_hf.cli.options import JSON, argument, option, with_parameters
from flodl_hf.cli.shared import check_places, emit, reporting, say
from flodl_hf.training.options import EvaluateOptions

OPTIONS = {*EvaluateOptions.__annotations__, "devices"} - {"batch_size", "loss"}


PARAMETERS = (
    argument("model", str, "MODEL", "A local folder or a Hub name."),
    argument("file", str | None, "DATA", "Labelled data, as of --data.", None),
    option("data", str, "Labelled data: CSV, TSV, JSON lines, Parquet, CoNLL, SQuAD JSON or text; or several as "
           "name=file,name=file.", "-d"),
    option("batch_size", int, "Rows of a batch (default 32).", "-b", min=1, show_default=False),
    *option_parameters(OPTIONS),
    JSON,
)  # fmt: skip


@reporting
@with_parameters(PARAMETERS)
def command(model: str, file: str | None, data: str | None, json_output: bool, **values: Any) -> None:
    """Evaluate a model on labelled data, without training.

    Prints the metrics that finetune reports for --eval, with a table of labels and a confusion matrix. A folder that
    finetune wrote is evaluated with the task and the options of its recipe.yaml, unless they are given here.
    """
    if (file is None) == (data is None):
        found = f"{file!r} and {data!r}" if data else "no data"
        raise ConfigError(f"evaluate: found {found}, expected one file: --data FILE", problems=["data"])
    rows = train_data(file if data is None else data)
    options = {name: parse(name, value) for name, value in values.items()}
    devices = options.pop("devices")
    check_places("evaluation", {"model": model, "data": rows})
    with prefetching(model, {"device": devices if isinstance(devices, str) else None}):
        from flodl_hf.training import evaluate

        chosen = {name: value for name, value in options.items() if value is not None}
        result = evaluate(model, rows, devices=devices, **chosen)
    for note in result.notes:
        say(note)
    emit(result.to_dict(), str(result), json_output)
