"""Adapters in a worker: each a model of its own on the tensors of its base, answering as it does in Python.

Usually each runs weights that its sum is merged into. Mixed, the adapters of a base share batches: the base runs once
for rows of all of them, and no merged weights are kept (`flodl_hf.models.adapters.mixed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flodl.errors import ConfigError, FlodlError, capped
from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import TokenTable
from flodl_hf.inference.inputs import Encoded
from flodl_hf.inference.passes import Work
from flodl_hf.inference.pending import Pending

__all__ = ["Together", "open_adapters", "put_together"]

TOGETHER = 16
"""Most adapters of a batch: each token's sums are computed for all of them before its own are kept."""


def open_adapters(
    listed: Sequence[Mapping[str, str]], models: Mapping[str, Any], opened: Callable[[str, str, str], Any]
) -> dict[str, Any]:
    """Return a model for each adapter, by name; unadapted tensors are those of the base.

    Args:
        listed: what `find_adapters` gave.
        models: the bases, by name.
        opened: gives the model of a base's name, a head and an adapter's folder.

    Raises:
        ConfigError: adapters cannot be opened: no head, other shapes, damaged files; all of them are named.
    """
    from flodl_hf.models.adapters.folder import open_adapter

    found, problems = {}, []
    for one in listed:
        base = models[one["base"]]
        try:
            # One that does not say is for the task that the base is served for.
            head = open_adapter(one["folder"]).task(base.config.family) or base.head
            model = opened(one["base"], head, one["folder"])
        except FlodlError as fault:
            problems.append(f"{one['name']}: {fault}")
            continue
        _share(model, [base, *found.values()])
        found[one["name"]] = model
    if problems:
        raise ConfigError(
            f"adapters that cannot be served: {capped(problems)}\nTake their folders out, or mend them",
            problems=problems,
        )
    return found


def _share(model: Any, others: Sequence[Any]) -> None:
    """Let a model have the memory of others' tensors where they are equal."""
    held: dict[str, list[Any]] = {}
    for other in others:
        for name, parameter in other.graph.named_parameters():
            if not any(parameter.data_ptr() == one.data_ptr() for one in held.setdefault(name, [])):
                held[name].append(parameter)
    for name, parameter in model.graph.named_parameters():
        for other in held.get(name, ()):
            if parameter.dtype == other.dtype and parameter.shape == other.shape and torch.equal(parameter, other):
                parameter.data = other.data
                break


class Together:
    """Adapters whose rows share batches, in the place of a model.

    Args:
        base: a model for their task, without an adapter.
        members: models with an adapter each, by name.

    Raises:
        PredictError: they cannot share a batch.
    """

    def __init__(self, base: Any, members: Mapping[str, Any]) -> None:
        from flodl_hf.models.adapters.attach import Adapters
        from flodl_hf.models.adapters.mixed import Mixed

        self.names = tuple(members)
        held = Adapters()
        for name, member in members.items():
            held.add(name, member._held_adapters.named("default"))
        self._mixed = Mixed(base, held, self.names)

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None) -> Pending:
        """Return the results of rows; the only place of each is the number of its adapter."""
        assert places is not None
        numbers = np.fromiter((number for (number,) in places), np.int64, len(places))
        rows = replace(table, owners=np.arange(len(table)))
        return self._mixed.start(Encoded(rows, len(rows)), work, numbers)


def put_together(
    listed: Sequence[Mapping[str, str]], adapted: Mapping[str, Any], opened: Callable[[str, str, str], Any]
) -> dict[str, tuple[Together, int]]:
    """Return which adapters share batches: by name, with whom, and their number there.

    Left out are those that share none: other kinds than sums, other tasks than labels, labels that no other has.

    Args:
        listed: what `find_adapters` gave.
        adapted: what `open_adapters` gave.
        opened: as there.
    """
    groups: dict[Any, list[Mapping[str, str]]] = {}
    for one in listed:
        model = adapted[one["name"]]
        kind = one["base"], model.head, tuple(model.config.labels), model.config.problem_type
        groups.setdefault(kind, []).append(one)
    found: dict[str, tuple[Together, int]] = {}
    for (name, head, *_), members in groups.items():
        if len(members) < 2:
            continue
        base = opened(name, head, members[0]["folder"])
        base.set_adapter(None)
        _share(base, [adapted[one["name"]] for one in members])
        able = {one["name"]: adapted[one["name"]] for one in members if _mixes(base, adapted[one["name"]])}
        names = list(able)
        for first in range(0, len(names), TOGETHER):
            part = names[first : first + TOGETHER]
            if len(part) > 1:
                together = Together(base, {each: able[each] for each in part})
                found |= {each: (together, number) for number, each in enumerate(part)}
    return found


def _mixes(base: Any, model: Any) -> bool:
    try:
        Together(base, {"one": model})
    except PredictError:
        return False
    return True
