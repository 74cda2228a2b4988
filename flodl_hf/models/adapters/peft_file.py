"""Parse and write peft's ``adapter_config.json``.

A setting that would change numbers and is not supported raises an error with its name; a setting that is absent or
has no effect is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flodl.errors import ConfigError, capped, printable
from flodl_hf.families.schema.tasks import HEADS, task_named
from flodl_hf.models.adapters.settings import (
    ALL_LINEAR,
    BIASES,
    IA3,
    LORA,
    PEFT_ALPHA,
    Lora,
    Prefix,
    Prompt,
    Settings,
    listed,
)

Rule = tuple[str, Callable[[Any], bool]] | None
"""The accepted values in words, and their test; None for any value."""


def _of(*kinds: type | None) -> Callable[[Any], bool]:
    """Return a test for values of these JSON types, of which bool is no int; None is null."""
    return lambda value: (None if value is None else type(value)) in kinds


def _names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _or_null(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _each(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a test for null and for tables with accepted values."""
    return _or_null(lambda value: isinstance(value, dict) and all(map(test, value.values())))


def _token_ids(value: Any) -> bool:
    lists = value.values() if isinstance(value, dict) else [value or []]
    return all(isinstance(ids, list) and all(map(_of(int), ids)) for ids in lists)


_NAMES = ("names", _or_null(_names))
_TARGETS = ("names", lambda value: bool(value) and _names(value))
_COMMON: dict[str, Rule] = {
    "modules_to_save": _NAMES,
    "task_type": ("a task", _of(str, None)),
    "base_model_name_or_path": ("a name", _of(str, None)),
    "peft_type": None,
}
_LORA: dict[str, Rule] = {
    "init_lora_weights": None,
    "r": ("an integer", _of(int)),
    **dict.fromkeys(("lora_alpha", "lora_dropout"), ("a number", _of(int, float))),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias"), ("true or false", _of(bool, None))),
    "rank_pattern": ("ranks by name", _each(_of(int))),
    "alpha_pattern": ("alphas by name", _each(_of(int, float))),
    "target_modules": _TARGETS,
    **dict.fromkeys(("exclude_modules", "layers_pattern"), _NAMES),
    "layers_to_transform": (
        "numbers of layers", lambda v: _of(int, None)(v) or (isinstance(v, list) and all(map(_of(int), v)))
    ),
    "trainable_token_indices": ("ids of tokens", _token_ids),
    "bias": ("none, all or lora_only", BIASES.__contains__),
    **_COMMON,
}  # fmt: skip
_IA3: dict[str, Rule] = {
    "target_modules": _TARGETS,
    # Ends of paths, as ours are; a pattern is none.
    "feedforward_modules": ("a list", lambda value: value is None or (isinstance(value, list) and _names(value))),
    "exclude_modules": _NAMES,
    "init_ia3_weights": None,
    **_COMMON,
}
_VIRTUAL: dict[str, Rule] = {
    "num_virtual_tokens": ("an integer", _of(int)),
    "num_transformer_submodules": ("1", lambda value: value is None or (_of(int)(value) and value == 1)),
    **dict.fromkeys(("token_dim", "num_attention_heads", "num_layers"), ("an integer", _of(int, None))),
    # How virtual tokens were initialised, and which network produced them in training; files contain its output.
    **dict.fromkeys(
        (
            *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
            *("init_weights", "prefix_projection", "encoder_hidden_size", "encoder_reparameterization_type"),
            *("encoder_num_layers", "encoder_dropout"),
        )
    ),
    **_COMMON,
}
_FIELDS = {name: word.ours for name, word in LORA.items() if word.ours is not None}
_FIELDS |= {name: name for name in ("bias", "lora_bias", "trainable_token_indices")}
"""Fields of `Lora` by the names of peft."""
_REQUIRED = ("target_modules", "num_virtual_tokens")
VIRTUAL = {"PROMPT_TUNING": Prompt, "P_TUNING": Prompt, "PREFIX_TUNING": Prefix}
CHANGES_NOTHING = (
    *("auto_mapping", "revision", "inference_mode", "peft_version", "runtime_config", "fan_in_fan_out"),
    *("megatron_core", "ensure_weight_tying", "qalora_group_size", "eva_config", "velora_config"),
)
"""How an adapter was begun or is trained, and what belongs to settings that are off."""
MOST_REPEATS = 4
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "pissa_niter")
"""Ways to begin that also changed the base's weights, which are then none of the base's files."""


