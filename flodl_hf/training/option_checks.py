"""Checks of options: single values, and combinations of values that exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, get_args

from flodl.errors import ConfigError, FlodlError, capped, nearest
from flodl_hf.models.adapters.settings import Prompt

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
"""Schedules with their ``schedule_options``; `flodl_hf.training.rates` creates them."""


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
    if hint in (Sequence[str], Sequence[str] | None, bool | Sequence[str]) and not isinstance(value, bool):
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
    problems = []
    if isinstance(options.adapter, Prompt) and options.neftune:
        problems.append("neftune: a prompt has separate trained embeddings; expected no noise")
    prompts = options.prompts
    texts = [*prompts, *prompts.values()] if isinstance(prompts, Mapping) else [prompts or ""]
    if not all(isinstance(text, str) for text in texts):
        problems.append(f"prompts: found {prompts!r}; expected a text, or a mapping of columns to texts")
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
        problems.append("schedule_options: found a schedule object; expected none, or the name of a schedule")
    elif not hasattr(schedule, "lr"):
        problems.append(f"schedule: found {type(schedule).__name__}; expected a name, or an object with lr(step)")
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


def schedule_values(schedule: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a schedule as numbers and texts, and their problems."""
    known, values, problems = SCHEDULES[schedule], {}, []
    for name, value in options.items():
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
    if schedule == "cosine" and {"floor", "end"} <= options.keys():
        problems.append("schedule_options: found floor and end; expected one, a share of lr or a rate")
    return values, problems


VECTORS = ("embedding", "sparse", "multivector")
WORDS = ("masked_lm", "replaced_tokens")
LABELLED = ("sequence_classification", "token_classification")
USED_BY: dict[str, tuple[str, ...]] = {
    "labels": LABELLED,
    "problem_type": ("sequence_classification",),
    "class_weights": LABELLED,
    "label_smoothing": (*LABELLED, "masked_lm", "next_sentence"),
    "concatenate": WORDS,
    "whole_words": (*WORDS, "pretraining"),
    "projection": ("multivector",),
    "prompts": ("embedding", "sparse"),
    "vector_loss": (*VECTORS, "rank"),
    "loss_options": (*VECTORS, "rank"),
    **dict.fromkeys(("matryoshka", "guide", "pooling", "normalize", "cache_tokens"), VECTORS),
}
"""Options that only these tasks use."""
UNUSED_BY: dict[str, tuple[str, ...]] = {
    "neftune": (*VECTORS, "multiple_choice"),
    **dict.fromkeys(("tokens_per_batch", "micro_batch_size", "group_by_length"), VECTORS),
}
"""Options that all tasks but these use."""
WITH_GENERATOR = ("neftune", "label_smoothing")
"""Options that replaced tokens with a generator do not use."""
ONE_ROW = (*VECTORS, "rank", "multiple_choice", "next_sentence", "pretraining")
"""Tasks whose texts are one row each, whatever their length."""


def task_faults(name: str, options: Any, refused: Iterable[str] = ()) -> list[str]:
    """Return the problems of options that a task does not use.

    Args:
        name: the task.
        options: the options of the run.
        refused: further options that it does not use.
    """
    unused = [option for option, tasks in USED_BY.items() if name not in tasks]
    unused += [option for option, tasks in UNUSED_BY.items() if name in tasks]
    unused += [option for option in refused if option not in unused]
    by_generator: dict[str, str] = {}
    if name == "replaced_tokens":
        generated = options.generator is not None
        by_generator = dict.fromkeys(
            WITH_GENERATOR if generated else ("concatenate", "whole_words"),
            f" {'with' if generated else 'without'} a generator",
        )
        unused += by_generator
    given = [option for option in dict.fromkeys(unused) if getattr(options, option) not in (None, (), False, 0.0)]
    if name == "rank":
        same = {"labels": ("LABEL_0",), "problem_type": "regression"}
        given = [option for option in given if getattr(options, option) != same.get(option)]
    problems = [f"{option}: {name}{by_generator.get(option, '')} takes none; leave it out" for option in given]
    if options.long_texts == "windows" and name in ONE_ROW:
        problems.append(
            f"long_texts: found 'windows'; expected 'truncate' for {name}, where each text is one row; a greater "
            "max_length keeps more of it"
        )
    if options.long_texts == "error" and name != "sequence_classification":
        problems.append(f"long_texts: found 'error'; expected 'truncate' for {name}; only classifiers support 'error'")
    if name == "question_answering" and options.layout == "packed" and not options.masks_padding:
        problems.append(
            "layout: found 'packed', whose rows have no padding to include in the loss; expected 'padded' with "
            "compat='transformers'"
        )
    if name in VECTORS and options.shard is not None:
        problems.append(
            "shard: vectors are compared over whole batches, which ranks with shards do not compute together; expected "
            "another task, or no shard"
        )
    return problems


