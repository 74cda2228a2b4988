"""A name becomes a folder of files: a local folder as it is, or a repository of the Hub through its cache.

Decides: valid names, checks after a download, and the conditions for working offline. Others decide which
files are fetched (`flodl_hf.checkpoints.hub.choosing`) and their meaning. Environment variables (``HF_HOME``,
``HF_HUB_CACHE``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``) are the ones of huggingface_hub, which is
imported only when a repository has to be looked up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

from flodl.errors import FlodlError, capped, nearest, printable
from flodl.files import read_regular
from flodl_hf.checkpoints.folders import MODEL_FILES, local_folder, matching, refused
from flodl_hf.checkpoints.hub.choosing import (
    WEIGHTS,
    check_cached,
    config_telling,
    lacking,
    named_weights,
    select,
    select_modules,
)
from flodl_hf.checkpoints.hub.request import (
    HubRequest,
    explain,
    is_unreachable,
    reason,
    same_origin,
    time_for,
    token_for_one_host,
    within,
)
from flodl_hf.checkpoints.weights.checksums import digest_of
from flodl_hf.errors import HubError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95})?")
_ADDRESS = re.compile(rf"https?://(huggingface\.co|hf\.co)/(?P<name>{_NAME.pattern})(/.*)?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,255}")
_SUBFOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,127}(/[A-Za-z0-9_][A-Za-z0-9_. -]{0,127})*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[A-Za-z0-9_.:=+-]{1,200}")

# Without a network the caller should know within seconds; huggingface_hub's own retries take half a minute.
_TIMEOUT_S = 5.0
_PAUSES = 6  # of a time limit for one read, until a server that sends drop by drop is given up


@dataclass(frozen=True, slots=True)
class Resolved:
    """A folder of files and its origin.

    Attributes:
        folder: the folder to read.
        name: ``"owner/name"``, or ``None`` for a local folder.
        revision: the requested branch, tag or commit, or ``None`` for a local folder.
        commit: the commit of the files, or ``None`` for a local folder.
    """

    folder: Path
    name: str | None = None
    revision: str | None = None
    commit: str | None = None


def resolve_folder(
    name_or_path: str | os.PathLike[str], hub: Mapping[str, Any], files: Sequence[str]
) -> tuple[Path, str | None]:
    """Return the local folder behind a name, and the Hub commit it was resolved to.

    A folder that exists is used without a request, and without an import of the Hub client.

    Args:
        name_or_path: a folder, or a repository of the Hub.
        hub: keyword arguments of `resolve`: ``subfolder``, ``revision`` and others.
        files: patterns of the requested files, relative to the subfolder.

    Raises:
        HubError: as of `resolve`.
    """
    path = local_folder(name_or_path)
    if path is not None and not hub.get("subfolder"):
        return path, None
    resolved = resolve(name_or_path, files=files, modules=True, **hub)
    return resolved.folder, resolved.commit


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    files: Sequence[str] = MODEL_FILES,
    modules: bool = False,
) -> Resolved:
    """Return the folder that holds the files of ``name_or_path``, fetching what is missing.

    A folder that exists wins over a repository of the same name. A commit (40 hexadecimal digits) that is complete in
    the cache is used without a request to the Hub.

    Args:
        name_or_path: folder, ``"owner/name"`` or ``"owner/name@revision"``.
        revision: branch, tag or commit; ``"main"`` if not given.
        subfolder: folder inside the folder or repository.
        token: access token; ``None`` takes the one that is logged in, ``False`` takes none.
        cache_dir: where downloads are kept, by default as huggingface_hub has it.
        local_files_only: open no network connection.
        files: patterns of the requested files, relative to ``subfolder``; ``"model.safetensors"``
            stands for the weights, in one file or many.
        modules: whether files in the folders of modules, which ``modules.json`` names, are requested too.

    Raises:
        HubError: the name is malformed or not found, access is refused, the network is
            needed and absent, or a downloaded file differs from the Hub's announcement.
    """
    path = expect_place(name_or_path)
    if path is not None:
        return _local(path, subfolder, revision)
    text = os.fspath(name_or_path)
    if subfolder and not _plain(subfolder, _SUBFOLDER):
        expected = "names separated by '/', relative and without '..'; give a folder of the repository"
        raise refused("subfolder", f"found {printable(subfolder)}", expected, kind=HubError, name=text)
    name, wanted = _repository(text, revision)
    from huggingface_hub import constants

    request = HubRequest(
        name=name,
        revision=wanted,
        subfolder=subfolder,
        token=token,
        cache=Path(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE).expanduser(),
        files=tuple(files),
        modules=modules,
    )
    if local_files_only or constants.HF_HUB_OFFLINE:
        why = "local_files_only is set" if local_files_only else "HF_HUB_OFFLINE is set"
        return _from_cache(request, why)
    if _COMMIT.fullmatch(wanted):
        try:
            return _from_cache(request, "")
        except HubError as fault:
            if "damaged" in fault.details:
                _forget(Path(fault.details["damaged"]), request.storage)
    with token_for_one_host(constants.ENDPOINT):
        return _from_hub(request)


def expect_place(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Return the local path for a name, None for a repository of the Hub; without network access.

    Raises:
        HubError: it is a URL, a path that does not exist, or neither text nor a path.
    """
    text = os.fspath(name_or_path) if isinstance(name_or_path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or any(ord(char) < 32 or ord(char) == 127 for char in text):
        found = "an empty name" if text == "" else "no valid name"
        what = printable(str(name_or_path))
        raise refused(what, found, "a folder, 'owner/name' or 'owner/name@revision'", kind=HubError, name=text or "")
    path = Path(os.path.expanduser(text))
    try:
        if path.exists():
            return path
    except OSError:
        pass
    expected = "a folder that exists, or a repository as 'owner/name'"
    if "://" in text:
        meant = _ADDRESS.fullmatch(text)
        todo = f"; pass {meant['name']!r}" if meant else "; download it, and pass its folder"
        raise refused(text[:400], "an address", expected + todo, kind=HubError, name=text)
    if isinstance(name_or_path, os.PathLike) or text.startswith((".", "/", "~", "\\")) or text.count("/") > 1:
        raise refused(text[:400], f"no such folder{_alike(text)}", expected, kind=HubError, name=text)
    return None


def _repository(text: str, revision: str | None) -> tuple[str, str]:
    """Return the repository and the revision.

    Raises:
        HubError: one of them is malformed, or two revisions are requested.
    """
    name, at, stated = text.partition("@")
    wanted = stated if at else revision or "main"
    if not _plain(name, _NAME):
        found = "neither a folder that exists nor a repository name"
        expected = "'owner/name', each part at most 96 letters, digits, '-', '_' and '.'"
        raise refused(printable(text), found, expected, kind=HubError, name=name)
    if not _plain(wanted, _REVISION) or (at and revision not in (None, stated)):
        found = f"revision {printable(wanted)}" + (f" and revision={revision!r}" if at and revision else "")
        expected = "the name of one branch, tag or commit"
        raise refused(name, found, expected, kind=HubError, name=name, revision=wanted)
    return name, wanted


def _plain(text: str, grammar: re.Pattern[str]) -> bool:
    return grammar.fullmatch(text) is not None and ".." not in text and not text.endswith((".git", "/"))


def _local(path: Path, subfolder: str, revision: str | None) -> Resolved:
    folder = path / subfolder
    if revision not in (None, "main"):
        found, expected = f"a local path has no revision {revision!r}", "none, or the name of a repository"
    elif not os.path.isdir(folder):  # Path.is_dir raises for a name that no folder can have
        found, expected = f"is a file, or has no folder {subfolder!r}", "the folder of config.json and the weights"
    elif not folder.resolve().is_relative_to(path.resolve()):
        found, expected = f"the folder {subfolder!r} leads out of it", "a folder inside"
    else:
        return Resolved(folder)
    raise refused(path, found, expected, kind=HubError, name=str(path), revision=revision)


def _alike(path: str) -> str:
    """Return ``", did you mean 'x'?"`` for the sibling folder with the name nearest to a missing one."""
    beside, name = os.path.split(path.rstrip("/"))
    with suppress(OSError), os.scandir(beside or ".") as entries:
        return nearest(name, [entry.name for entry in entries if entry.is_dir()])
    return ""


# From the cache


def _from_cache(request: HubRequest, why: str) -> Resolved:
    """Return the cached files; ``why`` explains in errors why the network is not used."""
    remedy = (
        f"expected it in the cache. Download it once with a network: `hf download {request.name}"
        + (f" --revision {request.revision}" if request.revision != "main" else "")
        + f"`, or pass a folder. No folder here has this name{_alike(request.name)}"
    )
    commit = request.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = read_regular(request.storage / "refs" / request.revision, 1 << 10).decode("ascii").strip()
        except (OSError, ValueError):
            commit = ""
    snapshot = request.storage / "snapshots" / commit
    folder = snapshot / request.subfolder
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        raise request.error(f"not in the cache {request.cache}, and {why}", remedy, offline=True)
    present = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if WEIGHTS in request.files:
        missing = lacking(request, folder, present)
        if missing:
            raise request.error(
                f"in the cache without {capped(missing, 5, '').replace(chr(10), ', ')}, and {why}",
                remedy,
                offline=True,
                missing=missing,
            )
    elif not (matching(present, request.files) or (request.modules and "modules.json" in present)):
        raise request.error(f"in the cache without any of {', '.join(request.files)}, and {why}", remedy, offline=True)
    names = [request.prefix + name for name in present]
    wanted = replace(request, weights=named_weights(folder, present))
    check_cached(request, snapshot, {*select(wanted, names), *select_modules(wanted, names, folder)})
    return Resolved(folder, request.name, request.revision, commit)


# From the Hub


def _from_hub(request: HubRequest) -> Resolved:
    from huggingface_hub import HfApi

    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _TIMEOUT_S)
    ask = partial(HfApi(token=request.token).model_info, request.name, revision=request.revision, timeout=timeout)
    try:
        info = within(partial(ask, files_metadata=True), lambda: _PAUSES * timeout)
    except FlodlError:
        raise
    except Exception as cause:
        if is_unreachable(cause):
            return _from_cache(request, f"the Hub cannot be reached ({reason(cause)})")
        explain(request, cause)
    commit = info.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise request.no_hub(
            f"the server answered with commit {printable(str(commit))}, expected 40 hexadecimal digits"
        )
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or () if isinstance(sibling.rfilename, str)}
    snapshot = request.storage / "snapshots" / commit
    folder = snapshot / request.subfolder
    telling = config_telling(request, siblings)
    if telling:
        _bring(request, commit, telling, siblings)
        request = replace(request, weights=named_weights(folder, request.inside(siblings)))
    chosen = select(request, siblings)
    if not chosen:
        listed = capped(sorted(siblings), 10)
        raise request.error(
            f"none of {', '.join(request.files)} is present; it contains\n{listed}\n",
            "check the name and subfolder",
        )
    _bring(request, commit, [name for name in chosen if name not in telling], siblings)
    # The files of module folders are known once the small files that name them are present.
    more = [name for name in select_modules(request, siblings, folder) if name not in set(chosen)]
    _bring(request, commit, more, siblings)
    if request.revision != commit:
        # The revision can then be found offline; a read-only cache still serves this load.
        ref = request.storage / "refs" / request.revision
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            # Some file systems of caches have no locks.
            beside = ref.with_name(f"{ref.name}.{os.getpid()}.{get_ident()}")
            try:
                beside.write_text(commit, "ascii")
                beside.replace(ref)
            finally:
                beside.unlink(missing_ok=True)
    return Resolved(folder, request.name, request.revision, commit)


