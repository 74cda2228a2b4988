"""`verify`: compare any folder that this library writes with the checksums from when it was written.

Decides the kind of folder: a model, the checkpoints of a training run, the finished parts of an output file. The
expected checksums are read in `checksums`, or from the sealed manifest or record of a run.
"""

from __future__ import annotations

import os
from pathlib import Path

from flodl.errors import CheckpointError
from flodl_hf.checkpoints.weights.checksums import Comparison, FileState, compare_files, compare_folder, has_truth

__all__ = ["verify"]

MANIFEST = "manifest.json"
PARTS = ".parts"


def verify(folder: str | os.PathLike[str]) -> list[Comparison]:
    """Return the state of a folder's files: one comparison, or one for each checkpoint of a run.

    Nothing is loaded and nothing written; neither torch's weights nor transformers are needed.

    Args:
        folder: an export, the folder of a fine-tuned model, a snapshot in the Hub's cache, a checkpoint or the folder
            of a run's checkpoints, or the ``.parts`` folder of an output file.

    Raises:
        CheckpointError: the folder does not exist, or no expected checksums exist.
    """
    place = Path(folder)
    if not place.is_dir():
        raise CheckpointError(
            f"{place}: {'is a file' if place.exists() else 'does not exist'}; expected a folder. Give the folder "
            "of the files",
            path=str(place),
            problems=["not a folder"],
        )
    if has_truth(place):
        return [compare_folder(place)]
    if place.name.endswith(PARTS) and (place / MANIFEST).exists():
        return [_parts(place)]
    if (place / MANIFEST).exists():
        return [_checkpoint(place)]
    from flodl.train.saving.reading import list_checkpoints

    checkpoints = list_checkpoints(place)
    return [_checkpoint(path) for path in checkpoints] if checkpoints else [compare_folder(place)]


def _checkpoint(folder: Path) -> Comparison:
    from flodl.train.saving.reading import read_manifest

    by = "the manifest of a checkpoint"
    try:
        files = read_manifest(folder)["files"]
        listed = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Comparison(str(folder), by, None, [FileState(MANIFEST, "unreadable", str(error), "a sealed manifest")])
    return compare_files(folder, listed, by)


def _parts(folder: Path) -> Comparison:
    from flodl_hf.errors import PredictError
    from flodl_hf.jobs.parts import Parts

    target = folder.with_name(folder.name.removesuffix(PARTS))
    parts = Parts(target, target.suffix.lstrip("."))
    result = Comparison(str(folder), "the records of finished parts")
    try:
        parts.known()
        result.files.append(FileState(MANIFEST, "ok"))
    except PredictError as error:
        result.files.append(FileState(MANIFEST, "unreadable", error.message, "a sealed manifest"))
    for number in parts.numbers():
        data = parts.data_name(number)
        if parts.is_whole(number):
            result.files.append(FileState(data, "ok"))
        else:
            result.files.append(FileState(data, "changed", "other bytes, or a cut record", "the bytes in its record"))
    return result
