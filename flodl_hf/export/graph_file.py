"""A graph's checkpoint, ``.fdl`` or safetensors, written as a Hugging Face folder.

Such a file contains tensors with the names of a graph and nothing else, so configuration and tokenizer are read from a
folder of the same architecture, or from the file's sidecar ``<stem>.config.json``. Names may be ours
(``pooler.dense.weight``), a model's (``network.pooler...``), Hugging Face's, or the Rust flodl's
(``bert.pooler.dense/weight``).

The tensors are saved in a folder with the configuration under Hugging Face's names, loaded
as strictly as any other folder, exported, read again and compared with the checkpoint, value by value.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flodl.checkpoint import load_tensors
from flodl.checkpoint.files import Checkpoint as SavedGraph
from flodl.errors import CheckpointError, capped, printable
from flodl_hf.checkpoints.config.file import MAX_CONFIG_BYTES, patch_json
from flodl_hf.checkpoints.config.model_config import ModelConfig, read_config_file
from flodl_hf.checkpoints.folders import CONFIG_NAME, MODEL_FILES, TOKENIZER_FILES, read_member, refused
from flodl_hf.checkpoints.hub.download import resolve_folder
from flodl_hf.checkpoints.saving.publish import is_model_file, publish_folder
from flodl_hf.checkpoints.saving.state import WritePlan, WrittenFile, plan_state, same_bits, write_state
from flodl_hf.checkpoints.sentence.settings import module_folders, routing_of, transformer_folder, transformer_folders
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.checksums import CHECKSUMS
from flodl_hf.checkpoints.weights.loading import canonical_names, head_of
from flodl_hf.errors import ExportError
from flodl_hf.families.schema.record import translated
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.models.saving import export_model, needed_bytes, writer
from flodl_hf.nn.joined_tensors import joined

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel


_ENDINGS = (".fdl", ".fdl.gz", ".safetensors")
_MOST_BYTES = 1 << 30
_WRAPPERS = ("network.", "graph.")


@dataclass(frozen=True)
class GraphFile:
    """Result of exporting a checkpoint.

    Attributes:
        folder: the written folder.
        head: the task.
        tensors: number of tensors in the file.
        names: naming scheme of the file: "ours", or "Hugging Face".
        checked: whether the file has a structural hash, which matched.
        model: the model that was written.
    """

    folder: Path
    head: str
    tensors: int
    names: str
    checked: bool
    model: EncoderModel


def is_graph_file(name: str | os.PathLike[str]) -> bool:
    """Return whether this is a file with the ending of a graph's checkpoint."""
    return str(name).lower().endswith(_ENDINGS) and Path(name).is_file()


def export_graph_file(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    head: str = "auto",
    labels: Sequence[str] | None = None,
    dtype: Any = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    local_files_only: bool = False,
) -> GraphFile:
    """Write a graph's checkpoint to ``out`` as a Hugging Face folder, and compare it with the file.

    Args:
        file: what ``graph.save_checkpoint`` or the Rust flodl wrote.
        out: the folder to write.
        like: a folder or Hub name with the configuration and tokenizer of the same architecture; default: the sidecar
            next to the file.
        head: the task; "auto" for the configuration's task.
        labels: names of the classes, if they differ from the configuration's.
        dtype: cast the weights to this; None keeps the file's.
        max_shard_size: split the weights above this size, as ``"5GB"`` or bytes.
        overwrite: replace a folder that contains a model.
        revision: branch, tag or commit of ``like`` on the Hub.
        local_files_only: open no connection.

    Raises:
        ExportError: there is no configuration, or the written tensors differ from the file.
        CheckpointError: the file is damaged, or for another architecture: names or shapes do not fit, all listed.
    """
    from flodl_hf.heads.auto import load

    found = load_tensors(file)
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in found.tensors.values() if t.is_floating_point()})
    if len(kinds) > 1 and dtype is None:
        dtypes = f"tensors in {' and '.join(kinds)}"
        raise refused(found.path, dtypes, "one dtype. Cast it with --dtype", problems=kinds, kind=ExportError)
    files, config = _surroundings(Path(file), like, {"revision": revision, "local_files_only": local_files_only})
    named = head_of(config.family, config.source.get("architectures")) or "base"
    task = _task_of(found, config, named) if head == "auto" else task_named(head).head
    tensors, style = _named(found, config, task)
    files[CONFIG_NAME] = _config_text(config, task, labels).encode()
    with tempfile.TemporaryDirectory(prefix="flodl-hf-") as place:
        stage = Path(place)
        for name, data in files.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).write_bytes(data)
        weights = transformer_folder(stage)
        write_state(weights, plan_state(tensors))
        model = load(stage, head=task, dtype=dtype or (kinds or [None])[0])
        checked = _check(found, model, style)
        folder = export_model(
            model, Path(out), overwrite=overwrite, max_shard_size=max_shard_size,
            check=lambda written: _compare(tensors, written, model.dtype, str(file)),
        )  # fmt: skip
    return GraphFile(folder, task, len(found.tensors), style, checked, model)


