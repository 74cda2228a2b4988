"""Task adapters stored in the weight file: return a model with one of them added to its weights.

jina-embeddings-v3's first files contain five low-rank differences for each weight, one per task (Hu et al. 2021, arXiv
2106.09685). A model is loaded without any, as the repository's own code runs it where no task is named.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from flodl.errors import nearest
from flodl_hf.errors import PredictError
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.nn.joined_tensors import as_whole, part_of, split

ORIGINAL = "parametrizations.weight.original"
M = TypeVar("M", bound=GraphModel)
_KEPT: WeakKeyDictionary[Any, dict[str, tuple[tuple[int, ...], Any]]] = WeakKeyDictionary()


def adapted(model: M, task: str) -> M:
    """Return a copy of the model with one task's differences added to its weights; cached while weights stay.

    Args:
        model: as it was loaded.
        task: one of the tasks in the configuration.

    Raises:
        PredictError: the file has no such task, or the model was not read from one.
    """
    tasks = getattr(model.config.encoder, "tasks", ())
    held = model.source is not None and any(name.endswith(".lora_A") for name in model.source.carried)
    if task not in tasks or not held:
        known = ", ".join(tasks) if held else "none"
        raise PredictError(f"embed: no task {task!r}{nearest(task, tasks)}; the file has {known}", task=task)
    if model.weights_on_disk is not None:
        raise PredictError(
            f"embed: task={task!r} makes a copy of the model with the task's differences added, and the weights of "
            "this one stay on disk; load it with weights='memory'",
            task=task,
        )
    versions = tuple(parameter._version for parameter in model.graph.parameters())
    kept = _KEPT.setdefault(model, {})
    if task not in kept or kept[task][0] != versions:
        kept[task] = versions, _merged(model, tasks.index(task))
    found = kept[task][1]
    if found.device != model.device:
        found.to(model.device)
    found._run_options = model._run_options
    found.tokenizer, found.sentence_recipe = model.tokenizer, model.sentence_recipe
    return found


def instruction_of(model: GraphModel, task: str) -> str:
    """Return the prefix of texts for a task."""
    said = model.config.source.get("task_instructions")
    text = said.get(task, "") if isinstance(said, dict) else ""
    return text if isinstance(text, str) else ""


def _merged(model: M, index: int) -> M:
    assert model.source is not None
    settings = model.config.encoder
    names = model.config.family.key_map(settings, model.head)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for ours, parameter in copied.graph.named_parameters():
            theirs = names.theirs(ours)
            whole = as_whole(theirs)
            if not whole.endswith(ORIGINAL):
                continue
            first, second = (model.source.carried.get(whole.replace("original", f"0.lora_{side}")) for side in "AB")
            if first is None or second is None:
                raise PredictError(f"embed: {whole} has no adapters in the file; fetch it again", name=whole)
            part = part_of(theirs)
            a, b = first[index].float(), second[index].float()
            # Tables and projections have their sides in turned order.
            product = a @ b if ours.startswith("encoder.embeddings.") else b @ a
            difference = product * (settings.adapter_alpha / settings.adapter_rank)
            own = difference if part is None else split(difference, part)
            parameter.copy_((parameter.float() + own.to(parameter.device)).to(parameter.dtype))
    return copied
