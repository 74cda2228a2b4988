"""``flodl-hf merge``: a base and an adapter to one folder, which anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flodl_hf.checkpoints.folders import BASE_OF_ADAPTER
from flodl_hf.cli.command import command_line
from flodl_hf.cli.options import JSON, LOCAL, OUT, REPLACE, REVISION, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, tell


@reporting
@with_parameters((
    argument("base", str, "BASE", "The model below, a local folder or a Hub name."),
    argument("adapter", str, "ADAPTER", "The adapter, a local folder or a Hub name."), OUT,
    option("head", str, "The task, if the adapter does not specify it.", default="auto"),
    REPLACE, REVISION, LOCAL, JSON,
))  # fmt: skip
def command(
    base: str,
    adapter: str,
    out: Path,
    head: str,
    overwrite: bool,
    revision: str | None,
    local_files_only: bool,
    json_output: bool,
) -> None:
    """Write a model with an adapter's sum or scales in its weights, and the adapter's head.

    Each weight is summed in float64 and rounded once. Prompts and prefixes cannot be merged and are refused.
    """
    from flodl_hf.heads.auto import load
    from flodl_hf.models.adapters.folder import open_adapter

    # Unchanged weights stay memory-mapped, so that any size works.
    shown: dict[str, Any] = {"mapped": True, "weights": "memory"}
    model = load(base, head=head, adapter=adapter, revision=revision, local_files_only=local_files_only, **shown)
    named = open_adapter(adapter, {"local_files_only": local_files_only}).values.get(BASE_OF_ADAPTER)
    if named and Path(named).resolve() not in (Path(base).resolve(), Path(base.partition("@")[0]).resolve()):
        trained = f"warning: the adapter was trained on {named}, and the base is {base}"
        say(f"{trained}; the result is only correct if both are the same model", always=True, fg="yellow")
    model.merge_and_unload().save_pretrained(out, overwrite=overwrite)
    if json_output:
        emit_json({"folder": str(out), "task": model.head})
        return
    tell(str(out))
    say("check it: " + command_line("flodl-hf", "verify-export", out, "--no-source"))
