"""The table of tasks: their names, their model classes, and their uses in every entry point.

Loading, fine-tuning, pipelines, files of texts, the server, the command line and the documents read this table, so that
a word means the same in all of them. Upper and lower case, hyphens and underscores make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flodl.errors import ConfigError, nearest
from flodl.garbage_collection import gc_paused

_VECTOR_METHODS = (
    *("embed", "encode", "encode_query", "encode_document", "similarity", "similarity_pairwise"),
    *("embed_sparse", "embed_tokens", "embed_chunks"),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task.

    Args:
        name: our name; families, recipes and results use it.
        head: the name of the task that provides the model class; its own name if it has a class.
        training: the name of the task in fine-tuning, if it is another.
        trained_by: module and name of its class in `flodl_hf.training`, for the task of that name.
        model_class: module and name of the class of its models, in `flodl_hf.heads`.
        hf_suffix: what follows the class prefix in transformers' class names.
        short: the name in tables.
        aliases: further names.
        pipeline: the name of transformers' pipeline; None where there is none.
        hub_tag: the ``pipeline_tag`` of a model card.
        peft: peft's ``task_type``.
        problem_type: the ``problem_type`` that fine-tuning sets.
        methods: methods of the model that answer texts; the first one answers the rows of a file.
        answers: the kind of answers in a file.
        columns: arguments of ``predict_file`` that select the columns to read.
        options: options of ``flodl-hf predict`` for texts.
        routes: requests that the server answers.
    """

    name: str
    head: str
    training: str = ""
    trained_by: str = ""
    model_class: str = ""
    hf_suffix: str = ""
    short: str = ""
    aliases: tuple[str, ...] = ()
    pipeline: str | None = None
    hub_tag: str = ""
    peft: str | None = None
    problem_type: str | None = None
    methods: tuple[str, ...] = ()
    answers: str = "classes"
    columns: tuple[str, ...] = ("text_column",)
    options: tuple[str, ...] = ("top_k", "threshold")
    routes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", self.training or self.name)

    @property
    def model(self) -> Any:
        """The class of its models, imported on first use."""
        module, _, name = (self.model_class or task_named(self.head).model_class).partition(":")
        with gc_paused(settled=True):
            return getattr(import_module(f"flodl_hf.heads.{module}"), name)

    @property
    def trained(self) -> Any:
        """The class of the task in fine-tuning, imported on first use."""
        module, _, name = (self.trained_by or task_named(self.training).trained_by).partition(":")
        return getattr(import_module(f"flodl_hf.training.{module}"), name)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that mean this task, in lower case with underscores."""
        return tuple(word for word, task in WORDS.items() if task is self)


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


TASKS: tuple[Task, ...] = (
    Task(
        name="base", head="base", training="embedding", model_class="base:BaseModel", hf_suffix="Model", short="base",
        aliases=("encoder",), pipeline="feature-extraction", hub_tag="feature-extraction", peft="FEATURE_EXTRACTION",
        methods=_VECTOR_METHODS, answers="vectors", options=(),
        routes=("embed", "embed_all", "embed_sparse", "late_interaction", "similarity", "score"),
    ),
    Task(
        name="sequence_classification", head="sequence_classification", trained_by="sequence:SequenceTask",
        model_class="sequence_classification:SequenceClassifier", hf_suffix="ForSequenceClassification",
        short="seqcls", aliases=("sentiment_analysis", "classify"), pipeline="text-classification",
        hub_tag="text-classification", peft="SEQ_CLS", methods=("predict", "zero_shot", "rerank"),
        columns=("text_column", "pair_column"), routes=("classify", "rerank", "score", "zero_shot"),
    ),
    Task(
        name="token_classification", head="token_classification", trained_by="tokens:TokenTask",
        model_class="token_classification:TokenClassifier", hf_suffix="ForTokenClassification", short="tokcls",
        aliases=("ner", "entities"), pipeline="token-classification", hub_tag="token-classification", peft="TOKEN_CLS",
        methods=("predict",), answers="entities", options=("aggregation",), routes=("entities",),
    ),
    Task(
        name="question_answering", head="question_answering", trained_by="answers:AnswerTask",
        model_class="question_answering:QuestionAnswerer", hf_suffix="ForQuestionAnswering", short="qa",
        pipeline="question-answering", hub_tag="question-answering", peft="QUESTION_ANS",
        methods=("answer_batch", "answer"), answers="answers",
        columns=("text_column", "context_column", "question", "question_column"),
        options=("top_k", "no_answer", "question"), routes=("answer",),
    ),
    Task(
        name="masked_lm", head="masked_lm", trained_by="masked:MaskedTask", model_class="masked_lm:MaskedLM",
        hf_suffix="ForMaskedLM", short="mlm", pipeline="fill-mask", hub_tag="fill-mask",
        methods=("fill_mask", "encode", "encode_query", "encode_document", "embed_sparse"), answers="masks",
        options=("top_k",), routes=("embed_sparse", "fill_mask"),
    ),
    Task(
        name="multiple_choice", head="multiple_choice", trained_by="choices:ChoiceTask",
        model_class="multiple_choice:MultipleChoice", hf_suffix="ForMultipleChoice", short="choice",
        hub_tag="multiple-choice", methods=("predict",),
    ),
    Task(
        name="next_sentence", head="next_sentence", trained_by="pairs:PairTask",
        model_class="next_sentence:NextSentence", hf_suffix="ForNextSentencePrediction", short="nsp",
        aliases=("next_sentence_prediction",), hub_tag="text-classification", methods=("predict",),
    ),
    Task(
        name="pretraining", head="pretraining", trained_by="pairs:PairTask", model_class="pretraining:Pretrainer",
        hf_suffix="ForPreTraining", short="pretrain", hub_tag="fill-mask", methods=("predict",),
    ),
    # ELECTRA's class has BERT's suffix; the heads of a family decide which of the two tasks is meant.
    Task(
        name="replaced_tokens", head="replaced_tokens", trained_by="replaced:ReplacedTask",
        model_class="replaced_tokens:ReplacedTokens", hf_suffix="ForPreTraining", short="replaced",
        hub_tag="token-classification", methods=("predict",),
    ),
    Task(
        name="embedding", head="base", trained_by="vectors.task:EmbeddingTask", aliases=("embed", "embeddings"),
        hub_tag="sentence-similarity", methods=("embed",),
    ),
    Task(
        name="rank", head="sequence_classification", trained_by="ranking:RankTask",
        aliases=("rerank", "reranker", "reranking", "cross_encoder"), hub_tag="text-ranking", methods=("rerank",),
        answers="relevance", columns=("text_column", "query", "query_column"), options=("top_k",),
    ),
    Task(
        name="sparse", head="masked_lm", trained_by="vectors.sparse:SparseTask", aliases=("splade", "sparse_embedding"),
        hub_tag="feature-extraction", methods=("embed_sparse",),
    ),
    Task(
        name="multivector", head="base", trained_by="vectors.multivector:MultiVectorTask",
        aliases=("multi_vector", "colbert", "late_interaction"), hub_tag="feature-extraction",
        methods=("embed_tokens",),
    ),
    Task(
        name="zero_shot_classification", head="sequence_classification", training="sequence_classification",
        aliases=("zero_shot",), pipeline="zero-shot-classification", methods=("zero_shot",),
    ),
    Task(
        name="regression", head="sequence_classification", training="sequence_classification",
        pipeline="text-classification", problem_type="regression", methods=("predict",),
    ),
)  # fmt: skip

HEADS: tuple[Task, ...] = tuple(task for task in TASKS if task.model_class)
"""The tasks with a model class."""


def _names(task: Task) -> Iterator[str]:
    names = (task.name, task.short, *task.aliases, task.pipeline, task.hub_tag, task.hf_suffix)
    return (_plain(name) for name in names if name)


# Where two tasks share a name, it means the earlier task of the table.
WORDS: dict[str, Task] = {name: task for task in reversed(TASKS) for name in _names(task)}
"""Every name in lower case with underscores."""


def find_task(word: str) -> Task | None:
    """Return the task of a name; None where there is none."""
    return WORDS.get(_plain(word))


def task_named(word: str, option: str = "head") -> Task:
    """Return the task of a name.

    Args:
        word: any name of it, or what follows the class prefix in transformers' class names.
        option: the option that the error names.

    Raises:
        ConfigError: there is none; the nearest is suggested.
    """
    if (task := find_task(word)) is None:
        known = ", ".join(task.short or task.name for task in TASKS)
        raise ConfigError(
            f"{option}: found {word!r}{nearest(_plain(word), WORDS)}; expected one of {known}", problems=[word]
        )
    return task
