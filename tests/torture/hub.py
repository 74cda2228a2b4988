"""Suite ``hub``: a Hub that lies, drips, falls silent or sends elsewhere, its cache damaged, and names that are none.

The server stands on the loopback interface. Right is the model to the bit; after every refusal the same call is made
again of a server that is well, with the cache as the refused one left it, and has to be right then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from tests.torture import library
from tests.torture.case import Case, Fault, Grade, Kind, Verdict, dealt, right, silent
from tests.torture.checkpoints import checkpoint
from tests.torture.comparing import IDS, Seen, same_as, undamaged
from tests.torture.damage import BYTE_DAMAGE, ENTRIES, ESCAPES, VALUES, damaged_bytes, put_entry
from tests.torture.judging import judge
from tests.torture.loopback import COMMIT, REPOSITORY, Hub, listing_of

__all__ = ["NAME", "cases", "prepare", "run"]

NAME = "hub"
HEAD = "sequence_classification"
TOKEN = "hf_a_token_of_the_machine"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
TIMEOUT_S = 1.0
"""For one read; a call is given up after six of them and the time that its bytes may take."""


@cache
def files() -> Mapping[str, bytes]:
    """Return the repository's files."""
    return checkpoint("bert", HEAD, 1)


# --- damage -----------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, _number: int) -> Fault:
    return Fault()


