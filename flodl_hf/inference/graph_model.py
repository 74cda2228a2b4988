"""A graph with what belongs to it: configuration, tokenizer, where it was read from, how its predictions run.

Decides how a call with Hugging Face's tensors becomes a call of the graph. Models are created, read and written, and
get their public methods, in `flodl_hf.models`; loading, export and the runtime use only this class.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.weights.loaded import LoadReport
from flodl_hf.errors import PredictError, no_tokenizer
from flodl_hf.inference.hidden_states import given_embeddings, ids_for, watched
from flodl_hf.nn.attention import check_implementation
from flodl_hf.nn.layout import Padded
from flodl_hf.nn.prompts import ShiftedPositions, prefix_of

if TYPE_CHECKING:
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
    from flodl_hf.checkpoints.weights.loaded import OnDisk, Source
    from flodl_hf.tokenization.tokenizer import Tokenizer


def check_rows(input_ids: Tensor) -> None:
    """Raise unless the input is rows of at least one token.

    Raises:
        PredictError: it is no tensor, or the shape is another.
    """
    if not isinstance(input_ids, Tensor):
        raise PredictError(
            f"input_ids: found {type(input_ids).__name__}; expected a tensor of token ids: model(**model.tokenizer("
            'texts, padding=True, return_tensors="pt")). Texts go to the methods of the task: predict, embed, answer.'
        )
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or not shape[1]:
        raise PredictError(f"input_ids has shape {shape}; expected (batch, seq) with a token in each row", shape=shape)


def beyond_tables(
    config: ModelConfig,
    input_ids: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    taken: int = 0,
) -> PredictError | None:
    """Return the error for indices without a row in a table, or None if all have one.

    Args:
        config: the model's configuration.
        input_ids: of the call.
        token_type_ids: of the call, or None.
        position_ids: of the call, or None.
        taken: places that an adapter takes before each text.
    """
    encoder: Any = config.encoder
    tables = [
        ("input_ids", input_ids, encoder.vocab_size, "words"),
        ("token_type_ids", token_type_ids, config.token_types, "token types"),
        ("position_ids", position_ids, getattr(encoder, "max_positions", None), "positions"),
    ]
    faults = []
    for name, given, rows, table in tables:
        if given is None or not rows:
            continue
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= rows:
            faults.append(f"{name} contains {low if low < 0 else high}, expected 0 to {rows - 1} ({table})")
    longest = config.max_tokens and config.max_tokens - taken
    if position_ids is None and longest is not None and input_ids.shape[1] > longest:
        faults.append(f"a row has {input_ids.shape[1]} tokens, and the table of positions is for {longest}")
    if not faults:
        return None
    return PredictError(
        f"{'; '.join(faults)}. Expected indices of the model's tables: take the tokenizer that belongs to the model, "
        f"and cut rows (truncation=True, max_length={longest}) or let `predict` read long texts in windows.",
        problems=faults,
    )


_ran = False
_slowed = False


def warn_after_fork() -> None:
    """Note that a model runs in this process, and warn once where the process is a fork of such a one."""
    global _ran, _slowed
    if not _ran:
        _ran = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_slow_down)
    if _slowed:
        _slowed = False
        warnings.warn(
            "this process was forked after a model had run in its parent, and torch's threads do not live on in a "
            "fork: it computes with one thread. Start processes by spawn, or fork before the first prediction.",
            stacklevel=4,
        )


def _slow_down() -> None:
    global _slowed
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        _slowed = True


class Routed(nn.Module):
    """The other encoders of a folder of sentence-transformers with a transformer for each of several routes.

    They move, are cast and are written with the model of the usual route.

    Args:
        models: models by folder, relative to the root.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.folders = tuple(models)
        self.models = nn.ModuleList(models.values())

    def at(self, folder: str) -> Any:
        """Return the model of a folder; None of the folder of the usual route."""
        return self.models[self.folders.index(folder)] if folder in self.folders else None

    def items(self) -> list[tuple[str, Any]]:
        """Return folders with their models."""
        return list(zip(self.folders, self.models, strict=True))


def recipe_behind(recipe: SentenceTransformerConfig, folder: str) -> SentenceTransformerConfig:
    """Return a folder's settings for texts of one of its transformers, in the form of a single model's."""
    own = {name: replace(way, transformer="") for name, way in recipe.routes.items() if way.transformer == folder}
    first = next(iter(own.values()))
    if len(own) == 1:
        return first
    kinds = {kind: route for kind, route in recipe.kinds.items() if route in own}
    return replace(first, routes=own, usual_route=next(iter(own)), kinds=kinds)


