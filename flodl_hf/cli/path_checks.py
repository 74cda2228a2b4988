"""Check local paths of a command line before slow imports."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from flodl.errors import DataError, printable
from flodl_hf.checkpoints.folders import expect_file, expect_writable
from flodl_hf.checkpoints.hub.download import expect_place

MODEL, ROWS, FILE, FOLDER, TEXTS = "model", "rows", "file", "folder", "texts"

_LONGEST_NAME = 4096

PLACES: Mapping[str, Mapping[str, str]] = {
    "prediction": {"model": MODEL, "text": TEXTS, "source": ROWS, "out": FILE},
    "encode": {"model": MODEL, "source": ROWS, "out": FILE},
    "search": {"model": MODEL, "query": TEXTS, "corpus": ROWS, "vectors": ROWS},
    "mine": {"model": MODEL, "source": ROWS, "corpus": ROWS, "out": FILE},
    "training": {"model": MODEL, "train": ROWS, "eval": ROWS, "out": FOLDER},
    "evaluation": {"model": MODEL, "data": ROWS},
    "inspect": {"model": MODEL},
    "export": {"out": FOLDER},
    "convert": {"model": MODEL, "out": FOLDER},
    "merge": {"base": MODEL, "adapter": MODEL, "out": FOLDER},
}
"""Of each command, what its parameters name: a model, a file of rows, a file or a folder that is written, or texts.

"training" is what finetune's command line and recipe contain together, "prediction" and "evaluation" the arguments of
those commands after they were checked against each other. `serve` looks at its models by itself.
"""


def check_places(command: str, arguments: Mapping[str, Any]) -> None:
    """Refuse missing paths and outputs that cannot be written; without reading files or using the network.

    Args:
        command: a name of `PLACES`; other commands are not checked.
        arguments: the command's arguments, by parameter.

    Raises:
        HubError: a model is a path that does not exist.
        DataError: a file of rows is absent, an output cannot be written, or a text is the name of a file.
    """
    for name, kind in PLACES.get(command, {}).items():
        value = arguments.get(name)
        if kind == TEXTS:
            _expect_texts(value or ())
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or os.fspath(value) == "-":
            continue
        if kind == MODEL:
            expect_place(value)
        elif kind == ROWS:
            expect_file(value)
        elif kind == FOLDER or os.path.isdir(os.path.dirname(os.path.abspath(value))):
            expect_writable(value)
        else:
            raise DataError(f"{value}: its folder does not exist; make it first", path=str(value))


def _expect_texts(texts: Iterable[str]) -> None:
    for text in texts:
        if len(text) < _LONGEST_NAME and "\0" not in text and os.path.isfile(text):
            raise DataError(
                f"{printable(text, 400)}: found the name of a file, expected a text. To predict from its rows, use "
                f"--in {shlex.quote(text)} --out FILE; each line of standard input is a text, whatever it contains.",
                path=text,
            )
