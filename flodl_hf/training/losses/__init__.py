"""Losses that vectors are trained by, under the names that sentence-transformers has for them, with its numbers.

`LOSSES` is the table of them; `make_loss` makes one of its name and settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from flodl.errors import ConfigError, nearest
from flodl_hf.training.losses import pairs, ranking
from flodl_hf.training.losses.pairs import Form, VectorLoss
from flodl_hf.training.losses.ranking import AdaptiveLayerLoss, MatryoshkaLoss

__all__ = ["LOSSES", "AdaptiveLayerLoss", "MatryoshkaLoss", "VectorLoss"]

LOSSES: dict[str, Any] = {
    name: kind
    for name, kind in {**vars(ranking), **vars(pairs)}.items()
    if isinstance(kind, type) and issubclass(kind, VectorLoss) and name.endswith("Loss") and kind is not VectorLoss
}
"""By name."""

CACHED = {
    "CachedMultipleNegativesRankingLoss": "MultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss": "MultipleNegativesSymmetricRankingLoss",
    "CachedGISTEmbedLoss": "GISTEmbedLoss",
    "CachedMultiVectorMultipleNegativesRankingLoss": "MultiVectorMultipleNegativesRankingLoss",
}
"""Names of losses that process a batch in parts; here, every loss can do so."""

USUAL: dict[Form, str] = {
    "pairs": "MultipleNegativesRankingLoss",
    "triplets": "MultipleNegativesRankingLoss",
    "texts": "MultipleNegativesRankingLoss",
    "scored": "CoSENTLoss",
    "binary": "ContrastiveLoss",
    "classes": "BatchAllTripletLoss",
    "teacher_scores": "MarginMSELoss",
    "teacher_vectors": "MSELoss",
}
"""The loss of each form of data where none is named."""


def is_named(word: Any, *names: str) -> bool:
    """Return whether a word is one of some names of losses, in small letters, without signs and "Loss"."""
    return isinstance(word, str) and _plain(word) in names


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "").removesuffix("loss")


def loss_named(word: str, table: Mapping[str, Any] = LOSSES) -> str:
    """Return the name of a loss, of a table or `CACHED`, in whatever case and with "Loss" or without.

    Names of other tables than `LOSSES` begin alike (Sparse, MultiVector), which may be left out.

    Raises:
        ConfigError: there is none of this name.
    """
    plain = _plain(word)
    known = (*table, *(name for name, whole in CACHED.items() if whole in table))
    for name in known:
        own = name.lower().removesuffix("loss")
        if plain in (own, own.removeprefix("sparse").replace("multivector", "")):
            return name
    raise ConfigError(
        f"vector_loss: found {word!r}{nearest(word, known)}; expected one of {', '.join(known)}",
        problems=[word],
    )


def make_loss(word: str, settings: Mapping[str, Any] | None = None, table: Mapping[str, Any] = LOSSES) -> Any:
    """Return the loss of a name, with these settings.

    Args:
        word: a name of the table, or of `CACHED`.
        settings: its fields; numbers may be texts, as on a command line, and ``temperature`` may stand for
            ``scale``, its inverse.
        table: mapping of names to losses.

    Raises:
        ConfigError: there is no such loss or setting, or a value cannot be; ``problems`` lists all.
    """
    name = loss_named(word, table)
    kind, given = table[CACHED.get(name, name)], dict(settings or {})
    known = {f.name for f in fields(kind)}
    if "temperature" in given and "scale" in known and "temperature" not in known:
        try:
            given["scale"] = 1.0 / float(given.pop("temperature"))
        except (ValueError, TypeError, ZeroDivisionError) as fault:
            raise ConfigError(f"loss_options of {name}: temperature: {fault}", problems=["temperature"]) from None
    return with_settings(kind, given)


def with_settings(kind: Any, settings: Mapping[str, Any], *first: Any) -> Any:
    """Return a loss of a class, with the first values of its fields and settings of the others.

    Raises:
        ConfigError: there is no such setting, or a value cannot be; ``problems`` lists all.
    """
    values, problems = read_settings(settings, {f.name: f.default for f in fields(kind)[len(first) :]})
    for f in fields(kind):
        word = {type(None): "None", float: "float"}.get(type(values.get(f.name, ())), "")
        if word not in str(f.type):
            problems.append(f"{f.name}: found {values[f.name]}; expected {f.type}")
    if not problems:
        made = kind(*first, **values)
        problems = made.faults()
        if not problems:
            return made
    raise ConfigError(f"loss_options of {kind.__name__}: {'; '.join(problems)}", problems=problems)


def read_settings(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return settings in the types of their defaults, and the problems."""
    values, problems = {}, []
    for name, value in settings.items():
        try:
            if name not in usual:
                raise ValueError(f"it has none{nearest(name, usual)}; expected {', '.join(usual) or 'no setting'}")
            values[name] = _typed(usual[name], value)
        except (ValueError, TypeError) as fault:
            problems.append(f"{name}: {fault}")
    return values, problems


def _typed(usual: Any, value: Any) -> Any:
    """Return a setting in the type of its default."""
    if str(value).lower() == "none":
        return None
    if isinstance(usual, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise ValueError(f"found {value!r}; expected yes or no")
        return words[str(value).lower()]
    if isinstance(usual, tuple):
        return tuple(value.split("+")) if isinstance(value, str) else tuple(value)
    if isinstance(usual, float):
        return float(value)
    # settings that are None by default are words or numbers
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            return kind(str(value))
    return str(value)