def read_settings(values: Mapping[str, Any], file: str) -> Settings:
    """Return the adapter settings of a file.

    Args:
        values: of ``adapter_config.json``.
        file: the file, for messages.

    Raises:
        ConfigError: another kind of adapter, or settings that change numbers and are not understood; all are listed.
    """
    kind = values.get("peft_type")
    read = {"LORA": _read_lora, "IA3": _read_ia3, **dict.fromkeys(VIRTUAL, _read_virtual)}
    if not isinstance(kind, str) or kind not in read:
        raise ConfigError(
            f"{file}: peft_type is {printable(str(kind), 60)}; expected {', '.join(read)}, the kinds that are read "
            "here. Merge it with peft (merge_and_unload), save the model and load that",
            where=file,
            problems=["peft_type"],
        )
    try:
        return read[kind](values, file)
    except ConfigError as fault:
        if getattr(fault, "where", None) == file:
            raise
        raise ConfigError(
            f"{file}: {fault.message}; fetch the file again", where=file, problems=fault.problems
        ) from None


def _check(
    values: Mapping[str, Any], file: str, kind: str, rules: Mapping[str, Rule], problems: Sequence[str] = ()
) -> None:
    """Raise for settings without a rule that change numbers, and for values that their rule does not accept.

    Raises:
        ConfigError: there are such, or other ``problems``; all are listed.
    """
    problems = [
        *(
            f"{printable(name, 60)}: {printable(repr(value), 80)}, which changes numbers and is not understood"
            for name, value in values.items()
            if name not in rules and name not in CHANGES_NOTHING and value not in (None, False, "", [], {}, ())
        ),
        *problems,
        *(
            f"{name}: found {printable(repr(values.get(name)), 80)}, expected {rule[0]}"
            for name, rule in rules.items()
            if rule is not None and (name in values or name in _REQUIRED) and not rule[1](values.get(name))
        ),
    ]
    if problems:
        raise ConfigError(
            f"{file}: {len(problems)} settings cannot be followed:\n{capped(problems)}\nexpected an ordinary {kind}; "
            "merge the adapter with peft (merge_and_unload), save the model and load that, or fetch the file again",
            where=file,
            problems=problems,
        )


def _read_lora(values: Mapping[str, Any], file: str) -> Lora:
    begun = values.get("init_lora_weights", True)
    changed = isinstance(begun, str) and begun.lower().startswith(CHANGED_BASE)
    wrong = [f"init_lora_weights: {printable(begun, 60)}, which changed the base's weights too"] if changed else []
    _check(values, file, "LoRA", _LORA, wrong)
    fields = {ours: values[name] for name, ours in _FIELDS.items() if values.get(name) not in (None, [], {})}
    return Lora(**{"rank": 8, "alpha": PEFT_ALPHA, **fields, "targets": listed(values["target_modules"])})


def _read_ia3(values: Mapping[str, Any], file: str) -> IA3:
    _check(values, file, "IA3", _IA3)
    return IA3(targets=listed(values["target_modules"]), inputs=tuple(values.get("feedforward_modules") or ()))


def _read_virtual(values: Mapping[str, Any], file: str) -> Prompt | Prefix:
    kind = str(values["peft_type"])
    _check(values, file, kind, _VIRTUAL)
    made = kind == "P_TUNING" or bool(values.get("prefix_projection"))
    width = values.get("encoder_hidden_size") if made else None
    if VIRTUAL[kind] is Prefix:
        return Prefix(tokens=values["num_virtual_tokens"], encoder=width)
    lstm = width is not None and values.get("encoder_reparameterization_type") == "LSTM"
    return Prompt(tokens=values["num_virtual_tokens"], encoder=width, kind="lstm" if lstm else "mlp")


def task_of(values: Mapping[str, Any]) -> str | None:
    """Return our name of the task in a file; None if it names no supported task."""
    found = values.get("task_type")
    return next((head.name for head in HEADS if head.peft is not None and head.peft == found), None)


def targeted(values: Mapping[str, Any], modules: Iterable[str], file: str) -> set[str] | None:
    """Return the projections that the settings of a file mean, by peft's rules; None where all linear ones are meant.

    Args:
        values: of ``adapter_config.json``.
        modules: paths of all projections in transformers' model.
        file: the file, for messages.

    Raises:
        ConfigError: a pattern that is none.
    """
    wanted = values["target_modules"]
    if wanted == ALL_LINEAR:
        return None
    excluded = values.get("exclude_modules") or ()
    whole = values.get("modules_to_save") or ()
    layers, below = values.get("layers_to_transform"), values.get("layers_pattern") or ()
    numbers = None if layers is None or layers == [] else {layers} if isinstance(layers, int) else set(layers)
    try:
        return {
            path
            for path in modules
            if not _matches(excluded, path)
            and not any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", path) for name in whole)
            and _matches(wanted, path)
            and (isinstance(wanted, str) or numbers is None or _layer(path, listed(below)) in numbers)
        }
    except re.error as fault:
        raise ConfigError(
            f"{file}: target_modules or exclude_modules: {fault}; expected a pattern or a list of names; correct it, "
            "or name the projections in a list",
            where=file,
            problems=["target_modules"],
        ) from None


