"""The known families. A new family is a file in this folder and a name in the tuple below.

A file is imported on first use of its family. ``index.json``, which ``make docs`` writes, contains the
facts that select one. `register` adds a family from outside of the package; there is no automatic discovery.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, nearest
from flodl_hf.families.schema.tasks import HEADS

if TYPE_CHECKING:
    from flodl_hf.families.schema import Family
    from flodl_hf.families.schema.config_rows import Row

    FAMILIES: tuple[Family, ...]

__all__ = [
    "FAMILIES",
    "families",
    "index",
    "model_types",
    "named",
    "register",
    "registered",
    "row_of",
    "that_claims",
    "that_tokenizes",
]

FILES = (
    "bert",
    "roberta",
    "xlm_roberta",
    "camembert",
    "distilbert",
    "albert",
    "deberta_v2",
    "deberta",
    "electra",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "gte",
    "eurobert",
    "jina_bert",
    "jina_embeddings_v3",
    "xlm_roberta_xl",
    "roberta_prelayernorm",
    "data2vec_text",
    "esm",
    "roformer",
    "ernie",
)

_INDEX = Path(__file__).with_name("index.json")
_registered: dict[str, Family] = {}


def __getattr__(name: str) -> Any:
    if name == "FAMILIES":
        return _own()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def families() -> tuple[Family, ...]:
    """Import and return the families of this package, then those registered in this process."""
    return (*_own(), *_registered.values())


def model_types() -> list[str]:
    """Return the ``model_type`` of each family, in order."""
    return [entry["model_type"] for entry in _entries()]


def named(model_type: str | None) -> Family | None:
    """Return the family of a ``model_type``; None if it is unknown in this process."""
    return next((_found(entry) for entry in _entries() if entry["model_type"] == model_type), None)


def that_claims(source: Mapping[str, Any]) -> Family | None:
    """Return the family that claims a ``config.json`` of another ``model_type``; None without one."""
    return next((_found(entry) for entry in _entries() if entry["claims"] and _holds(source, entry["claims"])), None)


def that_tokenizes(word: str) -> Family | None:
    """Return the family with a tokenizer class that begins with a lower-case word; own classes have precedence."""
    own = [entry for entry in _entries() if entry["tokenizers"][:1] == [word]]
    shared = [entry for entry in _entries() if word in entry["tokenizers"][1:]]
    return next(map(_found, own + shared), None)


def row_of(key: str) -> Row | None:
    """Return the row of the first family that reads a key of ``config.json``; None without one."""
    rows = (row for entry in _entries() if key in entry["keys"] for row in _found(entry).rows)
    return next((row for row in rows if row.key == key), None)


def index() -> list[dict[str, Any]]:
    """Return the contents of ``index.json``: the place of each family, and the facts that select one."""
    return [entry for name in FILES for entry in _described(name)]


def registered() -> tuple[Family, ...]:
    """Return the families that `register` added in this process."""
    return tuple(_registered.values())


def register(family: Family) -> Family:
    """Add a family to this process, for ``from_pretrained``, export and the command line; returns it.

    Registering a ``model_type`` again replaces the record, so that a notebook cell can run twice.

    Raises:
        ConfigError: the package has a family of that ``model_type``, or a head belongs to no known task.
    """
    if family.model_type not in _registered and family.model_type in model_types():
        raise ConfigError(
            f"register: found the model_type {family.model_type!r} of a family of this package; expected another "
            "model_type. Derive an alias with FAMILY.renamed(...).",
            problems=["model_type"],
        )
    tasks = [head.name for head in HEADS if head.name != "base"]
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
    """Return the family of this process with a name.

    Raises:
        ConfigError: there is none.
    """
    if (family := named(model_type)) is not None:
        return family
    known = model_types()
    raise ConfigError(
        f"pickled family: found {model_type!r}, which is unknown in this process; expected one of {', '.join(known)}. "
        f"Call flodl_hf.families.register(FAMILY) where the module {config.__module__} is imported, so that every "
        "process that loads it knows the family.",
        problems=["model_type"],
        known=known,
    )


def _pickled_by_name(family: Family) -> tuple[Any, ...]:
    """Return what ``Family.__reduce__`` returns: a function and the names from which it finds the family again."""
    # Unpickling the class of the configuration imports the module of a family from outside, which registers the family.
    _travelled(family.model_type, family.config)
    return _travelled, (family.model_type, family.config)


@cache
def _own() -> tuple[Family, ...]:
    return tuple(_found(entry) for entry in _indexed())


@cache
def _indexed() -> tuple[dict[str, Any], ...]:
    """Return the index of the package's families; a file that the index lacks is imported."""
    written = json.loads(_INDEX.read_text("utf-8"))
    by_file = {name: [entry for entry in written if entry["place"].startswith(f"{name}.")] for name in FILES}
    return tuple(entry for name, entries in by_file.items() for entry in entries or _described(name))


def _entries() -> Iterable[dict[str, Any]]:
    return (*_indexed(), *(_entry(family, "") for family in _registered.values()))


def _described(name: str) -> list[dict[str, Any]]:
    from flodl_hf.families.schema import Family

    stated = vars(import_module(f"{__name__}.{name}")).items()
    return [_entry(value, f"{name}.{constant}") for constant, value in stated if isinstance(value, Family)]


def _entry(family: Family, place: str) -> dict[str, Any]:
    rules = family.tokenizer
    return {
        "model_type": family.model_type,
        "place": place,
        "claims": {key: list(values) for key, values in family.claims.items()},
        "tokenizers": [] if rules is None else [word.lower() for word in (family.class_prefix, *rules.classes)],
        "keys": [row.key for row in family.rows],
    }


def _found(entry: Mapping[str, Any]) -> Family:
    file, _, constant = entry["place"].partition(".")
    return getattr(import_module(f"{__name__}.{file}"), constant) if file else _registered[entry["model_type"]]


def _holds(source: Mapping[str, Any], claims: Mapping[str, list[Any]]) -> bool:
    return all(key in source and (not values or source[key] in values) for key, values in claims.items())
