"""Requests to the Hub: errors for their failures, limits of time, tokens for one server, model cards and uploads.

The classes of huggingface_hub and of the HTTP libraries below it vary: errors are identified by the names of their
classes and by the response status.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from flodl.errors import FlodlError, printable
from flodl_hf.errors import HubError


@dataclass(frozen=True, slots=True)
class HubRequest:
    """A checked request for files of a repository.

    Attributes:
        modules: files of the module folders of sentence-transformers are requested too.
        weights: weight files named by a configuration, if none of the usual names exist.
    """

    name: str
    revision: str
    subfolder: str
    token: str | bool | None
    cache: Path
    files: tuple[str, ...]
    modules: bool = False
    weights: tuple[str, ...] = ()

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        return self.cache / f"models--{self.name.replace('/', '--')}"

    @property
    def prefix(self) -> str:
        """What the names of files in the subfolder begin with."""
        return f"{self.subfolder}/" if self.subfolder else ""

    def inside(self, names: Iterable[str]) -> list[str]:
        """Return the names of files in the subfolder, relative to it."""
        return [name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix)]

    def error(self, problem: str, remedy: str, **details: Any) -> HubError:
        """Return an error with the repository, the finding, and the remedy."""
        where = self.name if self.revision == "main" else f"{self.name}@{self.revision}"
        # A name without an owner may be the folder of the examples.
        demo = "" if "/" in self.name else ". To try the library offline, `flodl-hf demo` writes the folder demo-model"
        return HubError(f"{where}: {problem}; {remedy}{demo}", name=self.name, revision=self.revision, **details)

    def no_hub(self, problem: str, **details: Any) -> HubError:
        """Return the error for an answer that the Hub does not give."""
        return self.error(problem, "check HF_ENDPOINT: this is no Hub", **details)


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


_LOGIN = "log in with `hf auth login`, set HF_TOKEN, or pass token="
_FAILURES = {
    "GatedRepoError": ("access is granted on request only", f"request access on the model's page, then {_LOGIN}"),
    "RevisionNotFoundError": (
        "the repository has no such revision", "expected a branch, tag or commit of it: check the name",
    ),
    "RepositoryNotFoundError": (
        "no such repository, or a private one that this token may not see",
        f"expected 'owner/name': check the spelling; for a private repository {_LOGIN}",
    ),
    "EntryNotFoundError": ("no such file in the repository", "expected one of its files: check name and subfolder"),
    "HFValidationError": ("not a valid name", "expected 'owner/name': correct it"),
}  # fmt: skip


def explain(request: HubRequest, cause: BaseException, filename: str | None = None) -> NoReturn:
    """Raise the ``HubError`` that explains a failure of huggingface_hub."""
    names = {kind.__name__ for link in _chain(cause) for kind in type(link).__mro__}
    status = next((s for s in map(_status, _chain(cause)) if s is not None), None)
    known = next((name for name in _FAILURES if name in names), None)
    if known == "EntryNotFoundError" and "LocalEntryNotFoundError" in names:
        known = None
    if known is not None and (status not in (401, 403) or known != "EntryNotFoundError"):
        found, remedy = _FAILURES[known]
    elif status in (401, 403):
        found, remedy = f"access is refused ({status}), expected a token that may read it", _LOGIN
    elif isinstance(cause, TimeoutError) and status is None:
        found = f"the server sends too slowly ({cause}), expected at least {LEAST_RATE >> 10} KiB a second"
        remedy = "try again; on a slow line set HF_HUB_DOWNLOAD_TIMEOUT to more seconds"
    elif "FileMetadataError" in names or isinstance(cause, (ValueError, KeyError, TypeError)):
        found = f"the server's answer is no Hub answer ({reason(cause)}), expected one"
        remedy = "check HF_ENDPOINT"
    elif "OSError" in names and getattr(cause, "errno", None) in (28, 30, 13):
        found = f"the cache {request.cache} cannot be written ({reason(cause)})"
        remedy = "free space, or name another folder with cache_dir or HF_HOME"
    else:
        found = f"the request failed ({reason(cause)}), expected the files as the Hub announces them"
        remedy = "try again; or pass a folder, or local_files_only=True for cached files"
    what = f"{filename}: " if filename and known != "RevisionNotFoundError" else ""
    raise request.error(what + found, remedy, status=status) from cause


R = TypeVar("R")

LEAST_RATE = 16 << 10
"""Bytes a second below which a download is given up."""
CHUNK = 12 << 20
"""Bytes that may have arrived and are not in a file yet."""


def within(act: Callable[[], R], allowed_s: Callable[[], float]) -> R:
    """Return or raise the result of a call.

    Args:
        act: the call; after a timeout it continues in its thread until it ends or the process does.
        allowed_s: seconds that it may take by current knowledge; evaluated repeatedly while it runs.

    Raises:
        TimeoutError: it took longer.
    """
    done: Future[R] = Future()

    def call() -> None:
        try:
            done.set_result(act())
        except BaseException as fault:
            done.set_exception(fault)

    began = monotonic()
    Thread(target=copy_context().run, args=(call,), name="flodl-hub", daemon=True).start()
    while True:
        try:
            return done.result(min(0.5, max(0.01, began + allowed_s() - monotonic())))
        except TimeoutError:
            if done.done():  # with its result, or a TimeoutError of its own
                return done.result()
            if monotonic() - began > allowed_s():
                raise TimeoutError(f"nothing whole within {monotonic() - began:.0f} s") from None


def time_for(size: int | None, folder: Path, pause_s: float) -> Callable[[], float]:
    """Return a function of the seconds allowed for a file; longer as more bytes arrive.

    Args:
        size: of the file in bytes; None where it is not known.
        folder: folder of partial files.
        pause_s: maximum pause without any bytes.
    """
    before = arrived(folder)

    def allowed_s() -> float:
        # What others fetch into the folder counts too: this download may wait for theirs.
        due = arrived(folder) - before + CHUNK
        return pause_s + (due if size is None else min(due, size)) / LEAST_RATE

    return allowed_s


def arrived(folder: Path) -> int:
    """Return the bytes of files in a folder that are still arriving."""
    total = 0
    for path in folder.glob("*.incomplete"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


_PORTS = {"http": 80, "https": 443}
_home: ContextVar[str | None] = ContextVar("flodl_hf_token_home", default=None)
_bound: Counter[tuple[str, str]] = Counter()
_lock = Lock()


def same_origin(url: str, other: str) -> bool:
    """Return whether two addresses are of one host, port and scheme."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme.lower(), (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:  # no port that there could be: of no server
        return "", url, None


