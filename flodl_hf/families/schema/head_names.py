"""What tasks are called: in families' records, in class names of transformers, in commands.

Nothing of what they compute, which is in `flodl_hf.heads`; so that families, loading and export can speak of tasks
without a model's class.
"""

from __future__ import annotations

from dataclasses import dataclass

from flodl.errors import ConfigError, nearest

__all__ = ["HEAD_NAMES", "OTHER_WORDS", "HeadNames", "names_of"]


@dataclass(frozen=True)
class HeadNames:
    """The names of one task.

    Args:
        name: our word for it, which families use as key.
        hf_suffix: what follows the class prefix in transformers' class names.
        short: the word for command lines and tables.
    """

    name: str
    hf_suffix: str
    short: str


BASE = HeadNames("base", "Model", "base")
SEQUENCE_CLASSIFICATION = HeadNames("sequence_classification", "ForSequenceClassification", "seqcls")
TOKEN_CLASSIFICATION = HeadNames("token_classification", "ForTokenClassification", "tokcls")
QUESTION_ANSWERING = HeadNames("question_answering", "ForQuestionAnswering", "qa")
MASKED_LM = HeadNames("masked_lm", "ForMaskedLM", "mlm")
MULTIPLE_CHOICE = HeadNames("multiple_choice", "ForMultipleChoice", "choice")
NEXT_SENTENCE = HeadNames("next_sentence", "ForNextSentencePrediction", "nsp")
PRETRAINING = HeadNames("pretraining", "ForPreTraining", "pretrain")
# ELECTRA's class has BERT's suffix; which of the two a family means, its heads say.
REPLACED_TOKENS = HeadNames("replaced_tokens", "ForPreTraining", "replaced")

HEAD_NAMES: tuple[HeadNames, ...] = (
    BASE,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    QUESTION_ANSWERING,
    MASKED_LM,
    MULTIPLE_CHOICE,
    NEXT_SENTENCE,
    PRETRAINING,
    REPLACED_TOKENS,
)

OTHER_WORDS = {
    "text-classification": SEQUENCE_CLASSIFICATION,
    "token-classification": TOKEN_CLASSIFICATION,
    "ner": TOKEN_CLASSIFICATION,
    "question-answering": QUESTION_ANSWERING,
    "fill-mask": MASKED_LM,
    "feature-extraction": BASE,
}
"""What transformers' pipelines call tasks."""


def names_of(word: str) -> HeadNames:
    """Return the task that a word means: its name, its short name, its class suffix, or what pipelines call it.

    Raises:
        ConfigError: there is none; the nearest is suggested.
    """
    for names in HEAD_NAMES:
        if word in (names.name, names.short, names.hf_suffix):
            return names
    if word in OTHER_WORDS:
        return OTHER_WORDS[word]
    known = [word for names in HEAD_NAMES for word in (names.short, names.name)]
    raise ConfigError(
        f"no head {word!r}{nearest(word, known)}; expected one of {', '.join(names.short for names in HEAD_NAMES)}",
        problems=[word],
    )
