"""Open a target from its address: an endpoint over HTTP, a folder, or an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flodl_hf.checkpoints.sentence.routing import WEIGHT_FILES
from flodl_hf.parity.endpoint_checks.folder import FolderTarget
from flodl_hf.parity.endpoint_checks.http import open_http
from flodl_hf.parity.endpoint_checks.targets import Target, TargetError


def open_target(where: str, task: str, labels: Sequence[str], **options: Any) -> Target:
    """Return the target at an address: a URL, a folder of sentence-transformers or transformers, or an ONNX file.

    A folder with an ONNX file and no other weights is that file.

    Args:
        where: ``http://...``, ``https://...``, a folder, or a file that ends in ``.onnx``.
        task: "vectors", "labels" or "ranking".
        labels: labels of the source, in the order of their ids.
        **options: options of `flodl_hf.parity.endpoint_checks.http.open_http`.

    Raises:
        TargetError: the address has no usable target.
    """
    if where.startswith(("http://", "https://")):
        return open_http(where, task, labels, **options)
    place = Path(where).expanduser()
    if (place.suffix == ".onnx" and place.is_file()) or _only_onnx(place):
        from flodl_hf.parity.endpoint_checks.onnx import OnnxTarget

        return OnnxTarget(place, task, labels)
    if place.is_dir():
        return FolderTarget(place, task, labels)
    raise TargetError(
        f"{where}: there is no such folder; expected a folder, an ONNX file, or an address that begins with http:// or "
        "https://",
        status=0,
    )


def _only_onnx(place: Path) -> bool:
    """Return whether a folder has an ONNX file at a usual path, and no other weights."""
    has_onnx = any((place / name).is_file() for name in ("onnx/model.onnx", "model.onnx"))
    return has_onnx and not any((place / name).is_file() for name in WEIGHT_FILES)
