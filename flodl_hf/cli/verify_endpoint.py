"""``flodl-hf verify-endpoint``: compare an endpoint's outputs with its model's."""

from __future__ import annotations

from typing import Any

import typer

from flodl_hf.cli import options as shared
from flodl_hf.cli.options import REQUIRED, STYLES, argument, chosen, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, tell

_TARGET = "A URL, a folder of sentence-transformers, or an ONNX file."
_SOURCE = "The model it should answer as: a folder or Hub name."
_STYLE = "API of the endpoint: text-embeddings-inference, OpenAI, Hugging Face."
_TOLERANCE = "Largest difference that counts as equal, as a share of the largest number."
OPTIONS = (
    option("style", STYLES, _STYLE, default="auto"),
    option("model", str, "Name of the endpoint's model."),
    option("api_key", str, "The key that the endpoint needs.", envvar="FLODL_HF_ENDPOINT_KEY"),
    option("tolerance", float, _TOLERANCE, min=0.0),
    option("timeout_s", float, "Request timeout in seconds.", default=60.0, min=0.001),
    shared.LOCAL,
)
"""Keywords of `flodl_hf.parity.endpoint_checks.verify_endpoint`."""


@reporting
@with_parameters((
    argument("target", str, "TARGET", _TARGET), option("source", str, _SOURCE, default=REQUIRED, metavar="MODEL"),
    *OPTIONS, shared.JSON,
))  # fmt: skip
def command(target: str, source: str, json_output: bool, **values: Any) -> None:
    """Compare an endpoint with the model it serves: token ids, vectors or scores, prompts, batches, long texts.

    Some twenty short requests. Where answers differ, known mistakes are tried one and two at a time, and the one that
    gives the same numbers is named: GELU by its tanh form, pooling, scaling, prompts, lower case, special tokens,
    padding that is read, order, where long texts are cut.

    Exit status 0 if nothing differs, 1 if something does.
    """
    from flodl_hf.parity.endpoint_checks import verify_endpoint

    report = verify_endpoint(target, source, **chosen(values, OPTIONS))
    if json_output:
        emit_json(report.to_dict())
    else:
        tell(f"{report.target}\nbeside {report.source}\n")
        tell(report.table())
        tell("answers as its model" if report.passed else "DIFFERS", fg="green" if report.passed else "red")
    raise typer.Exit(0 if report.passed else 1)
