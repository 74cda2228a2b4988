"""Rewrite a folder of ``.bin`` weights as safetensors, without executing pickle code.

Decides which of several names for one tensor is written if the family does not specify it: the name of an embedding,
as in the reference, else the first in alphabetical order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flodl_hf.checkpoints.saving.publish import is_model_file, publish_folder
from flodl_hf.checkpoints.saving.state import WritePlan, WrittenFile, plan_state
from flodl_hf.checkpoints.sentence.routing import module_folders, routing_of, transformer_folders
from flodl_hf.checkpoints.weights.checkpoint.folder import Checkpoint
from flodl_hf.checkpoints.weights.checkpoint.safe_open import Folder
from flodl_hf.checkpoints.weights.checksums import CHECKSUMS
from flodl_hf.errors import ExportError
from flodl_hf.models.saving import needed_bytes, writer

_BIN = (".bin", ".bin.index.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_OF_THE_SOURCE = (CHECKSUMS, "verification.json")  # say what the source's files are, not these
_COPY_LIMIT = 1 << 30


def convert_bin(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    ties: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
) -> list[WrittenFile]:
    """Write the ``.bin`` checkpoint in ``folder`` to ``out`` as safetensors; return the weight files written.

    Config, tokenizer and other model files of the folder are copied byte for byte, including sentence-transformers'
    modules; ``.bin`` weights of a module are converted too. The new folder appears as a whole and
    is read again before it does.

    Args:
        folder: contains ``pytorch_model.bin``, or its index and shards.
        out: a new or empty folder.
        ties: a name to the name that it is tied to and that is kept, as the family declares it.
        max_shard_size: cut the weights above this size, see `plan_state`.
        overwrite: replace ``out`` if it is a model folder.

    Raises:
        UnsafeFileError: a weight file does more than build tensors.
        CheckpointError: the folder has no usable ``.bin`` weights.
        ExportError: ``out`` cannot be written.
    """
    root = Path(folder)
    copies = model_files(root)
    # Folders of transformers, and of layers without safetensors.
    layers = [
        _part_of(name) for name in copies
        if name.endswith(_BIN) and f"{_part_of(name)}/model.safetensors" not in copies
    ]  # fmt: skip
    parts = dict.fromkeys([*transformer_folders(root), *layers])
    plans = {part: _planned(root / part, ties or {}, max_shard_size) for part in parts}
    copies = {name: data for name, data in copies.items() if not (name.endswith(_BIN) and _part_of(name) in plans)}
    written: list[WrittenFile] = []
    publish_folder(out, writer(plans, copies, written), overwrite=overwrite, needed_bytes=needed_bytes(plans, copies))
    return [file for file in written if file.name not in copies]


def _planned(folder: Path, ties: Mapping[str, str], max_shard_size: int | str | None) -> WritePlan:
    with Checkpoint.open(folder, bin_only=True) as source:
        aliases = kept_names(source.manifest.ties, ties)
        # Memory-mapped, because they are only written: mapped pages need no free memory.
        tensors = {name: tensor for name, tensor in source.read_all(mapped=True).items() if name not in aliases}
        return plan_state(tensors, ties=ties, max_shard_size=max_shard_size)


def _part_of(name: str) -> str:
    return name.rpartition("/")[0]


def kept_names(stored: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """Return each name to leave out, with the name that keeps its tensor.

    Args:
        stored: a name to the first name that has the very same storage in the file.
        declared: the family's ties, name to kept name; they decide where they speak.
    """
    groups: dict[str, list[str]] = {}
    for name, first in stored.items():
        groups.setdefault(first, [first]).append(name)
    result: dict[str, str] = {}
    for names in groups.values():
        wanted = [name for name in names if name not in declared] or names
        kept = min(wanted, key=lambda name: ("embed" not in name, name))
        result.update({name: kept for name in names if name != kept})
    return result


def model_files(folder: Path) -> dict[str, bytes]:
    """Return the files of ``folder`` other than its transformers' weights, by name; links follow the same rule.

    The files of modules in ``modules.json`` are included, with the weights of dense layers.
    """
    folders = module_folders(folder)
    routers = {_part_of(name): False for name in (routing_of(folder).files if folders else ())}
    found: dict[str, bytes] = {}
    for part, holds_weights in ({"": True} | routers | folders).items():
        found |= _files_in(folder, part, weights=not holds_weights)
    return found


def _files_in(root: Path, part: str, *, weights: bool) -> dict[str, bytes]:
    """Return the model files of one folder, keyed by path from ``root``."""
    if part and not (root / part).is_dir():
        return {}  # a module without settings, as Normalize
    with Folder(root / part) as opened:
        copies: dict[str, bytes] = {}
        for entry in sorted((root / part).iterdir()):
            other = entry.name in _OF_THE_SOURCE or (not weights and entry.name.endswith(_WEIGHTS))
            if entry.is_dir() or other or not is_model_file(entry.name):
                continue
            with os.fdopen(opened.open(entry.name), "rb") as file:
                data = file.read(_COPY_LIMIT + 1)
            if len(data) > _COPY_LIMIT:
                raise ExportError(
                    f"{entry}: larger than {_COPY_LIMIT:,} bytes, expected a config or tokenizer file; move it away",
                    path=str(entry),
                    problems=["too large"],
                )
            copies[f"{part}/{entry.name}" if part else entry.name] = data
        return copies
