"""The starting model of a run: its labels, its head, and how it is opened."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flodl.errors import ConfigError, visible
from flodl_hf.training.data import Known
from flodl_hf.training.factory import FixedModel, ModelFactory
from flodl_hf.training.generator import GeneratorTask
from flodl_hf.training.options import Options
from flodl_hf.training.ranking import RankTask
from flodl_hf.training.task import Task
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["ATTACHING_TASKS", "known_of", "open_start", "settle_head"]

ATTACHING_TASKS = (EmbeddingTask, GeneratorTask)
"""Tasks that attach additional modules to a model for the run."""


def known_of(model: Any, options: Options) -> Known:
    """Return the head and labels that the starting model has."""
    if not isinstance(model, (str, os.PathLike)):
        return Known(model.head, tuple(model.config.labels), _ordered(model.config.family))
    from flodl_hf.checkpoints.config.model_config import read_config
    from flodl_hf.checkpoints.weights.loading import head_of

    config = read_config(os.fspath(model), **_hub(options))
    head = head_of(config.family, config.source.get("architectures"))
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(config.labels))
    return Known(head, () if unnamed else tuple(config.labels), _ordered(config.family))


def _ordered(family: Any) -> bool:
    """Return whether a family's pairs are learned by their order, as ALBERT's are."""
    return "pretraining" in family.heads and family.heads["pretraining"].relation_output == "sop_logits"


def _hub(options: Options) -> dict[str, Any]:
    return {"revision": options.revision, "local_files_only": options.local_files_only}


def settle_head(known: Known, task: Task, options: Options) -> tuple[Options, list[str]]:
    """Return the options with ``new_head`` set, and notes for the user.

    A classification head is initialised again if the label names or their order
    differ, unless the caller keeps the old head.
    """
    old, new = known.labels, task.labels
    if new is None or known.head != task.head or len(old) != len(new) or old == new:
        return options, []
    kept = options.new_head is False
    pairs = ", ".join(f"{visible(a)} -> {visible(b)}" for a, b in list(zip(old, new, strict=True))[:8])
    what = "is used with the new names (new_head=False)" if kept else "is initialised again (new_head=False keeps it)"
    return replace(options, new_head=not kept), [f"the start was trained with other labels ({pairs}); its head {what}"]


def open_start(model: Any, task: Task, options: Options) -> tuple[EncoderModel, ModelFactory | FixedModel]:
    """Return the model with the task's head, and the factory that opens it in other processes.

    Raises:
        ConfigError: a model in memory that does not fit the data.
        CheckpointError, HubError, TokenizerError: it cannot be opened.
    """
    if isinstance(model, (str, os.PathLike)):
        # Ranks with shards map the file and share its pages, instead of reading the whole model.
        cut = bool(options.shard) and options.ranks > 1
        shown = {"mapped": True} if cut else {}
        factory = ModelFactory(
            os.fspath(model), task.head, task.labels, task.problem_type, options.freeze, options.dropout,
            {**shown, "attention": options.attention, **_hub(options)}, bool(options.new_head), options.adapter,
            options.seed,
            task.start if isinstance(task, (*ATTACHING_TASKS, RankTask)) else None,
            as_stored=cut and not isinstance(task, ATTACHING_TASKS),
        )  # fmt: skip
        return factory.open(), factory
    wrong = ["new_head requires a folder or name"] if options.new_head else []
    if options.adapter is not None and model.active_adapter is not None:
        wrong.append(f"found the active adapter {model.active_adapter!r}, expected none with lora=")
    if model.head != task.head:
        wrong.append(f"its head is {model.head}, the task is {task.head}")
    elif task.labels is not None and tuple(model.config.labels) != task.labels:
        wrong.append(f"its labels are {list(model.config.labels)[:8]}, expected {list(task.labels)[:8]}")
    if wrong:
        raise ConfigError(
            f"finetune: the model does not fit the data: {'; '.join(wrong)}. Give its folder or name instead, so that "
            "a new head is made, or load it with the right labels",
            problems=wrong,
        )
    if task.problem_type is not None:
        model.config = model.config.changed(problem_type=task.problem_type)
    if isinstance(task, RankTask):
        task.start(model)
    model.set_attention(options.attention)
    if options.adapter is not None:
        model.add_adapter(options.adapter)
    return model, FixedModel(model)
