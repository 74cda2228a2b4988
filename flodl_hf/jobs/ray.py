"""Ray: a dataset answered by actors, a file answered by a cluster in resumable parts, and every head over HTTP by many.

Two ways to outputs in which no row is missing or doubled:

* `answers` adds columns to a Ray dataset. Ray runs a batch again where an actor is lost, and each batch's rows are in
  the dataset once; whether a job's files are all there is for the job to say (Ray writes them without a last step).
* `predict_file` answers a file in the parts of `flodl_hf.predict_file`, one rank a worker, on a file system that all
  see: a part counts when its record is there, the output appears in one step, and the same call goes on after any end.

`deployment` is for Ray Serve: each replica is the application of `flodl-hf serve`, with all its paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from flodl_hf.errors import PredictError
from flodl_hf.jobs.partitions import Partitions
from flodl_hf.jobs.results import FileResult

__all__ = ["Answers", "answers", "deployment", "predict_file"]


class Answers:
    """The class that Ray's actors hold: a model, loaded once, that is called with Arrow tables.

    Args:
        model: a folder or Hub name that every node can read.
        **words: as in `flodl_hf.jobs.partitions.Partitions`.
    """

    def __init__(self, model: str, **words: Any) -> None:
        self._model, self._words = model, words
        self._partitions: Partitions | None = None

    def __call__(self, table: Any) -> Any:
        """Return the table with the answers' columns."""
        if self._partitions is None:
            self._partitions = Partitions(self._model, table.schema.names, **self._words)
        return self._partitions.arrow(table)


def answers(
    dataset: Any,
    model: str | os.PathLike[str],
    *,
    workers: int = 1,
    num_gpus: float = 0,
    num_cpus: float = 1,
    batch_size: int = 2048,
    **words: Any,
) -> Any:
    """Return a Ray dataset with the answers' columns behind its own: those of `flodl_hf.predict_file`.

    Args:
        dataset: with a column of texts.
        model: a folder or Hub name that every node can read.
        workers: most actors that hold the model. Ray starts one, and more while rows wait; what comes before them needs
            processors besides theirs.
        num_gpus: of each actor; one that has any loads the model on its GPU.
        num_cpus: of each actor.
        batch_size: rows that an actor gets at a time.
        **words: as in `flodl_hf.jobs.partitions.Partitions`: columns, ``on_error``, options of the model's method.

    Raises:
        PredictError: Ray is not installed.
    """
    data = _ray("data")
    given = {"device": "cuda" if num_gpus else None, **words}
    # As many as there is work for: a pool of fixed size would take the processors that Ray needs to read and cut rows
    # before a worker has any, and both would wait for ever.
    pool = data.ActorPoolStrategy(min_size=1, max_size=workers)
    return dataset.map_batches(
        Answers, fn_constructor_args=(os.fspath(model),), fn_constructor_kwargs=given, batch_format="pyarrow",
        batch_size=batch_size, compute=pool, num_gpus=num_gpus, num_cpus=num_cpus,
    )  # fmt: skip


def predict_file(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int = 1,
    num_gpus: float = 0,
    num_cpus: float = 1,
    **options: Any,
) -> FileResult:
    """Answer a file by a cluster; see `flodl_hf.predict_file`, of whose ranks each worker is one.

    Model, source and target are paths that every node sees. A worker that is lost is started again by Ray, and goes on
    from the parts that are there.

    Args:
        model: a folder or Hub name.
        source: the file of texts.
        target: the file of answers.
        workers: tasks that run at the same time.
        num_gpus: of each worker.
        num_cpus: of each worker.
        **options: of `flodl_hf.predict_file`.

    Raises:
        PredictError: Ray is not installed, or the cluster has no room for so many workers at once.
    """
    ray = _ray("")
    need = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
    if not ray.is_initialized():
        ray.init()
    short = [name for name, each in need.items() if ray.cluster_resources().get(name, 0) < each * workers]
    if short:
        raise PredictError(
            f"predict_file: {workers} workers at once need {need} each, and the cluster has "
            f"{ {name: ray.cluster_resources().get(name, 0) for name in need} }; expected room for all, because they "
            "share the file's parts; ask for fewer workers",
            problems=short,
        )
    job = {**options, "model": os.fspath(model), "source": os.fspath(source), "target": os.fspath(target)}
    task = ray.remote(_rank).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=3)
    return ray.get([task.remote(job, rank, workers) for rank in range(workers)])[0]


def deployment(
    models: str | Iterable[str],
    *,
    replicas: int = 1,
    num_gpus: float = 0,
    num_cpus: float = 1,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return an application for ``ray.serve.run``: replicas that answer what `flodl-hf serve` answers.

    Ray's proxies take the requests and choose a replica; batching, limits and metrics are those of each.

    Args:
        models: folders or Hub names that every node can read; ``"NAME=FOLDER"`` says what clients call one.
        replicas: how many there are.
        num_gpus: of each replica; one that has any runs on its GPU.
        num_cpus: of each replica.
        options: further options of ``ray.serve.deployment``, such as ``autoscaling_config`` (leave out ``replicas``).
        **settings: of `flodl_hf.serving.Settings`.

    Raises:
        PredictError: Ray Serve is not installed.
        ConfigError: settings that make no sense.
    """
    from flodl_hf.serving.settings import Settings, served

    ray_serve = _ray("serve")
    listed = [models] if isinstance(models, str) else models
    given: dict[str, Any] = {"devices": ("cuda",) if num_gpus else ("cpu",), **settings}
    said = Settings(models=served(listed), **given)

    def application() -> Any:
        from flodl_hf.serving.app import create_app

        return create_app(said)

    class Heads:
        pass

    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    words: dict[str, Any] = {"max_ongoing_requests": said.max_concurrent, "ray_actor_options": resources}
    words |= dict(options or {})
    if "autoscaling_config" not in words:
        words["num_replicas"] = replicas
    return ray_serve.deployment(name="flodl-hf", **words)(ray_serve.ingress(application)(Heads)).bind()


def _rank(job: dict[str, Any], rank: int, world: int) -> FileResult:
    """Return what came of one rank; Ray shows a task its own devices alone, of which it takes the first."""
    from flodl_hf.jobs import predict_file

    said = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    os.environ.update(said)
    try:
        return predict_file(**job)
    finally:  # Ray uses its processes again
        for name in said:
            os.environ.pop(name, None)


def _ray(part: str) -> Any:
    """Return Ray, or a part of it.

    Raises:
        PredictError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(f"ray.{part}" if part else "ray")
    except ImportError as error:
        raise PredictError(
            f"flodl_hf.jobs.ray: {error}; expected Ray with its data and serve libraries: pip install 'flodl-hf[ray]'",
            problems=["ray"],
        ) from error
