"""Arguments of `finetune`, `dry_run` and `find_lr`, checked together before anything is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.training.option_checks import Problems
from flodl_hf.training.options import Options, read_options

__all__ = ["read_arguments"]

SAVED = "write it with save_pretrained and give the folder"
OTHERS = {
    "transformers": f"a model of transformers; {SAVED}, or the name that it was loaded from",
    "sentence_transformers": f"a model of sentence-transformers; {SAVED}, or the name that it was loaded from",
    "peft": f"a model of peft; {SAVED}",
}
"""Models of other libraries, by package."""


def read_arguments(
    where: str, model: Any, train: Any, given: Mapping[str, Any], *, loss: Callable[..., Any] | str | None
) -> tuple[Options, Callable[..., Any] | None, Problems]:
    """Return the options of a call, its loss if that is a function, and the problems of all arguments.

    Args:
        where: the function that was called, for messages.
        model: the model to start from.
        train: the training data.
        given: the options.
        loss: the name of a loss, or a function.
    """
    problems, values = Problems(where), dict(given)
    if isinstance(loss, str):
        values["vector_loss"], loss = loss, None
    if not isinstance(model, (str, os.PathLike, GraphModel)):
        problems.add([f"model: found {_model_text(model)}"])
    if train is None and given.get("train_dataset") is None:
        problems.add(["train: found None; expected a file or rows to learn from"])
    options, faults = read_options(values)
    problems.add(faults)
    return options, loss, problems


def _model_text(model: Any) -> str:
    kind = type(model)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in OTHERS:
            return f"{name}, {OTHERS[package]}"
    expected = "expected a folder, a Hub name, or a model that flodl_hf.load returned"
    if isinstance(model, nn.Module):
        return f"{name}, a torch module; {expected}. flodl.train.Trainer trains any module"
    return f"{name}; {expected}"
