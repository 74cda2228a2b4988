"""``flodl-hf verify``: compare the files of a folder with the checksums from when they were written."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from flodl_hf.cli.options import JSON, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, tell

UNKNOWN = 3


@reporting
@with_parameters((
    argument("folder", str, "DIR", "A model, checkpoints, parts, or a Hub name that is in the cache."),
    option("expect", str, "The fingerprint that the folder must have.", metavar="FINGERPRINT"),
    option("write", bool, "Accept the current files: rewrite checksums.json.", default=False), JSON,
))  # fmt: skip
def command(folder: str, expect: str | None, write: bool, json_output: bool) -> None:
    """Compare every file with the length and SHA-256 recorded when it was written.

    Works on exports and fine-tuned models (checksums.json), on the Hub's cache (names of blobs), on the checkpoints of
    a run and on the finished parts of an output file. Loads nothing and needs no transformers.

    Exit status 0 if every file is unchanged, 1 if one differs, 3 if no expected checksums exist.
    """
    from flodl.errors import CheckpointError
    from flodl_hf.checkpoints.weights.checksums import CHECKSUMS, write_checksums
    from flodl_hf.parity.verifying import verify

    place = _place(folder)
    if write:
        if expect is not None:
            say("give --write or --expect, not both")
            raise typer.Exit(2)
        write_checksums(place)
    try:
        found = verify(place)
    except CheckpointError as error:
        if error.details.get("file") != CHECKSUMS or (place / CHECKSUMS).exists():
            raise
        say(f"{type(error).__name__}: {error}", fg="red")
        if json_output:
            emit_json({"whole": None, "error": type(error).__name__, "message": str(error)})
        raise typer.Exit(UNKNOWN) from None
    other = expect is not None and [comparison.fingerprint for comparison in found] != [expect]
    whole = not other and all(comparison.whole for comparison in found)
    if json_output:
        emit_json({"whole": whole, "expected_fingerprint": expect, "folders": [each.to_dict() for each in found]})
        raise typer.Exit(0 if whole else 1)
    for comparison in found:
        for state in comparison.faults:
            tell(f"FAIL  {os.path.join(comparison.folder, str(state))}")
        count = len(comparison.files)
        tell(f"{comparison.folder}: {count - len(comparison.faults)} of {count} files as {comparison.by} says")
        if comparison.fingerprint:
            tell(f"fingerprint {comparison.fingerprint}")
    if other:
        tell(f"FAIL  the fingerprint is not {expect}")
    tell("as written" if whole else "CHANGED", fg="green" if whole else "red")
    raise typer.Exit(0 if whole else 1)


def _place(folder: str) -> Path:
    """Return the folder of that name, or the cached folder of a Hub name."""
    if os.path.exists(folder) or folder.startswith((".", "/", "~")) or folder.count("/") > 1:
        return Path(os.path.expanduser(folder))
    from flodl_hf.checkpoints.folders import MODEL_FILES
    from flodl_hf.checkpoints.hub.download import resolve_folder

    return resolve_folder(folder, {"local_files_only": True}, MODEL_FILES)[0]
