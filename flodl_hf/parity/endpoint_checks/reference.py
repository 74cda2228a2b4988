"""Expected outputs of a model for a text: computed correctly, and with each known mistake of endpoints.

Texts are run one at a time by the model's own operations in float32, without batches, windows or kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.nn.layers.activations import GELUS, Activation
from flodl_hf.parity.endpoint_checks.targets import QUERY, by_label

_POOLINGS = ("mean", "cls", "max", "last_token", "mean_sqrt_len", "pooler")


@dataclass(frozen=True)
class Way:
    """Settings of a computation; the defaults are the right ones.

    Attributes:
        tanh: GELU by its tanh form.
        pooling: another pooling than the folder's.
        dense: whether the folder's dense layers are applied.
        scaled: whether vectors have length 1; None for the folder's setting.
        function: activation for scores; None for the configuration's.
        prompt: prefix of each text; None for the folder's prompt.
        lower: texts in lower case.
        special: whether special tokens are put around texts.
        swapped: the document before the query.
        one_type: the second text counted as the first.
        padded: texts filled up to so many tokens.
        masked: whether attention excludes the padding.
        counted: whether pooling includes the padding.
        limit: texts cut after so many tokens.
        left: cut at their beginning.
        half: computed in bfloat16.
    """

    tanh: bool = False
    pooling: tuple[str, ...] | None = None
    dense: bool = True
    scaled: bool | None = None
    function: str | None = None
    prompt: str | None = None
    lower: bool = False
    special: bool = True
    swapped: bool = False
    one_type: bool = False
    padded: int | None = None
    masked: bool = True
    counted: bool = False
    limit: int | None = None
    left: bool = False
    half: bool = False

    def said(self) -> str:
        """Return a description of the differences from the right settings."""
        words = []
        if self.tanh:
            words.append("GELU is computed by its tanh form")
        if self.pooling is not None:
            words.append(f"pooling is {' and '.join(self.pooling)}")
        if not self.dense:
            words.append("the folder's dense layers are left out")
        if self.scaled is not None:
            words.append("vectors are scaled to length 1" if self.scaled else "vectors are not scaled to length 1")
        if self.function is not None:
            words.append({"none": "scores are raw"}.get(self.function, f"scores are made by {self.function}"))
        if self.prompt is not None:
            words.append(f"the prompt {self.prompt!r} precedes texts" if self.prompt else "the prompt is omitted")
        if self.lower:
            words.append("texts are put in lower case")
        if not self.special:
            words.append("special tokens are left out")
        if self.swapped:
            words.append("documents precede the query")
        if self.one_type:
            words.append("token types of the second text equal the first text's")
        if not self.masked:
            words.append("attention reads the padding")
        if self.counted:
            words.append("pooling counts the padding")
        if self.limit is not None:
            words.append(f"texts are cut {'at their beginning ' if self.left else ''}to {self.limit} tokens")
        return " and ".join(words)

    def and_(self, other: Way) -> Way:
        """Return a copy with the other's differing settings applied."""
        right = Way()
        return replace(
            self,
            **{f.name: getattr(other, f.name) for f in fields(Way) if getattr(other, f.name) != getattr(right, f.name)},
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
        from flodl_hf.auto import load

        self.source = source
        self._given: dict[str, Any] = {"local_files_only": local_files_only, "device": "cpu", "dtype": torch.float32}
        self.model: Any = load(source, **self._given)
        self.model.eval()
        self.model.runtime(progress=False)
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
        self._models: dict[tuple[bool, bool], Any] = {(False, False): self.model}

    @property
    def labels(self) -> list[str]:
        """The labels in the order of their ids; none of vectors and ranks."""
        return list(self.model.config.labels) if self.task == "labels" else []

    @property
    def pooling(self) -> tuple[str, ...]:
        """The poolings in the folder's settings."""
        return tuple(self.recipe.pooling) if self.recipe else ("mean",)

    @property
    def limit(self) -> int | None:
        """Most tokens that are read of a text."""
        return self.model._most_tokens(self.recipe.max_tokens if self.recipe else None)

    def token_ids(self, texts: Sequence[str], way: Way = Way()) -> list[list[int]]:
        """Return ids of texts, without prompts."""
        given = [text.lower() for text in texts] if way.lower else list(texts)
        rows = self.model.tokenizer.encode_rows(given, add_special_tokens=way.special, offsets=False)
        return [list(row.ids) for (row,) in rows]

    def whole(self, items: Sequence[str], way: Way) -> np.ndarray | None:
        """Return the model's outputs for texts, long ones read in windows, ``(items, numbers)``.

        None if ``way`` has differences that are impossible for whole texts.

        Args:
            items: the texts.
            way: settings of the computation.
        """
        if self.touched(way) - {"tanh", "pooling", "scaled", "function", "prompt", "lower"}:
            return None
        texts = [text.lower() for text in items] if way.lower else list(items)
        run: dict[str, Any] = {}
        model = self._model(way)
        if self.task == "vectors":
            pooling = None if way.pooling is None else list(way.pooling)
            return model.embed(
                texts, normalize=self._scaled(way.scaled), pooling=pooling, prompt=way.prompt, windows=True
            ).numpy()  # fmt: skip
        if way.function is not None:
            run["function_to_apply"] = way.function
        if self.task == "labels":
            rows = model.predict(texts, **run)
            return by_label([[(one.label, one.score) for one in row] for row in rows], self.labels)
        found = np.zeros((len(items), 1))
        for one in model.rerank(QUERY, texts, **run):
            found[one.index] = one.score
        return found

    @torch.inference_mode()
    def answers(self, items: Sequence[str], way: Way = Way()) -> np.ndarray:
        """Return a row of numbers for each item, ``(items, numbers)``."""
        return np.stack([self._answer(item, way).double().numpy() for item in items])

    def ways(self, right: Way) -> Iterator[Way]:
        """Yield each known mistake that this model could be answered with, and then two at a time.

        Args:
            right: how it should be answered.
        """
        single = list(self._mistakes(right))
        yield from single
        for a, b in combinations(single, 2):
            if not self.touched(a) & self.touched(b):
                yield a.and_(b)

    @staticmethod
    def touched(way: Way) -> set[str]:
        """Return the names of settings that differ from the right ones."""
        return {f.name for f in fields(Way) if getattr(way, f.name) != getattr(Way(), f.name)}

    def _mistakes(self, right: Way) -> Iterator[Way]:
        if any(isinstance(m, Activation) and GELUS.get(m.name) is False for m in self.model.graph.modules()):
            yield Way(tanh=True)
        if self.task == "vectors":
            yield Way(scaled=not self._scaled(right.scaled))
            for name in _POOLINGS:
                if (name,) != self.pooling and (name != "pooler" or self.model.has_pooler):
                    yield Way(pooling=(name,))
            if self.recipe and self.recipe.dense:
                yield Way(dense=False)
            usual = self.recipe.resolve_prompt("embed") if self.recipe else ""
            known = self.recipe.prompts.values() if self.recipe else ()
            for prompt in dict.fromkeys(["", *known]):
                if prompt != usual:
                    yield Way(prompt=prompt)
        else:
            usual = self._function(Way())
            yield from (Way(function=name) for name in ("softmax", "sigmoid", "none") if name != usual)
        if self.task == "ranking":
            yield Way(swapped=True)
            yield Way(one_type=True)
        yield Way(lower=True)
        yield Way(special=False)
        if self.limit is not None:
            yield Way(padded=self.limit, masked=False)
            if self.task == "vectors":
                yield Way(padded=self.limit, counted=True)
                yield Way(padded=self.limit, masked=False, counted=True)

    def _scaled(self, wanted: bool | None) -> bool:
        return wanted if wanted is not None else (self.recipe.normalize if self.recipe else True)

    def _function(self, way: Way) -> Any:
        from flodl_hf.heads.sequence_classification import ranking_activation
        from flodl_hf.inference.decode.classes import activation_for
        from flodl_hf.models.score_function import score_function

        config = self.model.config
        if way.function is not None:
            return way.function
        if self.task == "ranking":
            return ranking_activation(config)
        return score_function(config) or activation_for(config.problem_type, self.model.num_labels)

    def _model(self, way: Way) -> Any:
        kind = (way.tanh, way.half)
        if kind not in self._models:
            from flodl_hf import auto

            given = {**self._given, "dtype": torch.bfloat16 if way.half else torch.float32}
            found: Any = auto.load(self.source, **given)
            for module in found.graph.modules():
                if way.tanh and isinstance(module, Activation) and GELUS.get(module.name) is False:
                    module.name = "gelu_pytorch_tanh"
            self._models[kind] = found.eval().runtime(progress=False)
        return self._models[kind]

    def _answer(self, item: str, way: Way) -> Tensor:
        prompt = ""
        if self.task == "vectors":
            usual = self.recipe.resolve_prompt("embed") if self.recipe else ""
            prompt = usual if way.prompt is None else way.prompt
        text = prompt + item
        lower = way.lower or (self.recipe is not None and self.recipe.lower_case)
        inputs = self._inputs(text.lower() if lower else text, way)
        count = inputs["input_ids"].shape[1]
        counted = torch.ones(1, count)
        if way.padded is not None and way.padded > count:
            inputs, counted = self._filled(inputs, way)
        model = self._model(way)
        out = model(**inputs)
        if self.task != "vectors":
            from flodl_hf.inference.decode.classes import class_scores

            return class_scores(out.logits.float(), self._function(way))[0]
        skipped = self._skipped(prompt)
        if skipped:
            counted[:, :skipped] = 0
        return self._vector(out, counted, way)

    def _vector(self, out: Any, counted: Tensor, way: Way) -> Tensor:
        from flodl_hf.inference.decode.pooling import finish_embeddings, pool_padded

        names: Any = way.pooling or self.pooling
        pooler = None if out.pooler_output is None else out.pooler_output.float()
        found = pool_padded(out.last_hidden_state.float(), counted, names, pooler_output=pooler)
        if self.recipe and way.dense and (way.pooling is None or len(way.pooling) == len(self.pooling)):
            for layer in self.recipe.dense:
                found = layer(found)
        return finish_embeddings(found, normalize=self._scaled(way.scaled))[0]

    def _inputs(self, text: str, way: Way) -> dict[str, Any]:
        tokenizer = self.model.tokenizer
        pair = None
        if self.task == "ranking":
            text, pair = (text, QUERY) if way.swapped else (QUERY, text)
        cutting: dict[str, Any] = {"truncation": False}
        limit = way.limit
        if limit is not None and way.left:
            (row,) = tokenizer.encode_rows([text], None if pair is None else [pair], offsets=False)[0]
            around = sum(map(bool, row.special))
            content = [number for number, added in zip(row.ids, row.special, strict=True) if not added]
            kept = content[len(content) - max(1, limit - around) :]
            first = [n for n, added in zip(row.ids[:1], row.special[:1], strict=True) if added]
            last = [n for n, added in zip(row.ids[-1:], row.special[-1:], strict=True) if added]
            return {"input_ids": torch.tensor([[*first, *kept, *last]])}
        if limit is not None:
            cutting = {
                "truncation": "only_second" if pair is not None and not way.swapped else True,
                "max_length": limit,
            }
        found = tokenizer(text, pair, add_special_tokens=way.special, return_tensors="pt", **cutting)
        given = {name: found[name] for name in ("input_ids", "token_type_ids") if name in found}
        if way.one_type and "token_type_ids" in given:
            given["token_type_ids"] = torch.zeros_like(given["token_type_ids"])
        return given

    def _filled(self, inputs: dict[str, Any], way: Way) -> tuple[dict[str, Any], Tensor]:
        """Return a row filled up, and which of its tokens pooling counts."""
        ids = inputs["input_ids"]
        more = (way.padded or 0) - ids.shape[1]
        filler = self.model.tokenizer.pad_token_id or 0
        found = {
            name: torch.nn.functional.pad(value, (0, more), value=filler if name == "input_ids" else 0)
            for name, value in inputs.items()
        }
        kept = torch.nn.functional.pad(torch.ones_like(ids), (0, more))
        found["attention_mask"] = kept if way.masked else torch.ones_like(kept)
        return found, torch.ones_like(kept).float() if way.counted else kept.float()

    def _skipped(self, prompt: str) -> int:
        """Return how many tokens of a prompt pooling leaves out."""
        if not prompt or self.recipe is None or self.recipe.include_prompt:
            return 0
        ((row,),) = self.model.tokenizer.encode_rows([prompt], offsets=False)
        return len(row.ids) - int(bool(row.special[-1]))
