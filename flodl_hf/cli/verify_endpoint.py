"""``flodl-hf verify-endpoint``: compare an endpoint's outputs with its model's."""

from __future__ import annotations

from typing import Annotated

import typer

from flodl_hf.cli.choices import STYLES
from flodl_hf.cli.shared import Json, Local, emit_json, reporting, tell


@reporting
def command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A URL, a folder of sentence-transformers, or an ONNX file.")
    ],
    source: Annotated[str, typer.Option(metavar="MODEL", help="The model it should answer as: a folder or Hub name.")],
    style: Annotated[
        STYLES, typer.Option(help="API of the endpoint: text-embeddings-inference, OpenAI, Hugging Face.")
    ] = "auto",
    model: Annotated[str | None, typer.Option(help="Name of the endpoint's model.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="FLODL_HF_ENDPOINT_KEY", help="The key that the endpoint needs.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest difference that counts as equal, as a share of the largest number."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout-s", min=0.001, help="Request timeout in seconds.")] = 60.0,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Compare an endpoint with the model it serves: token ids, vectors or scores, prompts, batches, long texts.

    Some twenty short requests. Where answers differ, known mistakes are tried one and two at a time, and the one that
    gives the same numbers is named: GELU by its tanh form, pooling, scaling, prompts, lower case, special tokens,
    padding that is read, order, where long texts are cut.

    Exit status 0 if nothing differs, 1 if something does.
    """
    from flodl_hf.parity.endpoint_checks import verify_endpoint
    from flodl_hf.parity.endpoint_checks.checks import TOLERANCE

    report = verify_endpoint(
        target, source, tolerance=TOLERANCE if tolerance is None else tolerance, local_files_only=local_files_only,
        style=style, model=model, api_key=api_key, timeout_s=timeout,
    )  # fmt: skip
    if json_output:
        emit_json(report.to_dict())
    else:
        tell(f"{report.target}\nbeside {report.source}\n")
        tell(report.table())
        tell("answers as its model" if report.passed else "DIFFERS", fg="green" if report.passed else "red")
    raise typer.Exit(0 if report.passed else 1)
