"""Select the class of a model by ``config.json``.

``AutoModelFor...`` define the task; `load` reads it from ``architectures``. ``model_type`` defines the family. The
tables of tasks and families are the only dispatch; there are no entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, Unpack

from flodl.errors import CheckpointError, ConfigError, printable
from flodl.garbage_collection import gc_paused
from flodl_hf.checkpoints.keywords import LOAD, accept_keywords
from flodl_hf.checkpoints.weights.prefetch import prefetching
from flodl_hf.families.schema.tasks import Task, task_named
from flodl_hf.models.opening import FromPretrained, LoadKeywords

if TYPE_CHECKING:
    import torch

    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.heads.base import BaseModel  # noqa: F401
    from flodl_hf.heads.masked_lm import MaskedLM  # noqa: F401
    from flodl_hf.heads.multiple_choice import MultipleChoice  # noqa: F401
    from flodl_hf.heads.next_sentence import NextSentence  # noqa: F401
    from flodl_hf.heads.question_answering import QuestionAnswerer  # noqa: F401
    from flodl_hf.heads.sequence_classification import SequenceClassifier  # noqa: F401
    from flodl_hf.heads.token_classification import TokenClassifier  # noqa: F401
    from flodl_hf.models.encoder_model import EncoderModel

ModelT = TypeVar("ModelT", bound="EncoderModel")

__path__: list[str] = []  # the former package flodl_hf.auto is this module, and its module `pipelines` still imports


class _AutoClass(Generic[ModelT]):
    """A name that users know; the class of the task is imported with torch on first use."""

    head: ClassVar[str]

    def __init__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} is not made by calling it; use {name}.from_pretrained(...) or {name}.from_config(...)")

    @classmethod
    @accept_keywords(LOAD, ConfigError, like=FromPretrained.from_pretrained)
    def from_pretrained(cls, name_or_path: str | Path, **options: Unpack[LoadKeywords]) -> ModelT:
        """Return the model of a folder or Hub repository; see `EncoderModel.from_pretrained`."""
        with prefetching(name_or_path, options):
            return cls._class(lambda: _config_of(name_or_path, options)).from_pretrained(name_or_path, **options)

    @classmethod
    def from_config(cls, config: ModelConfig, *, pooler: bool = True, dtype: torch.dtype | None = None) -> ModelT:
        """Return a model with fresh random weights; see `EncoderModel.from_config`."""
        return cls._class(lambda: config).from_config(config, pooler=pooler, dtype=dtype)

    @classmethod
    def _class(cls, config: Callable[[], ModelConfig]) -> Any:
        return head_named(cls.head).model


class AutoModel(_AutoClass["BaseModel"]):
    """The encoder alone: token states, and embeddings of whole texts."""

    head = "base"


class AutoModelForSequenceClassification(_AutoClass["SequenceClassifier"]):
    """Labels for whole texts."""

    head = "sequence_classification"


class AutoModelForTokenClassification(_AutoClass["TokenClassifier"]):
    """Labels for tokens: named entities."""

    head = "token_classification"


class AutoModelForQuestionAnswering(_AutoClass["QuestionAnswerer"]):
    """The span of a context that answers a question."""

    head = "question_answering"


class AutoModelForMaskedLM(_AutoClass["MaskedLM"]):
    """The word behind each mask."""

    head = "masked_lm"


class AutoModelForMultipleChoice(_AutoClass["MultipleChoice"]):
    """The choice that fits a prompt best."""

    head = "multiple_choice"


class AutoModelForNextSentencePrediction(_AutoClass["NextSentence"]):
    """Whether one text follows another."""

    head = "next_sentence"


class AutoModelForPreTraining(_AutoClass["EncoderModel"]):
    """The pretraining task of the family: masked words and pairs of texts, or replaced tokens."""

    head = "pretraining"

    @classmethod
    def _class(cls, config: Callable[[], ModelConfig]) -> Any:
        heads = config().family.heads
        first = next((head for head in ("pretraining", "replaced_tokens") if head in heads), "masked_lm")
        return head_named(first).model


def head_named(name: str) -> Task:
    """Return the head of a task, by any name of the table.

    Raises:
        ConfigError: there is none; the nearest is suggested.
    """
    return task_named(task_named(name).head)


def _config_of(name_or_path: str | Path, options: Any) -> ModelConfig:
    with gc_paused(settled=True):
        from flodl_hf.checkpoints.config.model_config import read_config
    return read_config(name_or_path, **_of_configurations(options))


@accept_keywords(LOAD, ConfigError, like=FromPretrained.from_pretrained)
def load(name_or_path: str | Path, *, head: str = "auto", **options: Unpack[LoadKeywords]) -> EncoderModel:
    """Return the model for the task of a folder, or the encoder alone if it names no task.

    Args:
        name_or_path: a local folder or a Hub repository.
        head: any [name of a task](../reference/heads.md); "auto" selects the task of the first class in
            ``architectures``, and the encoder alone (head "base") if there is none, if the class is unknown, or if the
            file lacks the tensors of the head.
        **options: as in `EncoderModel.from_pretrained`.
    """
    with prefetching(name_or_path, options):
        return _loaded(name_or_path, head, options)


def _loaded(name_or_path: str | Path, head: str, options: Any) -> EncoderModel:
    if head != "auto":
        return head_named(head).model.from_pretrained(name_or_path, **options)
    with gc_paused(settled=True):
        from flodl_hf.checkpoints.weights.loading import class_of, head_of
        from flodl_hf.heads.base import BaseModel
        from flodl_hf.models.pretrained import base_and_adapter
    base, adapter = base_and_adapter(name_or_path, options.get("adapter"), _of_configurations(options))
    config = _config_of(base, options)
    architectures = config.source.get("architectures")
    task = None if adapter is None else adapter.task(config.family)
    found = task or head_of(config.family, architectures) or "base"
    try:
        model = head_named(found).model.from_pretrained(name_or_path, **options)
        recipe = model.sentence_recipe
        if found != "base" or recipe is None or recipe.scorer is None:
            return model
        # Only further files of the folder, which are read with the model, identify a cross-encoder without a head.
        return head_named("sequence_classification").model.from_pretrained(name_or_path, **options)
    except CheckpointError as fault:
        if found == "base" or not getattr(fault, "headless", False):
            raise
    # Encoders of sentences often name the class of their start, without its head.
    model = BaseModel.from_pretrained(name_or_path, **options)
    if model.load_report is not None:
        named = printable(class_of(architectures) or "", 60)
        note = f"architectures: found {named} and no tensors of its head; loaded the encoder alone"
        model.load_report.notes.append(note)
    return model


def _of_configurations(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _HUB_OPTIONS}


_HUB_OPTIONS = (
    "revision",
    "subfolder",
    "token",
    "cache_dir",
    "local_files_only",
    "ignore_config_keys",
    "strict_config",
    "verified",
)
