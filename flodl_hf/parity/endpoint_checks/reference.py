"""Expected outputs of a model for a text: computed correctly, and with each known mistake of endpoints.

Texts are run one at a time by the model's own operations in float32, without batches, windows or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.nn.layers import GELUS, Activation

QUERY = "where does the river rise"
"""Query of every ranking."""
_POOLINGS = ("mean", "cls", "max", "last_token", "mean_sqrt_len", "pooler")

Variant = dict[str, Any]
"""The settings of a computation that differ from the right ones; none for the right computation.

The keys of `_CAUSES`, and ``padded`` (number of tokens that texts are filled up to), ``limit`` (number of tokens that
they are truncated to), ``left`` (they are truncated at their beginning) and ``half`` (bfloat16).
"""
_CAUSES: dict[str, Callable[[Any], str]] = {
    "tanh": lambda _: "GELU is computed by its tanh form",
    "pooling": lambda name: f"pooling is {name}",
    "dense": lambda _: "the folder's dense layers are left out",
    "scaled": lambda scaled: f"vectors are {'' if scaled else 'not '}scaled to length 1",
    "function": lambda name: "scores are raw" if name == "none" else f"scores are made by {name}",
    "prompt": lambda prompt: f"the prompt {prompt!r} precedes texts" if prompt else "the prompt is omitted",
    "lower": lambda _: "texts are put in lower case",
    "special": lambda _: "special tokens are left out",
    "swapped": lambda _: "documents precede the query",
    "one_type": lambda _: "token types of the second text equal the first text's",
    "masked": lambda _: "attention reads the padding",
    "counted": lambda _: "pooling counts the padding",
}


def describe(way: Variant, right: Variant) -> str:
    """Return a description of the settings that differ from the right ones."""
    return " and ".join(
        cause(way[name]) for name, cause in _CAUSES.items() if name in way and way[name] != right.get(name)
    )


class Reference:
    """A model and its outputs.

    Args:
        source: a local folder or a name of the Hub.
        local_files_only: open no connection.

    Raises:
        PredictError: it is not a model for vectors, labels or ranks.
    """

    def __init__(self, source: str, *, local_files_only: bool = False) -> None:
        from flodl_hf.heads.auto import load

        self.source = source
        self._given: dict[str, Any] = {"local_files_only": local_files_only, "device": "cpu"}
        self.model: Any = load(source, dtype=torch.float32, **self._given)
        self.model.eval().runtime(progress=False)
        head = self.model.head
        if head == "base":
            self.task = "vectors"
        elif head == "sequence_classification":
            self.task = "ranking" if self.model.num_labels == 1 else "labels"
        else:
            raise PredictError(
                f"{source}: the model is for {head}; expected one of vectors, labels or ranks, which endpoints share"
            )
        self.model._ready("verify-endpoint")
        recipe = self.model.sentence_recipe if head == "base" else None
        self.recipe = None if recipe is None else recipe.on()  # texts of which an endpoint is told nothing
        self.labels = list(self.model.config.labels) if self.task == "labels" else []
        self.pooling = self.recipe.pooling if self.recipe else ("mean",)
        self.prompts: dict[str, str] = dict(self.recipe.prompts) if self.recipe else {}
        self.limit: int | None = self.model._most_tokens(self.recipe.max_tokens if self.recipe else None)
        self._models: dict[tuple[bool, bool], Any] = {(False, False): self.model}

    def token_ids(self, texts: Sequence[str], way: Variant | None = None) -> list[list[int]]:
        """Return ids of texts, without prompts."""
        way = way or {}
        given = [text.lower() for text in texts] if way.get("lower") else list(texts)
        rows = self.model.tokenizer.encode_rows(given, add_special_tokens=way.get("special", True), offsets=False)
        return [list(row.ids) for (row,) in rows]

    def predicted(self, items: Sequence[str], way: Variant | None = None, *, windows: bool = False) -> np.ndarray:
        """Return what the model's own methods predict, ``(items, numbers)``.

        Args:
            items: the texts.
            way: ``tanh``, ``pooling``, ``scaled``, ``function``, ``prompt`` and ``lower``.
            windows: read long texts of vectors in windows instead of truncating them; other tasks always do.
        """
        way = way or {}
        model = self._model(way)
        texts = [text.lower() for text in items] if way.get("lower") else list(items)
        if self.task == "vectors":
            names = {name: way.get(name) for name in ("pooling", "prompt")}
            return model.embed(texts, normalize=self._scaled(way), windows=windows, **names).numpy()
        run = {"function_to_apply": way["function"]} if "function" in way else {}
        if self.task == "labels":
            rows = [{one.label: one.score for one in row} for row in model.predict(texts, **run)]
            return np.array([[row.get(label, np.nan) for label in self.labels] for row in rows])
        found = sorted(model.rerank(QUERY, texts, **run), key=lambda one: one.index)
        return np.array([[one.score] for one in found])

    @torch.inference_mode()
    def answers(self, items: Sequence[str], way: Variant | None = None) -> np.ndarray:
        """Return a row of numbers for each item, ``(items, numbers)``."""
        return np.stack([self._answer(item, way or {}).double().numpy() for item in items])

    def ways(self, right: Variant) -> Iterator[Variant]:
        """Yield each known mistake that this model could be answered with, and then two at a time.

        Args:
            right: the right settings; each mistake is added to them.
        """
        single = list(self._mistakes(right))
        pairs = (a | b for a, b in combinations(single, 2) if not a.keys() & b.keys())
        for way in (*single, *pairs):
            yield right | way

    def padding(self, count: int) -> list[Variant]:
        """Return the known mistakes of texts that are filled up to a number of tokens."""
        ways: list[Variant] = [{"padded": count, "masked": False}]
        if self.task == "vectors":
            ways += [{"padded": count, "counted": True}, {"padded": count, "masked": False, "counted": True}]
        return ways

    def _mistakes(self, right: Variant) -> Iterator[Variant]:
        if any(map(_is_exact_gelu, self.model.graph.modules())):
            yield {"tanh": True}
        if self.task == "vectors":
            yield {"scaled": not self._scaled(right)}
            usable = [name for name in _POOLINGS if name != "pooler" or self.model.has_pooler]
            yield from ({"pooling": name} for name in usable if (name,) != self.pooling)
            if self.recipe and self.recipe.dense:
                yield {"dense": False}
            prompts = dict.fromkeys(["", *self.prompts.values()])
            yield from ({"prompt": prompt} for prompt in prompts if prompt != self._prompt({}))
        else:
            usual = score_function(self.model.config, self.task)
            yield from ({"function": name} for name in ("softmax", "sigmoid", "none") if name != usual)
        if self.task == "ranking":
            yield {"swapped": True}
            yield {"one_type": True}
        yield {"lower": True}
        yield {"special": False}
        if self.limit is not None:
            yield from self.padding(self.limit)

    def _scaled(self, way: Variant) -> bool:
        return way.get("scaled", self.recipe.normalize if self.recipe else True)

    def _prompt(self, way: Variant) -> str:
        return way.get("prompt", self.recipe.resolve_prompt("embed") if self.recipe else "")

    def _model(self, way: Variant) -> Any:
        kind = (way.get("tanh", False), way.get("half", False))
        if kind not in self._models:
            from flodl_hf.heads.auto import load

            found: Any = load(self.source, dtype=torch.bfloat16 if kind[1] else torch.float32, **self._given)
            for module in filter(_is_exact_gelu, found.graph.modules() if kind[0] else ()):
                module.name = "gelu_pytorch_tanh"
            self._models[kind] = found.eval().runtime(progress=False)
        return self._models[kind]

    def _answer(self, item: str, way: Variant) -> Tensor:
        prompt = self._prompt(way) if self.task == "vectors" else ""
        text = prompt + item
        if way.get("lower") or (self.recipe is not None and self.recipe.lower_case):
            text = text.lower()
        inputs = self._inputs(text, way)
        counted = inputs["attention_mask"].float()
        if way.get("counted"):
            counted = torch.ones_like(counted)
        if not way.get("masked", True):
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        out = self._model(way)(**inputs)
        if self.task != "vectors":
            from flodl_hf.inference.classes import class_scores

            function = way.get("function", score_function(self.model.config, self.task))
            return class_scores(out.logits.float(), function)[0]
        counted[:, : prompt_tokens(self.recipe, prompt, self.model.tokenizer)] = 0
        changed = {name: way[name] for name in ("pooling", "dense") if name in way}
        pooler = None if out.pooler_output is None else out.pooler_output.float()
        states = out.last_hidden_state.float()
        return vector(states, counted, self.recipe, scaled=self._scaled(way), pooler=pooler, **changed)

    def _inputs(self, text: str, way: Variant) -> dict[str, Tensor]:
        texts = [text] if self.task != "ranking" else [text, QUERY] if way.get("swapped") else [QUERY, text]
        limit, left = way.get("limit"), way.get("left", False)
        options: dict[str, Any] = {}
        if limit is not None:
            kind = "only_second" if self.task == "ranking" and not way.get("swapped") else True
            options = {"truncation": False if left else kind, "max_length": limit}
        elif "padded" in way:
            options = {"padding": "max_length", "max_length": way["padded"], "padding_side": "right"}
        found = self.model.tokenizer(
            *texts, add_special_tokens=way.get("special", True), return_tensors="pt", return_attention_mask=True,
            return_special_tokens_mask=True, **options,
        )  # fmt: skip
        special = found["special_tokens_mask"][0].bool()
        inputs = {name: found[name] for name in ("input_ids", "token_type_ids", "attention_mask") if name in found}
        if left:
            removed = (~special).nonzero().flatten()[: max(0, len(special) - (limit or 0))]
            kept = torch.ones_like(special).index_fill(0, removed, False)
            inputs = {name: value[:, kept] for name, value in inputs.items()}
        if way.get("one_type") and "token_type_ids" in inputs:
            inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
        return inputs


def _is_exact_gelu(module: Any) -> bool:
    return isinstance(module, Activation) and GELUS.get(module.name) is False


def score_function(config: Any, task: str) -> Any:
    """Return the activation for scores that a configuration specifies."""
    from flodl_hf.heads.sequence_classification import ranking_activation
    from flodl_hf.inference.classes import activation_for, score_function

    if task == "ranking":
        return ranking_activation(config)
    return score_function(config) or activation_for(config.problem_type, config.num_labels)


def prompt_tokens(recipe: Any, prompt: str, tokenizer: Any) -> int:
    """Return how many tokens of a prompt pooling leaves out."""
    if not prompt or recipe is None or recipe.include_prompt:
        return 0
    ((row,),) = tokenizer.encode_rows([prompt], offsets=False)
    return len(row.ids) - int(bool(row.special[-1]))


def vector(
    states: Tensor, counted: Tensor, recipe: Any, *, scaled: bool, pooler: Tensor | None = None,
    pooling: str | None = None, dense: bool = True,
) -> Tensor:  # fmt: skip
    """Return the vector of a text from states ``(1, tokens, features)``, as the settings of a folder specify."""
    from flodl_hf.inference.pooling import finish_embeddings, pool_padded

    own: Any = recipe.pooling if recipe else ("mean",)
    names: Any = (pooling,) if pooling else own
    found = pool_padded(states, counted, names, pooler_output=pooler)
    # Dense layers take as many features as the folder's poolings give.
    if recipe and dense and len(names) == len(own):
        for layer in recipe.dense:
            found = layer(found)
    return finish_embeddings(found, normalize=scaled)[0]
