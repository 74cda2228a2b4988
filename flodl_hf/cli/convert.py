"""``flodl-hf convert``: ``pytorch_model.bin`` to safetensors, without executing a pickle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flodl_hf.cli.options import JSON, LOCAL, MODEL, OUT, REPLACE, REVISION, with_parameters
from flodl_hf.cli.shared import emit, reporting

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig


@reporting
@with_parameters((MODEL, OUT, REPLACE, REVISION, LOCAL, JSON))  # fmt: skip
def command(
    model: str, out: Path, overwrite: bool, revision: str | None, local_files_only: bool, json_output: bool
) -> None:
    """Write the weights of a .bin checkpoint as safetensors, with its configuration and tokenizer.

    The pickle in the file is read by a parser that supports only tensors; no code in it runs.
    """
    from flodl_hf.checkpoints.config.model_config import read_config_file
    from flodl_hf.checkpoints.folders import BIN_FILES, MODEL_FILES
    from flodl_hf.checkpoints.hub.download import resolve_folder
    from flodl_hf.checkpoints.sentence.settings import transformer_folder
    from flodl_hf.export.graph_file import convert_bin

    hub = {"revision": revision, "local_files_only": local_files_only}
    folder, _ = resolve_folder(model, hub, (*MODEL_FILES, *BIN_FILES))
    convert_bin(folder, out, ties=stored_ties(read_config_file(transformer_folder(folder))), overwrite=overwrite)
    emit({"folder": str(out)}, str(out), json_output)


def stored_ties(config: ModelConfig) -> dict[str, str]:
    """Return, by stored name, the repeated names that transformers leaves out of a file."""
    ties: dict[str, str] = {}
    if not config.tie_words:
        return ties
    for head, spec in config.family.heads.items():
        names = config.family.key_map(config.encoder, head)
        ties |= {names.theirs(tie.also): names.theirs(tie.kept) for tie in spec.ties}
        ties |= dict(spec.aliases)
    return ties
