"""`Checkpoint`: an open folder of weights, with every header checked before a tensor is read.

Decides which of the known layouts a folder has, and which one is read of several: transformers' choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from flodl.errors import CheckpointError, capped, nearest, printable
from flodl_hf.checkpoints.weights.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_LIMIT,
    Layout,
    ShardIndex,
    SourceManifest,
    StoredTensor,
    check_shards,
    parse_index,
)
from flodl_hf.checkpoints.weights.checkpoint.safe_open import Folder, inside
from flodl_hf.checkpoints.weights.checkpoint.shard import SafetensorsShard, Shard
from flodl_hf.errors import MissingWeightsError

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


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
        allow_pickle_free_bin: bool = True,
        layout: Literal["safetensors", "safetensors-index", "bin"] | None = None,
        named: str | None = None,
    ) -> Checkpoint:
        """Return the checkpoint in ``folder``, its headers read and checked.

        Safetensors files are preferred to ``.bin`` files, and a single file to an index with shards, as transformers
        prefers them. If shards are ignored for this reason, the manifest reports it (``passed_over``): one of the two
        is stale, and nothing in the folder identifies which.

        Args:
            folder: contains ``model.safetensors``, or ``model.safetensors.index.json`` and its shards, or the
                same with ``pytorch_model.bin``.
            allow_pickle_free_bin: read ``.bin`` files, by a reader that executes nothing; otherwise they are
                refused.
            layout: take this layout where several are present.
            named: the file to read in place of the usual ones: a ``.safetensors`` file, or an index whose name ends
                in ``.index.json``, in the folder or in one below it.

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
                chosen, passed_over = _choose(opened, layout, allow_pickle_free_bin)
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
            manifest = _manifest(opened, shards, index, passed_over)
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

    def read(self, name: str) -> Tensor:
        """Return a copy of the tensor ``name`` in its stored dtype, on the CPU.

        Raises:
            CheckpointError: there is no such tensor, or its file was cut since it was opened.
        """
        return self._shards[self._stored(name).file].read([name])[0]

    def read_into(self, name: str, tensor: Tensor, *, cast: bool = False) -> None:
        """Copy the tensor ``name`` into ``tensor``, on any device.

        Args:
            name: the stored name.
            tensor: of the stored shape; its dtype must be the stored one unless ``cast`` is set.
            cast: convert to the dtype of ``tensor``.

        Raises:
            CheckpointError: no such tensor, another shape, another dtype without ``cast``, or a cut file.
        """
        stored = self._stored(name)
        problems: list[str] = []
        if tuple(tensor.shape) != stored.shape:
            problems.append(f"shape {list(stored.shape)} in the file, {list(tensor.shape)} given")
        if not cast and DTYPE_NAMES.get(tensor.dtype) != stored.dtype:
            problems.append(f"dtype {stored.dtype} in the file, {tensor.dtype} given; set cast=True to convert")
        if problems:
            raise CheckpointError(
                f"{self.manifest.folder / stored.file}: {printable(name)} does not fit: "
                f"{'; '.join(problems)}; "
                f"give a tensor like the stored one",
                path=str(self.manifest.folder / stored.file),
                problems=problems,
            )
        direct = (
            tensor.device.type == "cpu" and tensor.is_contiguous() and DTYPE_NAMES.get(tensor.dtype) == stored.dtype
        )
        if direct:
            self._shards[stored.file].read_into(name, tensor)
        else:
            with torch.no_grad():
                tensor.copy_(self.read(name))

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
        result: dict[str, Tensor] = {}
        for file, wanted in self._in_file_order(names):
            result.update(zip(wanted, self._shards[file].read(wanted, mapped=mapped), strict=True))
        return result

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` for ``names`` (all by default), one at a time, in file order.

        Raises:
            CheckpointError: unknown names (before the first tensor), or a file cut since it was opened.
        """
        for file, wanted in self._in_file_order(names):
            for name in wanted:
                yield name, self._shards[file].read([name])[0]

    def _stored(self, name: str) -> StoredTensor:
        self._require([name])
        return self.manifest.tensors[name]

    def _require(self, names: Iterable[str]) -> None:
        known = self.manifest.tensors
        missing = [name for name in names if name not in known]
        if missing:
            problems = [f"{printable(name)}{nearest(name, known)}" for name in missing[:50]]
            problems += [printable(name) for name in missing[50:]]
            raise CheckpointError(
                f"{self.manifest.folder}: contains no tensors with these names:\n{capped(problems)}\n"
                f"expected names of its {len(known)} tensors; see manifest.tensors",
                path=str(self.manifest.folder),
                problems=problems,
                missing=missing,
            )

    def _in_file_order(self, names: Iterable[str] | None) -> Iterator[tuple[str, list[str]]]:
        known = self.manifest.tensors
        if names is None:
            wanted = set(known)
        else:
            wanted = set(names)
            self._require(sorted(wanted))
        groups: dict[str, list[str]] = {}
        for name, stored in known.items():
            if name in wanted:
                groups.setdefault(stored.file, []).append(name)
        yield from groups.items()


def _choose(folder: Folder, layout: str | None, allow_bin: bool) -> tuple[str | ShardIndex, str]:
    """Return the single file to read or the parsed index, and a description of ignored weights."""
    for single, index_name, kinds in (
        (SAFETENSORS, SAFETENSORS_INDEX, ("safetensors", "safetensors-index")),
        (BIN, BIN_INDEX, ("bin",)),
    ):
        if layout is not None and layout not in kinds:
            continue
        has_single = folder.has(single) and layout != "safetensors-index"
        has_index = folder.has(index_name) and layout != "safetensors"
        if not has_single and not has_index:
            continue
        if single == BIN and not allow_bin:
            raise CheckpointError(
                f"{folder.path}: found only {BIN if has_single else BIN_INDEX}, expected safetensors files; "
                f"run `flodl-hf convert` on the folder once, or allow .bin files",
                path=str(folder.path / (BIN if has_single else BIN_INDEX)),
                problems=["only .bin weights"],
            )
        if not has_index:
            return single, ""
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
    wanted = {None: (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX), "bin": (BIN, BIN_INDEX)}
    names = wanted.get(layout, (SAFETENSORS, SAFETENSORS_INDEX))
    raise MissingWeightsError(
        f"{folder.path}: has no {'' if layout is None else f'.{layout} '}weights; expected {', '.join(names[:-1])} "
        f"or {names[-1]}; found {', '.join(map(printable, found[:12])) or 'an empty folder'}; {_remedy(found, names)}",
        path=str(folder.path),
        problems=["no weights"],
    )


def _index_in(folder: Folder, name: str, single: str) -> ShardIndex:
    """Return the index of this name, of files of the kind of ``single``."""
    where = str(folder.path / name)
    index = parse_index(folder.read_text(name, INDEX_LIMIT), name, where)
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


def _remedy(found: Sequence[str], wanted: Sequence[str]) -> str:
    """Return what to do where a folder with these files has no weights under the names that are wanted."""
    if SAFETENSORS not in wanted and {SAFETENSORS, SAFETENSORS_INDEX} & set(found):
        return "its weights are safetensors already, so there is nothing to convert"
    kept = [name for name in found if name.endswith(".safetensors") and not name.startswith("adapter_")]
    shards = [name for name in kept if re.search(r"-\d+-of-\d+\.", name)]
    if shards:
        return f"{printable(shards[0])} is one of several shards: fetch the index too, which lists the tensors of each"
    if len(kept) == 1:
        return f"if {printable(kept[0])} contains them, rename it to {SAFETENSORS}"
    return "give the folder with the weights, or complete the download"


def _open_shard(folder: Folder, name: str, stack: ExitStack) -> Shard:
    descriptor = folder.open(name)
    where = str(folder.path / name)
    if name.endswith(".bin"):
        from flodl_hf.checkpoints.weights.restricted_unpickler.shard import BinShard

        shard: Shard = BinShard(descriptor, name, where)
    else:
        shard = SafetensorsShard(descriptor, name, where)
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


def _manifest(
    folder: Folder, shards: Mapping[str, Shard], index: ShardIndex | None, passed_over: str
) -> SourceManifest:
    layouts: dict[tuple[bool, bool], Layout] = {
        (False, False): "single", (True, False): "sharded", (False, True): "bin", (True, True): "bin-sharded",
    }  # fmt: skip
    tensors: dict[str, StoredTensor] = {}
    ties: dict[str, str] = {}
    for file, shard in shards.items():
        for position, (name, (dtype, shape)) in enumerate(shard.entries.items()):
            tensors[name] = StoredTensor(name, dtype, shape, file, position)
        ties.update(shard.ties)
    return SourceManifest(
        folder=folder.path,
        layout=layouts[index is not None, any(file.endswith(".bin") for file in shards)],
        files=tuple(shard.file for shard in shards.values()),
        tensors=tensors,
        metadata={file: dict(shard.metadata) for file, shard in shards.items()},
        index_name=index.name if index else None,
        index_text=index.text if index else None,
        index_metadata=dict(index.metadata) if index else {},
        ties=ties,
        passed_over=passed_over,
    )


def place(
    targets: Mapping[str, Tensor],
    source: Checkpoint,
    rename: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mapped: bool = False,
) -> dict[str, Tensor]:
    """Return the new tensor of each target.

    A target on the ``meta`` device only states a shape and is *given* a tensor read from the file, in the
    stored dtype; hand the result to ``load_state_dict(..., assign=True)``. A target that has memory is filled
    in place and returned itself. Targets with one source (ties) are given one and the same tensor.

    Args:
        targets: our name to the tensor or meta tensor that waits there.
        source: the opened checkpoint.
        rename: our name to the stored name; names that are not in it are stored unchanged.
        dtype: convert floating-point tensors to this dtype; None keeps the stored dtype.
        device: the device of tensors for meta targets; the CPU by default.
        mapped: map the file for meta targets if nothing is converted or moved, see
            `Checkpoint.read_all` for the conditions.

    Raises:
        CheckpointError: before anything is read or written, with all ``problems``: names that the file lacks,
            shapes that differ, filled targets of another dtype than the stored and the requested one.
    """
    names = {target: (rename or {}).get(target, target) for target in targets}
    problems = [p for target, name in names.items() if (p := _misfit(target, targets[target], name, source, dtype))]
    if problems:
        raise CheckpointError(
            f"{source.manifest.folder}: {len(problems)} of {len(targets)} tensors cannot be placed:\n"
            f"{capped(problems)}\nexpected one stored tensor of the same shape for each; "
            f"check that config and weights belong together",
            path=str(source.manifest.folder),
            problems=problems,
        )
    given = [target for target, tensor in targets.items() if tensor.is_meta]
    stored = dict.fromkeys(names[target] for target in given)
    moves = device is not None and torch.device(device).type != "cpu"
    casts = any(_cast(source, name, dtype) is not None for name in stored)
    ready: dict[str, Tensor] = {}
    if moves or casts:
        # One at a time: the stored and the converted copy of only one tensor are alive together.
        for name, tensor in source.tensors(stored):
            ready[name] = tensor.to(device=device, dtype=_cast(source, name, dtype))
    else:
        ready = source.read_all(stored, mapped=mapped)
    result: dict[str, Tensor] = {}
    for target, tensor in targets.items():
        if tensor.is_meta:
            result[target] = ready[names[target]]
        else:
            source.read_into(names[target], tensor, cast=True)
            result[target] = tensor
    return result


def _cast(source: Checkpoint, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to convert ``name`` to, None when it stays as stored."""
    stored = DTYPES[source.manifest.tensors[name].dtype]
    return dtype if dtype is not None and stored.is_floating_point and stored != dtype else None


def _misfit(target: str, tensor: Tensor, name: str, source: Checkpoint, dtype: torch.dtype | None) -> str | None:
    stored = source.manifest.tensors.get(name)
    label = target if target == name else f"{target} (stored as {printable(name)})"
    if stored is None:
        return f"{label}: missing{nearest(name, source.manifest.tensors)}"
    if stored.shape != tuple(tensor.shape):
        return f"{label}: shape {list(stored.shape)} in the file, {list(tensor.shape)} in the model"
    asked = _cast(source, name, dtype)
    if not tensor.is_meta and DTYPE_NAMES.get(tensor.dtype) != stored.dtype and tensor.dtype != asked:
        return f"{label}: dtype {stored.dtype} in the file, {tensor.dtype} in the model; pass dtype="
    return None
