"""Adapter methods of models: create, attach, detach, merge.

The base's weights stay the same tensors with the same bits. Attaching an adapter replaces the target modules by
modules with a part, and the tensors that it stores whole (the head) by its own; detaching it restores the model's.
One adapter is active at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from flodl.errors import ConfigError, nearest
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.errors import PredictError
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.nn.adapter_layers import (
    AdaptedEmbedding,
    AdaptedLinear,
    LoraPart,
    RowsPart,
    ScaledLinear,
    ScalePart,
    TablePart,
)
from flodl_hf.nn.prompts import (
    MadePrefixPart,
    PrefixedAttention,
    PrefixPart,
    PromptedEmbedding,
    PromptPart,
    ShiftedPositions,
    ShiftPart,
)

if TYPE_CHECKING:
    from flodl_hf.models.adapters.fresh import Adapter
    from flodl_hf.models.adapters.settings import Settings

WINDOW = 512  # texts of several adapters that run together
KINDS: Mapping[type[nn.Module], Any] = {
    LoraPart: AdaptedLinear,
    TablePart: AdaptedEmbedding,
    RowsPart: AdaptedEmbedding,
    ScalePart: ScaledLinear,
    PromptPart: PromptedEmbedding,
    PrefixPart: PrefixedAttention,
    MadePrefixPart: PrefixedAttention,
    ShiftPart: ShiftedPositions,
}
"""The module class that replaces a module, by kind of part."""


@dataclass
class _Before:
    """The model's state without the active adapter."""

    modules: dict[str, nn.Module]
    tensors: dict[str, nn.Parameter]
    learned: list[nn.Parameter]
    untouched: dict[str, int]
    config: Any
    recipe: SentenceTransformerConfig | None


@dataclass
class Adapters:
    """The adapters of one model.

    Attributes:
        known: all adapters, by name.
        active: the name of the one that is in, or None.
        merged: whether its sum is in the base's weights now.
        before: the model's state without the active adapter.
        weights: the base's weights and biases while a sum is merged into them, by path.
    """

    known: dict[str, Adapter] = field(default_factory=dict)
    active: str | None = None
    merged: bool = False
    before: _Before | None = None
    weights: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)


