"""`Checkpoint`: an open folder of weights, with every header checked before a tensor is read.

Decides which of the known layouts a folder has, and which one is read of several: transformers' choice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flodl.errors import CheckpointError, UnsafeFileError, capped, nearest, printable
from flodl_hf.checkpoints.folders import (
    BIN,
    BIN_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Folder,
    inside,
    plain_name_fault,
    refused,
)
from flodl_hf.checkpoints.weights.manifest import Layout, Shard, SourceManifest, StoredTensor
from flodl_hf.errors import MissingWeightsError

_INDEX_LIMIT = 32 << 20
_MAX_SHARDS = 10_000
_EXAMPLE = (
    'an object {"metadata": {...}, "weight_map": {"tensor name": "model-00001-of-00002.safetensors"}}. Fetch the file '
    "again"
)
_BIN_ENDS = (".bin", ".pt")


class Checkpoint:
    """An opened folder of weights: its `manifest`, and its tensors on request.

    Opening reads headers only. The files stay open, so the tensors come from the checked files, and tensors
    are copies in memory that no change of the files can reach. Use it as a context manager, or `close` it.

        with Checkpoint.open("bert-base-uncased") as source:
            print(source.manifest.layout, len(source.manifest.tensors))
            weights = source.read_all()
    """

    def __init__(self, manifest: SourceManifest, shards: Mapping[str, Shard], resources: ExitStack) -> None:
        self.manifest = manifest
        self._shards = shards
        self._resources = resources

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        bin_only: bool = False,
        named: str | None = None,
    ) -> Checkpoint:
        """Return the checkpoint in ``folder``, its headers read and checked.

        Safetensors files are preferred to ``.bin`` files, and a single file to an index with shards, as transformers
        prefers them. If shards are ignored for this reason, the manifest reports it (``passed_over``): one of the two
        is stale, and nothing in the folder identifies which.

        Args:
            folder: contains ``model.safetensors``, or ``model.safetensors.index.json`` and its shards, or the
                same with ``pytorch_model.bin``.
            bin_only: read ``.bin`` files although safetensors files may be present.
            named: the file to read in place of the usual ones, in the folder or in one below it: a file of weights, or
                an index whose name ends in ``.index.json``.

        Raises:
            UnsafeFileError: the index or a link points outside the folder, or a ``.bin`` file contains more than
                tensors.
            CheckpointError: no weights, missing shards, damaged files, or an index that contradicts its shards.
        """
        with ExitStack() as stack:
            inner, _, leaf = (named or "").rpartition("/")
            opened = Folder(inside(folder, inner) if inner else folder)
            stack.callback(opened.close)
            if not leaf:
                chosen, passed_over = _choose(opened, bin_only=bin_only)
            else:
                chosen = _read_index(opened, leaf, SAFETENSORS) if leaf.endswith(".index.json") else leaf
                passed_over = ""
            if isinstance(chosen, str):
                index, shards = None, {chosen: _open_shard(opened, chosen, stack)}
            else:
                index, shards = chosen, _open_shards(opened, chosen, stack)
                try:
                    _check_shards(index, shards, opened.path / index.name)
                except CheckpointError:
                    if index.files not in ((SAFETENSORS,), (BIN,)):
                        raise
                    passed_over = _passed_over(index.files[0], f"{index.name}, which lists other tensors")
                    index = None
            is_bin = any(file.endswith(_BIN_ENDS) for file in shards)
            layout: Layout = ("bin-sharded" if is_bin else "sharded") if index else ("bin" if is_bin else "single")
            manifest = SourceManifest(
                folder=opened.path,
                layout=layout,
                files=tuple(shard.file for shard in shards.values()),
                tensors={
                    name: StoredTensor(name, dtype, shape, file)
                    for file, shard in shards.items()
                    for name, (dtype, shape) in shard.entries.items()
                },
                metadata={file: dict(shard.metadata) for file, shard in shards.items()},
                index_name=index.name if index else None,
                index_text=index.text if index else None,
                index_metadata=dict(index.metadata) if index else {},
                ties={name: kept for shard in shards.values() for name, kept in shard.ties.items()},
                passed_over=passed_over,
            )
            return cls(manifest, shards, stack.pop_all())

    def close(self) -> None:
        """Release the files; tensors already read stay valid. Closing twice is harmless."""
        self._resources.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_all(self, names: Iterable[str] | None = None, *, mapped: bool = False) -> dict[str, Tensor]:
        """Return the tensors ``names`` (all by default), in file order.

        Names that a ``.bin`` file stores once (ties) come back as one and the same tensor.

        Args:
            names: stored names in any order.
            mapped: map the file instead of copying it. This returns immediately and reads pages on first use;
                but the file must not change while one of the tensors is alive: overwriting it changes
                them, and cutting it kills the process. Good for files that nobody writes to, such as the blobs
                of a Hub cache.

        Raises:
            CheckpointError: unknown names (all listed), or a file that was cut since it was opened.
        """
        known = self.manifest.tensors
        wanted = set(known if names is None else names)
        if missing := sorted(wanted - known.keys()):
            problems = [f"{printable(name)}{nearest(name, known)}" for name in missing[:50]]
            found = f"contains no tensors with these names:\n{capped(problems)}\n"
            raise refused(self.manifest.folder, found, "names in its manifest", problems=problems, missing=missing)
        result: dict[str, Tensor] = {}
        for shard in self._shards.values():
            if found := [name for name in shard.entries if name in wanted]:
                result.update(zip(found, shard.read(found, mapped=mapped), strict=True))
        return result


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Contents of a shard index.

    Attributes:
        name: its file name.
        text: the unchanged file text.
        weight_map: tensor name to shard name, in the order of the file.
        metadata: the ``metadata`` object of the index.
        files: shard names, each once, in sorted order (their numbers are zero-filled).
    """

    name: str
    text: str
    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]
    files: tuple[str, ...]


