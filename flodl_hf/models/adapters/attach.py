"""Adapters in a model: create, attach, detach, merge; the base's weights stay the same tensors with the same bits.

Attaching an adapter replaces the target modules by modules with a part, and the tensors that it stores whole
(the head) by its own; detaching it restores the model's. One adapter is active at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flodl.errors import ConfigError, nearest
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.models.adapters.settings import Settings
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

Part = LoraPart | TablePart | RowsPart | ScalePart | PromptPart | PrefixPart | ShiftPart
"""The parts of an adapter for one module."""
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


@dataclass(frozen=True)
class Site:
    """A projection or embedding table of transformers' model, and our modules that it contains.

    Attributes:
        theirs: the module's path in transformers' model.
        paths: our paths; several if one matrix contains several projections.
        marks: the slice of the matrix for each path, as in a key row; empty for the whole matrix.
        bias_apart: whether transformers adds the bias outside the module, so that scales do not apply to it.
        is_table: whether it is an embedding table.
    """

    theirs: str
    paths: tuple[str, ...]
    marks: tuple[str, ...] = ()
    bias_apart: bool = False
    is_table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All paths."""
        return (self.theirs, *self.paths)


@dataclass
class Adapter:
    """One adapter, in a model or not.

    Attributes:
        settings: the settings that it was created with.
        sites: where it goes, by transformers' path.
        parts: its parts by our path of the module.
        kept: tensors that it stores whole, by our name.
        untrained: names of the tensors in ``kept`` with random values, with their version counters.
        labels: names of the head's labels; None for the model's.
        problem_type: the problem type of the labels; None for the model's.
        stored: settings of the file that it was loaded from.
        recipe: how vectors are made with it; None for as the model makes them.
        score_activation: path of the activation that makes scores of a ranker's logits; None for the model's.
    """

    settings: Settings
    sites: dict[str, Site]
    parts: dict[str, Part]
    kept: dict[str, nn.Parameter]
    untrained: dict[str, int] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None
    stored: Mapping[str, Any] = field(default_factory=dict)
    recipe: SentenceTransformerConfig | None = None
    score_activation: str | None = None

    def parameters(self) -> Iterable[nn.Parameter]:
        """Yield all modules and tensors of the adapter."""
        for part in self.parts.values():
            yield from part.parameters()
        yield from self.kept.values()


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
    """

    known: dict[str, Adapter] = field(default_factory=dict)
    active: str | None = None
    merged: bool = False
    _before: _Before | None = None
    _weights: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def named(self, name: str) -> Adapter:
        """Return an adapter.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self.known:
            held = ", ".join(self.known) or "none"
            raise ConfigError(
                f"adapter {name!r}: found {held}{nearest(name, self.known)}; add it first, or load it", problems=[name]
            )
        return self.known[name]

    def add(self, name: str, adapter: Adapter) -> None:
        """Register an adapter without activating it.

        Raises:
            ConfigError: the name is taken, or is none.
        """
        if not name or name in self.known:
            found = f"there is one called {name!r}" if name else "found no name"
            raise ConfigError(f"adapter: {found}; give name= another, or remove_adapter it first", problems=[name])
        self.known[name] = adapter

    def put(self, model: GraphModel, name: str) -> None:
        """Put an adapter into the model, in the place of the one that is in.

        Raises:
            ConfigError: there is none of this name.
        """
        adapter = self.named(name)
        if self.active == name:
            return
        if model.routed is not None:
            raise ConfigError(
                "adapter: each route of this folder has a separate transformer, and an adapter belongs to one model; "
                "expected one model; load its own folder and put the adapter there",
                problems=[name],
            )
        self.take_out(model)
        graph = model.graph
        named = dict(graph.named_parameters(remove_duplicate=False))
        learned = [p for p in graph.parameters() if p.requires_grad]
        before = _Before({}, {}, learned, dict(model._untouched), model.config, model.sentence_recipe)
        home = next(graph.parameters()).device
        for parameter in graph.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.data = parameter.data.to(home)
        for path, part in adapter.parts.items():
            owner, leaf = _owner(graph, path)
            module: Any = graph.get_submodule(path)
            before.modules[path] = module
            setattr(owner, leaf, KINDS[type(part)](module, part.train(module.training)))
        for tensor, parameter in adapter.kept.items():
            before.tensors[tensor] = named[tensor]
            _set(graph, tensor, parameter)
        for parameter in adapter.parameters():
            parameter.requires_grad_(True)
        model._untouched = {n: v for n, v in model._untouched.items() if n not in adapter.kept} | adapter.untrained
        stated = (adapter.labels, adapter.problem_type, adapter.score_activation)
        if any(value is not None for value in stated):
            labels, kind, activation = stated
            model.config = model.config.changed(labels=labels, problem_type=kind, score_activation=activation)
        model.sentence_recipe = adapter.recipe or model.sentence_recipe
        self.active, self._before = name, before

    def take_out(self, model: GraphModel) -> None:
        """Leave the model as it was without an adapter."""
        self.unmerge(model)
        before, self._before = self._before, None
        if before is None or self.active is None:
            return
        graph, adapter = model.graph, self.known[self.active]
        adapter.untrained = {n: v for n, v in model._untouched.items() if n in adapter.kept}
        for path, module in before.modules.items():
            owner, leaf = _owner(graph, path)
            # The weights may have been exchanged meanwhile, as moving a model to a device can.
            now: Any = graph.get_submodule(path)
            module._parameters.update({name: getattr(now, name) for name in module._parameters})
            if hasattr(module, "implementation"):
                module.implementation = now.implementation
            setattr(owner, leaf, module.train(now.training))
        for tensor, parameter in before.tensors.items():
            parameter.data = parameter.data.to(next(graph.parameters()).device)
            _set(graph, tensor, parameter)
        for parameter in before.learned:
            parameter.requires_grad_(True)
        model._untouched = {n: before.untouched.get(n, v) for n, v in before.untouched.items()}
        if model.sentence_recipe is not before.recipe:
            adapter.recipe, model.sentence_recipe = model.sentence_recipe, before.recipe
        model.config, self.active = before.config, None

    def merge(self, model: GraphModel) -> None:
        """Put the sum of the adapter that is in into the base's weights: in float64, rounded once.

        Raises:
            ConfigError: no adapter is in.
        """
        if self.active is None:
            raise ConfigError("merge_adapter: no adapter is in the model; set_adapter one first", problems=["adapter"])
        if self.merged:
            return
        parts = self.known[self.active].parts
        if not all(hasattr(part, "merged") for part in parts.values()):
            kind = type(self.known[self.active].settings).__name__
            raise ConfigError(
                f"merge_adapter: {self.active!r} is a {kind}, which adds tokens or keys and values to each text, and "
                "cannot be merged into weights; keep it as an adapter, or train a Lora",
                problems=[kind],
            )
        assert self._before is not None
        graph = model.graph
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
            owner, leaf = _owner(graph, path)
            adapted, module = modules[path], self._before.modules[path]
            bias = getattr(adapted, "bias", None)
            self._weights[path] = adapted.weight.data, None if bias is None else bias.data
            adapted.weight.data = part.merged(adapted.weight)
            if bias is not None:
                bias.data = part.merged_bias(bias.data)
            module._parameters.update(adapted._parameters)
            setattr(owner, leaf, module.train(adapted.training))
        self.merged = True

    def unmerge(self, model: GraphModel) -> None:
        """Restore the base's weights bit for bit and attach the adapter again."""
        if not self.merged or self.active is None:
            return
        graph = model.graph
        for path, part in self.known[self.active].parts.items():
            owner, leaf = _owner(graph, path)
            linear: Any = graph.get_submodule(path)
            home = linear.weight.device
            weight, bias = self._weights.pop(path)
            linear.weight.data = weight.to(home)
            if bias is not None:
                linear.bias.data = bias.to(home)
            setattr(owner, leaf, KINDS[type(part)](linear, part.to(home).train(linear.training)))
        self.merged = False

    def settle(self, model: GraphModel) -> None:
        """Keep the merged weights as the model's and remove all adapters.

        Raises:
            ConfigError: no adapter is in.
        """
        self.merge(model)
        assert self._before is not None
        for parameter in (*self._before.learned, *model.graph.parameters()):
            parameter.requires_grad_(parameter.is_floating_point())
        self.known.clear()
        self._weights.clear()
        self.active, self.merged, self._before = None, False, None

    def remove(self, model: GraphModel, name: str) -> None:
        """Forget an adapter; the model is without one if it was in.

        Raises:
            ConfigError: there is none of this name.
        """
        self.named(name)
        if self.active == name:
            self.take_out(model)
        del self.known[name]

    def recipe_without(self, model: GraphModel) -> SentenceTransformerConfig | None:
        """Return how the model makes vectors without an adapter."""
        return model.sentence_recipe if self._before is None else self._before.recipe

    def part_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the active adapter's parts, without the head that it keeps."""
        parts = () if self.active is None else self.known[self.active].parts.values()
        return [parameter for part in parts for parameter in part.parameters()]

    def base_names(self, model: GraphModel) -> frozenset[str]:
        """Return the names of tensors of the base that do not learn while an adapter is in."""
        if self.active is None:
            return frozenset()
        own = {id(p) for p in self.known[self.active].parameters()}
        named = model.graph.named_parameters(remove_duplicate=False)
        return frozenset(name for name, p in named if id(p) not in own and not p.requires_grad)


def adapters_of(model: GraphModel) -> Adapters:
    """Return the adapters of a model."""
    return model.__dict__.setdefault("_adapters", Adapters())


def _owner(graph: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, leaf = path.rpartition(".")
    return graph.get_submodule(module), leaf


def _set(graph: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, leaf = _owner(graph, name)
    owner._parameters[leaf] = parameter
    if isinstance(owner, nn.Linear) and leaf == "weight":
        owner.out_features = parameter.shape[0]  # heads of several adapters may have other numbers of labels