def _bring(request: HubRequest, commit: str, names: Sequence[str], siblings: Mapping[str, Any]) -> None:
    """Have files in the cache, and each as the Hub announced it."""
    from huggingface_hub import constants

    snapshot = request.storage / "snapshots" / commit
    pause = _PAUSES * float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    for filename in names:
        _check_announced(request, filename, siblings[filename])
    for filename in names:
        target = snapshot / filename
        cached = target.is_file()
        for attempt in (0, 1):
            # A file that differs from the Hub's announcement is fetched once more before an error is raised.
            fetch = partial(_fetch, request, filename, commit, cached=cached, again=attempt == 1)
            try:
                within(fetch, time_for(siblings[filename].size, request.storage / "blobs", pause))
                fault = _fault(target, siblings[filename], check_bytes=not cached or attempt == 1)
            except FlodlError:
                raise
            except Exception as cause:
                explain(request, cause, filename)
            if fault is None:
                break
        else:
            _forget(target, request.storage)
            raise request.error(
                f"{filename} arrived damaged: {fault}",
                f"try again; if it stays so, a proxy or mirror alters the file, or {target} has to be removed",
                file=filename,
            )


def _check_announced(request: HubRequest, filename: str, announced: Any) -> None:
    """Refuse a file with an invalid length or digest before anything is fetched."""
    size, digest, blob = announced.size, getattr(announced.lfs, "sha256", "0" * 64), announced.blob_id
    sound = size is None or (type(size) is int and size >= 0)
    sound = sound and isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest) is not None
    if not sound or not isinstance(blob, str | None):
        found = printable(f"{size!r}, {digest!r}, {blob!r}", 160)
        raise request.no_hub(f"{filename}: the server announces {found}, expected length and digests", file=filename)


