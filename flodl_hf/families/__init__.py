"""The families this package knows. A new one is a file in this folder and a name in the tuple below.

`register` adds one from outside the package; nothing is discovered by itself.
"""

from __future__ import annotations

import copyreg
from typing import Any

from flodl.errors import ConfigError, nearest
from flodl_hf.config.head_names import HEAD_NAMES
from flodl_hf.families import (
    albert,
    bert,
    camembert,
    data2vec_text,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    esm,
    eurobert,
    gte,
    jina_bert,
    jina_embeddings_v3,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    roberta_prelayernorm,
    xlm_roberta,
    xlm_roberta_xl,
)
from flodl_hf.family import Family

__all__ = ["FAMILIES", "families", "named", "register", "registered"]

FAMILIES: tuple[Family, ...] = (
    bert.FAMILY,
    roberta.FAMILY,
    xlm_roberta.FAMILY,
    camembert.FAMILY,
    distilbert.FAMILY,
    albert.FAMILY,
    deberta_v2.FAMILY,
    deberta.FAMILY,
    electra.FAMILY,
    mpnet.FAMILY,
    modernbert.FAMILY,
    nomic_bert.FAMILY,
    gte.FAMILY,
    gte.NEW,
    eurobert.FAMILY,
    jina_bert.FAMILY,
    jina_embeddings_v3.FAMILY,
    jina_embeddings_v3.TASKED,
    xlm_roberta_xl.FAMILY,
    roberta_prelayernorm.FAMILY,
    data2vec_text.FAMILY,
    esm.FAMILY,
)

_registered: dict[str, Family] = {}


def families() -> tuple[Family, ...]:
    """Return the families of this package, then those that were registered in this process."""
    return (*FAMILIES, *_registered.values())


def named(model_type: str | None) -> Family | None:
    """Return the family of a ``model_type``, or None where this process knows none."""
    return next((family for family in families() if family.model_type == model_type), None)


def registered() -> tuple[Family, ...]:
    """Return the families that `register` added in this process."""
    return tuple(_registered.values())


def register(family: Family) -> Family:
    """Make ``from_pretrained``, export and the command line of this process know a family; returns it.

    Registering a ``model_type`` again replaces the former record, so that a notebook cell can be run twice.

    Raises:
        ConfigError: the package itself has a family of that ``model_type``, or a head is of no known task.
    """
    if any(family.model_type == own.model_type for own in FAMILIES):
        raise ConfigError(
            f"register: this package has a family {family.model_type!r} of its own; expected another model_type. "
            "Derive an alias from it with FAMILY.renamed(...).",
            problems=["model_type"],
        )
    tasks = [names.name for names in HEAD_NAMES if names.name != "base"]
    unknown = [name for name in family.heads if name not in tasks]
    if unknown:
        raise ConfigError(
            f"register: {family.model_type} has a head {unknown[0]!r}{nearest(unknown[0], tasks)}; "
            f"expected some of {', '.join(tasks)}",
            problems=unknown,
        )
    _registered[family.model_type] = family
    return family


def _travelled(model_type: str, config: type[Any]) -> Family:
    """Return the family of this process with that name.

    Raises:
        ConfigError: there is none.
    """
    if (family := named(model_type)) is not None:
        return family
    known = [family.model_type for family in families()]
    raise ConfigError(
        f"the family {model_type!r} of what is pickled is not known in this process, which has {', '.join(known)}. "
        f"Call flodl_hf.register(FAMILY) where the module {config.__module__} is imported, so that every process that "
        "loads it knows the family.",
        problems=["model_type"],
        known=known,
    )


def _by_name(family: Family) -> tuple[Any, ...]:
    # A family is code, so it travels by name. Naming its configuration's class has the other process import the
    # module of a family from outside, which is where such a family registers itself.
    _travelled(family.model_type, family.config)
    return _travelled, (family.model_type, family.config)


copyreg.pickle(Family, _by_name)
