"""`Checkpoint`: an open folder of weights, with every header checked before a tensor is read.

Decides which of the known layouts a folder has, and which one is read of several: transformers' choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from torch import Tensor

from flodl.errors import CheckpointError, capped, nearest, printable
from flodl_hf.checkpoints.folders import BIN, BIN_INDEX, SAFETENSORS, SAFETENSORS_INDEX, Folder, inside
from flodl_hf.checkpoints.weights.manifest import (
    INDEX_LIMIT,
    Layout,
    Shard,
    ShardIndex,
    SourceManifest,
    StoredTensor,
    check_shards,
    parse_index,
)
from flodl_hf.errors import MissingWeightsError

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
                chosen = _index_in(opened, leaf, SAFETENSORS) if leaf.endswith(".index.json") else leaf
                passed_over = ""
            if isinstance(chosen, str):
                index, shards = None, {chosen: _open_shard(opened, chosen, stack)}
            else:
                index, shards = chosen, _open_shards(opened, chosen, stack)
                try:
                    contents = {name: list(shard.entries) for name, shard in shards.items()}
                    check_shards(index, contents, str(opened.path / index.name))
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            problems += [printable(name) for name in missing[50:]]
            raise CheckpointError(
                f"{self.manifest.folder}: contains no tensors with these names:\n{capped(problems)}\n"
                f"expected names of its {len(known)} tensors; see manifest.tensors",
                path=str(self.manifest.folder),
                problems=problems,
                missing=missing,
            )
        result: dict[str, Tensor] = {}
        for shard in self._shards.values():
            if found := [name for name in shard.entries if name in wanted]:
                result.update(zip(found, shard.read(found, mapped=mapped), strict=True))
        return result


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
            index = _index_in(folder, index_name, single)
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
    found = sorted(entry.name for entry in folder.path.iterdir())
    names = [name for kind in kinds for name in kind]
    raise MissingWeightsError(
        f"{folder.path}: has no {'.bin ' if bin_only else ''}weights; expected {', '.join(names[:-1])} "
        f"or {names[-1]}; found {', '.join(map(printable, found[:12])) or 'an empty folder'}; {_remedy(found, names)}",
        path=str(folder.path),
        problems=["no weights"],
    )


def _index_in(folder: Folder, name: str, single: str) -> ShardIndex:
    """Return the index of this name, of files of the kind of ``single``."""
    where = str(folder.path / name)
    index = parse_index(folder.read(name, INDEX_LIMIT), name, where)
    suffix = single.rpartition(".")[2]
    foreign = [file for file in index.files if not file.endswith(f".{suffix}")]
    if foreign:
        raise CheckpointError(
            f"{where}: lists files of another kind:\n{capped([printable(f) for f in foreign])}\n"
            f"expected names that end in .{suffix}; fetch the folder again",
            path=where,
            problems=[f"{printable(file)}: not a .{suffix} file" for file in foreign],
        )
    return index


def _passed_over(single: str, other: str) -> str:
    return f"{single} is read, as by transformers; {other}, is ignored: delete the stale files"


def _remedy(present: Sequence[str], wanted: Sequence[str]) -> str:
    """Return what to do where a folder with these files has no weights under the names that are wanted."""
    if SAFETENSORS not in wanted and {SAFETENSORS, SAFETENSORS_INDEX} & set(present):
        return "its weights are safetensors already, so there is nothing to convert"
    kept = [name for name in present if name.endswith(".safetensors") and not name.startswith("adapter_")]
    shards = [name for name in kept if re.search(r"-\d+-of-\d+\.", name)]
    if shards:
        return f"{printable(shards[0])} is one of several shards: fetch the index too, which lists the tensors of each"
    if len(kept) == 1:
        return f"if {printable(kept[0])} contains them, rename it to {SAFETENSORS}"
    return "give the folder with the weights, or complete the download"


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
        raise CheckpointError(
            f"{folder.path / index.name}: {len(missing)} of {len(index.files)} shards are missing:\n"
            f"{capped(missing)}\nexpected them in the folder of the index; complete the download",
            path=str(folder.path / index.name),
            problems=[f"{file}: missing" for file in missing],
            missing=missing,
        )
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
        raise type(damaged[0])(
            f"{folder.path}: {len(damaged)} of {len(index.files)} shards cannot be used:\n"
            f"{capped([error.message for error in damaged])}",
            path=str(folder.path),
            problems=[error.message for error in damaged],
        )
    return shards
