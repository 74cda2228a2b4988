"""Parse peft's ``adapter_config.json``.

A setting that would change numbers and is not supported raises an error with its name; a setting that is absent or
has no effect is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flodl.errors import ConfigError, capped, printable
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.models.adapters.settings import (
    ALL_LINEAR,
    IA3,
    IA3_WORDS,
    LORA,
    PEFT_ALPHA,
    PROMPT,
    Lora,
    Prefix,
    Prompt,
    Settings,
    listed,
)  # fmt: skip

FIELDS = {name: word.ours for name, word in LORA.items() if word.ours is not None}
FIELDS |= {name: name for name in ("bias", "lora_bias", "trainable_token_indices")}
"""Fields of `Lora` by the names of peft."""
VIRTUAL = {"PROMPT_TUNING": Prompt, "P_TUNING": Prompt, "PREFIX_TUNING": Prefix}
_PLACES = ("target_modules", "exclude_modules")
_SELECTING = (*_PLACES, "modules_to_save", "layers_to_transform")
_TOKENS = (
    *("num_virtual_tokens", "num_transformer_submodules", "token_dim", "num_attention_heads", "num_layers"),
    # How virtual tokens were initialised, and which network produced them in training; files contain its output.
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs", "init_weights"),
    *("prefix_projection", "encoder_hidden_size", "encoder_reparameterization_type", "encoder_num_layers"),
    "encoder_dropout",
)
_KNOWN = {
    "LORA": (*FIELDS, *_PLACES, "layers_pattern", "layers_to_transform", "init_lora_weights"),
    "IA3": (*_PLACES, "feedforward_modules", "init_ia3_weights"),
    **dict.fromkeys(VIRTUAL, _TOKENS),
}
"""Settings that are followed, by kind of adapter."""
_OF_ALL = ("peft_type", "task_type", "base_model_name_or_path", "modules_to_save")
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
    if kind not in list(_KNOWN):
        raise ConfigError(
            f"{file}: peft_type is {printable(str(kind), 60)}; expected {', '.join(_KNOWN)}, the kinds that are read "
            "here. Merge it with peft (merge_and_unload), save the model and load that",
            where=file,
            problems=["peft_type"],
        )
    problems = [
        f"{printable(name, 60)}: {printable(repr(value), 80)}, which changes numbers and is not understood"
        for name, value in values.items()
        if name not in (*_KNOWN[kind], *_OF_ALL, *CHANGES_NOTHING) and value not in (None, False, "", [], {}, ())
    ]
    begun = values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASE):
        problems.append(f"init_lora_weights: {printable(begun, 60)}, which changed the base's weights too")
    if values.get("num_transformer_submodules") not in (None, 1):
        problems.append("num_transformer_submodules: expected 1")
    needed = ("num_virtual_tokens",) if kind in VIRTUAL else ("target_modules",)
    numbers = [name for name in ("r", "lora_alpha", "lora_dropout") if name in values]
    problems += [f"{name}: found nothing, expected a value" for name in (*needed, *numbers) if values.get(name) is None]
    if not problems:
        try:
            return _settings(kind, values)
        except (TypeError, AttributeError) as fault:
            problems = [str(fault)]
        except ConfigError as fault:
            names = {word.ours: name for words in (IA3_WORDS, PROMPT, LORA) for name, word in words.items()}
            problems = [f"{names.get(ours := problem.split()[0], ours)}: {problem}" for problem in fault.problems]
    raise ConfigError(
        f"{file}: {len(problems)} settings cannot be followed:\n{capped(problems)}\nexpected an ordinary adapter; "
        "merge the adapter with peft (merge_and_unload), save the model and load that, or fetch the file again",
        where=file,
        problems=problems,
    )


def _settings(kind: str, values: Mapping[str, Any]) -> Settings:
    if kind == "LORA":
        fields = {ours: values[name] for name, ours in FIELDS.items() if values.get(name) not in (None, [], {})}
        return Lora(**{"rank": 8, "alpha": PEFT_ALPHA, **fields, "targets": listed(values["target_modules"])})
    if kind == "IA3":
        # Ends of paths, as ours are; a pattern is none.
        return IA3(listed(values["target_modules"]), tuple(values.get("feedforward_modules") or ()))
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
    try:
        numbers = None if layers is None or layers == [] else {layers} if isinstance(layers, int) else set(layers)
        return {
            path
            for path in modules
            if not _matches(excluded, path)
            and not any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", path) for name in whole)
            and _matches(wanted, path)
            and (isinstance(wanted, str) or numbers is None or _layer(path, listed(below)) in numbers)
        }
    except (re.error, TypeError) as fault:
        raise ConfigError(
            f"{file}: {' or '.join(_SELECTING)}: {fault}; expected a pattern, or a list of names or numbers. "
            "Correct it, or name the projections in target_modules",
            where=file,
            problems=list(_SELECTING),
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
