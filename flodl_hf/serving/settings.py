"""What a server is told when it starts: models, devices, limits.

Decides defaults and what makes sense. Nothing here imports a server or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flodl.errors import ConfigError

__all__ = ["Served", "Settings", "served"]


@dataclass(frozen=True)
class Served:
    """A model and the name that clients call it by.

    Attributes:
        name: what clients write.
        source: a local folder or a name of the Hub.
        head: the task it is loaded for; "auto" is what the folder was written for.
    """

    name: str
    source: str
    head: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server runs.

    Attributes:
        models: what is served; nothing else is ever loaded.
        devices: where models run, "auto" is the best there is.
        workers: worker processes for each device, each of which holds the models: many small requests keep an
            interpreter busy rather than the device. None is two on a GPU with memory for them, else one.
        http_processes: processes that answer HTTP, all at the same port; one answers some thousands of small
            requests a second, and keeps a core busy with them. With several this process holds them together.
        precision: see `flodl_hf.inference.Precision`; None is that of the weights.
        adapters: directories that hold a folder for each adapter, each served by its folder's name; ``NAME=DIR`` says
            of which model. They are listed when models are loaded.
        mix_adapters: adapters of one base share batches where they can; no merged weights are kept, and answers are
            those of each adapter alone up to the order of sums.
        batch_invariant: answers never depend on what else is in the batch, bit for bit; slower.
        local_files_only: open no connection to the Hub.
        api_keys: who may ask; none is everybody.
        max_batch_tokens: most tokens that run together; None is what suits the device.
        max_concurrent: most requests at a time; more are refused with 429.
        max_key_concurrent: most requests of one key at a time; None is no bound but the other.
        max_key_tokens: most tokens of one key in a minute; None is no bound.
        max_inputs: most texts of a request.
        max_tokens: most tokens of a request, about, counted before they are known.
        max_body: most bytes of a request's body.
        max_queue_s: a request is refused when what waits before it would take longer.
        max_wait_s: likewise of a queue that stays: more is asked for than is done, and has been for a second.
        timeout_s: after so long a request is given up; clients may ask for less (``x-timeout-s``).
        header_s: a connection that has not sent a request's head by then is closed.
        body_s: a body has to be there by then.
        write_s: a client that reads nothing for so long loses its connection.
        idle_s: how long a connection without a request stays.
        drain_s: how long requests may still run once the server is told to stop.
        max_connections: most connections at a time.
        log_texts: whether logs say what was asked.
        otlp_endpoint: the address of an OpenTelemetry collector that is sent traces; None sends none.
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
        wrong = [f"the name {name!r} twice" for name in sorted({n for n in names if names.count(n) > 1})]
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
                "serve: mix_adapters runs the weights as they are, and answers depend on their batch to the last bit; "
                "leave out precision and batch_invariant, or mix_adapters"
            )
        if wrong:
            raise ConfigError(
                f"serve: found {'; '.join(wrong)}; expected at least one model, names that differ, and limits above 0",
                problems=wrong,
            )

    def said(self) -> dict[str, Any]:
        """Return all of it as JSON types, for `heard`."""
        return asdict(self)

    @classmethod
    def heard(cls, said: Mapping[str, Any]) -> Settings:
        """Return what another process said.

        Args:
            said: of `said`.
        """
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
        return cls(**{**given, "models": tuple(Served(**model) for model in said["models"])})

    def of_worker(self, device: str, adapters: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
        """Return what a worker on a device is told, as JSON types.

        Args:
            device: its device.
            adapters: name, folder and base of each.
        """
        return {
            "models": [asdict(model) for model in self.models],
            "adapters": list(adapters),
            "mix_adapters": self.mix_adapters,
            "device": device,
            "precision": self.precision,
            "batch_invariant": self.batch_invariant,
            "local_files_only": self.local_files_only,
            "max_batch_tokens": self.max_batch_tokens,
            "threads": self.max_concurrent,
            "links": self.http_processes,
        }


def served(models: Iterable[str | Served], head: str = "auto") -> tuple[Served, ...]:
    """Return models by name; ``NAME=FOLDER`` says which, else it is what stands there without a trailing slash.

    Args:
        models: local folders, names of the Hub, or records.
        head: the task of those that name none.
    """
    found = []
    for model in models:
        if isinstance(model, Served):
            found.append(model)
            continue
        name, equal, source = str(model).partition("=")
        source = source if equal else str(model)
        found.append(Served((name if equal else source).rstrip("/\\") or source, source, head))
    return tuple(found)
