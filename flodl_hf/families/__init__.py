"""The known families. A new family is a file in this folder and a name in the tuple below.

A file is imported on first use of its family. ``index.json``, which ``make docs`` writes, contains the
facts that select one. `register` adds a family in a process. Other packages add families and heads with entry points
of the group ``flodl_hf.families``: ``MODEL_TYPE`` names a `Family`, ``MODEL_TYPE.TASK`` a `FamilyHead`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, nearest
from flodl_hf.families.schema.tasks import HEADS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from flodl_hf.families.schema import Family
    from flodl_hf.families.schema.config_rows import Row

    FAMILIES: tuple[Family, ...]

__all__ = ["FAMILIES", "families", "register", "registered"]

FILES = (
    "bert", "roberta", "xlm_roberta", "camembert", "distilbert", "albert", "deberta_v2", "deberta", "electra", "mpnet",
    "modernbert", "nomic_bert", "gte", "eurobert", "jina_bert", "jina_embeddings_v3", "xlm_roberta_xl",
    "roberta_prelayernorm", "data2vec_text", "esm", "roformer", "ernie",
)  # fmt: skip

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
    """Return the family of a ``model_type``, also of an installed package; None if it is unknown."""
    found = next((_found(entry) for entry in _entries() if entry["model_type"] == model_type), None)
    if found is None and model_type in _installed():
        return register(_loaded(model_type, "Family"))
    return found


def match_config(source: Mapping[str, Any]) -> Family | None:
    """Return the family that claims a ``config.json`` of another ``model_type``; None without one."""
    return next((_found(entry) for entry in _entries() if entry["claims"] and _holds(source, entry["claims"])), None)


def by_tokenizer_class(word: str) -> Family | None:
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
    _check_tasks(family.model_type, family.heads)
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


def _entry(family: Family, location: str) -> dict[str, Any]:
    rules = family.tokenizer
    return {
        "model_type": family.model_type,
        "place": location,
        "claims": {key: list(values) for key, values in family.claims.items()},
        "tokenizers": [] if rules is None else [word.lower() for word in (family.class_prefix, *rules.classes)],
        "keys": [row.key for row in family.rows],
    }


def _found(entry: Mapping[str, Any]) -> Family:
    file, _, constant = entry["place"].partition(".")
    return _own_family(file, constant) if file else _registered[entry["model_type"]]


@cache
def _own_family(file: str, constant: str) -> Family:
    """Return a family of this package with the heads that installed packages add."""
    family = getattr(import_module(f"{__name__}.{file}"), constant)
    added = [name for name in _installed() if name.startswith(f"{family.model_type}.")]
    heads = {name.removeprefix(f"{family.model_type}."): _loaded(name, "FamilyHead") for name in added}
    _check_tasks(family.model_type, heads)
    return replace(family, heads={**heads, **family.heads}) if heads else family


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name."""
    from importlib.metadata import entry_points  # not needed by an import of this package

    return {point.name: point for point in entry_points(group=__name__)}


def _loaded(name: str, kind: str) -> Any:
    """Return the object of an entry point.

    Raises:
        ConfigError: it is not of the class ``kind``, or a family has another ``model_type``.
    """
    value = _installed()[name].load()
    if type(value).__name__ != kind or (kind == "Family" and value.model_type != name):
        found = f"a {type(value).__name__} of {getattr(value, 'model_type', 'no model_type')}"
        raise ConfigError(
            f"entry point {name} of flodl_hf.families: found {found}, expected a {kind} of {name.partition('.')[0]}. "
            "Correct pyproject.toml of the package that declares it, or remove the package.",
            problems=[name],
        )
    return value


def _check_tasks(model_type: str, names: Iterable[str]) -> None:
    tasks = [head.name for head in HEADS if head.name != "base"]
    unknown = [name for name in names if name not in tasks]
    if unknown:
        raise ConfigError(
            f"register: {model_type} has a head {unknown[0]!r}{nearest(unknown[0], tasks)}; "
            f"expected some of {', '.join(tasks)}",
            problems=unknown,
        )


def _holds(source: Mapping[str, Any], claims: Mapping[str, list[Any]]) -> bool:
    return all(key in source and (not values or source[key] in values) for key, values in claims.items())
