"""From an address to what can be asked there: an endpoint over HTTP, or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flodl_hf.endpoints.folder import FolderTarget
from flodl_hf.endpoints.http import open_http
from flodl_hf.endpoints.targets import Target, TargetError

__all__ = ["open_target"]


def open_target(where: str, task: str, labels: Sequence[str], **options: Any) -> Target:
    """Return what stands at an address: a URL, or a folder of sentence-transformers or transformers.

    Args:
        where: ``http://...``, ``https://...`` or a folder.
        task: "vectors", "labels" or "ranking".
        labels: of the source, in the order of their ids.
        **options: of `flodl_hf.endpoints.http.open_http`.

    Raises:
        TargetError: there is nothing that can be asked.
    """
    if where.startswith(("http://", "https://")):
        return open_http(where, task, labels, **options)
    place = Path(where).expanduser()
    if place.is_dir():
        return FolderTarget(place, task, labels)
    raise TargetError(
        f"{where}: there is no such folder; expected a folder, or an address that begins with http:// or https://",
        status=0,
    )
