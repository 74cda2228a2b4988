"""Which files of a repository are fetched: by patterns, weights in whatever parts they come, modules in folders.

Files in the cache are named by their digest. A file is read and compared once; its size and time are stored next to
the cached files, and it is read again only if they differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flodl.errors import capped
from flodl.files import read_regular, write_atomically
from flodl_hf.checkpoints.folders import (
    BIN,
    CONFIG_NAME,
    SAFETENSORS,
    WEIGHTS_KEY,
    matching,
    weights_named,
)
from flodl_hf.checkpoints.hub.request import HubRequest
from flodl_hf.checkpoints.weights.checksums import digest_of

WEIGHTS = SAFETENSORS
_MODULES = "modules.json"
_ROUTING = (_MODULES, "router_config.json", "*/router_config.json", "*/config.json")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def weights_among(names: Iterable[str]) -> list[str]:
    """Return the weight files among ``names``: one safetensors file, else shards, else ``.bin`` files."""
    present = set(names)
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if f"{stem}.{suffix}" in present:
            return [f"{stem}.{suffix}"]
        index = f"{stem}.{suffix}.index.json"
        if index in present:
            return [index, *sorted(matching(present, [f"{stem}-*-of-*.{suffix}"]))]
    return []


def select(request: HubRequest, names: Iterable[str]) -> list[str]:
    """Return which of a repository's files are wanted, with their subfolder.

    Raises:
        HubError: if weights are wanted and there are none that can be read.
    """
    inside = request.inside(names)
    chosen = matching(inside, request.files)
    if WEIGHTS in request.files:
        weights = weights_among(inside) or [name for name in request.weights if name in inside]
        if not weights and not _in_modules(request, inside):
            others = sorted(name for name in inside if re.search(r"\.(safetensors|bin|h5|msgpack|onnx|pt|ot)$", name))
            raise request.error(
                f"no {WEIGHTS}, {WEIGHTS}.index.json or pytorch_model.bin"
                + (f" in {request.subfolder}/" if request.subfolder else "")
                + (f"; other weight files are\n{capped(others, 8)}\n" if others else ""),
                "expected one of them: set subfolder, choose a repository with PyTorch weights, or make "
                "model.safetensors from a local file with `flodl-hf convert`",
                others=others,
            )
        chosen |= set(weights)
    if not chosen and request.modules and _MODULES in inside:
        chosen = matching(inside, _ROUTING)  # which tell where the wanted ones lie
    return [request.prefix + name for name in sorted(chosen)]


def config_telling(request: HubRequest, names: Iterable[str]) -> list[str]:
    """Return the configuration, in a list, if only it can name the weight file; else nothing."""
    inside = request.inside(names)
    if WEIGHTS not in request.files or weights_among(inside) or _in_modules(request, inside):
        return []
    told = CONFIG_NAME in inside and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in inside)
    return [request.prefix + CONFIG_NAME] if told else []


def named_weights(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of weights among ``names`` that a folder's configuration names, an index before its shards.

    Raises:
        ConfigError: the configuration names what can be no such file.
    """
    try:
        found = json.loads(read_regular(folder / CONFIG_NAME)).get(WEIGHTS_KEY)
    except (OSError, ValueError, AttributeError, RecursionError):
        return ()  # which is the reader's to say
    named = weights_named(found, str(folder / CONFIG_NAME))
    if named is None or named not in (present := set(names)):
        return ()
    if not named.endswith(".index.json"):
        return (named,)
    shard = re.compile(re.escape(named.removesuffix(".safetensors.index.json")) + r"-[^/]*-of-[^/]*\.safetensors")
    return (named, *sorted(filter(shard.fullmatch, present)))


def _in_modules(request: HubRequest, names: Iterable[str]) -> bool:
    """Return whether weights may be in the module folders that ``modules.json`` names."""
    return request.modules and _MODULES in request.files and _MODULES in names


def select_modules(request: HubRequest, names: Iterable[str], folder: Path) -> list[str]:
    """Return the files to fetch from module folders; the small files that name them are already present.

    Raises:
        HubError: a transformer has no weights that can be read.
    """
    if not request.modules:
        return []
    from flodl_hf.checkpoints.sentence.settings import module_folders

    prefix = request.prefix
    present, found = set(names), []
    wanted = (CONFIG_NAME, *((WEIGHTS, BIN) if WEIGHTS in request.files else ()))
    for part, has_transformer in module_folders(folder).items():
        if has_transformer:
            found += select(replace(request, subfolder=prefix + part, modules=False), present)
        else:
            found += sorted(present.intersection(f"{prefix}{part}/{name}" for name in wanted))
    return found


def lacking(request: HubRequest, folder: Path, present: Sequence[str]) -> list[str]:
    """Return the names of weights that are missing from a folder of the cache.

    Args:
        request: the request.
        folder: folder of the cache.
        present: names of all its files.
    """
    if weights := weights_among(present) or named_weights(folder, present):
        names: list[Any] = []
        if weights[0].endswith(".index.json"):
            # Faults of the index are reported by its reader.
            with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                names = list(json.loads(read_regular(folder / weights[0]))["weight_map"].values())
        shards = {name for name in names if isinstance(name, str) and _SHARD.fullmatch(name)}
        return sorted(shards - set(present))
    if not _in_modules(request, present):
        return [WEIGHTS]
    from flodl_hf.checkpoints.sentence.settings import module_folders

    missing = []
    for part in (part for part, holds in module_folders(folder).items() if holds):
        below = [name.removeprefix(f"{part}/") for name in present if name.startswith(f"{part}/")]
        missing += [f"{part}/{name}" for name in lacking(replace(request, modules=False), folder / part, below)]
    return missing


VERIFIED = "flodl-verified.json"
"""File of a repository's folder in the cache: size and modification time of each verified file, by its digest."""

_MOST = 1 << 24
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def check_cached(request: HubRequest, snapshot: Path, names: Iterable[str]) -> None:
    """Compare files of the cache with their digests; files that have no digest in the cache are skipped.

    Raises:
        HubError: the content of a file differs from the server's announcement.
    """
    place = request.storage / VERIFIED
    known: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads(read_regular(place, _MOST))
        known = found if isinstance(found, dict) else {}
    new: dict[str, Any] = {}
    for name in names:
        path = snapshot / name
        blob = path.resolve()
        if not path.is_symlink() or not _DIGEST.fullmatch(blob.name):
            continue
        stat = blob.stat()
        state = [stat.st_size, stat.st_mtime_ns]
        if known.get(blob.name) == state:
            continue
        if (digest := digest_of(blob, git=len(blob.name) == 40)) != blob.name:
            raise request.error(
                f"{name} in the cache is damaged: digest {digest} instead of {blob.name}",
                f"remove {blob} and download it again: `hf download {request.name} {name}`",
                file=name,
                damaged=str(blob),
                offline=True,
            )
        new[blob.name] = state
    if new:
        with suppress(OSError):  # a read-only cache is verified each time
            write_atomically(place, [json.dumps({**known, **new}).encode()])
