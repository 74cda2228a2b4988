"""What tasks of fine-tuning are called: in options, recipes and results; without what they compute."""

from __future__ import annotations

from flodl.errors import ConfigError, nearest

__all__ = ["TASKS", "TASK_WORDS", "task_named"]

TASKS = (
    *("sequence_classification", "token_classification", "question_answering", "masked_lm"),
    *("multiple_choice", "next_sentence", "pretraining", "replaced_tokens"),
    *("embedding", "rank", "sparse", "multivector"),
)
TASK_WORDS = {
    "seqcls": "sequence_classification",
    "text_classification": "sequence_classification",
    "tokcls": "token_classification",
    "ner": "token_classification",
    "qa": "question_answering",
    "mlm": "masked_lm",
    "fill_mask": "masked_lm",
    "choice": "multiple_choice",
    "nsp": "next_sentence",
    "pretrain": "pretraining",
    "replaced": "replaced_tokens",
    "splade": "sparse",
    "colbert": "multivector",
    "multi_vector": "multivector",
}
"""Short words, and those of others."""


def task_named(name: str) -> str:
    """Return our word for a task.

    Raises:
        ConfigError: there is no such task.
    """
    word = name.lower().replace("-", "_")
    word = TASK_WORDS.get(word, word)
    if word not in TASKS:
        known = [*TASKS, *TASK_WORDS]
        raise ConfigError(
            f"task: found {name!r}{nearest(name, known)}; expected one of {', '.join(known)}", problems=[name]
        )
    return word
