"""Ray: datasets predicted by actors, files predicted by a cluster in resumable parts, and Ray Serve.

* `answers` adds columns to a Ray dataset. Ray repeats a batch of a lost actor, and each row appears once in the
dataset. The job has to check that all output files exist, because Ray writes them without a final commit.
* `predict_file` predicts a file in the parts of `flodl_hf.predict_file`, one rank for each worker, on a shared file
system: a part counts when its record exists, the output appears in one step, and the same call resumes.
* `deployment` runs the application of `flodl-hf serve` as a replica of Ray Serve.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from flodl_hf.errors import PredictError
from flodl_hf.jobs.partitions import Partitions
from flodl_hf.jobs.run import FileResult


class Answers:
    """Callable for Ray's actors: a model, loaded once, that is called with Arrow tables.

    Args:
        model: a folder or Hub name that every node can read.
        **words: as for `flodl_hf.jobs.partitions.Partitions`.
    """

    def __init__(self, model: str, **words: Any) -> None:
        self._model, self._words = model, words
        self._partitions: Partitions | None = None

    def __call__(self, table: Any) -> Any:
        """Return the table with the result columns."""
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
    """Return a Ray dataset with the result columns of `flodl_hf.predict_file` after its own columns.

    Args:
        dataset: dataset with a column of texts.
        model: a folder or Hub name that every node can read.
        workers: maximum number of actors with a model. Ray starts one, and more while rows wait; reading the input
            needs further processors.
        num_gpus: GPUs of each actor; with any, the model is loaded on a GPU.
        num_cpus: CPUs of each actor.
        batch_size: rows of one call of an actor.
        **words: as for `flodl_hf.jobs.partitions.Partitions`: columns, ``on_error``, options of the model's method.

    Raises:
        PredictError: Ray is not installed.
    """
    data = _ray("data")
    given = {"device": "cuda" if num_gpus else None, **words}
    # A pool of fixed size could take all processors that Ray needs to read the input, so that neither could proceed.
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
    """Predict a file by a cluster; see `flodl_hf.predict_file`. Each worker is one of its ranks.

    Model, source and target are paths on a shared file system. Ray restarts a lost worker, which resumes from the
    finished parts.

    Args:
        model: a folder or Hub name.
        source: file of texts.
        target: file of results.
        workers: number of concurrent tasks.
        num_gpus: GPUs of each worker.
        num_cpus: CPUs of each worker.
        **options: options of `flodl_hf.predict_file`.

    Raises:
        PredictError: Ray is not installed, or the cluster cannot run so many workers at a time.
    """
    ray = _ray("")
    need = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
    if not ray.is_initialized():
        ray.init()
    short = [name for name, each in need.items() if ray.cluster_resources().get(name, 0) < each * workers]
    if short:
        raise PredictError(
            f"predict_file: {workers} concurrent workers need {need} each, and the cluster has "
            f"{ {name: ray.cluster_resources().get(name, 0) for name in need} }, expected enough for all. "
            "Use fewer workers.",
            problems=short,
        )
    paths = {"model": os.fspath(model), "source": os.fspath(source), "target": os.fspath(target)}
    job = {**options, **paths}
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
    """Return an application for ``ray.serve.run`` whose replicas run `flodl-hf serve`.

    Ray's proxies distribute the requests; each replica has its own batches, limits and metrics.

    Args:
        models: folders or Hub names that every node can read; ``"NAME=FOLDER"`` sets the name that clients use.
        replicas: number of replicas.
        num_gpus: GPUs of each replica; with any, it runs on a GPU.
        num_cpus: CPUs of each replica.
        options: further options of ``ray.serve.deployment``, such as ``autoscaling_config`` (then without
            ``replicas``).
        **settings: fields of `flodl_hf.serving.Settings`.

    Raises:
        PredictError: Ray Serve is not installed.
        ConfigError: settings are invalid.
    """
    from flodl_hf.serving.settings import Settings, served

    ray_serve = _ray("serve")
    listed = [models] if isinstance(models, str) else models
    given: dict[str, Any] = {"devices": ("cuda",) if num_gpus else ("cpu",), **settings}
    server = Settings(models=served(listed), **given)

    def application() -> Any:
        from flodl_hf.serving.app import create_app

        return create_app(server)

    class Heads:
        pass

    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    words: dict[str, Any] = {"max_ongoing_requests": server.max_concurrent, "ray_actor_options": resources}
    words |= dict(options or {})
    if "autoscaling_config" not in words:
        words["num_replicas"] = replicas
    return ray_serve.deployment(name="flodl-hf", **words)(ray_serve.ingress(application)(Heads)).bind()


def _rank(job: dict[str, Any], rank: int, world: int) -> FileResult:
    """Run one rank. Ray shows a task only its own devices, of which it uses the first."""
    from flodl_hf.jobs import predict_file

    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    os.environ.update(variables)
    try:
        return predict_file(**job)
    finally:  # Ray reuses its processes
        for name in variables:
            os.environ.pop(name, None)


def _ray(part: str) -> Any:
    """Return Ray, or a submodule of it.

    Raises:
        PredictError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(f"ray.{part}" if part else "ray")
    except ImportError as error:
        raise PredictError(
            f"flodl_hf.jobs.ray: {error}. Install Ray with its data and serve libraries: pip install 'flodl-hf[ray]'",
            problems=["ray"],
        ) from error
