"""Digests of files in the Hub's cache, which names each file by the digest that the server announced.

A file is read and compared once. Its size and time are stored next to the cached files, and it is read again only if
they differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flodl.files import read_regular, write_atomically
from flodl_hf.checkpoints.hub.request import HubRequest

VERIFIED = "flodl-verified.json"
"""File of a repository's folder in the cache: size and modification time of each verified file, by its digest."""

_MOST = 1 << 24
_CHUNK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def digest_of(path: Path, like: str) -> str:
    """Return the digest of a file: SHA-256 if ``like`` is one, else the SHA-1 that git names its content by."""
    git = len(like) == 40
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False) if git else hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_cached(request: HubRequest, snapshot: Path, names: Iterable[str]) -> None:
    """Compare files of the cache with their digests; files that have no digest in the cache are skipped.

    Raises:
        HubError: the content of a file differs from the server's announcement.
    """
    place = request.storage / VERIFIED
    known: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads(read_regular(place, _MOST))
        known = found if isinstance(found, dict) else {}
    new: dict[str, Any] = {}
    for name in names:
        path = snapshot / name
        blob = path.resolve()
        if not path.is_symlink() or not _DIGEST.fullmatch(blob.name):
            continue
        stat = blob.stat()
        state = [stat.st_size, stat.st_mtime_ns]
        if known.get(blob.name) == state:
            continue
        if (digest := digest_of(blob, blob.name)) != blob.name:
            raise request.error(
                f"{name} in the cache is damaged: digest {digest} instead of {blob.name}",
                f"remove {blob} and download it again: `hf download {request.name} {name}`",
                file=name,
                damaged=str(blob),
                offline=True,
            )
        new[blob.name] = state
    if new:
        with suppress(OSError):  # a read-only cache is verified each time
            write_atomically(place, [json.dumps({**known, **new}).encode()])