def route_within(recipe: SentenceTransformerConfig | None, route: str | None) -> str | None:
    """Return the recipe of a route's own encoder: empty unless another route shares that encoder."""
    return route if recipe is not None and recipe.routes else None


class GraphModel(nn.Module):
    """A graph that computes one task, and what belongs to it.

    Attributes:
        graph: the network, a plain `flodl.graph.Graph` with the same vocabulary in every family.
        config: the configuration.
        tokenizer: the folder's tokenizer, or None.
        load_report: what became of every tensor, or None for a model made from a configuration.
        source: the source that it was loaded from, or None.
        sentence_recipe: how its states become the vector of a text, if the folder specifies it.
        beside: modules trained together with the graph: a projection of token vectors, a decoder.
        training_recipe: options of the fine-tune that made the model in this process; None for others.
        routed: encoders of the folder's other routes, if routes have separate transformers.
        dtype_in_shards: what weights are cast to, a layer at a time, when they are cut into shards; None leaves them.
    """

    head: ClassVar[str] = "base"
    _per_text: ClassVar[bool] = False
    """Whether the head scores whole texts rather than tokens."""
    forward_methods: ClassVar[tuple[str, ...]] = ("_one_pass",)
    """Methods other than the forward that run passes of the model, for which sharded weights are gathered."""
    config: ModelConfig
    load_report: LoadReport | None

    def __init__(self, config: ModelConfig, graph: Graph) -> None:
        super().__init__()
        self.config = config
        # Not as "graph": modules that torch generates, as torch.export does, have an attribute of that name.
        self.network = graph
        self.load_report = None
        self.source: Source | None = None
        self.tokenizer: Tokenizer | None = None
        self.sentence_recipe: SentenceTransformerConfig | None = None
        self.beside: nn.Module | None = None
        self.training_recipe: Mapping[str, Any] | None = None
        self.routed: Routed | None = None
        self.dtype_in_shards: torch.dtype | None = None
        self._on_disk: OnDisk | None = None
        self._untouched: dict[str, int] = {}
        # `flodl_hf.inference.RunOptions`, which those put in who run it.
        self._run_options: Any = None

    def _run_graph(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        outputs: Sequence[str] = (),
        *,
        embeds: Tensor | None = None,
        hidden_states: bool = False,
        attentions: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, tuple[Tensor, ...]]]:
        """Return the graph's result, the named outputs, and the requested intermediate values, by outputs' names."""
        if (input_ids is None) == (embeds is None):
            raise PredictError("expected either input_ids or inputs_embeds, found both or neither")
        if embeds is not None:
            input_ids = ids_for(self.graph, embeds)
        assert input_ids is not None
        if not torch.compiler.is_compiling():
            check_rows(input_ids)
            warn_after_fork()
        layout, lead, ids = Padded.of(attention_mask), prefix_of(self.graph), input_ids
        if position_ids is not None:
            layout.memo["places"] = position_ids  # by which queries and keys are turned
        types, led = token_type_ids, layout
        if lead is not None:
            if position_ids is not None:
                raise PredictError(
                    "position_ids: the adapter puts virtual tokens before each text and counts places itself; leave "
                    "them out"
                )
            ids, types, led = lead.rows(ids, types, layout)
            embeds = None if embeds is None else lead.embedded(embeds)
        given: dict[str, Any] = {"token_type_ids": types, "position_ids": position_ids, "layout": led}
        seen: dict[str, list[Tensor]] = {}
        with ExitStack() as stack:
            if embeds is not None:
                stack.enter_context(given_embeddings(self.graph, embeds))
            if hidden_states or attentions:
                inside = watched(self.graph, hidden_states=hidden_states, attentions=attentions)
                seen = stack.enter_context(inside)
            try:
                if outputs:
                    result, named = self.graph(ids, **given, outputs=list(outputs))
                else:
                    result, named = self.graph(ids, **given), {}
            except IndexError as fault:
                taken = self.virtual_tokens
                raise beyond_tables(self.config, input_ids, token_type_ids, position_ids, taken) or fault from fault
        if lead is not None and not self._per_text:
            result = layout.behind(lead.count, result)
        return result, named, {name: tuple(values) for name, values in seen.items()}

    def _one_pass(self, call: Callable[[Self, Any], Any], batch: Any) -> Any:
        """Return ``call`` of this model, of its additional modules, and of a batch."""
        return call(self, batch)

    def set_attention(self, implementation: str) -> Self:
        """Choose "sdpa", "eager" or "fast" attention in every layer; returns the model.

        Raises:
            ConfigError: there is no such implementation.
        """
        check_implementation(implementation)
        for module in self.modules():
            if module is not self and hasattr(module, "implementation"):
                module.implementation = implementation  # type: ignore[assignment]
        return self

    def _mark_untrained(self, names: Iterable[str]) -> None:
        """Mark tensors with random values as untrained until they are written to."""
        self._untouched = {name: self.graph.get_parameter(name)._version for name in names}

    @property
    def untrained(self) -> list[str]:
        """Names of tensors that still have their random initial values."""
        return [name for name, version in self._untouched.items() if self.graph.get_parameter(name)._version == version]

    def __getstate__(self) -> dict[str, Any]:
        # Version counters belong to these tensors; a copy's counters start at zero.
        return {**self.__dict__, "_untouched": self.untrained, "_on_disk": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_untrained(state["_untouched"])

    def _ready(self, task: str, *, untrained: bool = False) -> Tokenizer:
        """Return the tokenizer if the model can predict.

        Args:
            task: name of the calling method in the message.
            untrained: do not raise although parts of the model have random values.

        Raises:
            PredictError: there is no tokenizer, or parts of the model were never trained.
        """
        fresh = [] if untrained or not self._untouched else self.untrained
        if fresh:
            raise PredictError(
                f"{task}: {len(fresh)} tensors of this model are new and untrained ({', '.join(fresh[:4])}"
                f"{', ...' if len(fresh) > 4 else ''}), so its answers would be random. Load a checkpoint that was "
                "written for this task, train the model, or, from Python, pass untrained=True.",
                untrained=fresh,
            )
        if self.tokenizer is None:
            raise no_tokenizer(task)
        return self.tokenizer

    @property
    def max_tokens(self) -> int | None:
        """The longest row of tokens that the model and its tokenizer allow; None where nothing bounds it."""
        return self._most_tokens(None)

    def _most_tokens(self, stated: int | None) -> int | None:
        """Return the longest row of tokens; None where nothing bounds it.

        Args:
            stated: maximum from the folder's recipe, which overrides the tokenizer's; None for nothing.
        """
        places = self.config.max_tokens
        told = stated or (None if self.tokenizer is None else self.tokenizer.settings.model_max_length)
        return min(filter(None, (places and places - self.virtual_tokens, told)), default=None)

    @property
    def _reads_types(self) -> bool:
        """Whether predictions give token types: as in transformers, the tokenizer's model_input_names decide too."""
        return self.config.uses_token_types and (self.tokenizer is None or self.tokenizer.settings.type_ids)

    @property
    def virtual_tokens(self) -> int:
        """Number of positions that the active adapter adds before each text, for a prompt or a prefix."""
        lead = prefix_of(self.graph)
        table = dict(self.graph.get_submodule("encoder.embeddings").named_children()).get("position")
        return lead.count if lead is not None else table.prefix.count if isinstance(table, ShiftedPositions) else 0

    @property
    def weights_on_disk(self) -> OnDisk | None:
        """What shows the weights where layers are read from disk for each prediction; None where they are in memory."""
        on_disk = self._on_disk
        return on_disk if on_disk is not None and on_disk.holds(self.graph.get_submodule("encoder.layers")) else None

    def on_route(self, route: str | None = None) -> Self:
        """Return the model for texts of a route: this one, unless the route has a separate transformer.

        Args:
            route: its name, or what texts are for; None for the usual one.

        Raises:
            PredictError: the route does not exist, or none was given and none is the default.
        """
        recipe = self.sentence_recipe
        found = None if self.routed is None or recipe is None else self.routed.at(recipe.on(route).transformer)
        if found is None:
            return self
        found._run_options = self._run_options
        return found

    # --- what belongs to it ---------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The network; its parameter names have no prefix, the model's begin with ``network.``."""
        return self._modules["network"]  # type: ignore[return-value]

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self.network = graph

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the word table."""
        return next(self.parameters()).dtype

    @property
    def num_labels(self) -> int:
        """How many labels the configuration names."""
        return self.config.num_labels