def _choose(folder: Folder, *, bin_only: bool) -> tuple[str | ShardIndex, str]:
    """Return the single file to read or the parsed index, and a description of ignored weights."""
    kinds = ((SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX))[bin_only:]
    for single, index_name in kinds:
        has_single, has_index = folder.has(single), folder.has(index_name)
        if not has_index:
            if has_single:
                return single, ""
            continue
        try:
            index = _read_index(folder, index_name, single)
        except CheckpointError as fault:
            if not has_single:
                raise
            return single, _passed_over(single, f"{index_name}, which cannot be used ({fault.problems[0]})")
        if not has_single or index.files == (single,):
            return index, ""
        held = sum(map(folder.has, index.files))
        if not held:  # an index alone is no weights
            return single, ""
        return single, _passed_over(single, f"{index_name}, with {held} of {len(index.files)} files present")
    present = sorted(entry.name for entry in folder.path.iterdir())[:12]
    found = f"has no weights; it contains {', '.join(map(printable, present)) or 'nothing'}"
    names = ", ".join(name for kind in kinds for name in kind)
    expected = f"one of {names}. Shards need their index; a single file with another name has to be renamed"
    raise refused(folder.path, found, expected, problems=["no weights"], kind=MissingWeightsError)


def _passed_over(single: str, other: str) -> str:
    return f"{single} is read, as by transformers; {other}, is ignored: delete the stale files"


def _read_index(folder: Folder, name: str, single: str) -> ShardIndex:
    """Return the index of this name, of files of the kind of ``single``.

    Raises:
        UnsafeFileError: a shard name is anything else than the plain name of a sibling file.
        CheckpointError: the text is not JSON of the expected types, repeats a key, or lists other files.
    """
    path = folder.path / name
    data = folder.read(name, _INDEX_LIMIT)
    suffix = f".{single.rpartition('.')[2]}"
    try:
        text = data.decode("utf-8")
        content = json.loads(text, object_pairs_hook=_without_repeats)
        weight_map, metadata = content["weight_map"], content.get("metadata") or {}
        files = sorted(set(weight_map.values()))
        if not 0 < len(files) <= _MAX_SHARDS or not isinstance(metadata, dict):
            raise ValueError(f"{len(files):,} shards, and metadata in a {type(metadata).__name__}")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {printable(str(error))[1:-1]}"
        raise refused(path, f"not a usable shard index ({problem})", _EXAMPLE, problems=[problem]) from None
    if faults := [f"shard {printable(str(f))}: {fault}" for f in files if (fault := plain_name_fault(f))]:
        found = f"not a usable shard index:\n{capped(faults)}\n"
        raise refused(path, found, "plain names of files", problems=faults, kind=UnsafeFileError)
    if foreign := [f"{printable(file)}: not a {suffix} file" for file in files if not file.endswith(suffix)]:
        found = f"lists files of another kind:\n{capped(foreign)}\n"
        raise refused(path, found, f"names that end in {suffix}. Fetch the folder again", problems=foreign)
    return ShardIndex(name, text, weight_map, metadata, tuple(files))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is present more than once")
    return found


def _check_shards(index: ShardIndex, shards: Mapping[str, Shard], path: Path) -> None:
    """Compare the index with the tensor names in the headers of its shards.

    Raises:
        CheckpointError: a listed tensor is missing, in another shard, or in two; or a shard contains a
            tensor that the index does not list.
    """
    homes: dict[str, list[str]] = {name: [] for name in index.weight_map}
    for file, shard in shards.items():
        for name in shard.entries:
            homes.setdefault(name, []).append(file)
    problems = [
        f"{printable(name)}: listed for {index.weight_map.get(name, 'no shard')}, found in {', '.join(files) or 'none'}"
        for name, files in homes.items()
        if files != [index.weight_map.get(name)]
    ]
    if problems:
        found = f"index and shards disagree about {len(problems)} tensors:\n{capped(problems)}\n"
        raise refused(path, found, "files of one version. Fetch the folder again", problems=problems)


def _open_shard(folder: Folder, name: str, stack: ExitStack) -> Shard:
    descriptor = folder.open(name)
    where = str(folder.path / name)
    if name.endswith(_BIN_ENDS):
        from flodl_hf.checkpoints.weights.torch_file import BinShard

        shard: Shard = BinShard(descriptor, name, where)
    else:
        shard = Shard(descriptor, name, where)
    stack.callback(shard.close)
    shard.parse()
    return shard


def _open_shards(folder: Folder, index: ShardIndex, stack: ExitStack) -> dict[str, Shard]:
    missing = [file for file in index.files if not folder.has(file)]
    if missing:
        found = f"{len(missing)} of {len(index.files)} shards are missing:\n{capped(missing)}\n"
        expected = "them in the folder of the index. Complete the download"
        problems = [f"{file}: missing" for file in missing]
        raise refused(folder.path / index.name, found, expected, problems=problems, missing=missing)
    shards: dict[str, Shard] = {}
    damaged: list[CheckpointError] = []
    for file in index.files:
        try:
            shards[file] = _open_shard(folder, file, stack)
        except CheckpointError as error:
            damaged.append(error)
    if len(damaged) == 1:
        raise damaged[0]
    if damaged:
        problems = [error.message for error in damaged]
        raise refused(folder.path, f"unusable shards:\n{capped(problems)}\n", "whole files", problems=problems)
    return shards