def _surroundings(file: Path, like: Any, hub: dict[str, Any]) -> tuple[dict[str, bytes], ModelConfig]:
    """Return the configuration and the files to write next to the weights."""
    if like is not None:
        root, _ = resolve_folder(like, hub, MODEL_FILES)
        folder = transformer_folder(root)
        if folder != root:
            expected = f"a folder with config.json at its top; give {folder}"
            raise refused(root, f"its transformer is in {folder.name}", expected, kind=ExportError)
        return model_files(folder), read_config_file(folder)
    stem = file.name
    for ending in (".gz", ".fdl", ".safetensors"):
        stem = stem.removesuffix(ending)
    sidecar = file.with_name(f"{stem}.config.json")
    if not sidecar.is_file():
        found = f"contains no configuration, and {sidecar.name} does not exist"
        expected = "a configuration and a tokenizer; give a folder with them: like= (--like FOLDER)"
        raise refused(file, found, expected, kind=ExportError)
    present = [name for name in TOKENIZER_FILES if (file.parent / name).is_file()]
    files = {name: read_member(file.parent, name, _MOST_BYTES) for name in present}
    text = read_member(file.parent, sidecar.name, MAX_CONFIG_BYTES).decode("utf-8", "replace")
    return files, ModelConfig.from_text(text, str(sidecar))


def _named(saved: SavedGraph, config: ModelConfig, task: str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors under Hugging Face's names, and the original naming scheme.

    Raises:
        CheckpointError: the file mixes two naming schemes.
    """
    key_map = config.family.key_map(config.encoder, task)
    plain = {_bare(name): tensor for name, tensor in saved.tensors.items()}
    if len(plain) != len(saved.tensors):
        raise CheckpointError(f"{saved.path}: two tensors have one name but for their beginning", path=saved.path)
    ours = [name for name in plain if translated(name, key_map.pairs)]
    if not ours:
        return {name.replace("/", "."): tensor for name, tensor in saved.tensors.items()}, "Hugging Face"
    strange = [name for name in plain if name not in set(ours)]
    if strange:
        shown = capped([printable(name, 120) for name in strange], 10)
        found = f"{len(strange)} tensors are not of a {config.model_type} for {task}:\n{shown}\n"
        raise refused(saved.path, found, "the names of one graph; give its head (--head)", problems=strange)
    names = canonical_names(config.family, key_map, ours, bare=task == "base")
    return joined({names[name]: tensor for name, tensor in plain.items()}), "ours"


def _task_of(saved: SavedGraph, config: ModelConfig, named: str) -> str:
    """Return the task of the configuration, or another one with the names in a graph's file."""
    names = [_bare(name) for name in saved.tensors]
    for task in dict.fromkeys([named, *config.family.heads]):
        pairs = config.family.key_map(config.encoder, task).pairs
        if all(translated(name, pairs) for name in names):
            return task
    return named


def _bare(name: str) -> str:
    return next((name.removeprefix(w) for w in _WRAPPERS if name.startswith(w)), name)


def _config_text(config: ModelConfig, task: str, labels: Sequence[str] | None) -> str:
    changes: dict[str, Any] = {"architectures": [config.family.class_prefix + task_named(task).hf_suffix]}
    if labels is not None:
        changes |= config.changed(labels=labels).label_changes()
        if "num_labels" in config.source:
            changes["num_labels"] = len(labels)
    named = config.source.get("architectures")
    if head_of(config.family, named) == task or (task == "base" and head_of(config.family, named) is None):
        del changes["architectures"]
    return patch_json(config.text or json.dumps(config.to_dict()), changes)


def _check(saved: SavedGraph, model: EncoderModel, style: str) -> bool:
    """Compare the file's structural hash with the model's; return whether the file has one.

    Raises:
        CheckpointError: the hash differs, or the model has tensors that are not in the file.
    """
    report = model.load_report
    if report is not None and report.new:
        found = f"{len(report.new)} tensors of the model are not in the file: {', '.join(report.new[:10])}"
        expected = "a checkpoint of the whole model; give the head that it has (--head)"
        raise refused(saved.path, found, expected, problems=report.new)
    if style != "ours" or not saved.structural_hash:
        return False
    own = model.graph.structural_hash()
    if saved.structural_hash != own:
        found = f"made for the structure {saved.structural_hash[:8]}"
        expected = f"that of the model, {own[:8]}: the configuration that the checkpoint was made with"
        raise refused(saved.path, found, expected)
    return True


def _compare(tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, file: str) -> None:
    """Read the written folder and compare it with the checkpoint cast to ``dtype``, bit for bit.

    Raises:
        ExportError: names or values differ.
    """
    with Checkpoint.open(folder) as written:
        there = written.read_all()
    wrong = sorted(set(tensors) ^ set(there))
    for name in set(tensors) & set(there):
        expected = tensors[name].to(dtype) if tensors[name].is_floating_point() else tensors[name]
        if not same_bits(there[name], expected):
            wrong.append(name)
    if wrong:
        found = f"{len(wrong)} written tensors would differ: {', '.join(wrong[:10])}. Nothing was written"
        raise refused(file, found, "equal values; please report this", problems=wrong, kind=ExportError)


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
    for part, has_transformer in ({"": True} | routers | folders).items():
        if part and not (folder / part).is_dir():
            continue  # a module without settings, as Normalize
        for entry in sorted((folder / part).iterdir()):
            other = entry.name in _OF_THE_SOURCE or (has_transformer and entry.name.endswith(_WEIGHTS))
            if not entry.is_dir() and not other and is_model_file(entry.name):
                name = f"{part}/{entry.name}" if part else entry.name
                found[name] = read_member(folder, name, _COPY_LIMIT)
    return found
