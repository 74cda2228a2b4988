"""Adapters in a worker: models that share the unadapted tensors of their base.

By default each adapter has separate merged weights. With ``mix_adapters``, adapters of one base share batches: the
base runs once for the rows of all of them, without merged weights (`flodl_hf.models.adapters.mixed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flodl.errors import ConfigError, FlodlError, capped
from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import Pending, Work
from flodl_hf.inference.token_table import TokenTable

MAX_MIXED_ADAPTERS = 16
"""Maximum number of adapters of a batch: the terms of all of them are computed for each token."""


def open_adapters(
    listed: Sequence[Mapping[str, str]], models: Mapping[str, Any], opened: Callable[[str, str, str], Any]
) -> dict[str, Any]:
    """Return a dict with a model for each adapter.

    Args:
        listed: the result of `find_adapters`.
        models: dict of the base models.
        opened: function that loads a model from the name of its base, a head and an adapter's folder.

    Raises:
        ConfigError: adapters cannot be loaded; the message lists all of them.
    """
    from flodl_hf.models.adapters.folder import open_adapter

    found, problems = {}, []
    for one in listed:
        base = models[one["base"]]
        try:
            # An adapter without a task has the task of its base.
            head = open_adapter(one["folder"]).task(base.config.family) or base.head
            model = opened(one["base"], head, one["folder"])
        except FlodlError as fault:
            problems.append(f"{one['name']}: {fault}")
            continue
        _share(model, [base, *found.values()])
        found[one["name"]] = model
    if problems:
        raise ConfigError(
            f"adapters that cannot be served: {capped(problems)}\nRemove or repair their folders.",
            problems=problems,
        )
    return found


def _share(model: Any, others: Sequence[Any]) -> None:
    """Use the memory of other models' tensors for equal tensors of a model."""
    known: dict[str, list[Any]] = {}
    for other in others:
        for name, parameter in other.graph.named_parameters():
            if not any(parameter.data_ptr() == one.data_ptr() for one in known.setdefault(name, [])):
                known[name].append(parameter)
    for name, parameter in model.graph.named_parameters():
        for other in known.get(name, ()):
            if parameter.dtype == other.dtype and parameter.shape == other.shape and torch.equal(parameter, other):
                parameter.data = other.data
                break


class MixedAdapters:
    """Several adapters that share batches; used like a model.

    Args:
        base: a model of their task without an adapter.
        members: dict of models with one adapter each.

    Raises:
        PredictError: the adapters cannot share a batch.
    """

    def __init__(self, base: Any, members: Mapping[str, Any]) -> None:
        from flodl_hf.models.adapters.mixed import Mixed

        self.names = tuple(members)
        self._mixed = Mixed(base, {name: member._adapter_named("default") for name, member in members.items()})

    def start(self, table: TokenTable, work: Work, places: Sequence[Sequence[int]] | None) -> Pending:
        """Return the pending results of rows; the only place of each row is the index of its adapter."""
        assert places is not None
        numbers = np.fromiter((number for (number,) in places), np.int64, len(places))
        rows = replace(table, owners=np.arange(len(table)))
        return self._mixed.start(numbers, None, None, rows, work, None)


def mix_adapters(
    listed: Sequence[Mapping[str, str]], adapted: Mapping[str, Any], opened: Callable[[str, str, str], Any]
) -> dict[str, tuple[MixedAdapters, int]]:
    """Return the adapters that share batches: for each name the group and the index in it.

    Adapters that cannot share batches are omitted: other kinds than sums, other tasks than labels, unique labels.

    Args:
        listed: the result of `find_adapters`.
        adapted: the result of `open_adapters`.
        opened: as for `open_adapters`.
    """
    groups: dict[Any, list[Mapping[str, str]]] = {}
    for one in listed:
        model = adapted[one["name"]]
        kind = one["base"], model.head, tuple(model.config.labels), model.config.problem_type
        groups.setdefault(kind, []).append(one)
    found: dict[str, tuple[MixedAdapters, int]] = {}
    for (name, head, *_), members in groups.items():
        if len(members) < 2:
            continue
        base = opened(name, head, members[0]["folder"])
        base.set_adapter(None)
        _share(base, [adapted[one["name"]] for one in members])
        able = {}
        for one in members:
            with suppress(PredictError):
                MixedAdapters(base, {"one": adapted[one["name"]]})
                able[one["name"]] = adapted[one["name"]]
        names = list(able)
        for first in range(0, len(names), MAX_MIXED_ADAPTERS):
            part = names[first : first + MAX_MIXED_ADAPTERS]
            if len(part) > 1:
                together = MixedAdapters(base, {each: able[each] for each in part})
                found |= {each: (together, number) for number, each in enumerate(part)}
    return found