def _body(random: Random, number: int) -> Fault:
    """Other bytes than the Hub announced."""
    at = FILES[number % len(FILES)]
    way = ("flip", "cut", "more", "put")[number // len(FILES) % 4]
    damage = BYTE_DAMAGE[way](random, random.randrange(10**6), len(files()[at]))
    return Fault({"at": at, "only": "GET", "once": random.random() < 0.2, **damage}, (at,))


def _listing_bytes(random: Random, number: int) -> Fault:
    way = ("flip", "cut", "put", "flip")[number % 4]
    size = len(json.dumps(listing_of(files())))
    return Fault(
        {"at": "listing", "once": random.random() < 0.1, **BYTE_DAMAGE[way](random, number, size)}, (REPOSITORY,)
    )


WAYS = ("silent", "stop", "drop", "drip", "slow-head", "closed")


def _way(random: Random, number: int) -> Fault:
    """An answer that does not come, or not to its end."""
    at = ("listing", *FILES)[number // len(WAYS) % 4]
    what = {"at": at, "way": WAYS[number % len(WAYS)], "part": random.randrange(4), "once": random.random() < 0.3}
    return Fault({**what, "only": random.choice((None, "GET"))}, (REPOSITORY if at == "listing" else at,))


STATUSES = (204, 301, 304, 400, 401, 403, 404, 408, 410, 413, 416, 418, 429, 451, 500, 502, 503, 504, 599)
SAID: tuple[Mapping[str, str], ...] = (
    {}, {"Retry-After": "1000000000"}, {"Retry-After": "-1"}, {"Retry-After": "soon"}, {"X-Error-Code": "GatedRepo"},
    {"X-Error-Code": "EntryNotFound"}, {"X-Error-Message": "\x1b[2Jgo away"},
    {"RateLimit": '"api";r=0;t=1000000000'},
)  # fmt: skip


def _status(random: Random, number: int) -> Fault:
    at = ("listing", *FILES)[random.randrange(4)]
    what = {"at": at, "status": STATUSES[number % len(STATUSES)], "headers": dict(random.choice(SAID))}
    what |= {"once": random.random() < 0.2, "only": random.choice((None, "GET", "HEAD")), "body": "{}"}
    return Fault(what, (REPOSITORY if at == "listing" else at,))


TARGETS = (
    "{elsewhere}/config.json", "{elsewhere}/evil/model.safetensors", "{url}{path}", "/", "file:///etc/passwd",
    "ftp://127.0.0.1/x", "http://", "http://127.0.0.1:1/x", "//127.0.0.1:1/x", "http://[::1", "\x00", "", "x" * 9000,
    "javascript:1", "http://127.0.0.1:99999/", "{elsewhere}/evil/tokenizer.json", "{elsewhere}/model.safetensors",
)  # fmt: skip


def _redirect(random: Random, number: int) -> Fault:
    at = ("listing", *FILES)[random.randrange(4)]
    what = {"at": at, "to": TARGETS[number % len(TARGETS)], "only": random.choice((None, "GET", "HEAD"))}
    return Fault(what, (REPOSITORY if at == "listing" else at,))


HEADS: tuple[Mapping[str, str | None], ...] = (
    {"ETag": None}, {"ETag": ""}, {"ETag": '"../../../outside/evil"'}, {"ETag": "/outside/evil"}, {"ETag": '"a\0b"'},
    {"ETag": '"' + "e" * 5000 + '"'}, {"ETag": '"0"'}, {"ETag": 'W/"' + "0" * 64 + '"'}, {"ETag": '".."'},
    {"ETag": '"nul\x01\x1b[2J"'},
    {"X-Repo-Commit": None}, {"X-Repo-Commit": "../../outside"}, {"X-Repo-Commit": "f" * 40}, {"X-Repo-Commit": ""},
    {"Content-Length": "0"}, {"Content-Length": "-5"}, {"Content-Length": "99999999999999"}, {"Content-Length": "x"},
    {"X-Linked-Size": "7"}, {"X-Linked-Size": "-1"}, {"X-Linked-Size": "evil"}, {"X-Linked-ETag": '"../x"'},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "evil"}, {"Transfer-Encoding": "chunked"},
    {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": "/nowhere"}, {"Link": '<{x}>; rel="xet-auth"', "X-Xet-Hash": "1"},
    {"Content-Disposition": 'attachment; filename="../../evil"'}, {"Set-Cookie": "a=b"}, {"Content-Type": "text/html"},
    {"Content-Range": "bytes 5-9/3"},
)  # fmt: skip


def _head(random: Random, number: int) -> Fault:
    at = FILES[random.randrange(len(FILES))]
    what = {"at": at, "headers": dict(HEADS[number % len(HEADS)]), "only": random.choice((None, "HEAD"))}
    return Fault(what, (at,))


NAMES = (
    "../evil", "../../outside/evil", "/outside/evil", "a/../../evil", "..\\evil", "config.json/../../evil", "", ".",
    "..", "nul\0", "x" * 300, "model-00001-of-00002.safetensors", "../model.safetensors", "CON", "a//b",
    "model.safetensors ", "Model.safetensors", *ESCAPES,
)  # fmt: skip


def _listing(random: Random, number: int) -> Fault:
    """Fields of the listing, and of what it says of one file."""
    value = VALUES[number % len(VALUES)]
    key = random.choice(("sha", "siblings", "id", "private", "tags", "lastModified", "cardData", "safetensors"))
    change: dict[str, Any] = {key: value}
    if random.random() < 0.6:
        said = listing_of(files())["siblings"]
        one = random.choice([entry for entry in said if entry["rfilename"] in FILES])
        inner = random.choice(("rfilename", "size", "lfs", "blobId", "new", "hostile", "twice", "gone", "strange"))
        if inner in one:
            one[inner] = value
        elif inner == "hostile":
            said.append({**one, "rfilename": random.choice(NAMES)})
        elif inner == "twice":
            said.append({**one, "size": 3})
        elif inner == "gone":
            said.remove(one)
        elif inner == "strange":
            said.insert(0, value)
        elif one.get("lfs"):
            one["lfs"][random.choice(("sha256", "size", "pointerSize"))] = value
        change = {"siblings": said}
    return Fault({"at": "listing", "listing": change}, (REPOSITORY, *FILES))


def _huge(_random: Random, number: int) -> Fault:
    return Fault({"at": "listing", "many": (50_000, 200_000)[number % 2]}, (REPOSITORY,))


def _cache(random: Random, number: int) -> Fault:
    """What stands in the cache is damaged, and asked for with and without a network."""
    at = FILES[number % len(FILES)]
    kinds = [kind for kind in ENTRIES if kind not in ("socket", "sparse", "zero", "device")]
    place = random.choice(("blob", "link", "ref", "bytes"))
    what: dict[str, Any] = {
        "cached": place,
        "file": at,
        "offline": random.random() < 0.5,
        "entry": random.choice(kinds),
    }
    if place == "bytes":
        what["how"] = BYTE_DAMAGE["flip"](random, number, len(files()[at]))
    return Fault(what, (REPOSITORY, at))


def _killed(random: Random, number: int) -> Fault:
    at = FILES[number % len(FILES)]
    return Fault({"at": at, "only": "GET", "way": "kill", "after": random.randrange(10**6), "once": True}, (at,))


ASKED = (
    "", "..", "../x", "a/../b", "ada/tiny@", "ada/tiny@../x", "ada//tiny", "ada/ti ny", "a/b/c", "http://127.0.0.1/x",
    "file:///etc", "ada/tiny.git", "-rf", "ada/\x1b[2J", "nul\0", "ada/t..y", "ada\\tiny", "x" * 400, "ada/tıny",
    "ada/tiny@" + "r" * 400, "/nowhere/at/all", "~nobody/x", "ada/tiny?x=1", "ada/tiny#x", "%2e%2e/x",
)  # fmt: skip


def _asked(_random: Random, number: int) -> Fault:
    if number % 4 == 3:
        return Fault({"subfolder": ("..", "a/../b", "/etc", "a//b", "a\0", "~")[number // 4 % 6]}, ())
    return Fault({"name": ASKED[number % len(ASKED)]}, ())


SLOW = {"wall_s": 90.0}
KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("body", 20, _body, SLOW),
    Kind("listing", 16, _listing, SLOW),
    Kind("listing-bytes", 10, _listing_bytes, SLOW),
    Kind("head", 10, _head, SLOW),
    Kind("status", 8, _status, SLOW),
    Kind("redirect", 8, _redirect, SLOW),
    Kind("cache", 12, _cache, SLOW),
    Kind("asked", 8, _asked),
    Kind("killed", 4, _killed, SLOW),
    Kind("way", 4, _way, SLOW),
    Kind("huge", 1, _huge, {**SLOW, "memory_mb": 1_000}),
)

cases = partial(dealt, NAME, KINDS)


# --- the server and the calls -----------------------------------------------------------------------------------------

_hubs: dict[int, Hub] = {}


def prepare() -> None:
    """Import what asks the Hub, and make the files, before workers are forked."""
    import_module("huggingface_hub")
    import_module("huggingface_hub.file_download")
    files()


def _hub() -> Hub:
    """Return this process's server, and have huggingface_hub ask it."""
    if os.getpid() not in _hubs:
        _hubs[os.getpid()] = Hub(files())
        constants: Any = import_module("huggingface_hub.constants")
        url = _hubs[os.getpid()].url
        constants.ENDPOINT = url
        constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_PROGRESS_BARS = False, True
    return _hubs[os.getpid()]


def _ask_anew(seconds: float) -> None:
    """Have questions wait so long for a read, on new connections: answers that were cut leave old ones out of step."""
    import_module("huggingface_hub").close_session()
    constants: Any = import_module("huggingface_hub.constants")
    constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = seconds
    os.environ["HF_HUB_ETAG_TIMEOUT"] = str(seconds)


def _loaded(kept: Path, name: str = REPOSITORY, **options: Any) -> Seen:
    """Return what is read from a repository."""
    model = library.load(name, HEAD, cache_dir=kept, token=TOKEN, **options)
    return Seen(model, library.tensors(model), library.scores(model, IDS))


def run(case: Case, folder: Path) -> Verdict:
    """Load from a Hub at fault, compare with what is right, and load again from one that is well."""
    clean = undamaged(folder.parent, NAME, files(), HEAD)
    hub, kept, what = _hub(), folder / "cache", case.what
    options = {"name": what.get("name", REPOSITORY), "subfolder": what.get("subfolder", "")}
    fault = dict(what)
    if "many" in what:
        said = [{"rfilename": f"data/{place % 977}/part-{place:07}.json", "size": 3} for place in range(what["many"])]
        fault["listing"] = {"siblings": said + listing_of(files())["siblings"]}
    if "cached" in what:
        hub.take({})
        _ask_anew(10.0)
        _loaded(kept)
        _damage_cache(kept, what)
        options |= {"local_files_only": what["offline"], "verified": "how" in what}
    hub.take(fault if "at" in what else {})
    _ask_anew(10.0 if case.kind in ("killed", "cache") else TIMEOUT_S)
    if what.get("way") == "kill":
        _killed_midway(lambda: _loaded(kept), hub)
    verdict = judge(
        case, lambda: _loaded(kept, **options), lambda it: _right(case, it, clean, hub),
        writes=(kept,), network=True,
    )  # fmt: skip
    if hub.strangers:
        return Verdict(Grade.ESCAPED, "the token was shown to another host")
    if case.kind == "asked" and hub.requests:
        return Verdict(Grade.ESCAPED, f"asked the Hub for {hub.requests[0]}")
    if not verdict.good or "cached" in what:
        return verdict
    hub.take({})
    _ask_anew(10.0)
    try:
        again = same_as(_loaded(kept), clean)
    except Exception as error:
        return Verdict(Grade.PARTIAL, f"{verdict.grade.value}, and the next call fails: {error}", type(error).__name__)
    return verdict if again is not None else Verdict(Grade.PARTIAL, "the next call gives another model")


def _right(case: Case, it: Seen, clean: Seen, hub: Hub) -> Verdict:
    if case.kind == "asked":
        return silent("loaded something by a name that is none")
    return right() if same_as(it, clean) is not None else silent(f"another model; {len(hub.requests)} requests")


def _damage_cache(kept: Path, what: Mapping[str, Any]) -> None:
    storage = kept / f"models--{REPOSITORY.replace('/', '--')}"
    link = storage / "snapshots" / COMMIT / what["file"]
    blob = link.resolve()
    if what["cached"] == "bytes":
        data = damaged_bytes(blob.read_bytes(), what["how"])
        blob.chmod(0o644)
        blob.write_bytes(data)
        return
    place = {"blob": blob, "link": link, "ref": storage / "refs" / "main"}[what["cached"]]
    outside = kept.parent / "outside"
    outside.mkdir(exist_ok=True)
    put_entry(place.parent, place.name, what["entry"], outside)


def _killed_midway(call: Callable[[], Any], hub: Hub) -> None:
    """Have a process of its own make the call, and be killed by the server while a file arrives."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        with suppress(BaseException):
            call()
        os._exit(0)
    hub.victim = child
    os.write(write, b"x")
    os.waitpid(child, 0)
    hub.victim = 0
    os.close(read)
    os.close(write)