def _matches(wanted: str | Sequence[str], path: str) -> bool:
    if isinstance(wanted, str):
        # A pattern may be made to take forever; what repeats groups, or repeats often, is.
        if len(wanted) > 1000 or re.search(r"\)[*+{]", wanted) or len(re.findall(r"[*+{]", wanted)) > MOST_REPEATS:
            raise re.error("a pattern that may take too long")
        return re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith("." + name) for name in wanted)


def of_pattern(patterns: Mapping[str, Any] | None, path: str, usual: Any) -> Any:
    """Return the value of the first pattern that a path ends with, by peft's rule; ``usual`` if none matches."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return usual


def _layer(path: str, below: Sequence[str]) -> int | None:
    """Return the layer number of a projection."""
    patterns = [rf"(?:^|.*?\.){re.escape(name)}\.(\d+)\." for name in below] or [r".*?\.[^.]*\.(\d+)\."]
    found = next((match for pattern in patterns if (match := re.match(pattern, path))), None)
    return None if found is None else int(found[1])


def lora_values(
    settings: Lora, targets: Sequence[str], ranks: Mapping[str, int], alphas: Mapping[str, float]
) -> dict[str, Any]:
    """Return the entries of ``adapter_config.json`` for low-rank sums, without the common entries.

    Args:
        settings: the adapter's settings.
        targets: transformers' paths of projections, or ends of them.
        ranks: other ranks by transformers' path.
        alphas: other alphas by transformers' path.
    """
    alpha, tokens = settings.alpha_of(), settings.trainable_token_indices
    ids = {name: list(rows) for name, rows in tokens.items()} if isinstance(tokens, Mapping) else list(tokens)
    return {
        **{name: getattr(settings, ours) for name, ours in _FIELDS.items()},
        "alpha_pattern": dict(alphas),
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "peft_type": "LORA",
        "rank_pattern": dict(ranks),
        "target_modules": list(targets),
        "trainable_token_indices": ids or None,
    }


def ia3_values(targets: Sequence[str], inside: Sequence[str]) -> dict[str, Any]:
    """Return the entries of ``adapter_config.json`` for learned scales, without the common entries.

    Args:
        targets: transformers' paths of projections, or ends of them.
        inside: the targets with scaled inputs.
    """
    return {
        "fan_in_fan_out": False,
        "feedforward_modules": list(inside),
        "init_ia3_weights": True,
        "peft_type": "IA3",
        "target_modules": list(targets),
    }


def virtual_values(settings: Prompt | Prefix, width: int, heads: int, layers: int) -> dict[str, Any]:
    """Return the entries of ``adapter_config.json`` for virtual tokens, without the common entries.

    Args:
        settings: the adapter's settings.
        width: of a vector, or of a layer's keys.
        heads: of attention.
        layers: of the encoder.
    """
    found: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_layers": layers,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": settings.tokens,
        "token_dim": width,
    }
    if isinstance(settings, Prefix):
        made = {"encoder_hidden_size": settings.encoder, "prefix_projection": settings.encoder is not None}
        return found | made | {"peft_type": "PREFIX_TUNING"}
    if settings.encoder is not None:
        made = {"encoder_hidden_size": settings.encoder, "encoder_reparameterization_type": settings.kind.upper()}
        return found | made | {"peft_type": "P_TUNING", "encoder_dropout": 0.0, "encoder_num_layers": 2}
    return found | {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}


def every_value(values: Mapping[str, Any], modules: Sequence[str], *, base: str | None, head: str) -> dict[str, Any]:
    """Return all entries of ``adapter_config.json``, sorted by name.

    Args:
        values: the entries of this kind of adapter.
        modules: transformers' paths of modules that are stored whole.
        base: folder or name of the base.
        head: our word for the task.
    """
    common = {
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "modules_to_save": list(modules) or None,
        "revision": None,
        "task_type": task_named(head).peft,
    }
    return dict(sorted({**values, **common}.items()))
