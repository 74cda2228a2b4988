"""A checked request for files of a repository of the Hub, and the errors for its failures.

The classes of huggingface_hub and of the HTTP libraries below it vary: errors are identified by the names of their
classes and by the response status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flodl.errors import FlodlError, printable
from flodl_hf.checkpoints.hub.timeouts import LEAST_RATE
from flodl_hf.errors import HubError

__all__ = ["HubRequest", "explain", "is_unreachable", "reason"]


@dataclass(frozen=True, slots=True)
class HubRequest:
    """A checked request for files of a repository.

    Attributes:
        modules: maps a folder with the small files of sentence-transformers to its module folders, and
            whether each has a transformer; None if not needed.
        weights: weight files named by a configuration, if none of the usual names exist.
    """

    name: str
    revision: str
    subfolder: str
    token: str | bool | None
    cache: Path
    files: tuple[str, ...]
    modules: Callable[[Path], Mapping[str, bool]] | None = None
    weights: tuple[str, ...] = ()

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        return self.cache / f"models--{self.name.replace('/', '--')}"

    def error(self, found: str, remedy: str, **details: Any) -> HubError:
        """Return an error with the repository, the finding, and the remedy."""
        where = self.name if self.revision == "main" else f"{self.name}@{self.revision}"
        # A name without an owner may be the folder of the examples.
        demo = "" if "/" in self.name else ". To try the library offline, `flodl-hf demo` writes the folder demo-model"
        return HubError(f"{where}: {found}; {remedy}{demo}", name=self.name, revision=self.revision, **details)


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


def is_unreachable(error: BaseException) -> bool:
    """Return whether the server was unreachable or could not answer; the HTTP library's classes vary."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status == 429
    links = [link for link in _chain(error) if not isinstance(link, FlodlError)]  # a HubError is an OSError, too
    names = {kind.__name__ for link in links for kind in type(link).__mro__}
    return bool(names & {"ConnectionError", "TimeoutError", "TransportError", "OSError", "RequestException"})


def reason(error: BaseException) -> str:
    """Return in a few words why a server was unreachable."""
    status = _status(error)
    if status is not None:
        return f"it answers {status}"
    text = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__, 160)


def explain(request: HubRequest, cause: BaseException, filename: str | None = None) -> NoReturn:
    """Raise the ``HubError`` that explains a failure of huggingface_hub."""
    names = {kind.__name__ for link in _chain(cause) for kind in type(link).__mro__}
    what = f"{filename}: " if filename else ""
    status = next((s for s in map(_status, _chain(cause)) if s is not None), None)
    login = "log in with `hf auth login`, set HF_TOKEN, or pass token="
    if "GatedRepoError" in names:
        error = request.error(
            f"{what}access is granted on request only", f"request access on the model's page, then {login}"
        )
    elif "RevisionNotFoundError" in names:
        error = request.error(
            "the repository has no such revision", "expected a branch, tag or commit of it: check the name"
        )
    elif status in (401, 403) and "RepositoryNotFoundError" not in names:
        error = request.error(f"{what}access is refused ({status}), expected a token that may read it", login)
    elif "RepositoryNotFoundError" in names:
        error = request.error(
            f"{what}no such repository, or a private one that this token may not see",
            f"expected 'owner/name': check the spelling; for a private repository {login}",
        )
    elif isinstance(cause, TimeoutError) and status is None:
        error = request.error(
            f"{what}the server sends too slowly ({cause}), expected at least {LEAST_RATE >> 10} KiB a second",
            "try again; on a very slow line set HF_HUB_DOWNLOAD_TIMEOUT to more seconds, or pass a folder",
        )
    elif "EntryNotFoundError" in names and "LocalEntryNotFoundError" not in names:
        error = request.error(
            f"{what}no such file in the repository", "expected one of its files: check name and subfolder"
        )
    elif "HFValidationError" in names:
        error = request.error(f"{what}not a valid name", "expected 'owner/name': correct it")
    elif "FileMetadataError" in names or isinstance(cause, (ValueError, KeyError, TypeError)):
        error = request.error(
            f"{what}the server's answer is no Hub answer ({reason(cause)}), expected one", "check HF_ENDPOINT"
        )
    elif "OSError" in names and getattr(cause, "errno", None) in (28, 30, 13):
        error = request.error(
            f"{what}the cache {request.cache} cannot be written ({reason(cause)})",
            "expected a folder to write into: free space, or name another one with cache_dir or HF_HOME",
        )
    else:
        error = request.error(
            f"{what}the download failed ({reason(cause)}), expected the file as the Hub announces it"
            if filename
            else f"the question for its files failed ({reason(cause)}), expected a list of them",
            "try again; with the files at hand, pass their folder, or local_files_only=True if they are cached",
        )
    raise HubError(error.message, **{**error.details, "status": status}) from cause
