"""Options that one task uses and others do not, and problems of a plan that are reported together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from flodl.errors import ConfigError, FlodlError, capped

__all__ = ["Problems", "task_faults", "weight_faults"]

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
    **dict.fromkeys(("matryoshka", "adaptive_layers", "guide", "pooling", "normalize", "cache_tokens"), VECTORS),
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
"""Tasks whose texts are one row each, however long."""


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
            f"long_texts: found 'windows'; expected 'cut' for {name}, where each text is one row; a greater max_length "
            "keeps more of it"
        )
    if name == "question_answering" and options.layout == "packed" and not options.masks_padding:
        problems.append(
            "layout: found 'packed', whose rows have no padding to include in the loss; expected 'padded' with "
            "mask_padding=False or compat='transformers'"
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
            "or weights by name; none below 0"
        )
    return problems


@dataclass
class Problems:
    """Collects the problems of a plan; as a context it takes in the errors that are raised inside.

    Attributes:
        where: the function that was called, for the message.
        found: all problems, each with the name of its option.
        first: the first error that was raised.
    """

    where: str
    found: list[str] = field(default_factory=list)
    first: FlodlError | None = None

    def add(self, problems: Iterable[str]) -> None:
        """Take in further problems."""
        self.found += [problem for problem in problems if problem not in self.found]

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: Any, fault: BaseException | None, trace: Any) -> bool:
        if not isinstance(fault, FlodlError):
            return False
        if self.first is None and not self.found:
            self.first = fault
        listed = list(fault.details.get("problems", ()))
        named = isinstance(fault, ConfigError) and listed and all(": " in problem for problem in listed)
        self.add(listed if named else [fault.message.removeprefix(f"{self.where}: ").removeprefix("finetune: ")])
        return True

    def check(self) -> None:
        """Raise if there are problems.

        Raises:
            ConfigError: several problems, all of them in ``problems``; or problems of options.
            FlodlError: the only problem, as it was raised.
        """
        if not self.found:
            return
        if self.first is not None and (len(self.found) == 1 or self.found == self.first.details.get("problems")):
            raise self.first
        several = f"{self.where}: found {len(self.found)} problems:\n{capped(self.found)}"
        text = self.found[0] if len(self.found) == 1 else several
        raise ConfigError(text, problems=list(self.found), where=self.where)