class Adapted(GraphModel):
    """A model that adapters can be added to; its own weights stay as they are."""

    @property
    def _held_adapters(self) -> Adapters:
        return self.__dict__.setdefault("_adapters", Adapters())

    @property
    def adapters(self) -> dict[str, Settings]:
        """Map each adapter's name to its settings."""
        return {name: adapter.settings for name, adapter in self._held_adapters.known.items()}

    @property
    def active_adapter(self) -> str | None:
        """The name of the adapter that the model computes with; None for none."""
        return self._held_adapters.active

    def add_adapter(self, adapter: Settings | None = None, name: str = "default") -> Self:
        """Add a fresh adapter with a copy of the head, and have the model compute with it; returns the model.

        A `Lora` and an `IA3` change nothing before they are trained. Only the adapter and its head learn from then on.

        Args:
            adapter: a `flodl_hf.models.adapters.Lora` (rank, scale, where it goes), `IA3`, `Prompt` or `Prefix`; None
                for the usual `Lora`.
            name: name of the new adapter.

        Raises:
            ConfigError: the name is taken, a target names no projection, or the model takes no such adapter.
        """
        from flodl_hf.models.adapters.fresh import new_adapter
        from flodl_hf.models.adapters.settings import Lora

        with self._without_adapter(always=False):
            self._register(name, new_adapter(self, adapter or Lora()))
        return self.set_adapter(name)

    def load_adapter(self, folder: str | Path, name: str = "default") -> Self:
        """Add an adapter from a folder or Hub repository, and have the model compute with it; returns the model.

        Raises:
            ConfigError: the name is taken, or the folder's settings are not understood.
            CheckpointError: its tensors do not fit the model, or its head is missing.
        """
        from flodl_hf.models.adapters.folder import open_adapter

        opened = open_adapter(folder)
        with self._without_adapter(always=False):
            own = self.config
            labels = opened.labels(own, self.head)
            try:
                self.config = own.changed(labels=labels) if labels is not None else own
                found = opened.adapter(self)
            finally:
                self.config = own
            self._register(name, found)
        return self.set_adapter(name)

    def _register(self, name: str, adapter: Adapter) -> None:
        """Register an adapter without activating it.

        Raises:
            ConfigError: the name is taken, or is none.
        """
        if not name or name in self._held_adapters.known:
            found = f"there is one called {name!r}" if name else "found no name"
            raise ConfigError(f"adapter: {found}; give name= another, or remove_adapter it first", problems=[name])
        self._held_adapters.known[name] = adapter

    def _adapter_named(self, name: str) -> Adapter:
        """Return an adapter.

        Raises:
            ConfigError: there is none of this name.
        """
        known = self._held_adapters.known
        if name not in known:
            raise ConfigError(
                f"adapter {name!r}: found {', '.join(known) or 'none'}{nearest(name, known)}; add it first, or load it",
                problems=[name],
            )
        return known[name]

    @contextmanager
    def disable_adapter(self) -> Iterator[Self]:
        """Have the model compute as it did before adapters, while inside."""
        with self._without_adapter(always=True):
            yield self

    @contextmanager
    def _without_adapter(self, *, always: bool) -> Iterator[None]:
        """Detach the adapter while inside; attach it again if an exception is raised, or always."""
        held = self._held_adapters
        before, merged = held.active, held.merged
        self.set_adapter(None)
        done = False
        try:
            yield
            done = not always
        finally:
            if not done and before is not None and before in held.known:
                self.set_adapter(before)
                if merged:
                    self.merge_adapter()

    def set_adapter(self, name: str | None) -> Self:
        """Have the model compute with another adapter, its head and its labels; None for without; returns the model.

        Raises:
            ConfigError: there is none of this name.
        """
        held = self._held_adapters
        adapter = None if name is None else self._adapter_named(name)
        if adapter is not None and held.active == name:
            return self
        if adapter is not None and self.routed is not None:
            raise ConfigError(
                "adapter: each route of this folder has a separate transformer, and an adapter belongs to one model; "
                "expected one model; load its own folder and put the adapter there",
                problems=[name],
            )
        self._detach()
        if adapter is None:
            return self
        graph = self.graph
        named = dict(graph.named_parameters(remove_duplicate=False))
        learned = [p for p in graph.parameters() if p.requires_grad]
        before = _Before({}, {}, learned, dict(self._untouched), self.config, self.sentence_recipe)
        home = next(graph.parameters()).device
        for parameter in graph.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.data = parameter.data.to(home)
        for path, part in adapter.parts.items():
            module: Any = graph.get_submodule(path)
            before.modules[path] = module
            graph.set_submodule(path, KINDS[type(part)](module, part.train(module.training)))
        for tensor, parameter in adapter.kept.items():
            before.tensors[tensor] = named[tensor]
            _set(graph, tensor, parameter)
        for parameter in adapter.parameters():
            parameter.requires_grad_(True)
        self._untouched = {n: v for n, v in self._untouched.items() if n not in adapter.kept} | adapter.untrained
        labels, kind, activation = adapter.labels, adapter.problem_type, adapter.score_activation
        if any(value is not None for value in (labels, kind, activation)):
            self.config = self.config.changed(labels=labels, problem_type=kind, score_activation=activation)
        self.sentence_recipe = adapter.recipe or self.sentence_recipe
        held.active, held.before = name, before
        return self

    def _detach(self) -> None:
        """Leave the model as it was without an adapter."""
        self.unmerge_adapter()
        held = self._held_adapters
        before, held.before = held.before, None
        if before is None or held.active is None:
            return
        graph, adapter = self.graph, held.known[held.active]
        adapter.untrained = {n: v for n, v in self._untouched.items() if n in adapter.kept}
        for path, module in before.modules.items():
            # The weights may have been exchanged meanwhile, as moving a model to a device can.
            now: Any = graph.get_submodule(path)
            module._parameters.update({name: getattr(now, name) for name in module._parameters})
            if hasattr(module, "implementation"):
                module.implementation = now.implementation
            graph.set_submodule(path, module.train(now.training))
        for tensor, parameter in before.tensors.items():
            parameter.data = parameter.data.to(next(graph.parameters()).device)
            _set(graph, tensor, parameter)
        for parameter in before.learned:
            parameter.requires_grad_(True)
        self._untouched = before.untouched
        if self.sentence_recipe is not before.recipe:
            adapter.recipe, self.sentence_recipe = self.sentence_recipe, before.recipe
        self.config, held.active = before.config, None

    def predict_mixed(self, texts: Sequence[Any], adapters: Sequence[str], **options: Any) -> list[Any]:
        """Return the `predict` results of each text with its own adapter, several adapters in one batch.

        The base runs once for all rows, concatenated, with torch operators, and each token's sum is added; results
        equal each adapter's alone up to the order of sums. The active adapter stays active.

        Args:
            texts: as for ``predict``, a list.
            adapters: a name for each text.
            **options: options of ``predict``, except those that select how it runs.

        Raises:
            PredictError: the number of names differs, the task has no labels, or the adapters' labels differ.
            ConfigError: there is no adapter of such a name.
        """

        from functools import partial

        import numpy as np

        from flodl_hf.inference.pipeline import SENDING
        from flodl_hf.models.adapters.mixed import Mixed

        texts, given = list(texts), list(adapters)
        if isinstance(adapters, str) or len(texts) != len(given):
            raise PredictError(
                f"predict_mixed: found {len(texts)} texts and {len(given)} names of adapters; expected a list of "
                "names, one for each text",
            )
        if not texts:
            return []
        chosen = {name: self._adapter_named(name) for name in given}
        names, first, answers = list(chosen), chosen[given[0]], []
        with self.disable_adapter():
            mixed, config = Mixed(self, chosen), self.config
            if first.labels is not None or first.problem_type is not None:
                self.config = config.changed(labels=first.labels, problem_type=first.problem_type)
            untouched, self._untouched = self._untouched, {}
            try:
                for at in range(0, len(texts), WINDOW):
                    chunk = texts[at : at + WINDOW]
                    numbers = np.array([names.index(name) for name in given[at : at + len(chunk)]], np.int64)
                    token = SENDING.set(partial(mixed.start, numbers))
                    try:
                        answers += self.predict(chunk, window=WINDOW, **options)  # type: ignore[attr-defined]
                    finally:
                        SENDING.reset(token)
            finally:
                self.config, self._untouched = config, untouched
        return answers

    def remove_adapter(self, name: str = "default") -> Self:
        """Forget an adapter; returns the model.

        Raises:
            ConfigError: there is none of this name.
        """
        self._adapter_named(name)
        if self._held_adapters.active == name:
            self._detach()
        del self._held_adapters.known[name]
        return self

    def merge_adapter(self) -> Self:
        """Put the adapter's sum into the weights, in float64 and rounded once; returns the model.

        `unmerge_adapter` gives the weights back to the bit; `merge_and_unload` keeps no way back.

        Raises:
            ConfigError: the model computes with no adapter.
        """
        held, graph = self._held_adapters, self.graph
        if held.active is None or held.before is None:
            raise ConfigError("merge_adapter: no adapter is in the model; set_adapter one first", problems=["adapter"])
        if held.merged:
            return self
        parts = held.known[held.active].parts
        if not all(hasattr(part, "merged") for part in parts.values()):
            kind = type(held.known[held.active].settings).__name__
            raise ConfigError(
                f"merge_adapter: {held.active!r} is a {kind}, which adds tokens or keys and values to each text, and "
                "cannot be merged into weights; keep it as an adapter, or train a Lora",
                problems=[kind],
            )
        modules: dict[str, Any] = {path: graph.get_submodule(path) for path in parts}
        part: Any
        for path, part in parts.items():
            if getattr(part, "up_bias", None) is not None and modules[path].bias is None:
                raise ConfigError(
                    f"merge_adapter: {path}: found an adapter with a bias (lora_bias) at a projection without one; "
                    "expected a projection with a bias. Keep the adapter unmerged.",
                    problems=[path],
                )
        for path, part in parts.items():
            adapted, module = modules[path], held.before.modules[path]
            bias = getattr(adapted, "bias", None)
            held.weights[path] = adapted.weight.data, None if bias is None else bias.data
            adapted.weight.data = part.merged(adapted.weight)
            if bias is not None:
                bias.data = part.merged_bias(bias.data)
            module._parameters.update(adapted._parameters)
            graph.set_submodule(path, module.train(adapted.training))
        held.merged = True
        return self

    def unmerge_adapter(self) -> Self:
        """Give the weights back as they were before `merge_adapter`; returns the model."""
        held = self._held_adapters
        if not held.merged or held.active is None:
            return self
        for path, part in held.known[held.active].parts.items():
            linear: Any = self.graph.get_submodule(path)
            home = linear.weight.device
            weight, bias = held.weights.pop(path)
            linear.weight.data = weight.to(home)
            if bias is not None:
                linear.bias.data = bias.to(home)
            self.graph.set_submodule(path, KINDS[type(part)](linear, part.to(home).train(linear.training)))
        held.merged = False
        return self

    def merge_and_unload(self) -> Self:
        """Make the merged weights and the adapter's head the model's own, and forget all adapters; returns the model.

        Raises:
            ConfigError: the model computes with no adapter.
        """
        before = self.merge_adapter()._held_adapters.before
        assert before is not None
        for parameter in (*before.learned, *self.graph.parameters()):
            parameter.requires_grad_(parameter.is_floating_point())
        self.__dict__["_adapters"] = Adapters()
        return self

    def save_adapter(
        self,
        folder: str | Path,
        name: str | None = None,
        *,
        overwrite: bool = False,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write an adapter with its head as peft reads it; return the folder.

        Args:
            folder: where to.
            name: which adapter; None for the one that the model computes with.
            overwrite: replace a folder that contains an adapter or a model.
            extra_files: further files to write into the folder, by file name.

        Raises:
            ConfigError: there is no such adapter.
            ExportError: the folder is in use or not empty, or cannot be written.
        """
        from flodl_hf.models.adapters.write import adapter_contents
        from flodl_hf.models.saving import write_contents

        adapter = self._adapter_named(name if name is not None else self._held_adapters.active or "default")
        contents = adapter_contents(self, adapter)
        return write_contents(folder, {"": contents}, overwrite=overwrite, extra_files=extra_files)

    def _fixed_names(self) -> frozenset[str]:
        """Return the names of tensors that training does not change, which checkpoints can omit."""
        beside, held, fixed = self.beside, self._held_adapters, []
        if held.active is not None:
            own = {id(p) for p in held.known[held.active].parameters()}
            named = self.graph.named_parameters(remove_duplicate=False)
            fixed = [f"network.{name}" for name, p in named if id(p) not in own and not p.requires_grad]
        further = beside._fixed_names() if isinstance(beside, Adapted) else ()
        return frozenset([*fixed, *(f"beside.{name}" for name in further)])


def _set(graph: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    owner = graph.get_submodule(path)
    owner._parameters[leaf] = parameter
    if isinstance(owner, nn.Linear) and leaf == "weight":
        owner.out_features = parameter.shape[0]  # heads of several adapters may have other numbers of labels
