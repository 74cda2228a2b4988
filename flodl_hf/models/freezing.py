"""Which parts of a model learn, by short paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch import nn

from flodl.errors import ConfigError, nearest
from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.models.adapters.attach import adapters_of


def frozen_paths(model: GraphModel, paths: Sequence[str]) -> list[str]:
    """Return the full paths that short ones stand for: ``layers.0-2`` is three layers of the encoder.

    Raises:
        ConfigError: a path matches nothing; ``problems`` lists these paths.
    """
    names = [name for name, _ in model.graph.named_parameters()]
    parents = {".".join(parts[:k]) for name in names for parts in [name.split(".")] for k in range(1, len(parts) + 1)}
    found, problems = [], []
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)-(\d+)(.*)", path)
        if match:
            places, fault = _range(match, parents)
            found += places
            problems += [f"{path}{fault}"] if fault else []
        elif full := next((p for p in (path, f"encoder.{path}") if p in parents), None):
            found.append(full)
        else:
            known = {p.removeprefix("encoder.") for p in parents} | parents
            problems.append(f"{path}{nearest(path, known)}")
    if problems:
        roots = sorted({name.split(".")[0] for name in names})
        raise ConfigError(
            f"freeze: no module at {'; '.join(problems)}. Expected paths such as embeddings, layers.0-5, "
            f"layers.3.attention or one of {', '.join(roots)}",
            problems=problems,
        )
    return found


def _range(written: re.Match[str], parents: Collection[str]) -> tuple[list[str], str]:
    """Return the paths of a range, and its problem as text, "" for none."""
    head, first, last, tail = written.groups()
    ends = int(first), int(last)
    for start in (head, f"encoder.{head}"):
        numbers = sorted(
            int(number)
            for path in parents
            if path.startswith(start) and path.endswith(tail)
            if (number := path[len(start) : len(path) - len(tail)]).isdecimal()
        )
        if not numbers:
            continue
        there = f"; there are {head}{numbers[0]}-{numbers[-1]}{tail}"
        if ends[0] > ends[1]:
            return [], f" ends before it begins{there}"
        if ends[0] < numbers[0] or ends[1] > numbers[-1]:
            return [], there
        return [f"{start}{number}{tail}" for number in numbers if ends[0] <= number <= ends[1]], ""
    return [], f" has no numbered parts under {head.rstrip('.') or 'no name'}"


def frozen_parameters(model: GraphModel, paths: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters of the base model at ``paths``, without the parts of an adapter.

    Raises:
        ConfigError: a path matches nothing, or no parameter would be left to train.
    """
    if not paths:
        return []
    places, adapter = frozen_paths(model, paths), {id(p) for p in adapters_of(model).part_parameters()}
    found = [
        parameter
        for name, parameter in model.graph.named_parameters()
        if id(parameter) not in adapter and any(name == place or name.startswith(place + ".") for place in places)
    ]
    chosen = {id(parameter) for parameter in found}
    if not any(p.requires_grad and id(p) not in chosen for p in model.parameters()):
        raise ConfigError(
            f"freeze: found {', '.join(paths)}, which leaves nothing to train; expected fewer parts",
            problems=["freeze"],
        )
    return found


def freeze(model: GraphModel, paths: Sequence[str]) -> None:
    """Exclude the base model's parameters at ``paths`` from training; see `frozen_parameters`.

    Raises:
        ConfigError: a path matches nothing, or no parameter would be left to train.
    """
    for parameter in frozen_parameters(model, paths):
        parameter.requires_grad_(False)
