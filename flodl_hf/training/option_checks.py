"""Checks of options: single values, and combinations of values that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from flodl.errors import ConfigError, nearest
from flodl_hf.models.adapters.settings import adapter_faults, adapter_of

__all__ = ["SCHEDULES", "checked", "combination_faults", "schedule_values"]

SCHEDULES: dict[str, dict[str, type]] = {
    "linear": {},
    "cosine": {"cycles": float, "floor": float, "end": float},
    "cosine_with_restarts": {"cycles": float},
    "polynomial": {"power": float, "end": float},
    "inverse_sqrt": {"timescale": int},
    "warmup_stable_decay": {
        "decay": float,
        "stable": int,
        "rise": str,
        "fall": str,
        "floor": float,
        "cycles": float,
    },
    "constant": {},
    "one_cycle": {"divisor": float},
    "plateau": {"patience": int, "factor": float, "floor": float},
}
"""Names of curves, and what each takes in ``schedule_options``; `flodl_hf.training.rates` makes them."""


def checked(value: Any, hint: Any, checks: Mapping[str, Any]) -> Any:
    """Return a value in the type of its option.

    Args:
        value: the value that was given.
        hint: the type annotation of the option.
        checks: the metadata of the option's field.

    Raises:
        ValueError: the value is of another type, or out of range.
    """
    kinds = get_args(hint) or (hint,)
    if value in checks.get("words", ()):
        return value
    if value is None:
        if type(None) in kinds or hint is Any:
            return None
        raise ValueError("found nothing; expected a value")
    if hint in (Sequence[str], Sequence[str] | None):
        value = _texts(value)
    elif hint == Mapping[str, str] | None:
        if not isinstance(value, Mapping):
            raise ValueError(f"found {value!r}; expected a map of roles to columns")
    elif hint == Mapping[str, Any] | None:
        if not isinstance(value, Mapping):
            raise ValueError(f"found {value!r}; expected a map of names to values")
    elif bool in kinds:
        if not isinstance(value, bool):
            raise ValueError(f"found {value!r}; expected true or false")
    elif float in kinds or int in kinds:
        value = _number(value, float in kinds)
        low, high = checks.get("least", float("-inf")), checks.get("most", float("inf"))
        if not low <= value <= high:
            raise ValueError(f"found {value!r}; expected {low} {f'to {high}' if high < float('inf') else 'or more'}")
    elif str in kinds and not isinstance(value, str):
        raise ValueError(f"found {value!r}; expected a text")
    parts: Any = value if "each" in checks else ()
    strange = [part for part in parts if part not in checks["each"]]
    if strange:
        raise ValueError(f"found {', '.join(map(repr, strange))}; expected some of {', '.join(checks['each'])}")
    among = checks.get("among")
    if among and value not in among:
        raise ValueError(f"found {value!r}{nearest(str(value), among)}; expected one of {', '.join(among)}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(v, (str, int)) for v in parts):
        raise ValueError(f"found {value!r}; expected a list of texts")
    return tuple(str(v) for v in parts)


def _number(value: Any, fraction: bool) -> int | float:
    if isinstance(value, str):
        # YAML 1.1 reads 5e-5 as a text.
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"found {value!r}; expected a number") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"found {value!r}; expected a number")
    if fraction:
        return float(value)
    if int(value) != value:
        raise ValueError(f"found {value!r}; expected an integer")
    return int(value)


def combination_faults(options: Any) -> list[str]:
    """Return the problems of options that are valid by themselves and exclude each other."""
    problems = adapter_faults(options)
    try:
        adapter_of(options)
    except ConfigError as fault:
        problems.append(f"adapter: {fault.message}")
    prompts = options.prompts
    texts = [*prompts, *prompts.values()] if isinstance(prompts, Mapping) else [prompts or ""]
    if not all(isinstance(text, str) for text in texts):
        problems.append(f"prompts: found {prompts!r}; expected a text, or a text for each column by its name")
    schedule = options.schedule
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            problems.append(
                f"schedule: found {schedule!r}{nearest(schedule, SCHEDULES)}; expected {', '.join(SCHEDULES)}"
            )
        else:
            values, wrong = schedule_values(schedule, options.schedule_options or {})
            problems += wrong or _curve_faults(options, values)
            if schedule == "plateau" and options.warmup:
                problems.append("warmup: a plateau schedule takes none; expected 0")
    elif options.schedule_options:
        problems.append("schedule_options: the schedule is an object; expected none, or the schedule by its name")
    elif not hasattr(schedule, "lr"):
        problems.append(f"schedule: found {type(schedule).__name__}; expected a name, or an object with lr(step)")
    problems += _rule_faults(options)
    if options.ema and options.policy in ("cadence", "async"):
        problems.append(
            f"ema: ranks of policy={options.policy!r} step by themselves, without a common average; expected "
            "policy='sync', or no ema"
        )
    if options.neftune and options.compile:
        problems.append("neftune: torch.compile would translate the model without it; expected compile=False")
    if options.ema in (0.0, 1.0):
        problems.append(f"ema: found {options.ema}; expected a number above 0 and below 1, such as 0.999")
    if options.label_smoothing == 1.0:
        problems.append("label_smoothing: found 1.0; expected less, or nothing of the target is left")
    if options.mask_probability == 0.0:
        problems.append("mask_probability: found 0.0; expected more, or nothing is learned")
    if options.discriminator_weight is not None and options.generator is None:
        problems.append("discriminator_weight: there is no generator whose loss it stands beside; expected generator")
    if options.warmup > 1 and options.warmup != int(options.warmup):
        problems.append(f"warmup: found {options.warmup!r}; expected an integer of steps, or a share below 1")
    return problems


def _curve_faults(options: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the problems of values that are of the right type and out of the range of the curve."""
    if not values:
        return []
    from flodl_hf.training.rates import make_schedule

    try:
        make_schedule(
            options.schedule, options.lr or 1.0, options.warmup, 1_000_000, lower_is_better=True, options=values
        )
    except ConfigError as fault:
        return [f"schedule_options: {fault.message}"]
    return []


def schedule_values(schedule: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a curve as numbers and texts, and what is wrong with them."""
    known, values, problems = SCHEDULES[schedule], {}, []
    for name, value in given.items():
        if name not in known:
            takes = f"expected {', '.join(known)}" if known else "it takes none"
            problems.append(f"schedule_options: {schedule} has no {name!r}{nearest(name, known)}; {takes}")
            continue
        try:
            if known[name] is str and not isinstance(value, str):
                raise ValueError(f"found {value!r}; expected a text")
            values[name] = value if known[name] is str else _number(value, known[name] is float)
        except ValueError as fault:
            problems.append(f"schedule_options: {name}: {fault}")
    if schedule == "cosine" and {"floor", "end"} <= given.keys():
        problems.append("schedule_options: found floor and end; expected one, a share of lr or a rate")
    return values, problems


def _rule_faults(options: Any) -> list[str]:
    """Return what is wrong with the texts of rules."""
    if not options.rules:
        return ["trend_every: there are no rules that ask about trends; expected rules"] if options.trend_every else []
    from flodl.train.rules import parse_rule

    problems = []
    for text in options.rules:
        try:
            parse_rule(text)
        except ConfigError as fault:
            problems.append(f"rules: {fault.message}")
    return problems
