"""The starting model of a run: its labels and head, how it is opened, frozen parts and dropout."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flodl.errors import ConfigError, visible
from flodl.train.saving.state import check_fits, fixed_names
from flodl_hf.models.transformers_methods import freeze
from flodl_hf.training.options import Options
from flodl_hf.training.task import Known, Task

if TYPE_CHECKING:
    from flodl_hf.models.adapters.settings import Settings
    from flodl_hf.models.encoder_model import EncoderModel


@dataclass(frozen=True)
class ModelFactory:
    """Opens the model of a run; every rank calls it with its device.

    Args:
        name: folder or Hub name.
        head: the head's name.
        labels: label names; None keeps the source's.
        problem_type: kind of the labels.
        freeze: parts that do not learn.
        dropout: in place of the model's own.
        options: further options of ``from_pretrained``.
        new_head: initialise a new head, even if the source has one.
        adapter: added, to learn in place of the base; None for none.
        seed: seed of new weights; None keeps the state of the generator.
        start: gives the model further parts that learn; None for none.
        as_stored: leave weights in half precision as they are, for shards that are made float32 as they are cut: pages
            of a file that ranks share, instead of the whole in float32 on each.
    """

    name: str | Path
    head: str
    labels: tuple[str, ...] | None
    problem_type: str | None
    freeze: Sequence[str]
    dropout: float | None
    options: dict[str, Any]
    new_head: bool = False
    adapter: Settings | None = None
    seed: int | None = None
    start: Callable[[EncoderModel], Any] | None = None
    as_stored: bool = False

    def __call__(self, device: torch.device) -> EncoderModel:
        """Return the model, on the CPU: the trainer moves it."""
        model = self.open()
        freeze(model, self.freeze)
        if self.dropout is not None:
            set_dropout(model, self.dropout)
        return model

    def open(self) -> EncoderModel:
        """Return the model as it is in its folder, with the head and labels of this run."""
        # Weights that learn are kept in float32; a run in half precision casts as it computes.
        model = self._as_stored() if self.as_stored else self._read(torch.float32)
        if self.new_head:
            _draw(model, [name for name, _ in model.graph.named_parameters() if name.startswith("head.")])
        if self.adapter is not None:
            model.add_adapter(self.adapter)
        if self.start is not None:
            self.start(model)
        return model

    def _read(self, dtype: torch.dtype | str) -> EncoderModel:
        from flodl_hf.heads.auto import head_named

        if self.seed is not None:
            torch.manual_seed(self.seed)  # every rank draws the same
        opened: EncoderModel = head_named(self.head).model.from_pretrained(
            self.name,
            labels=self.labels,
            problem_type=self.problem_type,
            dtype=dtype,
            **{"weights": "memory", **self.options},
        )
        return opened

    def _as_stored(self) -> EncoderModel:
        """Return the model in the dtype of its files; missing tensors are initialised in float32."""
        from flodl_hf.checkpoints.weights.manifest import DTYPES
        from flodl_hf.nn.joined_tensors import as_whole

        model: Any = self._read("auto")
        stored = model.source.manifest.tensors
        kinds = {DTYPES[stored[as_whole(name)].dtype] for name in model.source.placed.values()}
        if kinds != {model.dtype}:
            # config.json may state another dtype than the files have.
            model = self._read(kinds.pop() if kinds in ({torch.bfloat16}, {torch.float16}) else torch.float32)
        if model.dtype not in (torch.bfloat16, torch.float16):
            return model
        new = () if model.load_report is None else model.load_report.new
        if new:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            _draw(model, new)
            model._mark_untrained(new)
        model.dtype_in_shards = torch.float32
        return model


def _draw(model: EncoderModel, names: Iterable[str]) -> None:
    """Initialise parameters in float32: half precision would draw other numbers."""
    from flodl_hf.models.building import assign, initialise

    half = [name for name in names if model.graph.get_parameter(name).dtype != torch.float32]
    assign(model.graph, {name: torch.empty(model.graph.get_parameter(name).shape) for name in half})
    initialise(model.graph, names, float(model.config.source.get("initializer_range", 0.02)))


def cast_stored(model: EncoderModel, replaced: Container[str] = (), left: Container[str] = ()) -> None:
    """Cast the parameters of a model that was opened as it is stored.

    Args:
        model: as `ModelFactory` opens it with ``as_stored``; others are left as they are.
        replaced: names of parameters that are replaced afterwards, so their values are dropped.
        left: names of parameters that a later call casts.
    """
    dtype, model.dtype_in_shards = model.dtype_in_shards, None
    if dtype is None:
        return
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dtype != dtype and parameter.is_floating_point():
            if name in left:
                model.dtype_in_shards = dtype
                continue
            empty = torch.zeros(1, dtype=dtype).expand(parameter.shape)
            parameter.data = empty if name in replaced else parameter.data.to(dtype)


def take(model: EncoderModel, state: Mapping[str, Tensor]) -> None:
    """Replace the tensors of a model by trained ones, without a second copy of the model.

    What does not learn stays as it is stored, which `cast_stored` ends: an adapter is written without its base.

    Raises:
        CheckpointError: names, shapes or dtypes differ from the model.
    """
    cast_stored(model, state, fixed_names(model))
    check_fits(model, state)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own: dict[str, Any] = dict(named)
    with torch.no_grad():
        for name, value in state.items():
            own[name].set_(value.to(own[name].device))  # noted as written to, unlike an exchange of ``data``


def set_dropout(model: nn.Module, probability: float) -> list[tuple[Any, str, float]]:
    """Set every dropout of a model; return the former values."""
    before: list[tuple[Any, str, float]] = []
    for module in model.modules():
        for name in ("p", "attention_dropout", "inner_dropout"):
            # Where the attribute is a module, that one's own probability is set.
            number = isinstance(getattr(module, name, None), (int, float))
            if (name == "p" and isinstance(module, nn.Dropout)) or (name != "p" and number):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, probability)
    return before


def checkpoint_layers(model: Any) -> None:
    """Make every encoder layer keep only its input, and compute its inside again in the backward pass."""
    for layer in model.graph.get_submodule("encoder.layers").children():
        layer.forward = partial(checkpoint, type(layer).forward.__get__(layer), use_reentrant=False)


def restore_layers(model: Any) -> None:
    """Undo `checkpoint_layers`."""
    for layer in model.graph.get_submodule("encoder.layers").children():
        layer.__dict__.pop("forward", None)


def known_of(model: Any, options: Options) -> Known:
    """Return the head and labels that the starting model has."""
    if isinstance(model, (str, os.PathLike)):
        from flodl_hf.checkpoints.config.model_config import read_config
        from flodl_hf.checkpoints.weights.loading import head_of

        config = read_config(os.fspath(model), revision=options.revision, local_files_only=options.local_files_only)
        head = head_of(config.family, config.source.get("architectures"))
        unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(config.labels))
        labels = () if unnamed else tuple(config.labels)
    else:
        config, head, labels = model.config, model.head, tuple(model.config.labels)
    pretraining = config.family.heads.get("pretraining")
    # Pairs of a family may be learned by their order, as ALBERT's are.
    return Known(head, labels, pretraining is not None and pretraining.relation_output == "sop_logits")


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
    note = f"the checkpoint was trained with other labels ({pairs}); its head {what}"
    return replace(options, new_head=not kept), [note]


def open_start(model: Any, task: Task, options: Options) -> tuple[EncoderModel, ModelFactory | None]:
    """Return the model with the task's head, and the factory that opens it in other processes, if it has a name.

    Raises:
        ConfigError: a model in memory that does not fit the data.
        CheckpointError, HubError, TokenizerError: it cannot be opened.
    """
    if isinstance(model, (str, os.PathLike)):
        # Ranks with shards map the file and share its pages, instead of reading the whole model.
        cut = bool(options.shard) and options.ranks > 1
        opening: dict[str, Any] = {"mapped": True} if cut else {}
        opening |= {name: getattr(options, name) for name in ("attention", "revision", "local_files_only")}
        factory = ModelFactory(
            os.fspath(model), task.head, task.labels, task.problem_type, options.freeze, options.dropout, opening,
            bool(options.new_head), options.adapter, options.seed, task.start, as_stored=cut and not task.attaches,
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
    model.set_attention(options.attention)
    if options.adapter is not None:
        model.add_adapter(options.adapter)
    return model, None