def _fetch(request: HubRequest, filename: str, commit: str, *, cached: bool, again: bool) -> None:
    """Fetch a file into the cache with huggingface_hub.

    huggingface_hub names files of the cache by server responses: a name with a path outside is refused before.

    Raises:
        HubError: the server returns such a name, or another commit, or redirects a token elsewhere.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    if not cached or again:
        url = hf_hub_url(request.name, filename, revision=commit)
        said = get_hf_file_metadata(url, token=request.token, timeout=_TIMEOUT_S)
        etag, fault = said.etag, ""
        if etag is not None and (_ETAG.fullmatch(etag) is None or ".." in etag):
            fault = f"answered with ETag {printable(str(etag), 160)}, expected a digest"
        elif said.commit_hash not in (None, commit):
            fault = f"answered with commit {printable(str(said.commit_hash), 160)}, expected {commit}"
        # Where a key for the store of large files is fetched, with the token.
        keys_at = getattr(getattr(said, "xet_file_data", None), "refresh_route", None)
        if not fault and keys_at is not None and not same_origin(str(keys_at), constants.ENDPOINT):
            at = printable(str(keys_at), 160)
            fault = f"sends the token to {at}, expected an address of {constants.ENDPOINT}"
        if fault:
            raise request.no_hub(f"{filename}: the server {fault}", file=filename)
    hf_hub_download(
        request.name, filename, revision=commit, cache_dir=request.cache, token=request.token, force_download=again
    )


def _fault(path: Path, announced: Any, check_bytes: bool) -> str | None:
    """Return how a file differs from the Hub's announcement, or ``None``."""
    if not path.is_file():
        return "no file in the cache instead of one"
    size = path.stat().st_size
    if announced.size is not None and size != announced.size:
        return f"{size} bytes instead of {announced.size}"
    if not check_bytes:
        return None
    # Large files are named by SHA-256; small ones are stored in git, which uses its own digest.
    expected = announced.blob_id if announced.lfs is None else announced.lfs.sha256
    if announced.lfs is None and not (expected and _COMMIT.fullmatch(expected)):
        return None
    digest = digest_of(path, git=len(expected) == 40)
    return None if digest == expected else f"digest {digest} instead of {expected}"


def _forget(path: Path, storage: Path) -> None:
    """Remove a damaged file from the cache: the link, and its target if that is in the cache too."""
    with suppress(OSError, RuntimeError):
        blob = path.resolve()
        if blob.is_relative_to(storage.resolve()):
            blob.unlink(missing_ok=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)
