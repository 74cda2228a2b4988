"""What ``flodl-hf encode``, ``search`` and ``mine`` share: a model that makes vectors, and texts of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flodl.errors import DataError
from flodl_hf.cli.shared import device_said
from flodl_hf.errors import PredictError

Encode = Callable[..., Any]
"""From texts to vectors, ``(texts, width)``, a numpy array; takes the keywords of ``encode``, and as
``kind`` "query" or "document", which selects the route if the folder has one."""


def check_target(path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a file that could not be written, before a model is loaded.

    Raises:
        DataError: its suffix names no format, or its folder does not exist.
    """
    if path.suffix.lower() not in suffixes:
        raise DataError(
            f"{path}: the suffix {path.suffix or '(none)'!r} names no format; expected {', '.join(suffixes)}"
        )
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder; expected a file" if path.is_dir() else "its folder does not exist; make it first"
        raise DataError(f"{path}: {what}")


def encoder(model: str, options: dict[str, Any]) -> Encode:
    """Return a function from texts to vectors with truncation, using the folder's settings.

    Args:
        model: the model.
        options: values of `flodl_hf.cli.options.ENCODER`, which are removed.

    Raises:
        PredictError: the model cannot make vectors.
    """
    from flodl_hf.heads.base import BaseModel

    device, precision = device_said(options.pop("device")), options.pop("precision")
    loading = {name: options.pop(name) for name in ("revision", "local_files_only")}
    found = BaseModel.from_pretrained(model, **loading, device=device)
    if found.tokenizer is None:
        raise PredictError(f"{model}: has no tokenizer, so texts cannot become vectors; add its files to the folder")
    run: dict[str, Any] = {} if precision is None else {"precision": precision}

    routes = () if found.sentence_recipe is None else found.sentence_recipe.routes

    def encode(texts: Sequence[str], kind: str | None = None, **how: Any) -> Any:
        how |= {"route": kind} if kind in routes else {}
        return found.encode(texts, convert_to_tensor=True, store="float32", **run, **how).float().cpu().numpy()

    return encode


def texts_of(path: str, column: str | None) -> list[str]:
    """Return the texts of a file; each line of plain text is one, so that vectors of the file fit.

    Raises:
        DataError: no column of texts is identified.
    """
    from flodl_hf.tokenization.readers.columns import NAMES, column_names
    from flodl_hf.tokenization.readers.files import read_rows

    rows = list(read_rows(path, blank_lines=True))
    if not rows:
        raise DataError(f"{path}: has no rows; expected some, each with a text", rows=0)
    names = column_names(rows[:1])
    known = [name for name in names if name.lower() in NAMES["text"]]
    if column is None:
        texts = [name for name in names if isinstance(rows[0][name], str)]
        column = known[0] if known else texts[0] if len(texts) == 1 else None
    if column is None or column not in rows[0]:
        raise DataError(
            f"{path}: found several columns: {names}. Select the texts with --text-column NAME", names=names
        )
    wrong = [i for i, row in enumerate(rows) if not isinstance(row.get(column), str)]
    if wrong:
        raise DataError(f"{path}: row {wrong[0]} has no text in column {column!r}; expected a text in each", rows=wrong)
    return [row[column] for row in rows]