@contextmanager
def token_for_one_host(endpoint: str, authorization: str | None = None) -> Iterator[None]:
    """Restrict the Hub client's tokens to one server, within this context and its copies.

    Args:
        endpoint: its address.
        authorization: a header sent only to that server meanwhile, also in threads started by the client.
    """
    from huggingface_hub import utils

    # Where a connection fails, huggingface_hub closes its client and has its factory make another for the next try.
    http: Any = getattr(utils, "_http", None)
    factory = getattr(http, "_GLOBAL_CLIENT_FACTORY", None)
    if factory is not None and not hasattr(factory, "guarded"):
        http._GLOBAL_CLIENT_FACTORY = made = partial(lambda factory: _guarded(factory()), factory)
        made.guarded = True  # type: ignore[attr-defined]
    _guarded(utils.get_session())
    before = _home.set(endpoint)
    key = (authorization or "", endpoint)
    with _lock:
        _bound[key] += 1
    try:
        yield
    finally:
        _home.reset(before)
        with _lock:
            _bound[key] -= 1
            if not _bound[key]:
                del _bound[key]


def _guarded(client: Any) -> Any:
    # The client of older releases has no such hooks, and drops tokens by itself where host or port change.
    hooks = getattr(client, "event_hooks", None)
    if hooks is not None and _without_token not in hooks["request"]:
        client.event_hooks = {**hooks, "request": [*hooks["request"], _without_token]}
    return client


