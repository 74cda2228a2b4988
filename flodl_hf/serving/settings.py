"""Settings of a server: models, devices, limits. Imports neither a server nor torch."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, FlodlError, capped, nearest
from flodl_hf.checkpoints.folders import ADAPTER_CONFIG


@dataclass(frozen=True)
class Served:
    """A model and the name that clients use for it.

    Attributes:
        name: the name that clients use.
        source: a local folder or a Hub name.
        head: task for which the model is loaded; "auto" uses the task of the folder.
    """

    name: str
    source: str
    head: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server.

    Attributes:
        models: the served models; the server never loads others. Requests may use any name if there is one model. A
            model named "*" answers requests with names of no other model.
        devices: devices of the models; "auto" is the best available one.
        workers: worker processes for each device, each with all models. Many small requests occupy the interpreter
            rather than the device. None is two on a GPU with enough memory, otherwise one.
        http_processes: processes that answer HTTP on the same port; see `usual_http_processes`.
        precision: see `flodl_hf.inference.Precision`; None is the type of the weights.
        adapters: directories with one folder for each adapter, served under the folder's name; ``NAME=DIR`` selects the
            base model. They are listed whenever models are loaded.
        mix_adapters: adapters of one base share batches if possible. No merged weights are stored, and results equal
            those of each adapter alone up to the order of sums.
        batch_invariant: results do not depend on other rows of the batch, bit for bit; slower.
        local_files_only: open no connection to the Hub.
        api_keys: accepted API keys; if empty, no key is required.
        max_batch_tokens: maximum number of tokens of a batch; None depends on the device.
        max_concurrent: maximum number of concurrent requests; more are refused with 429.
        max_key_concurrent: maximum number of concurrent requests of one key; None for no limit.
        max_key_tokens: maximum number of tokens of one key in a minute; None for no limit.
        max_inputs: maximum number of texts of a request.
        max_tokens: approximate maximum number of tokens of a request, estimated before tokenization.
        max_body: maximum number of bytes of a request's body.
        max_queue_s: a request is refused if the queue before it would take longer than this.
        max_wait_s: limit that replaces ``max_queue_s`` while the server has been overloaded for a second.
        timeout_s: timeout of a request; clients may shorten it (header ``x-timeout-s``).
        header_s: time in which a connection has to send the headers of a request.
        body_s: time in which a request's body has to arrive.
        write_s: a connection whose client reads nothing for this time is closed.
        idle_s: time after which a connection without a request is closed.
        drain_s: time for current requests to finish when the server stops.
        max_connections: maximum number of connections.
        log_texts: whether the log contains the fields of requests.
        otlp_endpoint: address of an OpenTelemetry collector that receives traces; None sends none.
    """

    models: tuple[Served, ...]
    devices: tuple[str, ...] = ("auto",)
    workers: int | None = None
    http_processes: int = 1
    precision: str | None = None
    adapters: tuple[str, ...] = ()
    mix_adapters: bool = False
    batch_invariant: bool = False
    local_files_only: bool = False
    api_keys: tuple[str, ...] = ()
    max_batch_tokens: int | None = None
    max_concurrent: int = 512
    max_key_concurrent: int | None = None
    max_key_tokens: int | None = None
    max_inputs: int = 2048
    max_tokens: int = 300_000
    max_body: int = 16 << 20
    max_queue_s: float = 10.0
    max_wait_s: float = 0.5
    timeout_s: float = 60.0
    header_s: float = 10.0
    body_s: float = 30.0
    write_s: float = 30.0
    idle_s: float = 75.0
    drain_s: float = 30.0
    max_connections: int = 4096
    log_texts: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        wrong = [f"duplicate name {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
        if not self.models:
            wrong.append("no model")
        if not self.devices:
            wrong.append("no device")
        if any(not key.strip() for key in self.api_keys):
            wrong.append("an empty API key")
        for field, value in asdict(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                wrong.append(f"{field}={value}")
        if self.mix_adapters and (self.batch_invariant or self.precision not in (None, "exact")):
            raise ConfigError(
                "serve: mix_adapters uses unmerged weights, and results depend on the batch to the last bit. "
                "Remove precision and batch_invariant, or mix_adapters."
            )
        if wrong:
            raise ConfigError(
                f"serve: found {'; '.join(wrong)}; expected at least one model, distinct names, and limits above 0",
                problems=wrong,
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Return the settings of another process.

        Args:
            values: the fields as JSON types.
        """
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**{**fields, "models": tuple(Served(**model) for model in values["models"])})

    def for_worker(self, device: str, adapters: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
        """Return the settings of one worker process as JSON types.

        Args:
            device: its device.
            adapters: name, folder and base of each adapter.
        """
        return {**asdict(self), "api_keys": (), "device": device, "adapters": list(adapters)}


def usual_http_processes() -> int:
    """Return the default number of HTTP processes: one for each eight cores of this process, at most four.

    One process answers some thousands of short requests a second, and needs a core for them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(4, cores // 8))


def freeze_gc() -> None:
    """Exclude existing objects from garbage collection, and collect rarely.

    With the default thresholds scans take a tenth of a process's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def served(models: Iterable[str | Served], head: str = "auto", name: str | None = None) -> tuple[Served, ...]:
    """Return models with names: NAME of ``NAME=FOLDER``, otherwise the last part of the source if it is unique.

    Args:
        models: local folders, Hub names, or records.
        head: task of models that are not records.
        name: name of the only model, as ``NAME=FOLDER`` gives it.

    Raises:
        ConfigError: a name is given for several models.
    """
    listed = list(models)
    if name is not None and len(listed) != 1:
        raise ConfigError(
            f"serve: found a served model name for {len(listed)} models, expected one. Name each with NAME=FOLDER."
        )
    found = []
    for model in listed:
        if isinstance(model, Served):
            found.append(model if name is None else replace(model, name=name))
            continue
        given, equal, folder = model.partition("=")
        source = folder if equal else model
        found.append(Served(name or (given if equal else re.split(r"[/\\]", source.rstrip("/\\"))[-1]), source, head))
    names = [model.name for model in found]
    # Models of the same last part keep their whole source as a name; duplicate given names are refused later.
    return tuple(
        replace(model, name=source) if names.count(model.name) > 1 and source == model.source else model
        for model, source in zip(found, map(str, listed), strict=True)
    )


# ---- adapters ------------------------------------------------------------------------------------------


def find_adapters(settings: Settings) -> list[dict[str, str]]:
    """Return name, folder and base of each adapter in the configured directories.

    Each folder is one adapter under the folder's name; files and folders with a leading dot are ignored. Only the
    configuration file is read here; workers load the adapters (`flodl_hf.serving.adapter_models`).

    Raises:
        ConfigError: a directory cannot be listed, a folder is not an adapter, a name is not unique, or a base is not
            served.
    """
    found: list[dict[str, str]] = []
    problems: list[str] = []
    taken = {model.name: f"the model {model.name}" for model in settings.models}
    for given in settings.adapters:
        where, base = _directory(settings, given)
        try:
            names = sorted(entry.name for entry in os.scandir(where) if entry.is_dir() and entry.name[0] != ".")
        except OSError as fault:
            problems.append(f"{where} cannot be listed ({fault.strerror}), expected a directory of adapters")
            continue
        for name in names:
            folder = where / name
            if not (folder / ADAPTER_CONFIG).is_file():
                problems.append(f"{folder} is not an adapter: it contains no {ADAPTER_CONFIG}")
            elif name in taken:
                problems.append(f"{folder}: the name {name!r} is already used by {taken[name]}")
            else:
                taken[name] = str(folder)
                try:
                    found.append({"name": name, "folder": str(folder), "base": base or _base_of(settings, folder)})
                except FlodlError as fault:
                    problems.append(str(fault))
    if problems:
        raise ConfigError(
            f"serve: adapters:\n{capped(problems)}\nexpected directories with one folder for each adapter. Remove "
            "other folders, and select the base with NAME=DIR if several models are served.",
            problems=problems,
        )
    return found


def _directory(settings: Settings, value: str) -> tuple[Path, str | None]:
    """Return a directory and its base: the model of ``NAME=DIR``, or the only served model, or None."""
    names = [model.name for model in settings.models]
    name, equal, where = value.partition("=")
    if equal and name in names:
        return Path(where).expanduser(), name
    if equal and not os.path.isdir(value):
        raise ConfigError(
            f"serve: adapters {value!r}: no model {name!r} is served{nearest(name, names)}; expected DIR, or NAME=DIR "
            f"with one of {', '.join(names)}",
            problems=[value],
        )
    return Path(value).expanduser(), names[0] if len(names) == 1 else None


def _base_of(settings: Settings, folder: Path) -> str:
    """Return the name of the served model that an adapter's configuration names as its base."""
    from flodl_hf.checkpoints.config.file import MAX_CONFIG_BYTES, read_json
    from flodl_hf.checkpoints.folders import read_member

    text = read_member(folder, ADAPTER_CONFIG, MAX_CONFIG_BYTES, ConfigError)
    named = str(read_json(text, str(folder / ADAPTER_CONFIG)).get("base_model_name_or_path") or "")
    path = os.path.realpath(named)
    able = [
        model.name
        for model in settings.models
        if named and (model.source == named or os.path.realpath(os.path.expanduser(model.source)) == path)
    ]
    if len(able) != 1:
        raise ConfigError(
            f"{folder}: its base is {named!r}, which {len(able) or 'none'} of the served models "
            f"{'are' if able else 'is'} read from"
        )
    return able[0]
