"""``flodl-hf config show``: the resolved values of a recipe, with the source of each."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from flodl_hf.cli.options import JSON, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, tell

app = typer.Typer(help="Look into recipes.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def group() -> None:
    """Look into recipes."""


@app.command(name="show")
@reporting
@with_parameters((
    argument("recipe", Path, "RECIPE", "A recipe, YAML or JSON."), option("env", str, "Override with RECIPE.ENV.yaml."),
    option("defaults", bool, "Also show default values.", default=False), JSON,
))  # fmt: skip
def show(recipe: Path, env: str | None, defaults: bool, json_output: bool) -> None:
    """Print each value of a recipe with its file and line.

    Options that do not exist are reported, and the exit status is then 1.
    """
    from flodl_hf.training.options import Options, make_options
    from flodl_hf.training.recipe import load_recipe

    found = load_recipe(recipe, env)
    rows = found.rows
    if defaults:
        rows += [(n, v, "default") for n, v in Options().to_dict().items() if n not in found.values]
    if json_output:
        emit_json({"values": found.values, "origins": {path: origin for path, _, origin in rows}})
    else:
        texts = [f"{path}: {json.dumps(value, ensure_ascii=False, default=str)}" for path, value, _ in rows]
        width = min(60, max(map(len, texts), default=0))
        for text, (_, _, origin) in zip(texts, rows, strict=True):
            tell(f"{text:<{width}}  # {origin}")
    say("merged, each over the one before: " + ", ".join(str(file) for file in found.files))
    others = ("model", "train", "eval", "out", "overwrite")
    make_options({k: v for k, v in found.values.items() if k not in others}, source=str(recipe))