def _without_token(request: Any) -> None:
    """Remove the token from a request to another host."""
    found = request.headers.get("authorization")
    if not found:
        return
    home = _home.get()
    with _lock:
        homes = [home] if home is not None else [place for header, place in _bound if header == found]
    if homes and not any(same_origin(str(request.url), place) for place in homes):
        del request.headers["authorization"]


def hub_name(name: str) -> str | None:
    """Return the repository that a model was named by, without its revision; None for a folder or a model in memory."""
    if name.count("/") != 1 or Path(name).exists() or name.startswith((".", "/", "~")):
        return None
    return name.partition("@")[0]


LONGEST = 1000
MOST_READ = 1 << 20  # larger files are not model cards


def front_matter(folder: Path) -> Mapping[str, Any]:
    """Return the metadata at the top of the card in a folder; empty without a readable card."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    path = Path(folder) / "README.md"
    try:
        readable = path.is_file() and path.stat().st_size <= MOST_READ
        stated = metadata_load(path) if readable else None
    except (OSError, ValueError, YAMLError):
        return {}
    clean = {k: v for k, v in stated.items() if isinstance(k, str)} if isinstance(stated, Mapping) else {}
    return {name: value for name, value in clean.items() if len(str(value)) <= LONGEST}


def card_file(card: str | Path | None, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``README.md`` with metadata at its top; values that the card contains already are kept.

    Args:
        card: a file or the text of a card; None for a card of metadata only.
        metadata: values by the Hub's names; None and empty values are left out.
    """
    from huggingface_hub import ModelCard

    text = card.read_text("utf-8") if isinstance(card, Path) else card
    found = ModelCard(text or "---\n{}\n---\n", ignore_metadata_errors=True)
    for name, value in metadata.items():
        if value and not found.data.get(name):
            found.data[name] = value
    return {"README.md": str(found).encode()}


def results_file(results: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the file of evaluation results of benchmark data sets, as the Hub reads it; nothing without results.

    Args:
        results: for each result the fields of ``huggingface_hub.EvalResultEntry``: ``dataset_id``, ``task_id`` and
            ``value``, and perhaps ``dataset_revision``, a commit of the data set.

    Raises:
        HubError: a result has another field, lacks one, or its ``dataset_revision`` is not a commit.
    """
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = []
    for result in results:
        revision = result.get("dataset_revision")
        if revision is not None and not re.fullmatch(r"[0-9a-f]{40}", str(revision)):
            raise HubError(
                f"push_to_hub: found dataset_revision={revision!r}, expected the 40 hexadecimal digits of a commit. "
                "Branches and tags may change."
            )
        try:
            entries.append(EvalResultEntry(**result))
        except (TypeError, ValueError) as fault:
            raise HubError(
                f"push_to_hub: found the result {dict(result)} ({fault}), expected dataset_id, task_id and value"
            ) from None
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    return {".eval_results/flodl-hf.yaml": text.encode()} if entries else {}


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    message: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Make the repository if need be, put the files of a folder into it in one commit, and return its address.

    Args:
        folder: the files.
        repo_id: "owner/name".
        message: of the commit.
        private: whether a new repository is.
        token: Hub token; None takes the environment's.
        revision: branch; None is the main one.
        create_pr: open a pull request instead.

    Raises:
        HubError: the Hub cannot be reached or refuses.
    """
    import os

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers

    # The environment now, not as it was when the client was imported.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        with token_for_one_host(api.endpoint, build_hf_headers(token=token).get("authorization")):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            done: Any = api.upload_folder(
                repo_id=repo_id, folder_path=str(folder), commit_message=message, revision=revision, create_pr=create_pr
            )
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as fault:
        why = f": {fault.__cause__}" if isinstance(fault, RuntimeError) and fault.__cause__ else ""  # of one file
        raise HubError(
            f"{repo_id}: nothing was uploaded ({type(fault).__name__}: {fault}{why}); check the name, and that the "
            "token may write there (hf auth login, or HF_TOKEN)",
            repo_id=repo_id,
        ) from fault
    return str(done.pr_url if create_pr and done.pr_url else done.commit_url)
