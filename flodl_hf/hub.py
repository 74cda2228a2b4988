"""A name becomes a folder of files: a local folder as it is, or a repository of the Hub through its cache.

Decides: what a valid name is, which files of a repository are fetched, what is checked after a download, and
when no network is touched. Leaves to others: what the files mean. Environment variables (``HF_HOME``,
``HF_HUB_CACHE``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``) are those of huggingface_hub, which only
this file imports, and only when a repository has to be looked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from flodl.errors import FlodlError, capped, printable
from flodl.files import read_regular
from flodl_hf.errors import HubError

__all__ = ["CHECKPOINT_FILES", "Resolved", "resolve"]

_WEIGHTS = "model.safetensors"

_OTHER_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".pt", ".ot")

# Which files a checkpoint is made of. "model.safetensors" stands for the weights in whatever parts they come.
CHECKPOINT_FILES = (
    "config.json",
    _WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spm.model",
    "spiece.model",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,255}")
_SUBFOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,127}(/[A-Za-z0-9_][A-Za-z0-9_. -]{0,127})*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

# Without a network the caller should know within seconds; huggingface_hub's own retries take half a minute.
_TIMEOUT_S = 5.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Resolved:
    """A folder of files and where it came from.

    Attributes:
        folder: the folder to read.
        name: ``"owner/name"``, or ``None`` for a local folder.
        revision: the branch, tag or commit that was asked for, or ``None`` for a local folder.
        commit: the commit whose files these are, or ``None`` for a local folder.
    """

    folder: Path
    name: str | None = None
    revision: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """A checked request for files of a repository."""

    name: str
    revision: str
    subfolder: str
    token: str | bool | None
    cache: Path
    files: tuple[str, ...]

    @property
    def storage(self) -> Path:
        return self.cache / f"models--{self.name.replace('/', '--')}"

    def error(self, found: str, remedy: str, **details: Any) -> HubError:
        where = self.name if self.revision == "main" else f"{self.name}@{self.revision}"
        return HubError(f"{where}: {found}; {remedy}", name=self.name, revision=self.revision, **details)


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    files: Sequence[str] = CHECKPOINT_FILES,
) -> Resolved:
    """Return the folder that holds the files of ``name_or_path``, fetching what is missing.

    A folder that exists wins over a repository of the same name. A commit (40 hexadecimal digits) that is in
    the cache whole is used without asking the Hub.

    Args:
        name_or_path: folder, ``"owner/name"`` or ``"owner/name@revision"``.
        revision: branch, tag or commit; ``"main"`` if not given.
        subfolder: folder inside the folder or repository.
        token: access token; ``None`` takes the one that is logged in, ``False`` takes none.
        cache_dir: where downloads are kept, by default as huggingface_hub has it.
        local_files_only: open no network connection.
        files: patterns of the files that are wanted, relative to ``subfolder``; ``"model.safetensors"``
            stands for the weights, in one file or many.

    Raises:
        HubError: if the name is malformed, nothing of that name is found, access is refused, the network is
            needed and absent, or a downloaded file is not what the Hub announced.
    """
    text = os.fspath(name_or_path)
    if not isinstance(text, str) or not text or any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise HubError(
            f"{printable(str(text))}: not a name; pass a folder, 'owner/name' or 'owner/name@revision'", name=str(text)
        )
    if subfolder and not _plain(subfolder, _SUBFOLDER):
        raise HubError(
            f"subfolder {printable(subfolder)}: expected names separated by '/', relative and without '..'",
            name=text,
            subfolder=subfolder,
        )
    path = Path(os.path.expanduser(text))
    try:
        exists = path.exists()
    except OSError:
        exists = False
    if exists:
        return _local(path, subfolder, revision)
    if isinstance(name_or_path, os.PathLike) or text.startswith((".", "/", "~", "\\")) or text.count("/") > 1:
        raise HubError(f"{text[:400]}: no such folder; check the path, or pass a repository as 'owner/name'", name=text)
    name, at, stated = text.partition("@")
    if at and revision is not None and revision != stated:
        raise HubError(
            f"{text}: the name asks for revision {stated!r} and the argument for {revision!r}; give one of them",
            name=name,
            revision=revision,
        )
    wanted = stated if at else revision or "main"
    if not _plain(name, _NAME):
        raise HubError(
            f"{printable(text)}: neither a folder that exists nor a repository name; a repository is "
            "'owner/name', "
            "each part at most 96 letters, digits, '-', '_' and '.'",
            name=name,
        )
    if not _plain(wanted, _REVISION):
        raise HubError(
            f"{name}: revision {printable(wanted)} is not a branch, tag or commit name; correct it",
            name=name,
            revision=wanted,
        )
    from huggingface_hub import constants

    request = _Request(
        name=name,
        revision=wanted,
        subfolder=subfolder,
        token=token,
        cache=Path(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE).expanduser(),
        files=tuple(files),
    )
    if local_files_only or constants.HF_HUB_OFFLINE:
        why = "local_files_only is set" if local_files_only else "HF_HUB_OFFLINE is set"
        return _from_cache(request, why)
    if _COMMIT.fullmatch(wanted):
        try:
            return _from_cache(request, "")
        except HubError:
            pass
    return _from_hub(request)


def _plain(text: str, grammar: re.Pattern[str]) -> bool:
    return grammar.fullmatch(text) is not None and ".." not in text and not text.endswith((".git", "/"))


def _local(path: Path, subfolder: str, revision: str | None) -> Resolved:
    if not path.is_dir():
        raise HubError(f"{path}: is a file; pass the folder that holds config.json and the weights", name=str(path))
    if revision not in (None, "main"):
        raise HubError(
            f"{path}: a local folder has no revision {revision!r}; leave revision out, or pass a repository name",
            name=str(path),
            revision=revision,
        )
    folder = path / subfolder if subfolder else path
    if not folder.is_dir():
        raise HubError(f"{path}: has no folder {subfolder!r}; check subfolder", name=str(path), subfolder=subfolder)
    return Resolved(folder)


# Which files


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _weights(names: Iterable[str]) -> list[str]:
    """Return the weight files among ``names``: one safetensors file, else shards, else ``.bin`` files."""
    present = set(names)
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if f"{stem}.{suffix}" in present:
            return [f"{stem}.{suffix}"]
        index = f"{stem}.{suffix}.index.json"
        if index in present:
            return [index, *sorted(name for name in present if _matches(name, f"{stem}-*-of-*.{suffix}"))]
    return []


def _select(request: _Request, names: Iterable[str]) -> list[str]:
    """Return which of a repository's files are wanted, with their subfolder.

    Raises:
        HubError: if weights are wanted and there are none that can be read.
    """
    prefix = f"{request.subfolder}/" if request.subfolder else ""
    inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    chosen = {name for name in inside if any(_matches(name, pattern) for pattern in request.files)}
    if _WEIGHTS in request.files:
        weights = _weights(inside)
        if not weights:
            others = sorted(name for name in inside if re.search(r"\.(safetensors|bin|h5|msgpack|onnx|pt|ot)$", name))
            raise request.error(
                f"no {_WEIGHTS}, {_WEIGHTS}.index.json or pytorch_model.bin"
                + (f" in {request.subfolder}/" if request.subfolder else "")
                + (f"; other weight files are\n{capped(others, 8)}\n" if others else ""),
                "set subfolder, choose a repository with PyTorch weights, or make model.safetensors from "
                "a local "
                "file with `flodl-hf convert`",
                others=others,
            )
        chosen |= set(weights)
    return [prefix + name for name in sorted(chosen)]


# From the cache


def _from_cache(request: _Request, why: str) -> Resolved:
    """Return the cached files; ``why`` tells in errors that, and why, the network is not asked."""
    remedy = (
        f"download it once with a network: `hf download {request.name}"
        + (f" --revision {request.revision}" if request.revision != "main" else "")
        + "`, or pass a folder"
    )
    commit = request.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (request.storage / "refs" / request.revision).read_text("ascii").strip()
        except (OSError, ValueError):
            commit = ""
    snapshot = request.storage / "snapshots" / commit
    folder = snapshot / request.subfolder if request.subfolder else snapshot
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        raise request.error(f"not in the cache {request.cache}, and {why}", remedy, offline=True)
    present = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if _WEIGHTS in request.files:
        missing = _missing_weights(folder, present)
        if missing:
            raise request.error(
                f"in the cache without {capped(missing, 5, '').replace(chr(10), ', ')}, and {why}",
                remedy,
                offline=True,
                missing=missing,
            )
    elif not any(_matches(name, pattern) for name in present for pattern in request.files):
        raise request.error(f"in the cache without any of {', '.join(request.files)}, and {why}", remedy, offline=True)
    return Resolved(folder, request.name, request.revision, commit)


def _missing_weights(folder: Path, present: Sequence[str]) -> list[str]:
    weights = _weights(present)
    if not weights:
        return [_WEIGHTS]
    if not weights[0].endswith(".index.json"):
        return []
    return sorted(_shards(folder / weights[0]) - set(present))


def _shards(index: Path) -> set[str]:
    """Return the names of the shards that an index lists; what is wrong with it is the reader's to say."""
    try:
        names = set(json.loads(read_regular(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in names if isinstance(name, str) and _SHARD.fullmatch(name)}


# From the Hub


def _from_hub(request: _Request) -> Resolved:
    from huggingface_hub import HfApi, hf_hub_download

    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _TIMEOUT_S)
    try:
        info = HfApi(token=request.token).model_info(
            request.name, revision=request.revision, timeout=timeout, files_metadata=True
        )
    except FlodlError:
        raise
    except Exception as cause:
        if _is_unreachable(cause):
            return _from_cache(request, f"the Hub cannot be reached ({_reason(cause)})")
        _explain(request, cause)
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise request.error(f"the server answered with commit {printable(commit)}", "check HF_ENDPOINT: this is no Hub")
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    wanted = _select(request, siblings)
    if not wanted:
        listed = capped(sorted(siblings), 10)
        raise request.error(
            f"none of {', '.join(request.files)} is there; it holds\n{listed}\n",
            "check the name and subfolder",
        )
    snapshot = request.storage / "snapshots" / commit
    for filename in wanted:
        target = snapshot / filename
        cached = target.is_file()
        for attempt in (0, 1):
            # A file that is not what the Hub announces is fetched once more before giving up.
            try:
                hf_hub_download(
                    request.name,
                    filename,
                    revision=commit,
                    cache_dir=request.cache,
                    token=request.token,
                    force_download=attempt == 1,
                )
            except Exception as cause:
                _explain(request, cause, filename)
            fault = _fault(target, siblings[filename], check_bytes=not cached or attempt == 1)
            if fault is None:
                break
        else:
            _forget(target)
            raise request.error(
                f"{filename} arrived damaged: {fault}",
                "try again; if it stays so, a proxy or mirror alters the file",
                file=filename,
            )
    if request.revision != commit:
        _remember(request, commit)
    folder = snapshot / request.subfolder if request.subfolder else snapshot
    return Resolved(folder, request.name, request.revision, commit)


def _fault(path: Path, announced: Any, check_bytes: bool) -> str | None:
    """Return how a file differs from what the Hub announced, or ``None``."""
    size = path.stat().st_size
    if announced.size is not None and size != announced.size:
        return f"{size} bytes instead of {announced.size}"
    if not check_bytes:
        return None
    if announced.lfs is not None:
        expected, digest = announced.lfs.sha256, hashlib.sha256()
    elif announced.blob_id and _COMMIT.fullmatch(announced.blob_id):
        # Small files are stored in git, which names them by this digest of a header and the contents.
        expected, digest = announced.blob_id, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        return None
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return None if digest.hexdigest() == expected else f"digest {digest.hexdigest()} instead of {expected}"


def _forget(path: Path) -> None:
    """Remove a damaged file from the cache: the link and what it points to."""
    for target in (path.resolve(), path):
        target.unlink(missing_ok=True)


def _remember(request: _Request, commit: str) -> None:
    """Note in the cache which commit the revision stands for, so that it can be found offline."""
    ref = request.storage / "refs" / request.revision
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        beside = ref.with_name(f"{ref.name}.{os.getpid()}")
        beside.write_text(commit, "ascii")
        beside.replace(ref)
    except OSError:
        # A read-only cache still serves this load.
        return


# What went wrong


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _is_unreachable(error: BaseException) -> bool:
    """Return whether the server could not be asked, or could not answer; the HTTP library's classes vary."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status == 429
    names = {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}
    return bool(names & {"ConnectionError", "TimeoutError", "TransportError", "OSError", "RequestException"})


def _reason(error: BaseException) -> str:
    status = _status(error)
    if status is not None:
        return f"it answers {status}"
    text = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__, 160)


def _explain(request: _Request, cause: BaseException, filename: str | None = None) -> NoReturn:
    """Raise the ``HubError`` that says what a failure of huggingface_hub means."""
    names = {kind.__name__ for link in _chain(cause) for kind in type(link).__mro__}
    what = f"{filename}: " if filename else ""
    status = next((s for s in map(_status, _chain(cause)) if s is not None), None)
    login = "log in with `hf auth login`, set HF_TOKEN, or pass token="
    if "GatedRepoError" in names:
        error = request.error(f"{what}access is granted on request", f"ask for it on the model's page, then {login}")
    elif "RevisionNotFoundError" in names:
        error = request.error("the repository has no such revision", "check the branch, tag or commit")
    elif status in (401, 403) and "RepositoryNotFoundError" not in names:
        error = request.error(f"{what}access is refused ({status})", login)
    elif "RepositoryNotFoundError" in names:
        error = request.error(
            "no such repository, or a private one that this token may not see",
            f"check the spelling; for a private repository {login}",
        )
    elif "EntryNotFoundError" in names and "LocalEntryNotFoundError" not in names:
        error = request.error(f"{what}no such file in the repository", "check the name and subfolder")
    elif "HFValidationError" in names:
        error = request.error(f"{what}not a valid name", "a repository is 'owner/name'")
    elif "FileMetadataError" in names or isinstance(cause, (ValueError, KeyError, TypeError)):
        error = request.error(f"{what}the server's answer is no Hub answer ({_reason(cause)})", "check HF_ENDPOINT")
    elif "OSError" in names and getattr(cause, "errno", None) in (28, 30, 13):
        error = request.error(
            f"{what}the cache {request.cache} cannot be written ({_reason(cause)})",
            "free space, or name another one with cache_dir or HF_HOME",
        )
    else:
        error = request.error(
            f"{what}the download failed ({_reason(cause)})",
            "try again; with the files at hand, pass their folder, or local_files_only=True if they are cached",
        )
    raise HubError(error.message, **{**error.details, "status": status}) from cause