def weight_faults(task: Any, options: Any) -> list[str]:
    """Return the problems of class weights and label smoothing for the labels of a task."""
    problems, given = [], options.class_weights
    if options.label_smoothing and task.kind in ("multi_label", "regression"):
        problems.append(
            f"label_smoothing: {task.kind} has no single right label to take a share from; expected 0, or "
            "problem_type='single_label_classification'"
        )
    if given is None or task.labels is None:
        return problems
    if task.kind == "regression":
        return [*problems, "class_weights: regression takes none; leave it out"]
    names = list(task.labels)
    if isinstance(given, Mapping):
        unknown = [str(name) for name in given if str(name) not in names]
        if unknown:
            return [*problems, f"class_weights: {unknown} are no labels; expected some of {names[:20]}"]
        given = list(given.values())
    elif isinstance(given, str) or not hasattr(given, "__len__") or len(given) != len(names):
        given = [] if given == "balanced" else None
    if given is None or not all(isinstance(w, Real) and float(w) >= 0 for w in given):
        problems.append(
            f"class_weights: found {options.class_weights!r}; expected 'balanced', a weight for each of {names[:20]}, "
            "or a mapping of labels to weights; none below 0"
        )
    return problems


def threshold_faults(task: Any) -> list[str]:
    """Return the problem of a task without thresholds: neither several labels per text nor two labels."""
    if task.kind == "multi_label" or (task.kind == "single_label" and len(task.labels or ()) == 2):
        return []
    return [
        f"tune_thresholds: found {task.kind.replace('_', ' ')} with {len(task.labels or ())} labels; expected several "
        "labels per text (multi_label_classification), or two labels"
    ]


@dataclass
class Problems:
    """Collects the problems of a plan; as a context manager it collects errors that are raised inside.

    Attributes:
        caller: name of the called function, for the message.
        messages: all problems, each with the name of its option.
        first: the first error that was raised.
    """

    caller: str
    messages: list[str] = field(default_factory=list)
    first: FlodlError | None = None

    def add(self, problems: Iterable[str]) -> None:
        """Add further problems."""
        self.messages += [problem for problem in problems if problem not in self.messages]

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: Any, fault: BaseException | None, trace: Any) -> bool:
        if not isinstance(fault, FlodlError):
            return False
        if self.first is None and not self.messages:
            self.first = fault
        listed = list(fault.details.get("problems", ()))
        named = isinstance(fault, ConfigError) and listed and all(": " in problem for problem in listed)
        self.add(listed if named else [fault.message.removeprefix(f"{self.caller}: ").removeprefix("finetune: ")])
        return True

    def check(self) -> None:
        """Raise if there are problems.

        Raises:
            ConfigError: several problems, all of them in ``problems``; or problems of options.
            FlodlError: the only problem, as it was raised.
        """
        if not self.messages:
            return
        if self.first is not None and (len(self.messages) == 1 or self.messages == self.first.details.get("problems")):
            raise self.first
        several = f"{self.caller}: found {len(self.messages)} problems:\n{capped(self.messages)}"
        text = self.messages[0] if len(self.messages) == 1 else several
        raise ConfigError(text, problems=list(self.messages), where=self.caller)
