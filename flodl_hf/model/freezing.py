"""Which parts of a model learn, by short paths."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flodl.errors import ConfigError, nearest
from flodl_hf.model.graph_model import GraphModel

__all__ = ["freeze", "frozen_paths"]


def frozen_paths(model: GraphModel, paths: Sequence[str]) -> list[str]:
    """Return the full paths that short ones stand for: ``layers.0-2`` is three layers of the encoder.

    Raises:
        ConfigError: nothing lies at a path; ``problems`` lists these.
    """
    names = [name for name, _ in model.graph.named_parameters()]
    parents = {".".join(parts[:k]) for name in names for parts in [name.split(".")] for k in range(1, len(parts) + 1)}
    found, problems = [], []
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)-(\d+)(.*)", path)
        wanted = [path]
        if match:
            head, first, last, tail = match.groups()
            wanted = [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1)]
        for one in wanted:
            full = next((p for p in (one, f"encoder.{one}") if p in parents), None)
            if full is None:
                known = {p.removeprefix("encoder.") for p in parents} | parents
                problems.append(f"{one}{nearest(one, known)}")
            else:
                found.append(full)
    if problems:
        roots = sorted({name.split(".")[0] for name in names})
        raise ConfigError(
            f"freeze: nothing lies at {'; '.join(problems)}. Expected paths such as embeddings, layers.0-5, "
            f"layers.3.attention or one of {', '.join(roots)}",
            problems=problems,
        )
    return found


def freeze(model: GraphModel, paths: Sequence[str]) -> None:
    """Exclude what lies at ``paths`` from training; see `frozen_paths`.

    Raises:
        ConfigError: nothing lies at a path, or nothing would be left to train.
    """
    if not paths:
        return
    places = frozen_paths(model, paths)
    for name, parameter in model.graph.named_parameters():
        if any(name == place or name.startswith(place + ".") for place in places):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"freeze: {', '.join(paths)} leave nothing to train", problems=list(paths))
