"""The tokenizer files of a folder as bytes, and JSON objects in them, with limits of size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import printable, shown
from flodl.files import POINTER_ADVICE, is_pointer, make_folders, write_atomically
from flodl_hf.checkpoints.folders import TOKENIZER_FILES, read_member
from flodl_hf.errors import ExportError, TokenizerError

if TYPE_CHECKING:
    from flodl_hf.families.schema import FamilyTokenizer

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# The largest tokenizer.json among the supported families (XLM-R, 250,002 pieces) is 17 MB.
MAX_BYTES = 64 * 1024 * 1024


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the contents of a regular file of at most ``limit`` bytes.

    Raises:
        UnsafeFileError: if it is a link that leads out of its folder.
        TokenizerError: if it is missing, not a regular file (reading a pipe would block), too large, or a git-lfs
            pointer.
    """
    data = read_member(path.parent, path.name, limit, TokenizerError)
    if is_pointer(data):
        raise TokenizerError(f"{path}: {POINTER_ADVICE}", path=str(path))
    return data


def read_source(folder: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in ``folder``, with file names as keys."""
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder}: is not a folder; pass the folder that contains the tokenizer files", path=str(folder)
        )
    return {name: read_bytes(folder / name) for name in TOKENIZER_FILES if os.path.lexists(folder / name)}


def vocabulary_file(files: Mapping[str, bytes]) -> str:
    """Return the name of the file among these that a vocabulary is read from."""
    return next((name for name in TOKENIZER_FILES if name in files and name not in _SETTINGS), "tokenizer.json")


def with_settings(files: Mapping[str, bytes], changes: Mapping[str, Any], folder: str) -> dict[str, bytes]:
    """Return tokenizer files with other settings; special tokens are replaced in ``special_tokens_map.json`` as well.

    Args:
        files: contents of the files.
        changes: settings of ``tokenizer_config.json``.
        folder: the folder of the files, for messages.
    """
    found = dict(files)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        stated = parse_json(files[name], f"{folder}/{name}") if name in files else {}
        here = changes if name == "tokenizer_config.json" else {key: changes[key] for key in changes.keys() & stated}
        if here:
            found[name] = json.dumps({**stated, **here}, indent=2, ensure_ascii=False).encode()
    return found


def decode_text(data: bytes, path: str) -> str:
    """Return the text in ``data``.

    Raises:
        TokenizerError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path}: byte {error.start} is not UTF-8; expected UTF-8 text; save the file so, or fetch it again",
            where=path,
        ) from error


def parse_json(data: bytes, path: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in ``data``; ``pairs`` makes the value of an object from its keys and values.

    Raises:
        TokenizerError: if it is not UTF-8, not JSON, nested too deeply, or not an object.
    """
    text = decode_text(data, path)
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise TokenizerError(
            f"{path}: not valid JSON: {printable(reason)}; expected an object; fetch the file again",
            where=path,
            reason=reason,
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(
            f"{path}: found a JSON {type(value).__name__}, expected an object; fetch the file again",
            where=path,
        )
    return value


def wrong_value(path: str, key: str, value: Any, expected: str, hint: str = "") -> TokenizerError:
    """Return the error of a setting with an invalid value; the message has a hint after the expected values."""
    text = f"{path}: {key} is {shown(value, 60)}, expected {expected}{hint}; correct the file"
    return TokenizerError(text, where=path, field=key, found=value, expected=expected)


def write_files(files: Mapping[str, bytes], folder: Path) -> tuple[str, ...]:
    """Write ``files`` into ``folder``, each under a temporary name that is then renamed; return their paths.

    Raises:
        ExportError: the folder cannot be made, or a file not be written; the others are as they were, or whole.
    """
    try:
        make_folders(folder)
        for name, data in files.items():
            write_atomically(folder / name, [data])
    except OSError as error:
        at = f" at {error.filename}" if error.filename else ""
        raise ExportError(
            f"{folder}: cannot be written: {error.strerror or error}{at}; expected to write the tokenizer's "
            "files; each is whole, the old one or the new. Free some space, or check that the folder may be written, "
            "and save again",
            path=str(folder),
            problems=[str(error)],
            errno=error.errno,
        ) from error
    return tuple(str(folder / name) for name in files)


@dataclass(frozen=True, slots=True)
class Source:
    """Files, settings and rules of a tokenizer that is built or read.

    Attributes:
        files: contents of the files.
        folder: the folder of the files, for messages.
        settings: ``tokenizer_config.json``.
        mapped: ``special_tokens_map.json``.
        added: ``added_tokens.json``.
        rules: of the tokenizer class, or of the model's family.
        tokens: special tokens by role; defaults of the class are included where a tokenizer is built.
        rows: rows of the model's word table, if known.
    """

    files: Mapping[str, bytes]
    folder: str
    settings: Mapping[str, Any]
    mapped: Mapping[str, Any]
    added: Mapping[str, Any]
    rules: FamilyTokenizer
    tokens: Mapping[str, str]
    rows: int | None = None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean setting, the default if it is absent or null."""
        value = self.settings.get(name)
        return default if value is None else bool(value)
